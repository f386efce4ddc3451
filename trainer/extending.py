"""What a run does when its dataset has grown: its plans know more steps, its stores later uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from schemas.job_train import TrainConfig
from schemas.plan_slots import Keyframe
from trainer.cache import PlannedCache, TablePlan
from trainer.following import Span
from trainer.next_use import NextUse
from trainer.planning import plans_of
from trainer.sources import RowSource
from trainer.stores.future_log import FutureLog
from trainer.stores.store import Store
from trainer.stores.together import group_of


def plans_of_span(
    span: Span,
    stores: Mapping[str, Store],
    config: TrainConfig,
    first_step: int,
    starts: Mapping[str, Keyframe],
) -> dict[str, TablePlan]:
    """Return the plan of each table from a step to the end of a span.

    Raises:
        PlanError: the cache is too small for a table.
    """
    return plans_of(
        span.dataset,
        span.order,
        stores,
        config.cache,
        first_step,
        None,
        starts,
        span.horizon.known,
    )


def settle(source: RowSource, at: int | None = None) -> int:
    """Return the step that training must reach before a source can know of more, and fix it.

    Args:
        source: of the run.
        at: a later step than would do, which another process has fixed.
    """
    return source.settle(at) if isinstance(source, PlannedCache) else 0


def extend(
    source: RowSource, stores: Mapping[str, Store], span: Span, config: TrainConfig, step: int
) -> None:
    """Let a source know of the steps of a span.

    A plan goes on from its keyframe, as a resumed run's does. Rows that a log had written down for
    no step are written down for the step that uses them, before any of these is read.

    Args:
        source: of the run.
        stores: by table.
        span: with more steps than the source knows.
        config: train section of the job.
        step: the next step; `settle` has returned it, or one before.

    Raises:
        PlanError: the cache is too small for a table.
    """
    if not isinstance(source, PlannedCache):
        return
    plans = plans_of_span(span, stores, config, step, source.keyframes())
    log = group_of(stores)
    reschedule = partial(_reschedule, log, span, step) if isinstance(log, FutureLog) else None
    source.go_on(plans, span.horizon.until, reschedule)


def _reschedule(log: FutureLog, span: Span, step: int) -> None:
    known: dict[str, NextUse] = {}  # of each table: a piece of the log has rows of all

    def next_uses(table: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if table not in known:
            known[table] = NextUse(span.dataset, span.order, span.horizon.known)
        return known[table](table, step, rows)

    log.reschedule(next_uses)
