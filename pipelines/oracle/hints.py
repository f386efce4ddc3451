"""Hints for TorchRec's planner, from statistics and the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipelines.statistics.stored import segment_statistics
from schemas.accesses import TableAccesses
from schemas.curve_points import lru_curve
from schemas.dataset import Dataset
from schemas.hints import TableHints
from schemas.order import Order

HOT_SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5)
"""Shares of the distinct rows whose share of all accesses is told."""
MISS_POINTS = 64
"""Points of the curve of misses."""


def hints_of(dataset: Dataset, order: Order) -> dict[str, TableHints]:
    """Return the hints of every table.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
    """
    index = dataset.index_for(order).manifest
    values, bags, samples = _bags(dataset)
    found: dict[str, TableHints] = {}
    for name, table in dataset.job.data.tables.items():
        accesses = TableAccesses(dataset, name, order)
        num_accesses, num_unique = index.num_accesses[name], index.num_rows[name]
        found[name] = TableHints(
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
    return found


def hot_rows(
    steps: Iterator[NDArray[np.int64]], num_unique: int
) -> tuple[tuple[float, float], ...]:
    """Return which share of all accesses the hottest rows have, a row once per step.

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
    """Return the misses among repeated accesses for caches of ascending shares of a table."""
    repeated = num_accesses - num_unique
    if repeated <= 0:
        return ((0.0, 1.0),)
    curve = lru_curve(steps, num_accesses, num_unique)
    places = np.unique(np.geomspace(1, len(curve.capacities), MISS_POINTS).astype(np.int64)) - 1
    misses = 1 - curve.hit_rates[places] * num_accesses / repeated
    shares = np.minimum(1.0, curve.capacities[places] / num_rows)
    points = zip(shares.tolist(), np.clip(misses, 0.0, 1.0).tolist(), strict=True)
    return ((0.0, 1.0), *points)


def _bags(dataset: Dataset) -> tuple[dict[str, float], dict[str, float], int]:
    """Return values and bags of each feature over all segments, and the samples."""
    values: dict[str, float] = {}
    bags: dict[str, float] = {}
    num_samples = 0
    for segment in dataset.segments:
        whole = segment_statistics(segment).datasets[0]
        num_samples += whole.num_examples
        for feature in whole.features:
            stats = getattr(feature, feature.WhichOneof("stats") or "num_stats")
            common, name = stats.common_stats, feature.path.step[0]
            values[name] = values.get(name, 0) + common.tot_num_values
            bags[name] = bags.get(name, 0) + common.num_non_missing + common.num_missing
    return values, bags, num_samples
