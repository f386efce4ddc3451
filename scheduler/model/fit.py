"""Fit coefficients to measurements, with residuals and confidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from scipy.optimize import nnls

from scheduler.model.terms import Floats, Setting

# A stream of measurements, kept as the latest ones of each setting.
#
# What is measured again at one setting takes the place of its own past, never that of another
# setting, so that a job which ran for long at one size remembers the others. Memory is bounded,
# and old settings fade. When a setting takes another time than it did, nothing that is older says
# anything of the job, and only the later measurements stay.

MAX_PER_CELL = 32
"""Measurements that a cell keeps: their median outlives a straggler."""
MAX_CELLS = 1024
"""Settings that are kept, the latest ones."""
HALF_LIFE = 900.0
"""Seconds after which a setting counts half, if nothing newer was measured at it: a job that
becomes lighter is not held back for long by what it took before."""
DRIFT = 0.3
"""Log ratio of the later half of a cell's measurements to the earlier one, above which the job has
become another: a third more, or a quarter less."""
MAX_HALF_LIVES = 5.0
"""Half lives after which a setting is forgotten."""

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Measurements of one setting.

    Attributes:
        columns: the setting, mean of those that fell into the cell.
        seconds: the latest measurements, oldest first.
        tick: when the latest one was taken.
    """

    columns: tuple[float, ...]
    seconds: tuple[float, ...]
    tick: float


@dataclass(frozen=True, slots=True)
class Window:
    """All cells, by their rounded settings."""

    cells: Mapping[Key, Cell] = field(default_factory=lambda: MappingProxyType(dict[Key, Cell]()))

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.cells)

    @property
    def num_measurements(self) -> int:
        """Measurements that are kept."""
        return sum(len(cell.seconds) for cell in self.cells.values())

    def columns(self) -> Floats:
        """Return (cells, fields) settings, in order of their keys."""
        return np.array([self.cells[key].columns for key in sorted(self.cells)], np.float64)

    def medians(self) -> Floats:
        """Return (cells,) median seconds."""
        return np.array([np.median(self.cells[key].seconds) for key in sorted(self.cells)])

    def weights(self) -> Floats:
        """Return (cells,) weights, 1 for what was measured last."""
        ticks = np.array([self.cells[key].tick for key in sorted(self.cells)], np.float64)
        return np.exp2((ticks - ticks.max(initial=-np.inf)) / HALF_LIFE)


