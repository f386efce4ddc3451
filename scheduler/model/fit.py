"""Measurements of a job, and coefficients fitted to them with intervals.

Measurements are kept by setting (`Window`): those of a setting replace older ones of the same
setting, never those of another, so that a job that runs at one size for long keeps what it showed
at others. Memory is bounded, and old settings fade. If the time of a setting changes, everything
older is dropped.

Each coefficient is a multiple of a prior one, found by non-negative least squares on relative
errors. A weak pull keeps the multiples equal where measurements do not tell them apart:
measurements at one size only scale the prior. Intervals assume no distribution. Within the measured
sizes the error of a prediction is that of predictions of held-back settings. Outside it grows with
each doubling, by the error of earlier doublings: the same fit to the lower half of a size predicts
the upper half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from scipy.optimize import nnls

from scheduler.model.terms import Floats, Setting

MAX_PER_CELL = 32
"""Latest measurements of a setting that are kept; their median is robust against stragglers."""
MAX_CELLS = 1024
"""Settings that are kept, the latest ones."""
HALF_LIFE = 900.0
"""Seconds after which a setting has half its weight, unless it was measured again: a job that
becomes lighter is not judged by old times for long."""
DRIFT = 0.3
"""Log ratio between the halves of a cell's measurements that counts as a change of the job: a third
more, or a quarter less."""
MAX_HALF_LIVES = 5.0
"""Half lives after which a setting is dropped."""

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Measurements of one setting.

    Attributes:
        columns: mean of the settings in the cell.
        seconds: the latest measurements, oldest first.
        tick: time of the latest one.
    """

    columns: tuple[float, ...]
    seconds: tuple[float, ...]
    tick: float


@dataclass(frozen=True, slots=True)
class Window:
    """Cells by their rounded settings."""

    cells: Mapping[Key, Cell] = field(default_factory=lambda: MappingProxyType(dict[Key, Cell]()))

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.cells)

    @property
    def num_measurements(self) -> int:
        """Number of measurements."""
        return sum(len(cell.seconds) for cell in self.cells.values())

    def columns(self) -> Floats:
        """Return (num_cells, num_fields) settings, ordered by key."""
        return np.array([self.cells[key].columns for key in sorted(self.cells)], np.float64)

    def medians(self) -> Floats:
        """Return (num_cells,) median seconds."""
        return np.array([np.median(self.cells[key].seconds) for key in sorted(self.cells)])

    def weights(self) -> Floats:
        """Return (num_cells,) weights by age, 1 for the latest."""
        ticks = np.array([self.cells[key].tick for key in sorted(self.cells)], np.float64)
        return np.exp2((ticks - ticks.max(initial=-np.inf)) / HALF_LIFE)


