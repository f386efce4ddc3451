"""From a dataset's index to the plan that a cache obeys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses
from schemas.dataset import Dataset
from schemas.jagged import Jagged
from schemas.job_train import CacheConfig
from schemas.order import Order
from schemas.plan import plan
from schemas.plan_size import check_size
from trainer.cache import TablePlan


def plans_of(
    dataset: Dataset,
    order: Order,
    tables: Iterable[str],
    config: CacheConfig,
    first_step: int,
    flush_every: int | None = None,
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
        flush_every: steps between checkpoints, which write all cached rows.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
        PlanError: `config.rows` is too small for a table; the message names the size that works.
    """
    index = dataset.index_for(order)
    distances = {t: _distances_from(first_step, order, index.distances(t)) for t in tables}
    check_size({table: _by_step(found) for table, found in distances.items()}, config)
    plans: dict[str, TablePlan] = {}
    for table, of_table in distances.items():
        accesses = TableAccesses(dataset, table, order)
        numbers = map(accesses.numbers, range(first_step, order.num_steps))
        steps = zip(numbers, _by_step(of_table), strict=True)
        planned = plan(steps, config, first_step=first_step, flush_every=flush_every)
        plans[table] = TablePlan(planned, accesses.rows)
    return plans


def _distances_from(first_step: int, order: Order, distances: Jagged) -> Jagged:
    """Return the distances of the steps to come, as narrow as the number of steps allows."""
    offsets = distances.offsets[first_step:]
    values = distances.values[offsets[0] :]
    return Jagged(values.astype(np.min_scalar_type(order.num_steps)), offsets - offsets[0])


def _by_step(distances: Jagged) -> Iterator[NDArray[np.int32]]:
    for start, end in pairwise(distances.offsets.tolist()):
        yield distances.values[start:end].astype(np.int32)
