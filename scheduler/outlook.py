"""How a running job would end at its sizes, and at the best ones that may be trusted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.candidates import candidates
from scheduler.decision import Candidate
from scheduler.fit import predict_seconds
from scheduler.grid import Grid
from scheduler.models import Models, segment_setting, training_setting
from scheduler.policy import SEED, candidate, haste_of, preference, weigh
from scheduler.predictions import SEC_PER_HOUR, predict
from scheduler.snapshot import Snapshot
from schemas.job_schedule import ScheduleConfig

REACH = 2
"""Times that a size may grow in one change: what lies further is not known well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of both pools."""

    segment_jobs: int
    """Segment jobs at once."""
    workers_per_job: int
    """Pipeline workers of each."""
    num_replicas: int
    """Trainer replicas."""
    num_stores: int
    """Embedding stores."""

    @property
    def grid(self) -> Grid:
        """Return the sizes as the only candidate."""
        sizes = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid.of_rows(np.array([sizes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is left of a job, with and without a change."""

    current: Candidate
    """Its sizes, and what they are predicted to take for what is left."""
    best: Candidate
    """The best sizes that may be trusted, the change itself counted in; maybe the same ones."""
    gain: float
    """What the change saves, as a share; at most 0 when nothing is better."""
    confident: bool
    """Whether the prediction for the current sizes may be trusted."""


def sizes_of(found: Candidate) -> Sizes:
    """Return the sizes of a candidate."""
    return Sizes(
        segment_jobs=found.segment_jobs,
        workers_per_job=found.workers_per_job,
        num_replicas=found.num_replicas,
        num_stores=found.num_stores,
    )


def outlook(
    snapshot: Snapshot,
    config: ScheduleConfig,
    models: Models,
    current: Sizes,
    pause_sec: float,
    largest_job: int | None = None,
    *,
    served: bool = False,
) -> Outlook:
    """Compare a job's sizes with all others whose prediction is narrow enough to act upon.

    Args:
        snapshot: of what is left: samples to build and to train.
        config: limits, and the time that is left until the deadline.
        models: fitted to what was measured up to now.
        current: what runs.
        pause_sec: time that a change costs.
        largest_job: workers of one segment job at most; None where only limits bound it.
        served: whether rows lie in stores, so that there must be some.

    Raises:
        PlanError: no size fits.
    """
    near = _within_reach(config, current)
    grid = candidates(snapshot, near, models, np.random.default_rng(SEED), largest_job)
    if served:
        grid = grid[grid.num_stores > 0]
    grid = grid[_trusted(grid, snapshot, config, models)]
    now = _of(current.grid, snapshot, config, models)
    known = bool(_trusted(current.grid, snapshot, config, models)[0])
    if not len(grid):
        return Outlook(current=now, best=now, gain=0.0, confident=known)
    found = predict(grid, snapshot, config, models)
    best = candidate(grid, found, config, int(preference(grid, found, config)[0]))
    if sizes_of(best) != current:
        paid = best.cost_per_hour * pause_sec / SEC_PER_HOUR
        best = replace(best, predicted_sec=best.predicted_sec + pause_sec, cost=best.cost + paid)
    return Outlook(current=now, best=best, gain=gain(now, best, config), confident=known)


def gain(current: Candidate, best: Candidate, config: ScheduleConfig) -> float:
    """Return what is saved as a share: of the delay while late, else of what `plan` makes small."""
    if config.deadline is None:
        haste = haste_of(config.budget)
        now, then = (weigh(one.predicted_sec, one.cost, haste) for one in (current, best))
        return 1.0 - then / max(now, 1e-12)
    wanted = config.deadline.total_seconds()
    late = max(0.0, current.predicted_sec - wanted), max(0.0, best.predicted_sec - wanted)
    if late[0] > 0.0:
        return 1.0 - late[1] / late[0]
    return -late[1] if late[1] > 0.0 else 1.0 - best.cost / max(current.cost, 1e-12)


def _within_reach(config: ScheduleConfig, current: Sizes) -> ScheduleConfig:
    """Return limits with which no size is more than doubled at once."""
    first, second = config.preprocessing, config.training
    workers = REACH * current.segment_jobs * current.workers_per_job
    return replace(
        config,
        preprocessing=replace(
            first, max_workers=min(first.max_workers, max(first.min_workers, workers))
        ),
        training=replace(
            second,
            max_replicas=min(
                second.max_replicas, max(second.min_replicas, REACH * current.num_replicas)
            ),
            max_stores=min(second.max_stores, REACH * max(1, current.num_stores)),
        ),
    )


def _of(grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models) -> Candidate:
    return candidate(grid, predict(grid, snapshot, config, models), config, 0)


def _trusted(grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models) -> np.ndarray:
    """Tell which candidates have narrow intervals for both pools."""
    steps = predict_seconds(models.training, training_setting(snapshot, config, grid))
    segments = predict_seconds(models.segments, segment_setting(models, snapshot, config, grid))
    return steps.confident & segments.confident
