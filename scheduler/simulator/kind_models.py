"""Measurements of each kind of job, and models fitted to them.

All policies that predict learn from the measurements of all jobs of a kind, more than the published
baselines did, which start anew with every job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from scheduler.elasticity import (
    HEADROOM,
    MIN_RATIO,
    NEED_MARGIN,
    Headroom,
    PoolReadings,
    Reading,
    estimate_need,
)
from scheduler.model.fit import Floats, TrainingSetting, Window, fit_window, merge_windows, observe
from scheduler.planner.correction import MAX_GROWTH
from scheduler.simulator.views import JobView, Measurement, Sizes, Snapshot

REFIT = 1.25
"""Growth of the number of measurements at which a kind is fitted again."""
REFIT_CELLS = 1.1
"""Growth of the number of measured sizes, likewise."""
SAMPLED = ((1, 1), (1, 3), (2, 5), (3, 3), (1, 6), (3, 1), (5, 5), (2, 9), (4, 12))
"""Replicas and stores of the first jobs of a kind: like Optimus, we measure some sizes before the
first fit."""
MIN_CELLS = 7
"""Measured sizes of a kind before its predictions are used."""
MEASURED_TICK = 0.0
"""Time of all measurements: a kind of job does not age."""


def allowed_sizes(allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the replicas and stores of all possible sizes, (n,) each."""
    stores, replicas = np.nonzero(allowed)
    return replicas, stores


def make_setting(replicas: np.ndarray, stores: np.ndarray, batch_samples: float) -> TrainingSetting:
    """Return the settings of sizes, with enough cores."""
    return TrainingSetting(num_replicas=replicas, num_stores=stores, batch_samples=batch_samples)


@dataclass(slots=True)
class KindMeasurements:
    """Measurements of one kind.

    Attributes:
        window: of steps.
        cores: replicas, stores, busy cores of each pool, and requested cores of each pool.
    """

    window: Window = field(default_factory=Window)
    cores: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])

    def add(self, measured: Measurement, request: Sizes, batch: float) -> None:
        """Add one measurement."""
        replicas, stores = np.array([measured.num_replicas]), np.array([measured.num_stores])
        setting = make_setting(replicas, stores, batch)
        self.window = observe(self.window, setting, [measured.step_sec], MEASURED_TICK)
        sizes = float(measured.num_replicas), float(measured.num_stores)
        busy = measured.replica_busy, measured.store_busy
        self.cores.append((*sizes, *busy, request.replica_cpus, request.store_cpus))


class KindModels:
    """Measurements by kind, and predicted seconds per step at every size."""

    def __init__(self, fit: Callable[[Window, np.ndarray, float], Floats]) -> None:
        """Start without measurements.

        Args:
            fit: measurements, possible sizes and batch size to (n,) seconds per step; nan for
                sizes that it does not predict.
        """
        self.fit = fit
        self.trusted: dict[str, KindMeasurements] = {}
        self.suspect: dict[str, KindMeasurements] = {}
        self.fitted: dict[str, tuple[int, int]] = {}
        self.seconds: dict[str, Floats] = {}
        self.versions: dict[str, int] = {}

    def update(self, snapshot: Snapshot, suspect: Collection[int] = ()) -> None:
        """Add the measurements since the last decision.

        Args:
            snapshot: with the measurements.
            suspect: jobs that may be slowed down by too few cores; their measurements are used
                only for sizes, and numbers of cores, without trusted ones.
        """
        requests = {view.job: view.request for view in snapshot.jobs}
        for measured in snapshot.measured:
            by_kind = self.suspect if measured.job in suspect else self.trusted
            kept = by_kind.setdefault(measured.kind, KindMeasurements())
            kept.add(measured, requests[measured.job], snapshot.batch_samples[measured.kind])
        for kind in sorted({measured.kind for measured in snapshot.measured}):
            self._refit(kind, snapshot)

    def _refit(self, kind: str, snapshot: Snapshot) -> None:
        """Fit a kind again if it has many more measurements than at its last fit."""
        window, count = self.window(kind), self._count(kind)
        before, cells = self.fitted.get(kind, (0, 0))
        if count < REFIT * max(before, 1e-9) and len(window) <= REFIT_CELLS * cells:
            return
        self.fitted[kind] = count, len(window)
        self.versions[kind] = self.versions.get(kind, 0) + 1
        batch = snapshot.batch_samples[kind]
        self.seconds[kind] = self.fit(window, snapshot.allowed[kind], batch)

    def _count(self, kind: str) -> int:
        """Return the number of all measurements of a kind, beyond those that its window keeps."""
        return sum(
            len(by_kind[kind].cores) for by_kind in (self.trusted, self.suspect) if kind in by_kind
        )

    def window(self, kind: str) -> Window:
        """Return the steps of a kind: at each size the trusted ones, if there are any."""
        suspect, trusted = (
            self.suspect.get(kind, KindMeasurements()),
            self.trusted.get(kind, KindMeasurements()),
        )
        return merge_windows(suspect.window, trusted.window)

    def cores(self, kind: str, least: int) -> list[tuple[float, ...]]:
        """Return the cores of a kind: only trusted ones if there are at least `least`."""
        suspect, trusted = (
            self.suspect.get(kind, KindMeasurements()),
            self.trusted.get(kind, KindMeasurements()),
        )
        return trusted.cores if len(trusted.cores) >= least else suspect.cores + trusted.cores

    def sample(self, view: JobView, allowed: np.ndarray) -> Sizes | None:
        """Return the sizes at which a new job is measured; None if enough sizes were measured."""
        if len(self.window(view.kind)) >= MIN_CELLS:
            return None
        replicas, stores = SAMPLED[view.job % len(SAMPLED)]
        in_range = stores < allowed.shape[0] and replicas < allowed.shape[1]
        if not in_range or not allowed[stores, replicas]:
            return view.request
        return replace(view.request, num_replicas=replicas, num_stores=stores)

    def predicted(self, kind: str, allowed: Mapping[str, np.ndarray]) -> Floats:
        """Return (n,) seconds per step at each possible size; nan if unknown."""
        seconds = self.seconds.get(kind)
        return np.full(int(allowed[kind].sum()), np.nan) if seconds is None else seconds


