"""Beam's pool of Python workers for Flink: starts one process for each worker that Flink asks for.

Beam's own (`apache_beam.runners.worker.worker_pool_main`) listens on all interfaces, starts the
first `python` on the path, and never reads what its workers print, so that a talkative one stops.
This one listens on the loopback interface, and prints its address:

    python deploy/flink/worker_pool.py [PORT [COMMAND ...]]

Without a port, or with 0, the system chooses one. COMMAND starts each worker, and runs the command
in its arguments, as `nice -n 5` does.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

WORKER = """
import sys
from apache_beam.runners.worker.sdk_worker import SdkHarness
SdkHarness(sys.argv[1], worker_id=sys.argv[2]).run()
"""
STOP_SEC = 10.0


class WorkerPool(beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolServicer):
    """Starts and stops workers, each of which is a process."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """Start with no worker; `prefix` goes before the command of each."""
        self.prefix = tuple(prefix)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.lock = threading.Lock()

    def StartWorker(  # noqa: N802, the name of the remote call
        self, request: beam_fn_api_pb2.StartWorkerRequest, context: grpc.ServicerContext
    ) -> beam_fn_api_pb2.StartWorkerResponse:
        """Start a worker that takes its work from the given address."""
        command = [*self.prefix, sys.executable, "-c", WORKER]
        command += [request.control_endpoint.url, request.worker_id]
        with self.lock:
            worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            self.workers[request.worker_id] = worker
        sys.stderr.write(f"worker {request.worker_id} is process {worker.pid}\n")
        return beam_fn_api_pb2.StartWorkerResponse()

    def StopWorker(  # noqa: N802, the name of the remote call
        self, request: beam_fn_api_pb2.StopWorkerRequest, context: grpc.ServicerContext
    ) -> beam_fn_api_pb2.StopWorkerResponse:
        """Stop a worker; one that is unknown has ended already."""
        with self.lock:
            worker = self.workers.pop(request.worker_id, None)
        if worker is not None:
            end(worker)
        return beam_fn_api_pb2.StopWorkerResponse()

    def close(self) -> None:
        """Stop all workers."""
        with self.lock:
            workers, self.workers = list(self.workers.values()), {}
        for worker in workers:
            worker.terminate()
        for worker in workers:
            end(worker)


def end(worker: subprocess.Popen[bytes]) -> None:
    """End a process, by force if it takes too long."""
    worker.terminate()
    try:
        worker.wait(STOP_SEC)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def main() -> None:
    """Serve until told to end."""
    told = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    pool, server = WorkerPool(sys.argv[2:]), grpc.server(ThreadPoolExecutor(8))
    beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(pool, server)
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    port = server.add_insecure_port(f"localhost:{wanted}")
    server.start()
    sys.stdout.write(f"localhost:{port}\n")
    sys.stdout.flush()
    told.wait()
    server.stop(0)
    pool.close()


if __name__ == "__main__":
    main()
