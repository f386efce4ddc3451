"""A run continues on the platform of its processes."""

import re
from pathlib import Path

import pytest

from presage.scheduler.controller.events import BudgetSet
from presage.scheduler.controller.log import LOG, Log
from presage.scheduler.drivers.driver import DriverOptions
from presage.scheduler.drivers.run_jobs import PLATFORM, RunRequest, run_jobs
from presage.scheduler.drivers.submit import submit
from presage.schemas.errors import PlanError
from presage.schemas.storage.location import Location
from tests.scheduler.drivers.test_input_split import write_log
from tests.scheduler.small_job import GIB, write_job

ELSEWHERE = "kubernetes https://one.example presage"


def request_of(output: Path, *jobs: Path, log: Path | None = None) -> RunRequest:
    return RunRequest(
        job_files=jobs,
        inputs={} if log is None else {"small": Location.parse(log)},
        output=output,
        storage=Location.parse(output),
        budget=None,
        driver=DriverOptions(output=output),
    )


def test_run_jobs_whose_processes_live_elsewhere_starts_nothing_here(tmp_path: Path) -> None:
    job, raw = write_job(tmp_path), write_log(tmp_path / "log", ["a.parquet"])
    output = tmp_path / "out"
    output.mkdir()
    submitted, _ = submit(job, {"small": Location.parse(raw)}, output, 1.0)
    with Log(output / LOG) as log:
        log.handle(BudgetSet(time_sec=1.0, cpus=4.0, memory_bytes=16 * GIB))
        log.handle(submitted)
    assert log.state.jobs["small"].processes
    (output / PLATFORM).write_text(f"{ELSEWHERE}\n")
    message = (
        f"processes of {output} run on another platform: {ELSEWHERE!r}, not 'process'; "
        "continue there, or use another --output"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        run_jobs(request_of(output, job, log=raw))
    assert (output / PLATFORM).read_text() == f"{ELSEWHERE}\n"
    assert not (output / "small" / "processes").exists()


def test_run_jobs_without_processes_moves_to_another_platform(tmp_path: Path) -> None:
    (tmp_path / PLATFORM).write_text(f"{ELSEWHERE}\n")
    run_jobs(request_of(tmp_path))
    assert (tmp_path / PLATFORM).read_text() == "process\n"
