"""Cache reports of each table and policy, and statistics for TorchRec's sharding planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelines.quality.segment_statistics import segment_statistics
from schemas.accesses import TableAccesses, indexed_steps
from schemas.cache_plan import Plan, cache_too_small, required_rows, summarize
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset
from schemas.miss_ratio import lru_curve
from schemas.order import Order
from schemas.sharding_hints import TableHints

HOT_SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5)
"""Shares of the distinct rows for which `hot_rows` returns the share of accesses."""
MISS_POINTS = 64
"""Points of the miss curve."""


def sharding_hints(dataset: Dataset, order: Order) -> dict[str, TableHints]:
    """Return the hints of every table.

    Raises:
        SchemaError: the dataset has no index for this order; the message gives the command.
    """
    index = dataset.index_for(order).manifest
    values, bags, samples = _bags(dataset)
    hints: dict[str, TableHints] = {}
    for name, table in dataset.job.data.tables.items():
        accesses = TableAccesses(dataset, name, order)
        num_accesses, num_unique = index.num_accesses[name], index.num_rows[name]
        hints[name] = TableHints(
            feature_names=tuple(table.features),
            pooling_factors=tuple(
                values.get(f, 0) / max(1, bags.get(f, 0)) for f in table.features
            ),
            num_poolings=tuple(bags.get(f, 0) / max(1, samples) for f in table.features),
            batch_sizes=(order.blocks_per_batch * dataset.job.data.block_samples,)
            * len(table.features),
            num_rows=table.num_rows,
            num_unique_rows=num_unique,
            unique_rows_per_step=num_accesses / max(1, order.num_steps),
            hot_rows=hot_rows(accesses.steps(), num_unique),
            lru_misses=lru_misses(accesses.steps(), num_accesses, num_unique, table.num_rows),
        )
    return hints


def hot_rows(
    steps: Iterator[NDArray[np.int64]], num_unique: int
) -> tuple[tuple[float, float], ...]:
    """Return (share of rows, share of accesses) for the hottest rows; a row counts once per step.

    Example:
        >>> hot_rows(iter([np.array([0, 1]), np.array([0])]), 2)[-1]
        (0.5, 0.6666666666666666)
    """
    counts = np.zeros(num_unique, np.int64)
    for numbers in steps:
        counts[numbers] += 1
    hottest = np.cumsum(np.sort(counts)[::-1])
    if not num_unique:
        return ()
    sizes = [max(1, round(share * num_unique)) for share in HOT_SHARES]
    return tuple(
        (share, float(hottest[size - 1] / hottest[-1]))
        for share, size in zip(HOT_SHARES, sizes, strict=True)
    )


def lru_misses(
    steps: Iterator[NDArray[np.int64]], num_accesses: int, num_unique: int, num_rows: int
) -> tuple[tuple[float, float], ...]:
    """Return (cache size as a share of the table, misses as a share of repeated accesses)."""
    repeated = num_accesses - num_unique
    if repeated <= 0:
        return ((0.0, 1.0),)
    curve = lru_curve(steps, num_accesses, num_unique)
    indices = np.unique(np.geomspace(1, len(curve.capacities), MISS_POINTS).astype(np.int64)) - 1
    misses = 1 - curve.hit_rates[indices] * num_accesses / repeated
    shares = np.minimum(1.0, curve.capacities[indices] / num_rows)
    points = zip(shares.tolist(), np.clip(misses, 0.0, 1.0).tolist(), strict=True)
    return ((0.0, 1.0), *points)


def _bags(dataset: Dataset) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the values and bags of each feature over all segments, and the number of samples."""
    values: dict[str, float] = {}
    bags: dict[str, float] = {}
    num_samples = 0
    for segment in dataset.segments:
        statistics = segment_statistics(segment).datasets[0]
        num_samples += statistics.num_examples
        for feature in statistics.features:
            stats = getattr(feature, feature.WhichOneof("stats") or "num_stats")
            common, name = stats.common_stats, feature.path.step[0]
            values[name] = values.get(name, 0) + common.tot_num_values
            bags[name] = bags.get(name, 0) + common.num_non_missing + common.num_missing
    return values, bags, num_samples


@dataclass(frozen=True, slots=True)
class TableReport:
    """Fields of `oracle --json` for one table under the job's plan."""

    num_lookups: int
    num_lookups_dedup: int
    num_accesses: int
    num_unique_rows: int
    fetched_rows: int
    hit_rate: float
    peak_cache_rows: int


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Results of one policy with one cache size.

    Attributes:
        required_rows: smallest cache size that the plan fits.
        cache_rows: cache size; None for no limit.
        fetched_rows: rows read, first uses included; None, like the next three, if the plan does
            not fit the cache.
        written_rows: rows written back on eviction.
        hit_rate: share of accesses that need no read.
        peak_cache_rows: maximum number of rows in the cache, including those in flight.
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
    """Run both policies over one table with `cache.rows`, or the peak of `ttl` if that is unset.

    Raises:
        SchemaError: the dataset has no index for this order; the message gives the command.
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
    summary = summarize(Plan(indexed_steps(dataset, index, table, order), cache))
    return PolicyReport(
        required_rows=required,
        cache_rows=cache.rows,
        fetched_rows=summary.fetched_rows,
        written_rows=summary.written_rows,
        hit_rate=summary.hit_rate,
        peak_cache_rows=summary.peak_cache_rows,
    )


def table_report(
    dataset: Dataset,
    table: str,
    order: Order,
    cache: CacheConfig,
    policies: Mapping[str, PolicyReport],
) -> TableReport:
    """Return the report of one table under the job's policy.

    Raises:
        PlanError: the cache is too small.
    """
    chosen = policies[cache.policy]
    if chosen.fetched_rows is None or chosen.hit_rate is None or chosen.peak_cache_rows is None:
        raise cache_too_small(cache, chosen.required_rows, table=table)
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
