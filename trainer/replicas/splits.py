"""Which leaves of a step each replica computes: a pure function of what all have agreed on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def split(num_leaves: int, speeds: Mapping[str, float]) -> dict[str, range]:
    """Cut the leaves of a step into one run per replica, in proportion to speed.

    Runs lie in the order of the names. The largest of all runs over speeds, the time of the step,
    is the smallest that whole leaves allow; of equal cuts the one with earlier long runs is taken.

    Args:
        num_leaves: of the step.
        speeds: by replica, leaves per second, positive.

    Returns:
        by replica its leaves, some of them perhaps none.

    Example:
        >>> split(8, {"a": 2.0, "b": 1.0, "c": 1.0})
        {'a': range(0, 4), 'b': range(4, 6), 'c': range(6, 8)}
    """
    if not speeds or min(speeds.values()) <= 0:
        raise ValueError(f"speeds must be positive, got {dict(speeds)}; leave others out")
    counts = dict.fromkeys(sorted(speeds), 0)
    for _ in range(num_leaves):
        # one leaf more for whoever would be done with it first
        soonest = min(counts, key=lambda name: ((counts[name] + 1) / speeds[name], name))
        counts[soonest] += 1
    runs: dict[str, range] = {}
    first = 0
    for name, count in counts.items():
        runs[name] = range(first, first + count)
        first += count
    return runs


def taken_over(
    num_leaves: int, held: Mapping[str, Collection[int]], speeds: Mapping[str, float]
) -> dict[str, list[int]]:
    """Share out the leaves of a step in flight that no living replica has.

    Args:
        num_leaves: of the step.
        held: by living replica, the leaves that it computes already.
        speeds: by living replica, leaves per second.

    Returns:
        by replica the leaves that it computes besides.

    Example:
        >>> taken_over(4, {"a": [0], "c": [3]}, {"a": 1.0, "c": 1.0})
        {'a': [1], 'c': [2]}
    """
    missing = sorted(set(range(num_leaves)) - {leaf for run in held.values() for leaf in run})
    runs = split(len(missing), speeds)
    return {name: [missing[i] for i in run] for name, run in runs.items()}


def smoothed(before: float | None, measured: float, weight: float = 0.3) -> float:
    """Return a speed that follows what was measured, and forgets.

    Args:
        before: None for the first.
        measured: leaves per second of one step.
        weight: of the newest.
    """
    return measured if before is None else before + weight * (measured - before)


def agreed_speeds(told: Mapping[str, float | None]) -> dict[str, float]:
    """Return a speed for every replica: one that has none yet is as fast as the middle of them.

    Args:
        told: by replica, leaves per second, None before its first step.
    """
    known: Sequence[float] = sorted(s for s in told.values() if s is not None)
    middle = known[len(known) // 2] if known else 1.0
    return {name: middle if speed is None else speed for name, speed in told.items()}