def observe(window: Window, setting: Setting, seconds: Iterable[float], tick: float) -> Window:
    """Return the window with measurements added; values that are not positive are left out.

    Args:
        window: the measurements before.
        setting: n settings.
        seconds: (n,) measurements.
        tick: their time on a clock that never goes back.
    """
    cells = dict(window.cells)
    rows, keys = setting.columns().tolist(), setting.rounded().tolist()
    for row, rounded, value in zip(rows, keys, seconds, strict=True):
        if not 0.0 < value < np.inf:
            continue
        key = tuple(rounded)
        old = cells.pop(key, None)  # inserted again at the end: cells are ordered by last use
        if old is None:
            cells[key] = Cell(tuple(row), (value,), tick)
            continue
        count = len(old.seconds)
        mean = tuple((a * count + b) / (count + 1) for a, b in zip(old.columns, row, strict=True))
        cells[key] = Cell(mean, (*old.seconds, value)[-MAX_PER_CELL:], max(tick, old.tick))
        if has_drifted(cells[key]):
            cells = {key: Cell(tuple(row), cells[key].seconds[MAX_PER_CELL // 2 :], tick)}
    for key in list(cells)[: max(0, len(cells) - MAX_CELLS)]:
        del cells[key]
    oldest = tick - MAX_HALF_LIVES * HALF_LIFE
    cells = {key: cell for key, cell in cells.items() if cell.tick >= oldest}
    return Window(MappingProxyType(cells))


def merge_windows(older: Window, newer: Window) -> Window:
    """Return the cells of both windows; the newer one wins."""
    return Window(MappingProxyType({**older.cells, **newer.cells}))


def has_drifted(cell: Cell) -> bool:
    """Return whether the later half of a full cell differs from the earlier one.

    The interquartile ranges of both halves must be apart, so that noise and stragglers do not
    count.
    """
    if len(cell.seconds) < MAX_PER_CELL:
        return False
    earlier, later = np.sort(np.log(cell.seconds).reshape(2, -1), axis=1)
    quarter = MAX_PER_CELL // 8
    rise, fall = later[quarter] - earlier[~quarter], earlier[quarter] - later[~quarter]
    return bool(max(rise, fall) > DRIFT)


PRIOR_WEIGHT = 0.01
"""Weight of the prior's proportions, in relative errors: they decide only what data leave open."""
LEVEL = 0.9
"""Share of measurements that an interval is to contain."""
FOLDS = 10
"""Folds of the cross-validation over cells."""
MIN_CELLS = 5
"""Fewest settings for cross-validation; below, the spread is that of repeated measurements."""
MIN_GROWTH = 0.4
"""Least log error of a doubling: the lower half of a curve rarely shows how it continues. Eight
models of a published testbed (DL2) needed 0.0 to 0.5 for 90 % of their points when their workers
were doubled (benchmarks/model.md)."""
ASSUMED_SPREAD = 0.7
"""Log error before anything was measured: half to twice. It fades with the root of the number of
measurements, until there are MIN_CELLS settings."""
MIN_SHARE = 1e-6
"""Least prediction as a share of the measurement, so that log errors are finite."""
MAX_SPREAD = 0.5
"""Largest half width (log) of the interval of a confident prediction: with an error of a tenth, one
doubling beyond the measured sizes is confident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients of one kind of setting, and their basis."""

    coefficients: tuple[float, ...]
    """One per term, at least 0."""
    num_cells: int = 0
    """Measured settings; 0 if the coefficients are the prior."""
    num_measurements: int = 0
    """Number of measurements."""
    error: float = 0.0
    """Mean relative error at the measured settings."""
    spread: float = ASSUMED_SPREAD
    """LEVEL quantile of the log error at measured sizes."""
    growth: float = MIN_GROWTH
    """Further log error for each doubling beyond them."""
    lowest: tuple[float, ...] = ()
    """Smallest measured value of each field of a setting."""
    highest: tuple[float, ...] = ()
    """Largest value of each."""
    least_sec: float = 0.0
    """Smallest median seconds of a setting."""

    def seconds(self, setting: Setting) -> Floats:
        """Return (n,) predicted seconds; `least_sec` where all terms vanish."""
        seconds = setting.design() @ np.array(self.coefficients)
        return np.where(seconds > 0.0, seconds, self.least_sec)

    def is_determined(self, setting: Setting) -> np.ndarray:
        """Return (n,) whether any term takes time there.

        The fitted terms may all vanish at other sizes: those of stores do in a plan without stores.
        """
        return setting.design() @ np.array(self.coefficients) > 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds with their interval, one entry per setting.

    Attributes:
        seconds: (n,) predicted.
        low: (n,) lower end.
        high: (n,) upper end.
        confident: (n,) whether the interval is narrow enough to act on the prediction.
    """

    seconds: Floats
    low: Floats
    high: Floats
    confident: np.ndarray


def predict_seconds(fit: Fit, setting: Setting) -> Prediction:
    """Return the predictions of a fit with intervals, even if nothing was measured."""
    seconds = fit.seconds(setting)
    half = fit.spread + fit.growth * doublings_outside(fit, setting)
    confident = (half <= MAX_SPREAD) & fit.is_determined(setting)
    return Prediction(seconds, seconds * np.exp(-half), seconds * np.exp(half), confident)


def doublings_outside(fit: Fit, setting: Setting) -> Floats:
    """Return (n,) doublings or halvings outside the measured sizes, summed over sizes.

    Loads do not count, because they are known ahead and time is proportional to them.
    """
    columns = setting.columns()[:, setting.NUM_LOADS :]
    if not fit.num_cells:
        return np.zeros(len(columns))
    near = np.clip(columns, fit.lowest[setting.NUM_LOADS :], fit.highest[setting.NUM_LOADS :])
    # The first store counts as a doubling, so that zeros need no special case.
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
        prior: coefficients whose proportions are kept where measurements do not tell; None to give
            all terms equal shares of the measured time.
        prior_spread: log error of the prior.

    Raises:
        ValueError: there is neither a measurement nor a prior.
    """
    if not len(window):
        if prior is None:
            raise ValueError("fit has neither a measurement nor a prior; measure a step")
        return Fit(coefficients=tuple(prior), spread=prior_spread)
    columns, medians, weights = window.columns(), window.medians(), window.weights()
    design = kind.of_columns(columns).design()
    start = even_prior(design, medians) if prior is None else np.array(prior, np.float64)
    coefficients = fit_multiples(design * start, medians, weights) * start
    predicted = design @ coefficients
    errors = _log_error(medians, predicted)
    spread = _spread(window, design * start, medians, weights, errors, prior_spread)
    return Fit(
        coefficients=tuple(coefficients.tolist()),
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
    """Return coefficients that give every term an equal share of the mean time.

    Example:
        >>> even_prior(np.array([[1.0, 4.0], [1.0, 0.0]]), np.array([3.0, 5.0])).tolist()
        [2.0, 1.0]
    """
    means = design.mean(axis=0)
    used = np.count_nonzero(means)
    return np.where(means > 0, seconds.mean() / used / np.where(means > 0, means, 1.0), 0.0)


def fit_multiples(terms: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Return the x >= 0 that minimise the relative errors of `terms @ x`, near a common multiple.

    Args:
        terms: (n, k) seconds of each term with the prior.
        seconds: (n,) measured seconds.
        weights: (n,) weights of the measurements, at most 1.
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
    """Return the LEVEL quantile of the log errors of held-back settings and of repetitions."""
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
        model = fit_multiples(terms[~out], seconds[~out], weights[~out])
        held[out] = _log_error(seconds[out], terms[out] @ model)
    return max(noise, _quantile(np.abs(held), weights))


def _growth(sizes: Floats, terms: Floats, seconds: Floats, weights: Floats, spread: float) -> float:
    """Return the log error per doubling, from doublings within the measured sizes.

    Used are lower halves that tell the terms apart: with at least three values of the size, and
    MIN_CELLS settings.
    """
    all_errors: list[Floats] = []
    all_weights: list[Floats] = []
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
            all_errors.append(np.maximum(errors - spread, 0.0) / steps)
            all_weights.append(weights[beyond])
    if not all_errors:
        return MIN_GROWTH
    return max(MIN_GROWTH, _quantile(np.concatenate(all_errors), np.concatenate(all_weights)))


def _log_error(seconds: Floats, predicted: Floats) -> Floats:
    """Return log errors; a fit to some of the sizes may predict 0 at others."""
    return np.log(seconds / np.maximum(predicted, seconds * MIN_SHARE))


def _quantile(errors: Floats, weights: Floats) -> float:
    """Return the weighted LEVEL quantile, conservatively: with one more error above all.

    Example:
        >>> _quantile(np.arange(20.0), np.ones(20)), _quantile(np.arange(3.0), np.ones(3))
        (18.0, 2.0)
        >>> _quantile(np.array([1.0, 9.0]), np.array([1.0, 0.01]))
        9.0
    """
    order = np.argsort(errors, kind="stable")
    cumulated = np.cumsum(weights[order])
    rank = int(np.searchsorted(cumulated, LEVEL * (cumulated[-1] + weights.max()) - 1e-9))
    return float(errors[order[min(rank, len(errors) - 1)]])
