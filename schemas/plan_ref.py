"""Slow and obvious plans of a cache; tests compare the fast ones with these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class StepRef:
    """What a cache does around one step.

    Attributes:
        cache: rows it holds during the step, those read for the steps of the window included.
        fetch: rows that are read for the step.
        evict: rows that leave after it.
    """

    cache: frozenset[int]
    fetch: frozenset[int]
    evict: frozenset[int]


def next_step(steps: Sequence[frozenset[int]], row: int, after: int) -> int | None:
    """Return the first step behind `after` that uses the row."""
    return next((s for s in range(after + 1, len(steps)) if row in steps[s]), None)


def plan_ref(
    steps: Sequence[frozenset[int]],
    policy: str,
    *,
    lookahead: int,
    prefetch_steps: int,
    rows: int | None,
) -> list[StepRef]:
    """Plan with sets, and by a look at all that is to come.

    Args:
        steps: rows of each step.
        policy: `ttl` or `belady`; for comparison `lru`, whose row that was used longest ago leaves.
        lookahead: steps that a row may wait under `ttl`.
        prefetch_steps: steps before its use that a row is read.
        rows: size of the cache; exceeded when the window alone does not fit.

    Example:
        >>> steps = [frozenset({1}), frozenset({2}), frozenset({1})]
        >>> found = plan_ref(steps, "belady", lookahead=1, prefetch_steps=0, rows=1)
        >>> [sorted(step.fetch) for step in found]
        [[1], [2], [1]]
    """
    cache = frozenset[int]()
    fetches: list[frozenset[int]] = []
    for step in steps[: prefetch_steps + 1]:
        fetches.append(step - cache)
        cache |= step
    found: list[StepRef] = []
    for now, used in enumerate(steps):
        gone: set[int] = set()
        for row in used:
            later = next_step(steps, row, now)
            if later is None or (policy == "ttl" and later - now > lookahead):
                gone.add(row)
        coming = now + prefetch_steps + 1
        if coming < len(steps):
            fetches.append(steps[coming] - (cache - gone))
            if policy != "ttl" and rows is not None:
                held = frozenset[int]().union(*steps[now + 1 : coming + 1])
                gone |= _pushed_out(steps, policy, cache - gone, held, rows, now)
        found.append(StepRef(cache, fetches[now], frozenset(gone)))
        cache -= gone
        if coming < len(steps):
            cache |= steps[coming]
    return found


def _pushed_out(
    steps: Sequence[frozenset[int]],
    policy: str,
    cache: frozenset[int],
    held: frozenset[int],
    rows: int,
    now: int,
) -> set[int]:
    def leaves_first(row: int) -> int:
        if policy == "belady":
            return -(next_step(steps, row, now) or 0)
        return max(step for step in range(now + 1) if row in steps[step])

    movable = sorted(cache - held, key=leaves_first)
    return set(movable[: max(0, len(cache | held) - rows)])


def fewest_fetches(
    steps: Sequence[frozenset[int]], *, prefetch_steps: int, rows: int
) -> int | None:
    """Return the fewest reads with which any cache of a size serves a run, by trying everything.

    Returns:
        The number of reads, None when the rows of some window do not fit.

    Example:
        >>> steps = [frozenset({1}), frozenset({2}), frozenset({1})]
        >>> fewest_fetches(steps, prefetch_steps=0, rows=2)
        2
    """
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for coming, step in enumerate(steps):
        held = frozenset[int]().union(*steps[max(0, coming - prefetch_steps) : coming + 1])
        after: dict[frozenset[int], int] = {}
        for cache, cost in costs.items():
            rest = sorted(cache - held)
            for count in range(min(len(rest), rows - len(held)) + 1):
                for kept in combinations(rest, count):
                    state = held | frozenset(kept)
                    total = cost + len(step - cache)
                    after[state] = min(total, after.get(state, total))
        costs = after
    return min(costs.values(), default=None)
