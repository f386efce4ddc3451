"""Bytes that training processes exchange per step, and the time of a step, against TorchRec.

`python -m benchmarks.scaling [--json] [--datasets NAME,NAME] [--counts 2,4] [--rounds N]
[--plans planner,row_wise]`

Both sides train the same DLRM on the same batches of the same log from the same parameters. Our
replicas each hold all rows; a replica computes the microbatches of its share of a step and sends
their sums to every other replica, without ids. TorchRec runs `DistributedModelParallel` over gloo:
tables are sharded by its planner, or by rows; ids are sent to the process that holds the table,
pooled vectors are sent back, their gradients are sent to the table again, and dense gradients are
averaged. TorchRec's batches are in memory; ours are read during the measurement. Bytes are the
kernel's count of what was sent over all TCP connections of all processes, without the lighthouse.
The sides alternate in turns of some steps; a waiting process is idle, and each process has one
thread. `parity` is the largest relative difference of the loss of the first step, `parity_after`
that of all steps.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.logs import (
    build_dataset,
    each_log,
    job_path,
    log_parser,
    read_job,
    write_job_file,
    write_result,
)
from benchmarks.scaling_processes import ProcessConfig, Turn, run_replica, run_torchrec
from schemas.config.job import load_job
from schemas.dataset.opened import open_dataset
from schemas.run.records import METRICS, read_metrics
from trainer.elastic.membership import Lighthouse
from trainer.run.folder import identity_of, start_run

LOGS, DIM, BATCH, STEPS = ("mind", "demo"), 64, 4096, 6
HEARTBEAT_SEC = 5.0
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORT, MAX_PORT = 10_000, 65_535

Run = Callable[[ProcessConfig, Connection], None]


def write_job(name: str, folder: Path) -> Path:
    """Write a shipped job with the benchmark's model; return its path."""
    shipped = job_path(name)
    job = read_job(shipped)
    job["data"].setdefault("oracle", {})["batch_samples"] = BATCH
    job["train"] = {
        "model": {
            "name": "dlrm",
            "bottom_layers": [64],
            "top_layers": [64, 32],
        },
        "embedding_dim": DIM,
        "batch_samples": BATCH,
        "pooling": "sum",
        "dtype": "float32",
        "sparse_optimizer": {"name": "rowwise_adagrad"},
        "num_threads": 1,
    }
    job.pop("schedule", None)
    return write_job_file(folder, job, shipped)


class ProcessGroup:
    """The processes of one side; a context in which they run."""

    def __init__(self, name: str, run: Run, config: ProcessConfig) -> None:
        """Store the configuration of all processes; each gets its own rank."""
        self.name = name
        self._run, self._config = run, config
        self._connections: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> ProcessGroup:
        """Start all processes and wait until they are ready for their first step."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.scaling_processes", "pandas"])
        for rank in range(self._config.count):
            parent, child = context.Pipe()
            config = replace(self._config, rank=rank)
            process = context.Process(target=self._run, args=(config, child), daemon=True)
            process.start()
            child.close()
            self._connections.append(parent)
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
        for connection in self._connections:
            connection.recv()
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the processes."""
        self._stack.close()

    def train(self, num_steps: int) -> tuple[float, list[Turn]]:
        """Train some steps; return the seconds until the last process finished."""
        start = time.perf_counter()
        for connection in self._connections:
            connection.send(num_steps)
        turns = [connection.recv() for connection in self._connections]
        return time.perf_counter() - start, turns


