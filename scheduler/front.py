"""Points that no other point beats, and the area that they cover; both objectives are small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.model import Floats

Ints = NDArray[np.int64]


def front(objectives: Floats) -> Ints:
    """Return the points that are not dominated, by the first objective ascending.

    A point is dominated when another is at least as small in both objectives; of equal
    points the first one stays.

    Args:
        objectives: (n, 2), to be small.

    Example:
        >>> front(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]])).tolist()
        [1, 0]
    """
    order = np.lexsort((np.arange(len(objectives)), objectives[:, 1], objectives[:, 0]))
    second = objectives[order, 1]
    before = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return order[second < before]


def ranks(objectives: Floats, violations: Floats) -> Ints:
    """Return the front that each point is in, 0 for the best one.

    Points that break a limit come after all others, by how much they break it.

    Args:
        objectives: (n, 2), to be small.
        violations: (n,), 0 where no limit is broken.
    """
    found = np.empty(len(objectives), np.int64)
    left = np.flatnonzero(violations <= 0)
    rank = 0
    while len(left):
        best = front(objectives[left])
        found[left[best]] = rank
        left = np.delete(left, best)
        rank += 1
    broken = violations > 0
    found[broken] = rank + np.unique(violations[broken], return_inverse=True)[1]
    return found


def crowding(objectives: Floats) -> Floats:
    """Return how far the neighbours of each point of one front are apart; its ends are infinite.

    Example:
        >>> crowding(np.array([[0.0, 4.0], [1.0, 2.0], [4.0, 0.0]])).tolist()
        [inf, 2.0, inf]
    """
    found = np.zeros(len(objectives))
    for values in objectives.T:
        order = np.argsort(values, kind="stable")
        width = values[order[-1]] - values[order[0]]
        found[order[[0, -1]]] = np.inf
        if width > 0:
            found[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / width
    return found


def hypervolume(objectives: Floats, reference: tuple[float, float]) -> float:
    """Return the area between points and a reference that is worse in both objectives.

    Example:
        >>> hypervolume(np.array([[0.0, 1.0], [1.0, 0.0]]), (2.0, 2.0))
        3.0
    """
    inside = objectives[(objectives < np.array(reference)).all(axis=1)]
    best = inside[front(inside)]
    if not len(best):
        return 0.0
    widths = np.diff(np.append(best[:, 0], reference[0]))
    return float(widths @ (reference[1] - best[:, 1]))
