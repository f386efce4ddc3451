"""Freed blocks are kept; the local runner gets as many workers as work and machine allow."""

import platform

import pytest

from pipelines.beam import runner
from pipelines.beam.runner import local_workers
from pipelines.memory import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_the_c_library_takes_the_settings() -> None:
    assert keep_freed_memory()


def test_workers_follow_work_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda _: set(range(8)))
    threads = "--direct_running_mode=multi_threading"
    monkeypatch.setattr(runner, "WORKER_BYTES", 1)
    processes = "--direct_running_mode=multi_processing"
    assert local_workers([], 100) == ["--direct_num_workers=8", processes]
    assert local_workers([], 23) == ["--direct_num_workers=8", threads]
    assert local_workers([], 3) == ["--direct_num_workers=3", threads]
    assert local_workers([], 1) == []
    monkeypatch.setattr(runner, "WORKER_BYTES", 1 << 62)
    assert local_workers([], 100) == []


def test_what_the_user_says_about_workers_wins() -> None:
    assert local_workers(["--direct_num_workers", "1"], 100) == []
