"""What a plan does with each table, and the trace of its accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses, indexed_steps
from schemas.dataset import Dataset
from schemas.order import Order
from schemas.plan import plan_ttl, summarize


@dataclass(frozen=True, slots=True)
class TableReport:
    """What `oracle --json` says of one table under a plan."""

    num_lookups: int
    num_lookups_dedup: int
    num_accesses: int
    num_unique_rows: int
    fetched_rows: int
    hit_rate: float
    peak_cache_rows: int


def report_table(
    dataset: Dataset, table: str, order: Order, lookahead: int, prefetch_steps: int,
    cache_rows: int | None,
) -> TableReport:  # fmt: skip
    """Run the plan over one table and add up what it does.

    Raises:
        PlanError: the cache is too small.
    """
    index = dataset.index_for(order)
    plan = plan_ttl(indexed_steps(dataset, index, table, order), lookahead, cache_rows)
    summary = summarize(plan, prefetch_steps)
    manifests = [s.manifest for s in dataset.segments]  # older ones may lack a table
    counts = [m.tables[table] for m in manifests if table in m.tables]
    return TableReport(
        num_lookups=order.epochs * sum(c.num_lookups for c in counts),
        num_lookups_dedup=order.epochs * sum(c.num_lookups_dedup for c in counts),
        num_accesses=summary.num_accesses,
        num_unique_rows=index.manifest.num_rows[table],
        fetched_rows=summary.fetched_rows,
        hit_rate=summary.hit_rate,
        peak_cache_rows=summary.peak_cache_rows,
    )


def flat_accesses(dataset: Dataset, table: str, order: Order) -> NDArray[np.int64]:
    """Return the numbers of all entries of all steps, in order: a trace for cache curves."""
    steps: Sequence[NDArray[np.int64]] = list(TableAccesses(dataset, table, order).steps())
    return np.concatenate([*steps, np.empty(0, np.int64)])
