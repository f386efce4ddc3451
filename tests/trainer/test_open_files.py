"""A process that trains often, or has many files open, goes on."""

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from presage.trainer.runtime import is_readable
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, run_job

MANY = 1100
"""More files than `select` can tell apart."""


def num_open() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def many_files() -> Iterator[None]:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < MANY + 200:
        pytest.skip(f"needs a limit of {MANY + 200} open files; see ulimit -n")
    with ExitStack() as opened:
        for _ in range(MANY):
            opened.enter_context(Path(os.devnull).open())
        yield


@pytest.mark.slow
def test_training_leaves_no_file_open(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENTS)
    run_job(job, dataset, tmp_path / "first")  # opens what is opened once
    before = num_open()
    run_job(job, dataset, tmp_path / "second")
    assert num_open() == before


def test_pipe_with_a_large_number_is_waited_for(many_files: None) -> None:
    with subprocess.Popen([sys.executable, "-c", "input(); print(1)"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.fileno() > 1024
        assert not is_readable(child.stdout, 0.0)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert is_readable(child.stdout, 30.0)
        assert child.stdout.readline() == b"1\n"
        assert is_readable(child.stdout, 30.0), "its end can be read"
        assert child.stdout.readline() == b""