@dataclass(slots=True)
class Measurements:
    """Seconds and bytes per step of one side in each turn, and the losses of its steps."""

    seconds: list[float]
    num_bytes: list[int]
    losses: list[float]

    def add(self, seconds: float, turns: Sequence[Turn]) -> None:
        """Add a turn."""
        self.seconds.append(seconds / STEPS)
        self.num_bytes.append(sum(turn.bytes_sent for turn in turns) // STEPS)
        self.losses += [sum(parts) for parts in zip(*(t.losses for t in turns), strict=True)]


def measure(
    job: Path, dataset: Path, count: int, rounds: int, plans: Sequence[str], scratch: Path
) -> dict[str, Any]:
    """Train all sides in turns.

    Args:
        job: job file.
        dataset: built from it.
        count: processes of each side.
        rounds: turns of each side after the first, which is a warm-up.
        plans: sharding plans of TorchRec's tables.
        scratch: folder for our run.
    """
    run = scratch / f"run-{count}"
    opened = open_dataset(dataset)
    start_run(run, job, opened, identity_of(opened, load_job(job).train, follows=False))
    # one step more: our replicas wait for the next turn before a step
    num_steps = (rounds + 1) * STEPS + 1
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse("127.0.0.1", 0, HEARTBEAT_SEC))

        def start(name: str, run_process: Run, address: str, plan: str = "") -> ProcessGroup:
            config = ProcessConfig(
                rank=0,
                count=count,
                job=job,
                dataset=dataset,
                run=run,
                address=address,
                num_steps=num_steps,
                plan=plan,
            )
            return stack.enter_context(ProcessGroup(name, run_process, config))

        groups = [start("ours", run_replica, lighthouse.address)]
        for plan in plans:
            groups.append(start(plan, run_torchrec, f"127.0.0.1:{free_port()}", plan))
        sides = {group.name: Measurements([], [], []) for group in groups}
        for number in range(rounds + 1):
            for group in groups if number % 2 else reversed(groups):
                sides[group.name].add(*group.train(STEPS))
        sides["ours"].losses = [metric.loss for metric in read_metrics(run / METRICS)]
    return {name: summarize(side, sides["ours"]) for name, side in sides.items()}


def free_port() -> int:
    """Return an unused port, if possible outside the kernel's range for outgoing connections."""
    first, last = map(int, EPHEMERAL_PORTS.read_text(encoding="ascii").split())
    outside = [*range(MIN_PORT, first), *range(last + 1, MAX_PORT + 1)]
    candidates = outside or [*range(MIN_PORT, MAX_PORT + 1)]
    secrets.SystemRandom().shuffle(candidates)
    return next(filter(_is_free, candidates))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def summarize(side: Measurements, reference: Measurements) -> dict[str, Any]:
    """Return the medians of a side without its warm-up, and the difference of its losses."""
    differences = [abs(a / b - 1) for a, b in zip(side.losses, reference.losses, strict=False)]
    ratios = [round(a / b, 3) for a, b in zip(side.seconds, reference.seconds, strict=True)]
    return {
        "step_ms": round(statistics.median(side.seconds[1:]) * 1e3, 1),
        "bytes": round(statistics.median(side.num_bytes[1:])),
        "faster": ratios[1:],
        "parity": differences[0],
        "parity_after": max(differences),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("scaling", __doc__, LOGS)
    parser.add_argument("--counts", default="2,4", help="processes of each side, comma-separated")
    parser.add_argument("--plans", default="planner,row_wise", help="of TorchRec's tables")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    plans = options.plans.split(",")
    details: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        job = write_job(name, scratch / "job")
        dataset = build_dataset(job, log, scratch / "dataset")
        for count in map(int, options.counts.split(",")):
            label = f"{name}, {count} processes"
            details[label] = measure(job, dataset, count, options.rounds, plans, scratch)
            sys.stderr.write(f"{label}: {json.dumps(details[label])}\n")
    label, first = next(iter(details.items()))
    result = {
        "ours": first["ours"]["bytes"],
        "peer": first[plans[0]]["bytes"],
        "ratio": round(first[plans[0]]["bytes"] / first["ours"]["bytes"], 3),
        "unit": f"bytes per step, {label}, dim {DIM}, batch {BATCH}",
        "rounds": first[plans[0]]["faster"],
        "details": details,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
