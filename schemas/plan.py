"""What the cache does at each step: a pure streaming function of the index.

Time-to-live policy (BagPipe's): after a step a row stays in the cache if and
only if it is used again within the next `lookahead` steps; otherwise it is
written back and its slot is free. Fetches for a step are issued at most
`prefetch_steps` (at most `lookahead`) steps before it, and a fetched row was
last used more than `lookahead` steps before, so its write-back always precedes
its fetch.

Source: BagPipe (SOSP 2023), the section on the oracle cacher.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError
from schemas.oracle import NEVER


@dataclass(frozen=True, slots=True)
class PlanStep:
    """What one step needs of one table's cache.

    Attributes:
        numbers: (entries,) ascending dense numbers of the step's rows.
        slots: (entries,) int64, where each row lies in the cache during the step.
        fetch: (entries,) bool, rows that must be read from the store before the step.
        evict: (entries,) bool, rows that are written back after the step, and leave.
        resident_rows: rows in the cache during the step.
        distances: (entries,) int32, steps until the row's next use, `NEVER` where there is none.
    """

    numbers: NDArray[np.int64]
    slots: NDArray[np.int64]
    fetch: NDArray[np.bool_]
    evict: NDArray[np.bool_]
    resident_rows: int
    distances: NDArray[np.int32]


class _Slots:
    """Hands out cache slots: those given back first, oldest first, then new ones."""

    def __init__(self) -> None:
        self.free = np.empty(0, np.int64)
        self.num_used = 0

    def take(self, count: int) -> NDArray[np.int64]:
        old, self.free = self.free[:count], self.free[count:]
        missing = count - len(old)
        new = np.arange(self.num_used, self.num_used + missing, dtype=np.int64)
        self.num_used += missing
        return np.concatenate([old, new])

    def give_back(self, slots: NDArray[np.int64]) -> None:
        self.free = np.concatenate([self.free, slots])


def plan_ttl(
    steps: Iterable[tuple[NDArray[np.int64], NDArray[np.int32]]],
    lookahead: int,
    cache_rows: int | None = None,
) -> Iterator[PlanStep]:
    """Plan a cache with a time to live, step by step.

    Args:
        steps: for each step, from the first of the run, its ascending numbers and their
            next-use distances.
        lookahead: steps that a row may wait for its next use in the cache, at least 1.
        cache_rows: most rows the cache may hold, or None.

    Raises:
        PlanError: a step needs more rows than `cache_rows`.
    """
    slots = _Slots()
    waiting: dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    num_waiting = 0
    for step, (numbers, distances) in enumerate(steps):
        cached_numbers, cached_slots = _arriving(waiting.pop(step, []))
        at = np.searchsorted(numbers, cached_numbers)
        fetch = np.ones(len(numbers), bool)
        fetch[at] = False
        resident = num_waiting + int(fetch.sum())
        if cache_rows is not None and resident > cache_rows:
            raise PlanError(
                "cache must hold the rows that wait and those of the step, got "
                f"cache_rows={cache_rows} and {resident} at step {step}; use at least {resident}, "
                "or a smaller lookahead",
                required_rows=resident,
            )
        taken = np.empty(len(numbers), np.int64)
        taken[at] = cached_slots
        taken[fetch] = slots.take(int(fetch.sum()))
        evict = (distances == NEVER) | (distances > lookahead)
        yield PlanStep(numbers, taken, fetch, evict, resident, distances)
        slots.give_back(taken[evict])
        num_waiting = resident - int(evict.sum())
        keep = ~evict
        for distance in np.unique(distances[keep]).tolist():
            chosen = distances == distance
            waiting.setdefault(step + distance, []).append((numbers[chosen], taken[chosen]))


def _arriving(
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cached rows that a step uses, and their slots."""
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Totals of a plan over all steps.

    Attributes:
        num_accesses: entries, summed over steps.
        fetched_rows: reads from the store, first uses included.
        peak_cache_rows: most rows in the cache at once, with the rows prefetched for later steps.
    """

    num_accesses: int
    fetched_rows: int
    peak_cache_rows: int

    @property
    def hit_rate(self) -> float:
        """Share of accesses that need no read."""
        return 1.0 - self.fetched_rows / self.num_accesses if self.num_accesses else 0.0


def summarize(plan: Iterable[PlanStep], prefetch_steps: int) -> PlanSummary:
    """Add up a plan.

    Args:
        plan: the plan of one table.
        prefetch_steps: steps before its use that a row is fetched.
    """
    resident: list[int] = []
    fetched: list[int] = []
    num_accesses = 0
    for step in plan:
        num_accesses += len(step.numbers)
        resident.append(step.resident_rows)
        fetched.append(int(step.fetch.sum()))
    peak = max(
        (r + sum(fetched[s + 1 : s + 1 + prefetch_steps]) for s, r in enumerate(resident)),
        default=0,
    )
    return PlanSummary(num_accesses, sum(fetched), peak)