def observe(window: Window, setting: Setting, seconds: Iterable[float], tick: float) -> Window:
    """Return the window with measurements added; those that are not positive are left out.

    Args:
        window: what was measured before.
        setting: n settings.
        seconds: (n,) measurements.
        tick: seconds on a clock that grows, of all of them.
    """
    cells = dict(window.cells)
    rows, keys = setting.columns().tolist(), setting.rounded().tolist()
    for row, exact, taken in zip(rows, keys, seconds, strict=True):
        if not 0.0 < taken < np.inf:
            continue
        key = tuple(exact)
        old = cells.pop(key, None)  # put back at the end: the order is that of the last use
        if old is None:
            cells[key] = Cell(tuple(row), (taken,), tick)
            continue
        count = len(old.seconds)
        mean = tuple((a * count + b) / (count + 1) for a, b in zip(old.columns, row, strict=True))
        cells[key] = Cell(mean, (*old.seconds, taken)[-MAX_PER_CELL:], max(tick, old.tick))
        if has_drifted(cells[key]):
            cells = {key: Cell(tuple(row), cells[key].seconds[MAX_PER_CELL // 2 :], tick)}
    for key in list(cells)[: max(0, len(cells) - MAX_CELLS)]:
        del cells[key]
    oldest = tick - MAX_HALF_LIVES * HALF_LIFE
    cells = {key: cell for key, cell in cells.items() if cell.tick >= oldest}
    return Window(MappingProxyType(cells))


def merge_windows(older: Window, newer: Window) -> Window:
    """Return the cells of both; where both measured a setting, those of the newer one."""
    return Window(MappingProxyType({**older.cells, **newer.cells}))


def has_drifted(cell: Cell) -> bool:
    """Tell whether a full cell's later measurements are of another job than its earlier ones.

    The middle halves of both must lie apart, so that neither noise nor stragglers count.
    """
    if len(cell.seconds) < MAX_PER_CELL:
        return False
    earlier, later = np.sort(np.log(cell.seconds).reshape(2, -1), axis=1)
    quarter = MAX_PER_CELL // 8
    rise, fall = later[quarter] - earlier[~quarter], earlier[quarter] - later[~quarter]
    return bool(max(rise, fall) > DRIFT)


# Coefficients from measurements, with what they are off by.
#
# Each coefficient is a multiple of a prior one, found by non-negative least squares on relative
# errors. A weak pull keeps the multiples equal where measurements do not tell them apart:
# measurements of one size only scale the prior.
#
# Intervals assume no distribution. Inside the measured sizes a prediction is off by what
# predictions of held-back settings were off by; outside, by a further part for each doubling,
# which is what earlier doublings were off by: the same fit to the lower half of a size predicts
# the upper half.

PRIOR_WEIGHT = 0.01
"""Pull of the prior's proportions, in relative errors: it decides only what data leave open."""
LEVEL = 0.9
"""Share of measurements that an interval is to hold."""
FOLDS = 10
"""Parts in which cells are held back, one after the other."""
MIN_CELLS = 5
"""Fewer settings cannot be held back: the spread is that of repeated measurements."""
MIN_GROWTH = 0.4
"""Log error of a doubling, at least: a small half of a curve rarely tells how it goes on. Eight
models of a published testbed (DL2) needed 0.0 to 0.5 for 90 % of their points when their workers
were doubled (benchmarks/model.md)."""
ASSUMED_SPREAD = 0.7
"""Log error before anything was measured: half to twice. It fades with the root of the number of
measurements, until there are MIN_CELLS settings."""
MIN_SHARE = 1e-6
"""A prediction below this share of the measurement counts as this share, to stay finite."""
MAX_SPREAD = 0.5
"""A prediction whose interval is wider, to either side, is not acted upon: one that is off by
a tenth may be trusted for one doubling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients of one kind of setting, and what they rest on."""

    coefficients: tuple[float, ...]
    """One per term, at least 0."""
    num_cells: int = 0
    """Settings that were measured, 0 when the coefficients are the prior."""
    num_measurements: int = 0
    """Measurements that are kept."""
    error: float = 0.0
    """Mean relative error at the measured settings."""
    spread: float = ASSUMED_SPREAD
    """Log error that LEVEL of all measurements stay below, at measured sizes."""
    growth: float = MIN_GROWTH
    """Further log error for each doubling beyond them."""
    lowest: tuple[float, ...] = ()
    """Smallest value measured of each field of a setting."""
    highest: tuple[float, ...] = ()
    """Largest value of each."""
    least_sec: float = 0.0
    """Smallest measured seconds, of the settings' medians."""

    def seconds(self, setting: Setting) -> Floats:
        """Return (n,) predicted seconds: the least that were measured, where no term is left."""
        found = setting.design() @ np.array(self.coefficients)
        return np.where(found > 0.0, found, self.least_sec)

    def knows(self, setting: Setting) -> np.ndarray:
        """Return (n,) whether a term is left that takes time there.

        Measurements may leave none but terms that vanish at other sizes: those of stores, of which
        a plan without stores has none.
        """
        return setting.design() @ np.array(self.coefficients) > 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds with their interval, one entry per setting.

    Attributes:
        seconds: (n,) predicted.
        low: (n,) lower end.
        high: (n,) upper end.
        confident: (n,) whether it is no guess, and its interval narrow enough to act upon.
    """

    seconds: Floats
    low: Floats
    high: Floats
    confident: np.ndarray


def predict_seconds(fit: Fit, setting: Setting) -> Prediction:
    """Return what a fit predicts; there is a number however little was measured."""
    seconds = fit.seconds(setting)
    half = fit.spread + fit.growth * doublings_outside(fit, setting)
    confident = (half <= MAX_SPREAD) & fit.knows(setting)
    return Prediction(seconds, seconds * np.exp(-half), seconds * np.exp(half), confident)


def doublings_outside(fit: Fit, setting: Setting) -> Floats:
    """Return (n,) doublings or halvings from the measured sizes, those of all sizes added.

    Loads do not count: they are known ahead, and enter in proportion.
    """
    columns = setting.columns()[:, setting.NUM_LOADS :]
    if not fit.num_cells:
        return np.zeros(len(columns))
    near = np.clip(columns, fit.lowest[setting.NUM_LOADS :], fit.highest[setting.NUM_LOADS :])
    # One store more than none is a doubling, so that zeros need no special case.
    return np.abs(np.log2(1.0 + columns) - np.log2(1.0 + near)).sum(axis=1)


def fit_window(
    window: Window,
    kind: type[Setting],
    prior: Sequence[float] | None = None,
    prior_spread: float = ASSUMED_SPREAD,
) -> Fit:
    """Fit all measurements of a window.

    Args:
        window: measurements.
        kind: of the settings.
        prior: coefficients whose proportions hold where nothing else tells; None for such that
            all terms take an equal share of the measured time.
        prior_spread: log error of the prior, before anything was measured.

    Raises:
        ValueError: there is neither a measurement nor a prior.
    """
    if not len(window):
        if prior is None:
            raise ValueError("fit must have a measurement or a prior, got neither; measure a step")
        return Fit(coefficients=tuple(prior), spread=prior_spread)
    columns, medians, weights = window.columns(), window.medians(), window.weights()
    design = kind.of_columns(columns).design()
    start = even_prior(design, medians) if prior is None else np.array(prior, np.float64)
    found = fit_multiples(design * start, medians, weights)
    predicted = design @ (found * start)
    errors = _log_error(medians, predicted)
    spread = _spread(window, design * start, medians, weights, errors, prior_spread)
    return Fit(
        coefficients=tuple((found * start).tolist()),
        num_cells=len(window),
        num_measurements=window.num_measurements,
        error=float(np.average(np.abs(medians / predicted - 1.0), weights=weights)),
        spread=spread,
        growth=_growth(columns[:, kind.NUM_LOADS :], design * start, medians, weights, spread),
        lowest=tuple(columns.min(axis=0).tolist()),
        highest=tuple(columns.max(axis=0).tolist()),
        least_sec=float(medians.min()),
    )


def even_prior(design: Floats, seconds: Floats) -> Floats:
    """Return coefficients with which every term takes an equal share of the mean time.

    Example:
        >>> even_prior(np.array([[1.0, 4.0], [1.0, 0.0]]), np.array([3.0, 5.0])).tolist()
        [2.0, 1.0]
    """
    means = design.mean(axis=0)
    used = np.count_nonzero(means)
    return np.where(means > 0, seconds.mean() / used / np.where(means > 0, means, 1.0), 0.0)


def fit_multiples(terms: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Return the x >= 0 with the smallest relative errors of terms x, near a common multiple.

    Args:
        terms: (n, k) seconds that the prior gives each term.
        seconds: (n,) measured.
        weights: (n,) of the measurements, at most 1.
    """
    roots = np.sqrt(weights)
    scale = float(np.median(seconds / terms.sum(axis=1)))
    width = terms.shape[1]
    left = np.concatenate(
        [terms * (roots / seconds)[:, None], PRIOR_WEIGHT / scale * np.eye(width)]
    )
    right = np.concatenate([roots, np.full(width, PRIOR_WEIGHT)])
    return np.asarray(nnls(left, right)[0], np.float64)


def _spread(
    window: Window,
    terms: Floats,
    seconds: Floats,
    weights: Floats,
    errors: Floats,
    prior_spread: float,
) -> float:
    """Return the log error that LEVEL of held-back settings, or of repetitions, stay below."""
    cells = [window.cells[key] for key in sorted(window.cells)]
    repeated = [np.abs(np.log(np.array(cell.seconds) / np.median(cell.seconds))) for cell in cells]
    counts = [len(errors) for errors in repeated]
    noise = _quantile(np.concatenate(repeated), np.repeat(weights, counts))
    if len(seconds) < MIN_CELLS:
        unknown = prior_spread / np.sqrt(window.num_measurements)
        return max(noise, unknown, float(np.abs(errors).max()))
    held = np.empty(len(seconds))
    for fold in range(min(FOLDS, len(seconds))):
        out = np.arange(len(seconds)) % FOLDS == fold
        found = fit_multiples(terms[~out], seconds[~out], weights[~out])
        held[out] = _log_error(seconds[out], terms[out] @ found)
    return max(noise, _quantile(np.abs(held), weights))


def _growth(sizes: Floats, terms: Floats, seconds: Floats, weights: Floats, spread: float) -> float:
    """Return the further log error per doubling, from doublings that were measured.

    Only halves that tell the terms apart say something: those with at least three values
    of the size, and MIN_CELLS settings.
    """
    found: list[Floats] = []
    counted: list[Floats] = []
    for axis in sizes.T:
        values = np.unique(axis)
        for cut in values[2 : np.searchsorted(values, values[-1] / 2.0, side="right")]:
            below = axis <= cut
            beyond = ~below & (axis <= 2.0 * cut)
            if below.sum() < MIN_CELLS or not beyond.any():
                continue
            model = fit_multiples(terms[below], seconds[below], weights[below])
            errors = np.abs(_log_error(seconds[beyond], terms[beyond] @ model))
            steps = np.log2((1.0 + axis[beyond]) / (1.0 + cut))
            found.append(np.maximum(errors - spread, 0.0) / steps)
            counted.append(weights[beyond])
    if not found:
        return MIN_GROWTH
    return max(MIN_GROWTH, _quantile(np.concatenate(found), np.concatenate(counted)))


def _log_error(seconds: Floats, predicted: Floats) -> Floats:
    """Return log errors; a part of the sizes may leave nothing but terms that vanish elsewhere."""
    return np.log(seconds / np.maximum(predicted, seconds * MIN_SHARE))


def _quantile(errors: Floats, weights: Floats) -> float:
    """Return the value that LEVEL of all, and of one more, stay below.

    Example:
        >>> _quantile(np.arange(20.0), np.ones(20)), _quantile(np.arange(3.0), np.ones(3))
        (18.0, 2.0)
        >>> _quantile(np.array([1.0, 9.0]), np.array([1.0, 0.01]))
        9.0
    """
    order = np.argsort(errors, kind="stable")
    passed = np.cumsum(weights[order])
    rank = int(np.searchsorted(passed, LEVEL * (passed[-1] + weights.max()) - 1e-9))
    return float(errors[order[min(rank, len(errors) - 1)]])
