"""Runs of the small dataset at URLs, and what tests ask of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from presage.schemas.config.job import load_job
from presage.schemas.run.records import RunSummary
from presage.schemas.run.run_manifest import (
    ALL,
    OBJECTS,
    RunManifest,
    RunState,
    fetch_run,
    read_newest_state,
)
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain
from presage.trainer.run.upload import open_output
from presage.trainer.train import train
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import assert_equal, run_job, small_dataset


def memory_url() -> str:
    """Return a new URL in the memory of this process."""
    return f"memory://bucket/{uuid.uuid4().hex}"


def train_at(
    url: str,
    work: Path,
    job: Path,
    dataset: Path,
    *,
    on_step: Callable[[int, Drain], None] = lambda step, drain: None,
    **options: Any,
) -> RunSummary:
    """Train at a URL as the command does; `on_step` is called with each step and the drain."""
    drain, ticks = Drain(), count()
    config, resume = load_job(job).train.checkpoint, options.get("resume", False)
    with open_output(Location.parse(url), work, config, resume=resume, drain=drain) as run:
        return train(
            job,
            Location.parse(dataset),
            run,
            TrainOptions(output=Location.parse(url), **options),
            clock=lambda: float(next(ticks)),
            on_step=lambda metric, num_steps: on_step(metric.step, drain),
            drain=drain,
        )


def newest_of(url: str) -> RunManifest:
    """Return the newest manifest of a run."""
    return newest_state(url).manifest


def newest_state(url: str) -> RunState:
    """Return the newest state of a run."""
    newest = read_newest_state(Location.parse(url))
    assert newest is not None, "the run was committed"
    return newest


def check_objects(url: str) -> None:
    """Check that the objects at a URL are those that the newest manifest names, and no others."""
    output, newest = Location.parse(url), newest_of(url)
    assert {f"{OBJECTS}/{e.path}" for e in (output / OBJECTS).entries()} == newest.objects
    number = newest_state(url).version.number
    assert Versions(output).all_numbers() == list(range(1, number + 1))


def check_equal(url: str, run: Path, copy: Path) -> None:
    """Check that a run at a URL has the bits of one in a folder, and is complete."""
    fetch_run(Location.parse(url), copy, ALL)
    assert_equal(copy, run)
    check_objects(url)


def write_saved_run(folder: Path) -> None:
    """Write a job, and its run by one process with a checkpoint every four steps."""
    job = write_job(folder / "job", every_steps="4")
    job.write_text(job.read_text().replace("keep: 20", "keep: 2"))
    run_job(job, small_dataset(), folder / "run")
