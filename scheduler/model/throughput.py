"""The model of throughput: equations, measurements of a job, and coefficients with intervals.

Letters: r replicas of c cores, s stores of d cores, n samples of a step, U distinct rows that it
touches, F rows that it fetches from the stores, B bytes that it moves to and from them (U, F and B
are known ahead from the oracle). A step takes

    T = a1 n / (r c) + a2 n / (r min(c, 1))     forward and backward: threads divide a1 only
      + u U / c                                 update of the rows, done by every replica
      + k1 (r - 1) + k2 log2 r                  synchronisation: one message each, tree rounds
      + e1 F / (s d) + e2 B / s + e3 B r / s    embedding: look-up, transfer, contention at a store
      + b / min(c, 1)                           fixed

where the terms of e vanish if s = 0. Training is synchronous with a fixed global batch, so more
replicas share the same work. Where a batch cannot be divided evenly, n is r times the largest
share. Fixed work is that of one thread. A segment job of S rows, with w workers
of c cores and j such jobs at once, takes

    t = (t0 + p1 S) / min(w' c, 1) + p2 S / (w' min(c, 1)) + p3 S (j - 1),  w' = w^0.85

for start-up, serial work, work that workers divide (each computes in one thread), and contention
between jobs. Start-up and serial work are one thread's, which may use the cores of all workers;
several workers lose some of their time to each other. All coefficients are at least 0.

Source: compute, update, synchronisation and embedding are the terms of DLRover-RM (2024, the
section on resource-performance modelling), there for asynchronous parameter servers; r - 1 is
Gunther's coherency (universal scalability law, 2007).

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

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRAINING_TERMS = (
    "compute",
    "serial",
    "update",
    "exchange",
    "tree",
    "lookup",
    "transfer",
    "meeting",
    "fixed",
)
"""Names of a1, a2, u, k1, k2, e1, e2, e3 and b."""
SEGMENT_TERMS = ("startup", "serial", "parallel", "sharing")
"""Names of t0, p1, p2 and p3."""
WORKERS_EXPONENT = 0.85
"""w' is w to this power: builds with the same cores in all took 2 to 24 % longer with two workers
than with one (benchmarks/pools.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(ABC):
    """Inputs of an equation: numbers or arrays that broadcast together, loads before sizes."""

    NUM_LOADS: ClassVar[int] = 0
    """Number of loads: leading fields that vary a little from step to step."""

    def columns(self) -> Floats:
        """Return (n, num_fields) values, one row per setting."""
        values = [np.asarray(getattr(self, field.name), np.float64) for field in fields(self)]
        shape = np.broadcast_shapes(*(value.shape for value in values))
        columns = np.empty((*shape, len(values)))
        for i, value in enumerate(values):
            columns[..., i] = value
        return columns.reshape(-1, len(values))

    def rounded(self, columns: Floats) -> Floats:
        """Return columns with loads rounded to steps of 6 % (a twelfth of a doubling)."""
        columns = columns.copy()
        loads = columns[:, : self.NUM_LOADS]
        columns[:, : self.NUM_LOADS] = np.round(12.0 * np.log2(1.0 + loads))
        return columns

    @property
    def is_single(self) -> bool:
        """Whether all inputs are numbers."""
        return all(isinstance(getattr(self, field.name), int | float) for field in fields(self))

    @abstractmethod
    def design(self) -> Floats:
        """Return (n, num_terms): each term without its coefficient."""

    @classmethod
    def of_columns(cls, columns: ArrayLike) -> Self:
        """Return the settings of (n, num_fields) columns."""
        rows = np.asarray(columns, np.float64)
        return cls(**{field.name: rows[..., i] for i, field in enumerate(fields(cls))})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetting(Setting):
    """Inputs of the time of a step."""

    NUM_LOADS: ClassVar[int] = 3

    unique_rows: ArrayLike = 1.0
    """U, distinct rows of the batch; 1 if unknown and the same in all steps."""
    fetched_rows: ArrayLike = 1.0
    """F, rows that the batch fetches from the stores; 1 if unknown."""
    moved_bytes: ArrayLike = 1.0
    """B, bytes to and from the stores; 1 if unknown."""
    num_replicas: ArrayLike
    """r, at least 1."""
    num_stores: ArrayLike = 0.0
    """s, 0 if each replica holds all rows."""
    replica_cpus: ArrayLike = 1.0
    """c, cores of one replica."""
    store_cpus: ArrayLike = 1.0
    """d, cores of one store."""
    batch_samples: ArrayLike = 1.0
    """n, samples of the global batch, as if all replicas had the largest share."""

    def rounded(self, columns: Floats) -> Floats:
        """Return columns with loads rounded; loads of stores are 0 without stores."""
        columns = Setting.rounded(self, columns)
        columns[columns[:, 4] == 0, 1:3] = 0.0
        return columns

    def design(self) -> Floats:
        """Return (n, 9): each term of a step without its coefficient."""
        rows, fetched, moved, r, s, c, d, n = self.columns().T
        has_stores = s > 0
        per_store = has_stores / np.where(has_stores, s, 1.0)
        one_thread = np.minimum(c, 1.0)
        terms = (
            n / (r * c),
            n / (r * one_thread),
            rows / c,
            r - 1.0,
            np.log2(r),
            fetched * per_store / d,
            moved * per_store,
            moved * r * per_store,
            1.0 / one_thread,
        )
        return np.stack(terms, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSetting(Setting):
    """Inputs of the time of a segment job."""

    NUM_LOADS: ClassVar[int] = 1

    rows: ArrayLike
    """S, raw rows of the segment."""
    workers: ArrayLike = 1.0
    """w, workers that have a part to write."""
    worker_cpus: ArrayLike = 1.0
    """c, cores of one worker."""
    segment_jobs: ArrayLike = 1.0
    """j, segment jobs at once."""

    def design(self) -> Floats:
        """Return (n, 4): each term of a segment job without its coefficient."""
        rows, w, c, j = self.columns().T
        w = w**WORKERS_EXPONENT
        one_thread = np.minimum(w * c, 1.0)
        divided = rows / (w * np.minimum(c, 1.0))
        terms = (1.0 / one_thread, rows / one_thread, divided, rows * (j - 1.0))
        return np.stack(terms, axis=1)


# Measurements.

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
DRIFT_CHECKED = MAX_PER_CELL // 4
"""Measurements of a setting after which a change is looked for."""
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
        setting: n settings, or numbers: one for all measurements.
        seconds: (n,) measurements.
        tick: their time on a clock that never goes back.
    """
    cells = dict(window.cells)
    values = [*seconds]
    if setting.is_single:
        chunks = [values[i : i + DRIFT_CHECKED] for i in range(0, len(values), DRIFT_CHECKED)]
        rows = [_single_row(setting)] * len(chunks)
    else:
        chunks, rows = [[value] for value in values], _rows(setting)
    for (row, key), chunk in zip(rows, chunks, strict=True):
        if measured := [value for value in chunk if 0.0 < value < np.inf]:
            _add_to_cell(cells, key, row, measured, tick)
    by_age = sorted(cells, key=lambda key: (cells[key].tick, key)) if len(cells) > MAX_CELLS else []
    for key in by_age[: len(cells) - MAX_CELLS]:
        del cells[key]
    oldest = tick - MAX_HALF_LIVES * HALF_LIFE
    cells = {key: cell for key, cell in cells.items() if cell.tick >= oldest}
    return Window(MappingProxyType(cells))


def _rows(setting: Setting) -> list[tuple[Key, Key]]:
    columns = setting.columns()
    keys = setting.rounded(columns).tolist()
    return [(tuple(row), tuple(key)) for row, key in zip(columns.tolist(), keys, strict=True)]


@lru_cache(maxsize=4096)
def _single_row(setting: Setting) -> tuple[Key, Key]:
    return _rows(setting)[0]


def _add_to_cell(
    cells: dict[Key, Cell], key: Key, row: Key, seconds: Sequence[float], tick: float
) -> None:
    """Add measurements of a setting; if they differ from its earlier ones, drop everything else."""
    old = cells.get(key)
    if old is None:
        cells[key] = Cell(row, tuple(seconds), tick)
        return
    a, b = len(old.seconds), len(seconds)
    mean = row
    if row != old.columns:
        mean = tuple((x * a + y * b) / (a + b) for x, y in zip(old.columns, row, strict=True))
    cell = Cell(mean, (*old.seconds, *seconds)[-MAX_PER_CELL:], max(tick, old.tick))
    if has_drifted(cell):
        cells.clear()
        cell = Cell(row, cell.seconds[MAX_PER_CELL // 2 :], tick)
    cells[key] = cell


def merge_windows(older: Window, newer: Window) -> Window:
    """Return the cells of both windows; the newer one wins."""
    return Window(MappingProxyType({**older.cells, **newer.cells}))


def has_drifted(cell: Cell) -> bool:
    """Return whether the later half of a full cell differs from the earlier one.

    The interquartile ranges of both halves must be apart, so that stragglers and usual noise do not
    count: of 500 runs of 640 steps with a tenth of stragglers, none with a noise of 0.25 (standard
    deviation of the logarithm) counted as changed; with 0.5, 8 %.
    """
    if len(cell.seconds) < MAX_PER_CELL:
        return False
    if max(cell.seconds) < math.exp(DRIFT) * min(cell.seconds):
        return False
    half, quarter = MAX_PER_CELL // 2, MAX_PER_CELL // 8
    earlier, later = sorted(cell.seconds[:half]), sorted(cell.seconds[half:])
    rise, fall = later[quarter] / earlier[~quarter], earlier[quarter] / later[~quarter]
    return math.log(max(rise, fall)) > DRIFT


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
    error: float = 0.0
    """Mean relative error at the measured settings."""
    spread: float = ASSUMED_SPREAD
    """LEVEL quantile of the log error at measured sizes."""
    growth: float = MIN_GROWTH
    """Further log error for each doubling beyond them."""
    lowest: tuple[float, ...] = ()
    """Smallest measured value of each field of a setting."""
    highest: tuple[float, ...] = ()
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
