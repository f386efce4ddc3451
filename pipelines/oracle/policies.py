"""What each policy's plan does with a table: reads, hits and the size that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.accesses import indexed_steps
from schemas.dataset import Dataset
from schemas.job_train import CacheConfig
from schemas.order import Order
from schemas.plan import plan, too_small
from schemas.plan_size import required_rows, summarize


@dataclass(frozen=True, slots=True)
class TableReport:
    """What `oracle --json` says of one table under the job's plan."""

    num_lookups: int
    num_lookups_dedup: int
    num_accesses: int
    num_unique_rows: int
    fetched_rows: int
    hit_rate: float
    peak_cache_rows: int


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What one policy does in a cache of some size.

    Attributes:
        required_rows: smallest cache with which it works.
        cache_rows: size that it was given; None when it takes what it needs.
        fetched_rows: reads, first uses included; None, as are the next three, when it does not fit.
        written_rows: rows written back when they leave.
        hit_rate: share of accesses that need no read.
        peak_cache_rows: most rows in the cache at once, those in flight included.
    """

    required_rows: int
    cache_rows: int | None
    fetched_rows: int | None
    written_rows: int | None
    hit_rate: float | None
    peak_cache_rows: int | None


def policy_reports(
    dataset: Dataset, table: str, order: Order, cache: CacheConfig
) -> dict[str, PolicyReport]:
    """Run both policies over one table, in caches of one size.

    That of `cache.rows`, or, where it sets none, the size that `ttl` takes.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
    """
    ttl = policy_report(dataset, table, order, replace(cache, policy="ttl"))
    rows = cache.rows or max(1, ttl.peak_cache_rows or 0)
    best = policy_report(dataset, table, order, replace(cache, policy="belady", rows=rows))
    return {"ttl": ttl, "belady": best}


def policy_report(dataset: Dataset, table: str, order: Order, cache: CacheConfig) -> PolicyReport:
    """Run one policy over one table."""
    index = dataset.index_for(order)
    distances = map(index.steps(table).__getitem__, range(order.num_steps))
    required = required_rows(distances, cache)
    if cache.rows is not None and required > cache.rows:
        return PolicyReport(required, cache.rows, None, None, None, None)
    found = summarize(plan(indexed_steps(dataset, index, table, order), cache))
    return PolicyReport(
        required_rows=required,
        cache_rows=cache.rows,
        fetched_rows=found.fetched_rows,
        written_rows=found.written_rows,
        hit_rate=found.hit_rate,
        peak_cache_rows=found.peak_cache_rows,
    )


def table_report(
    dataset: Dataset,
    table: str,
    order: Order,
    cache: CacheConfig,
    policies: Mapping[str, PolicyReport],
) -> TableReport:
    """Return what the job's own policy does with one table.

    Raises:
        PlanError: its cache is too small.
    """
    chosen = policies[cache.policy]
    if chosen.fetched_rows is None or chosen.hit_rate is None or chosen.peak_cache_rows is None:
        raise too_small(cache, chosen.required_rows, table=table)
    index = dataset.index_for(order).manifest
    manifests = [s.manifest for s in dataset.segments]  # older ones may lack a table
    counts = [m.tables[table] for m in manifests if table in m.tables]
    return TableReport(
        num_lookups=order.epochs * sum(c.num_lookups for c in counts),
        num_lookups_dedup=order.epochs * sum(c.num_lookups_dedup for c in counts),
        num_accesses=index.num_accesses[table],
        num_unique_rows=index.num_rows[table],
        fetched_rows=chosen.fetched_rows,
        hit_rate=chosen.hit_rate,
        peak_cache_rows=chosen.peak_cache_rows,
    )
