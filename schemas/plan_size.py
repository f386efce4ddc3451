"""What a plan needs and what it does, added up over all steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.job_train import CacheConfig
from schemas.oracle import NEVER
from schemas.plan import PlanStep, too_small


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Totals of a plan over all steps.

    Attributes:
        num_accesses: entries, summed over steps.
        fetched_rows: reads from the store, first uses included.
        written_rows: rows written back when they leave the cache.
        peak_cache_rows: most rows in the cache at once, with the rows read for later steps.
    """

    num_accesses: int
    fetched_rows: int
    written_rows: int
    peak_cache_rows: int

    @property
    def hit_rate(self) -> float:
        """Share of accesses that need no read."""
        return 1.0 - self.fetched_rows / self.num_accesses if self.num_accesses else 0.0


def summarize(plan: Iterable[PlanStep]) -> PlanSummary:
    """Add up a plan.

    Args:
        plan: the plan of one table.
    """
    accesses = fetched = written = peak = 0
    for step in plan:
        accesses += len(step.numbers)
        fetched += int(step.fetch.sum())
        written += int(step.write_back.sum())
        peak = max(peak, step.resident_rows)
    return PlanSummary(accesses, fetched, written, peak)


def required_rows(distances: Iterable[NDArray[np.integer]], cache: CacheConfig) -> int:
    """Return the smallest cache with which a plan works, from next-use distances alone.

    `ttl` needs the rows that wait and those of the window, prefetch_steps + 1 steps. `belady` needs
    those of the window, which are what a time to live of `prefetch_steps` keeps.

    Args:
        distances: for each step those of its entries.
        cache: policy and limits.

    Example:
        >>> steps = [np.array([2, 0]), np.array([0]), np.array([0])]
        >>> required_rows(steps, CacheConfig(policy="belady", prefetch_steps=1))
        3
        >>> required_rows(steps, CacheConfig(policy="ttl", lookahead=2, prefetch_steps=2))
        3
    """
    reach = cache.prefetch_steps if cache.policy == "belady" else cache.lookahead
    entries: list[int] = []
    kept: list[int] = []  # by step, rows that wait for their next use
    arriving = np.zeros(1024, np.int64)  # by step, rows that waited for it
    for step, found in enumerate(distances):
        counts = np.bincount(found[(found != NEVER) & (found <= reach)])
        entries.append(len(found))
        kept.append(int(counts.sum()))
        top = step + len(counts)
        if top > len(arriving):
            arriving = np.concatenate([arriving, np.zeros(top, np.int64)])
        arriving[step:top] += counts
    if not entries:
        return 0
    arrived = arriving[: len(entries)]
    waiting = np.cumsum(np.array(kept) - arrived) - kept + arrived  # before the step
    reads = np.cumsum(np.array(entries) - arrived)
    ends = np.minimum(np.arange(len(entries)) + cache.prefetch_steps, len(entries) - 1)
    in_window = reads[ends] - reads + entries - arrived
    return int((waiting + in_window).max())


def check_size(tables: Mapping[str, Iterable[NDArray[np.integer]]], cache: CacheConfig) -> None:
    """Refuse a cache that is too small, before anything is trained.

    Args:
        tables: by table, for each step the next-use distances of its entries.
        cache: policy and limits; the limit holds for each table.

    Raises:
        PlanError: `cache.rows` is below what some plan needs; names the table that needs the most,
            and how much: a size that works for all.
    """
    if cache.rows is None or not tables:
        return
    required = {table: required_rows(distances, cache) for table, distances in tables.items()}
    largest = max(required, key=lambda table: required[table])
    if required[largest] > cache.rows:
        raise too_small(cache, required[largest], table=largest)