# The model of our policy: seconds per step of `fit` and `predict_seconds`, and busy cores
#
#     busy = a + b v / n                     v samples per second, n processes of the pool
#
# fitted to the cores of all jobs of the kind, or to their share of the requested cores, whichever
# varies less.

QUANTILE = 0.9
"""Share of earlier jobs whose busy cores a new job's cores cover."""
LATEST_ROWS = 512
"""Latest measurements of cores of a kind that are fitted."""
MIN_ROWS = 5
"""Measurements of cores before they are used for new jobs."""


def fit_presage(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds per step at each size; nan if unknown or too far from measured sizes."""
    replicas, stores = allowed_sizes(allowed)
    fit = fit_window(window, TrainingSetting)
    setting = make_setting(replicas, stores, batch_samples)
    most_replicas, most_stores = window.columns()[:, 3:5].max(axis=0)
    # Few measurements may leave no term for the smallest sizes.
    seconds = np.where(fit.is_determined(setting), fit.seconds(setting), np.nan)
    # Measured sizes need no model.
    for cell in window.cells.values():
        here = (replicas == round(cell.columns[3])) & (stores == round(cell.columns[4]))
        seconds[here] = np.median(cell.seconds)
    near = (replicas <= MAX_GROWTH * most_replicas) & (stores <= MAX_GROWTH * most_stores)
    return np.where(near, seconds, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindModel:
    """Predictions of a kind at its trusted sizes; arrays have one entry per size."""

    version: int = 0
    """Version of the measurements."""
    replicas: np.ndarray
    """(n,) replicas."""
    stores: np.ndarray
    """(n,) stores."""
    seconds: Floats
    """(n,) seconds per step."""
    replica_busy: Floats
    """(n,) busy cores of one replica of a typical job."""
    store_busy: Floats
    """(n,) busy cores of one store."""
    relative: bool = False
    """Whether these are shares of the requested cores."""
    most: tuple[float, float]
    """Factors over the busy cores of a replica and of a store that cover `QUANTILE` of all jobs."""
    headroom: Headroom = field(default_factory=Headroom)
    """Headroom of its processes."""

    def index_of(self, num_replicas: int, num_stores: int) -> int | None:
        """Return the index of a size, None if it is not trusted."""
        matches = np.flatnonzero((self.replicas == num_replicas) & (self.stores == num_stores))
        return int(matches[0]) if len(matches) else None

    def at(self, selected: np.ndarray) -> KindModel:
        """Return the predictions at some sizes only."""
        names = ("replicas", "stores", "seconds", "replica_busy", "store_busy")
        return replace(self, **{name: getattr(self, name)[selected] for name in names})


def build_kind(
    version: int,
    seconds: Floats,
    allowed: np.ndarray,
    cores: list[tuple[float, ...]],
    headroom: Headroom,
) -> KindModel:
    """Return the model of a kind.

    Args:
        version: of the measurements.
        seconds: (sizes,) per step at each possible size; nan if it is not trusted.
        allowed: possible (stores, replicas).
        cores: of each measurement, as in `KindMeasurements.cores`.
        headroom: of its processes.
    """
    trusted = np.isfinite(seconds)
    replicas, stores = (part[trusted] for part in allowed_sizes(allowed))
    by_size = np.zeros(allowed.shape)
    by_size[allowed] = 1.0 / np.where(trusted, seconds, np.inf)
    seconds = seconds[trusted]
    rows = np.array(cores[-LATEST_ROWS:])
    measured = by_size[rows[:, 1].astype(int), rows[:, 0].astype(int)]
    rows, measured = rows[measured > 0], measured[measured > 0]
    model = KindModel(
        version=version,
        replicas=replicas,
        stores=stores,
        seconds=seconds,
        replica_busy=np.full(len(seconds), np.nan),
        store_busy=np.full(len(seconds), np.nan),
        most=(1.0, 1.0),
        headroom=headroom,
    )
    if len(rows) < MIN_ROWS:
        return model
    rates = measured[:, None] / rows[:, :2], 1.0 / seconds / np.stack([replicas, stores])
    plain, shares = (
        [_fit_busy(rates[0][:, pool], busy[:, pool], rates[1][pool]) for pool in (0, 1)]
        for busy in (rows[:, 2:4], rows[:, 2:4] / rows[:, 4:6])
    )
    relative = sum(part[2] for part in shares) < sum(part[2] for part in plain)
    first, second = shares if relative else plain
    return replace(
        model,
        relative=relative,
        replica_busy=first[0],
        store_busy=second[0],
        most=(first[1], second[1]),
    )


def _fit_busy(rates: Floats, busy: Floats, new_rates: Floats) -> tuple[Floats, float, float]:
    """Return busy cores at new rates, and the spread of the measurements around the fit.

    Returns:
        (n,) cores; the upper quantile of measured to fitted cores; and the log of its ratio to the
        lower one.
    """
    scale = max(float(rates.mean()), 1e-12)
    terms = np.stack([np.ones_like(rates), rates / scale], axis=1)
    coefficients = nnls(terms / busy[:, None], np.ones(len(busy)))[0]
    ratios = busy / (terms @ coefficients)
    low, high = np.quantile(ratios, [1.0 - QUANTILE, QUANTILE])
    cores = coefficients[0] + coefficients[1] * new_rates / scale
    return cores, float(high), float(np.log(high / low))


# Headroom of a kind, from jobs that were measured with more and with fewer cores. A step is as slow
# as the pool that lacks most, so the pool with the smaller headroom counts.

DOUBT_MARGIN = 1.05
"""Factor on the cores per busy core below which a process of a kind may lack cores."""
LOW_QUANTILE = 0.1
"""Share of the readings of many processes that may lie below the smallest need considered."""
MIN_GROUPS = 4
"""Processes that were measured with more and with fewer cores before they describe their kind."""


def estimate_headroom(groups: Sequence[Sequence[Reading]]) -> Headroom:
    """Return the headroom of a kind from the readings of several of its processes.

    Args:
        groups: readings of each process, relative to its own with most cores.
    """
    if len(groups) < MIN_GROUPS:
        return Headroom()
    need = estimate_need([reading for group in groups for reading in group], LOW_QUANTILE)
    if not need.slower:
        return Headroom(suspect_below=min(need.cpus, HEADROOM / DOUBT_MARGIN), measured=True)
    return Headroom(
        max(HEADROOM, NEED_MARGIN * need.cpus),
        NEED_MARGIN / DOUBT_MARGIN * need.cpus,
        measured=True,
    )


def relative_to_largest(readings: Sequence[Reading]) -> list[Reading]:
    """Return readings relative to the busy cores and step time of those with most cores.

    Example:
        >>> relative_to_largest([Reading(4.0, 2.0, 0.5), Reading(3.0, 1.0, 1.0)])[1]
        Reading(cpus=1.5, busy=0.5, step_sec=2.0)
    """
    most = max(reading.cpus for reading in readings)
    largest = [reading for reading in readings if MIN_RATIO * reading.cpus > most]
    busy = median(reading.busy for reading in largest)
    step_sec = median(reading.step_sec for reading in largest)
    return [Reading(r.cpus / busy, r.busy / busy, r.step_sec / step_sec) for r in readings]


def burst_readings(latest: Sequence[PoolReadings]) -> list[Reading]:
    """Return relative readings of one job for its kind; none if its cores hardly differed."""
    count = len(latest[-1]) if latest else 0
    pools = [relative_to_largest([both[pool] for both in latest]) for pool in range(count)]
    # The pool with less headroom determines the step time.
    readings = [min(both, key=lambda reading: reading.cpus) for both in zip(*pools, strict=True)]
    cpus = [reading.cpus for reading in readings]
    return readings if max(cpus) > MIN_RATIO * MIN_RATIO * min(cpus) else []
