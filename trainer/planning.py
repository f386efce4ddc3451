"""From a dataset's index to the plan that a cache obeys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses, kept_for
from schemas.dataset import Dataset
from schemas.job_train import CacheConfig
from schemas.oracle import known_before
from schemas.order import Order
from schemas.plan import plan
from schemas.plan_size import check_size
from schemas.plan_slots import Keyframe
from trainer.cache import TablePlan

KEPT_BYTES = 256 << 20
"""Decoded access lists of all tables together, of a shuffled run; others are decoded again."""


def plans_of(
    dataset: Dataset,
    order: Order,
    tables: Iterable[str],
    config: CacheConfig,
    first_step: int,
    flush_every: int | None = None,
    starts: Mapping[str, Keyframe] | None = None,
    until: int | None = None,
) -> dict[str, TablePlan]:
    """Return the plan of each table from a step on.

    Plans stream. For a whole table they hold 8 bytes of each row that the dataset uses and 4 more
    that the plan has seen, and of several segments 4 for each row of a segment; besides, for each
    table a file of lists and one of next uses, and `KEPT_BYTES` of lists of all tables together.

    A run that goes on with keyframes has the rest of the plan that it was stopped in. Without, it
    starts with an empty cache: its plan is that of a run whose first step is that one. Neither goes
    through the steps before.

    Args:
        dataset: open dataset.
        order: global order of the run.
        tables: table names.
        config: policy and limits; the limit holds for each table.
        first_step: first step to be trained.
        flush_every: steps between checkpoints, which write all cached rows.
        starts: state of each table's plan before the first step, empty for none.
        until: one after the last step that is known: the plan ends there, and knows no use beyond;
            the whole run when None.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
        PlanError: `config.rows` is too small for a table; the message names the size that works.
    """
    index, end = dataset.index_for(order), order.num_steps if until is None else until
    to_train = range(first_step, end)
    files = {table: index.steps(table) for table in tables}

    def distances(table: str) -> Iterator[NDArray[np.int32]]:
        found = files[table]
        return (
            known_before(found[step].astype(np.int32, copy=False), step, end) for step in to_train
        )

    check_size({table: distances(table) for table in files}, config)
    kept = kept_for(order, KEPT_BYTES)
    plans: dict[str, TablePlan] = {}
    for table in files:
        accesses = TableAccesses(dataset, table, order, kept)
        steps = zip(map(accesses.numbers, to_train), distances(table), strict=True)
        planned = plan(
            steps,
            config,
            first_step=first_step,
            flush_every=flush_every,
            start=(starts or {}).get(table),
        )
        plans[table] = TablePlan(planned, accesses.rows, planned.keyframe)
    return plans
