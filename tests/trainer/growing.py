"""A dataset that grows while it is read: versions made beforehand, committed by the test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from presage.schemas.dataset.manifest import commit_root, find_root, read_dataset
from presage.schemas.layout import JOB, SCHEMA, SEGMENTS
from presage.schemas.run.records import RunSummary, StepMetric
from presage.schemas.storage.location import Location
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain
from presage.trainer.train import train
from tests.shared import make_once
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import with_keys
from tests.trainer.runs import run_job

ONCE = {"epochs": "1"}
GROWING = [[(400, 50), (333, 30)], [(250, 0)], [(180, 40)], [(64, 0)], [(120, 60)]]
"""Training and evaluation samples of each file of each segment: 12, 4, 3, 1 and 2 steps."""


def make_versions(
    folder: Path, job: Path, segments: list[list[tuple[int, int]]] = GROWING
) -> list[Path]:
    """Write the dataset after each segment; the last one is sealed."""
    versions: list[Path] = []
    for number in range(1, len(segments) + 1):
        version, is_last = folder / f"version-{number}", number == len(segments)
        earlier = versions[-1] if versions else None
        make_dataset(version, job, segments[:number], sealed=is_last, earlier=earlier)
        versions.append(version)
    return versions


def grown_versions() -> list[Path]:
    """Return the dataset after each segment of `GROWING`, which no test changes.

    They are made once per test session, blocks in another order than stored. Beside them are
    `job/job.yaml` and `whole`, a plain run on the sealed dataset.
    """
    return sorted(make_once(_grown_versions).glob("version-*"))


def _grown_versions(folder: Path) -> None:
    job = write_job(folder / "job", **ONCE, poll="20ms")
    with_keys(job, "stores: {timeout: 60s}")
    run_job(job, make_versions(folder, job)[-1], folder / "whole")


@pytest.fixture(scope="module")
def versions() -> list[Path]:
    """The dataset after each segment, blocks in another order than stored."""
    return grown_versions()


@pytest.fixture(scope="module")
def job(versions: list[Path]) -> Path:
    """The job of the versions."""
    return versions[0].parent / "job" / "job.yaml"


@pytest.fixture(scope="module")
def whole(versions: list[Path]) -> Path:
    """A plain run on the sealed dataset."""
    return versions[0].parent / "whole"


def commit(version: Path, dataset: Path) -> None:
    """Copy the segments of a version into a dataset, which may be read meanwhile; then its root."""
    root, old = read_dataset(version), find_root(dataset)
    segments = [Path(SEGMENTS) / reference.id for reference in root.segments]
    parts = [Path(i.id) / part.id for i in root.indexes for part in i.parts.values()]
    for place in (*segments, *parts):
        if not (dataset / place).exists():
            shutil.copytree(version / place, dataset / place)
    for path in (*version.glob(f"{JOB}*"), *version.glob(f"{SCHEMA}*")):
        if not (dataset / path.name).exists():  # named by its hash; others may read it now
            shutil.copy(path, dataset)
    assert commit_root(dataset, old, root) is not None


class Versions:
    """Commits one version of a dataset after the other."""

    def __init__(self, versions: list[Path], dataset: Path) -> None:
        """Commit the first version, if there is one."""
        self.remaining = iter(versions)
        self._dataset = dataset
        self.commit_next()

    def commit_next(self) -> None:
        """Commit the next version, if there is one."""
        version = next(self.remaining, None)
        if version is not None:
            commit(version, self._dataset)


class Pipeline(Versions):
    """Commits versions after given steps, and whenever a run waits for one."""

    def __init__(self, versions: list[Path], dataset: Path, at: tuple[int, ...] = ()) -> None:
        """Commit the first version.

        Args:
            versions: in order.
            dataset: where they are committed.
            at: steps after which one more is committed.
        """
        super().__init__(versions, dataset)
        self.messages: list[str] = []
        self.steps: list[StepMetric] = []
        self.waited_sec = 0.0
        self._at = at

    def on_step(self, metric: StepMetric, num_steps: int) -> None:
        """Commit what is due after a step."""
        self.steps.append(metric)
        if metric.step in self._at:
            self.commit_next()

    def on_wait(self, message: str) -> None:
        """Commit the next version, a thousand seconds later."""
        self.messages.append(message)
        self.waited_sec += 1000
        self.commit_next()


def follow_job(
    job: Path,
    dataset: Path,
    run: Path,
    pipeline: Pipeline,
    *,
    drain: Drain | None = None,
    on_step: Callable[[StepMetric, int], None] | None = None,
    **options: object,
) -> RunSummary:
    """Train beside a pipeline, with a clock that advances by one second with each call."""
    ticks = count()
    return train(
        job,
        Location.parse(dataset),
        run,
        TrainOptions(follow=True, **options),  # type: ignore[arg-type]
        clock=lambda: next(ticks) + pipeline.waited_sec,
        on_step=on_step or pipeline.on_step,
        drain=drain,
        progress=pipeline.on_wait,
    )


class StoppedError(Exception):
    """What ends a run in the middle."""


def stopping_at(step: int, then: Callable[[StepMetric, int], None]) -> Callable[..., None]:
    """Return a function that calls another one, and ends a run after a step."""

    def on_step(metric: StepMetric, num_steps: int) -> None:
        then(metric, num_steps)
        if metric.step == step:
            raise StoppedError

    return on_step
