"""When a process meets its memory limit: its resident memory as it grows, measured.

Resident bytes over steps x are taken to be

    y = b + a x + e h(x)

with a leak or a fill of a bytes a step, and e bytes for each unit of a load h that is
known ahead (rows touched so far, from the oracle: a table that fills grows ever more
slowly, and a straight line would cry wolf). a and e are at least 0. Early on the load is
nearly a line itself: then it explains what was read, and says how much is needed, but the
line counts too for when the limit may be met, or a leak would be seen late. What counts are
peaks, so the highest reading of each of up to 64 stretches is fitted; their errors
follow one another, so they count for fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from scheduler.model import Floats

STRETCHES = 64
"""Stretches of steps whose peaks are fitted: more would be fitted to noise."""
MIN_STRETCHES = 8
"""Fewer peaks tell no trend."""
SKIPPED = 0.1
"""Share of the readings, the earliest ones, that is the process starting."""
LEVEL = 0.9
"""Share of peaks that the interval is to hold."""
MAX_POINTS = 4096
"""Steps of the future that are looked at."""
BETTER = 0.95
"""Squared error of a fit over that of one tried before it, below which it takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Resident memory up to the end of a process."""

    confident: bool
    """Whether enough was read to tell a trend; if not, the steps below are None."""
    expected_step: int | None
    """First step at which the limit is met; None when it is not, before the end."""
    earliest_step: int | None
    """First step at which the upper end of the interval meets it, or that of a line that explains
    what was read about as well as the load."""
    end_bytes: int
    """Expected at the last step, and at least the most that was read."""
    needed_bytes: int
    """The upper end there: with so much memory the process gets through."""


def forecast(
    steps: ArrayLike,
    resident_bytes: ArrayLike,
    *,
    end_step: int,
    limit_bytes: int,
    load: ArrayLike | None = None,
) -> Forecast:
    """Predict when a process meets its limit.

    Args:
        steps: (n,) ascending steps, or rows, or seconds, at which memory was read.
        resident_bytes: (n,) what was read.
        end_step: the last one that the process will make.
        limit_bytes: above which it is killed.
        load: (end_step + 1,) known ahead, of every step; None for a straight line.

    Raises:
        ValueError: there is no reading, or the end lies before the last one.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(resident_bytes, np.float64)
    if not len(x) or end_step < x[-1]:
        raise ValueError(
            "forecast must have a reading and an end after it, got "
            f"{len(x)} readings and end_step={end_step}; read memory first"
        )
    known = np.zeros(end_step + 1) if load is None else np.asarray(load, np.float64)
    top = float(y.max())
    late = x >= x[0] + SKIPPED * (x[-1] - x[0])
    x, y = peaks(x[late], y[late])
    if len(x) < MIN_STRETCHES:
        needed = int(top)
        return Forecast(
            confident=False,
            expected_step=None,
            earliest_step=None,
            end_bytes=needed,
            needed_bytes=needed,
        )
    future = np.unique(np.linspace(x[-1], end_step, MAX_POINTS).astype(np.int64))
    fits, right = _fits(_columns(x, known), y, _columns(future, known))
    middle, high = (np.maximum(end, y.max()) for end in _extrapolate(fits[0], y, right))
    alarms = [np.maximum(_extrapolate(fit, y, right)[1], y.max()) for fit in fits[1:]]
    return Forecast(
        confident=True,
        expected_step=_first(future, middle >= limit_bytes),
        earliest_step=_first(future, np.max([high, *alarms], axis=0) >= limit_bytes),
        end_bytes=int(np.ceil(max(middle[-1], top))),
        needed_bytes=int(np.ceil(max(high.max(), top))),
    )


def peaks(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the highest value of each stretch of steps, and where it is.

    Example:
        >>> peaks(np.arange(4.0), np.array([1.0, 3.0, 2.0, 5.0]))[1].tolist()
        [1.0, 3.0, 2.0, 5.0]
    """
    parts = np.array_split(np.arange(len(steps)), min(STRETCHES, len(steps)))
    places = [part[values[part].argmax()] for part in parts]
    return steps[places], values[places]


def _columns(steps: ArrayLike, load: Floats) -> Floats:
    """Return (n, 3): 1, steps, and the load at them."""
    at = np.asarray(steps, np.float64)
    return np.stack([np.ones_like(at), at, load[at.astype(np.int64)]], axis=1)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least squares over some of the columns.

    Attributes:
        support: which columns.
        used: (n, columns) that were fitted.
        found: their coefficients.
        error: sum of squares.
    """

    support: tuple[int, ...]
    used: Floats
    found: Floats
    error: float


def _fits(columns: Floats, values: Floats, future: Floats) -> tuple[list[_Fit], Floats]:
    """Return the fit that explains the values, and the line where it does so about as well.

    Least squares with the second and third coefficient at least 0: of the supports that are
    allowed, the one with the smallest error. The load comes before the line: they have as many
    coefficients, and the line must be the better one to take its place.

    Returns:
        One fit or two, and future columns on the scale of theirs.
    """
    # Columns of one size, so that no support is singular because of units.
    scale = np.maximum(np.abs(future).max(axis=0), 1.0)
    left = columns / scale
    order = ((0,), (0, 2), (0, 1), (0, 1, 2)) if columns[:, 2].any() else ((0,), (0, 1))
    allowed = [fit for fit in (_fit(left, values, one) for one in order) if _grows(fit)]
    best = allowed[0]
    for fit in allowed[1:]:
        # A further column must earn its place, or two that look alike share what is one's.
        best = fit if fit.error < BETTER * best.error else best
    lines = [fit for fit in allowed if fit.support == (0, 1) and best.support == (0, 2)]
    return [best, *(fit for fit in lines if BETTER * fit.error <= best.error)], future / scale


def _fit(left: Floats, values: Floats, support: tuple[int, ...]) -> _Fit:
    used = left[:, support]
    found = np.asarray(np.linalg.lstsq(used, values, rcond=None)[0], np.float64)
    return _Fit(support, used, found, float(np.sum((used @ found - values) ** 2)))


def _grows(fit: _Fit) -> bool:
    return bool((fit.found[1:] >= 0).all())


def _extrapolate(fit: _Fit, values: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Return a fit at future columns, and the upper end of its interval."""
    freedom = len(values) - len(fit.support)
    variance = fit.error / freedom * _inflation(values - fit.used @ fit.found)
    inverse = np.linalg.pinv(fit.used.T @ fit.used)
    later = right[:, fit.support]
    spread = np.einsum("ij,jk,ik->i", later, inverse, later)
    # One-sided: only the upper end kills.
    half = student.ppf(LEVEL, freedom) * np.sqrt(variance * (1.0 + spread))
    middle = later @ fit.found
    return middle, middle + half


def _inflation(residuals: Floats) -> float:
    """Return by how much errors that follow one another are worth less than others."""
    total = float(residuals @ residuals)
    if total == 0.0:
        return 1.0
    follow = float(np.clip(residuals[1:] @ residuals[:-1] / total, 0.0, 0.9))
    return (1.0 + follow) / (1.0 - follow)


def _first(steps: np.ndarray, met: np.ndarray) -> int | None:
    return int(steps[met.argmax()]) if met.any() else None
