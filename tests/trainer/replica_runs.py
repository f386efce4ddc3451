"""Replicas that a test starts: with faults, and with what is to happen meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from presage.schemas.run.records import LEDGER, RunSummary, StepMetric
from presage.schemas.storage.location import Location
from presage.trainer.elastic.launcher import LaunchOptions, LocalReplicas, train_replicas
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain
from presage.trainer.run.folder import read_ledger
from tests.trainer.faults import Faults
from tests.trainer.runs import small_dataset


def run_replicas(
    job: Path,
    run: Path,
    faults: Faults | None = None,
    *,
    dataset: Path | None = None,
    on_step: Callable[[StepMetric, int], None] = lambda *_: None,
    at_step: Mapping[int, Callable[[], None]] | None = None,
    on_start: Callable[[LocalReplicas], None] = lambda _: None,
    drain: Drain | None = None,
    progress: Callable[[str], None] = lambda _: None,
    launch: Mapping[str, Any] | None = None,
    **options: object,
) -> RunSummary:
    """Train a job by replicas.

    Args:
        job: its file.
        run: folder of the run.
        faults: that happen to the replicas.
        dataset: None: the small one.
        on_step: called after each step.
        at_step: what to do after a step, once.
        on_start: called with the replicas of each attempt.
        drain: asks the run to end.
        progress: called with a line when the start waits.
        launch: options of the launcher besides two replicas with heartbeats of two seconds.
        options: of the run.
    """
    actions = dict(at_step or {})

    def act(metric: StepMetric, num_steps: int) -> None:
        on_step(metric, num_steps)
        if metric.step in actions:
            actions.pop(metric.step)()

    chosen = {"count": 2, "heartbeat_sec": 2.0, "start": (faults or Faults()).start}
    return train_replicas(
        job,
        Location.parse(dataset or small_dataset()),
        run,
        TrainOptions(**options),  # type: ignore[arg-type]
        LaunchOptions(**(chosen | dict(launch or {}))),
        act,
        drain,
        on_start,
        progress,
    )


def steps_by_life(run: Path) -> dict[str, int]:
    """Return the number of steps in which each life of a replica computed microbatches."""
    return Counter(entry.replica for entry in read_ledger(run / LEDGER))
