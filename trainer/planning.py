"""From a dataset's index to the plan that a cache obeys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses
from schemas.dataset import Dataset
from schemas.jagged import Jagged
from schemas.job_train import CacheConfig
from schemas.order import Order
from schemas.plan import plan_ttl
from trainer.cache import TablePlan


def plans_of(
    dataset: Dataset, order: Order, tables: Iterable[str], config: CacheConfig, first_step: int
) -> dict[str, TablePlan]:
    """Return the plan of each table from a step on.

    A run that goes on at a later step starts with an empty cache, so its plan
    is that of a run whose first step is that one.

    Args:
        dataset: open dataset.
        order: global order of the run.
        tables: table names.
        config: policy and limits; the limit holds for each table.
        first_step: first step to be trained.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
        PlanError: while the plan is followed, a step needs more rows than `config.rows`.
    """
    index = dataset.index_for(order)
    plans: dict[str, TablePlan] = {}
    for table in tables:
        accesses = TableAccesses(dataset, table, order)
        steps = _steps_from(first_step, order, accesses, index.distances(table))
        plans[table] = TablePlan(plan_ttl(steps, config.lookahead, config.rows), accesses.rows)
    return plans


def _steps_from(
    first_step: int, order: Order, accesses: TableAccesses, distances: Jagged
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    for train_step in range(first_step, order.num_steps):
        start, end = distances.offsets[train_step : train_step + 2]
        yield accesses.numbers(train_step), distances.values[start:end].astype(np.int32)
