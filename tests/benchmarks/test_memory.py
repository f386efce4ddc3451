"""The memory limit and the workload of the memory benchmark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import BATCH, CGROUPS, DIM, EPOCHS, IN_CGROUP, memory_limit, write_job
from schemas.config.job import load_job

NEEDS_CGROUPS = pytest.mark.skipif(
    os.geteuid() != 0 or not (CGROUPS / "memory.limit_in_bytes").is_file(),
    reason="needs root and memory cgroups of version 1",
)


@NEEDS_CGROUPS
@pytest.mark.parametrize(("megabytes", "killed"), [(8, False), (200, True)])
def test_limit_applies_to_the_whole_process_and_its_cgroup_is_removed(
    megabytes: int, killed: bool
) -> None:
    fill = f"print(len(bytearray({megabytes} << 20)))"
    with memory_limit(64 << 20) as group:
        assert group is not None
        command = ["sh", "-c", IN_CGROUP, str(group / "cgroup.procs"), sys.executable, "-c", fill]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert int((group / "memory.max_usage_in_bytes").read_text()) > 1 << 20
    assert (found.returncode == -9) == killed
    assert found.stdout == ("" if killed else f"{megabytes << 20}\n")
    assert not group.exists()


def test_without_a_limit_no_cgroup_is_created() -> None:
    with memory_limit(None) as group:
        assert group is None


def test_job_of_the_workload_is_valid(tmp_path: Path) -> None:
    cache = {"policy": "belady", "rows": 6000, "prefetch_steps": 4}
    job = load_job(write_job(tmp_path / "job", 4096, {"num_threads": 1, "cache": cache}))
    assert (job.train.embedding_dim, job.train.batch_samples) == (DIM, BATCH)
    assert job.train.epochs == job.data.oracle.epochs == EPOCHS
    assert job.train.cache.rows == 6000
