"""The scaling benchmark counts sent bytes, and both sides give the same losses."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling import measure_count
from tests.trainer.make_dataset import make_dataset, write_job

COUNTS = """
import socket, threading
from benchmarks.peers.torchrec_ranks import sent_bytes

server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
sending = socket.create_connection(("127.0.0.1", port))
receiving, _ = server.accept()
before, others = sent_bytes(), sent_bytes(excluded_port=port)
got = threading.Thread(target=lambda: receiving.recv(70_000, socket.MSG_WAITALL))
got.start()
sending.sendall(bytes(70_000))
got.join()
print(sent_bytes() - before, sent_bytes(excluded_port=port) - others)
"""
"""Runs in a separate process, because this one has connections of other tests."""


@pytest.mark.slow
def test_sent_bytes_are_counted_except_to_one_port(repository: Path) -> None:
    command = [sys.executable, "-c", COUNTS]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout == "70000 0\n"


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_both_sides_give_the_same_losses(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", dtype="float32", pooling="sum")
    text = job.read_text().replace("9223372036854775808", "500")  # the peer keeps whole tables
    job.write_text(text)
    full_batches = [[(1024, 50)]]  # the peer's processes must have equally many samples
    dataset = make_dataset(tmp_path / "dataset", job, full_batches)
    found = measure_count(job, dataset, 2, 1, ["row_wise"], tmp_path)
    assert all(num_bytes > 0 for num_bytes in found["bytes"].values())
    assert found["parity"]["row_wise"]["first"] < 1e-6
    assert found["parity"]["row_wise"]["all"] < 1e-4
