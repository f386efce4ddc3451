"""A dataset of several days, and runs of it day by day."""

from __future__ import annotations

from pathlib import Path

from presage.schemas.run.records import RunSummary
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import run_job

DAYS = [[(400, 50), (333, 30)], [(250, 40)], [(180, 40)]]
"""Training and evaluation samples of each file of each day: 12, 4 and 3 steps."""
DATES = ["2026-04-08", "2026-04-09", "2026-04-11"]
IN_ORDER = {"epochs": "1", "shuffle": "none"}


def make_days(folder: Path, **changes: str) -> tuple[Path, Path]:
    """Write a job and its dataset of three days.

    Returns:
        (the job file, the dataset).
    """
    job_path = write_job(folder / "job", **{**IN_ORDER, **changes})
    return job_path, make_dataset(folder / "dataset", job_path, DAYS, days=DATES)


def run_days(
    job: Path, dataset: Path, folder: Path, dates: list[str] = DATES, **options: object
) -> list[RunSummary]:
    """Train one run a day, each beginning with the one before."""
    found: list[RunSummary] = []
    old: Path | None = None
    for day in dates:
        found.append(
            run_job(job, dataset, folder / day, start_from=old, segments=(day,), **options)
        )
        old = folder / day
    return found
