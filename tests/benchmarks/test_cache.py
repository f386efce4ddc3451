"""The memory limit and the workload of the cache benchmark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cache import EPOCHS, LARGE_BATCH, LARGE_DIM, write_large_job
from benchmarks.common.control_groups import GROUPS, group
from presage.schemas.config.job import load_job

NEEDS_CGROUPS = pytest.mark.skipif(
    os.geteuid() != 0 or not (GROUPS / "memory" / "memory.limit_in_bytes").is_file(),
    reason="needs root and control groups of version 1",
)


@NEEDS_CGROUPS
@pytest.mark.parametrize(("megabytes", "killed"), [(8, False), (200, True)])
def test_limit_applies_to_the_whole_process_and_its_group_is_removed(
    megabytes: int, killed: bool
) -> None:
    fill = f"print(len(bytearray({megabytes} << 20)))"
    with group("test") as limits:
        limits.limit_memory(64 << 20)
        command = limits.command([sys.executable, "-c", fill])
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert limits.peak_bytes > 1 << 20
    assert (found.returncode == -9) == killed
    assert found.stdout == ("" if killed else f"{megabytes << 20}\n")
    assert not limits.memory.exists()


def test_job_of_the_workload_is_valid(tmp_path: Path) -> None:
    cache = {"policy": "belady", "rows": 6000, "prefetch_steps": 4}
    job = load_job(write_large_job(tmp_path / "job", 4096, {"num_threads": 1, "cache": cache}))
    assert (job.train.embedding_dim, job.train.batch_samples) == (LARGE_DIM, LARGE_BATCH)
    assert job.train.epochs == job.data.oracle.epochs == EPOCHS
    assert job.train.cache.rows == 6000
