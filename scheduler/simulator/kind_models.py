"""Measurements of each kind of job, and models fitted to them.

All policies that predict learn from the measurements of all jobs of a kind, more than the published
baselines did, which start anew with every job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from presage.scheduler.model.throughput import (
    Floats,
    TrainingSetting,
    Window,
    fit_window,
    merge_windows,
    observe,
)
from presage.scheduler.planner.correction import MAX_GROWTH
from presage.scheduler.simulator.views import Allocation, ClusterView, Measurement, SimulatedJob

REFIT = 1.25
"""Growth of the number of measurements at which a kind is fitted again."""
REFIT_CELLS = 1.1
"""Growth of the number of measured sizes, likewise."""
FIRST_SIZES = ((1, 1), (1, 3), (2, 5), (3, 3), (1, 6), (3, 1), (5, 5), (2, 9), (4, 12))
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
        count: all measurements, beyond those that the window keeps.
    """

    window: Window = field(default_factory=Window)
    count: int = 0

    def add(self, measured: Measurement, batch: float) -> None:
        """Add one measurement."""
        replicas, stores = np.array([measured.num_replicas]), np.array([measured.num_stores])
        setting = make_setting(replicas, stores, batch)
        self.window = observe(self.window, setting, [measured.step_sec], MEASURED_TICK)
        self.count += 1


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

    def update(self, snapshot: ClusterView, suspect: Collection[int] = ()) -> None:
        """Add the measurements since the last decision.

        Args:
            snapshot: with the measurements.
            suspect: jobs that may be slowed down by too few cores; their measurements are used
                only for sizes without trusted ones.
        """
        for measured in snapshot.measured:
            by_kind = self.suspect if measured.job in suspect else self.trusted
            kept = by_kind.setdefault(measured.kind, KindMeasurements())
            kept.add(measured, snapshot.batch_samples[measured.kind])
        for kind in sorted({measured.kind for measured in snapshot.measured}):
            self._refit(kind, snapshot)

    def _refit(self, kind: str, snapshot: ClusterView) -> None:
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
        return sum(by[kind].count for by in (self.trusted, self.suspect) if kind in by)

    def window(self, kind: str) -> Window:
        """Return the steps of a kind: at each size the trusted ones, if there are any."""
        suspect, trusted = (
            self.suspect.get(kind, KindMeasurements()),
            self.trusted.get(kind, KindMeasurements()),
        )
        return merge_windows(suspect.window, trusted.window)

    def sample(self, view: SimulatedJob, allowed: np.ndarray) -> Allocation | None:
        """Return the sizes at which a new job is measured; None if enough sizes were measured."""
        if len(self.window(view.kind)) >= MIN_CELLS:
            return None
        replicas, stores = FIRST_SIZES[view.job % len(FIRST_SIZES)]
        in_range = stores < allowed.shape[0] and replicas < allowed.shape[1]
        if not in_range or not allowed[stores, replicas]:
            return view.request
        return replace(view.request, num_replicas=replicas, num_stores=stores)

    def predicted(self, kind: str, allowed: Mapping[str, np.ndarray]) -> Floats:
        """Return (n,) seconds per step at each possible size; nan if unknown."""
        seconds = self.seconds.get(kind)
        return np.full(int(allowed[kind].sum()), np.nan) if seconds is None else seconds


# The model of our policy: seconds per step of `fit` and `predict_seconds`.


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
    replicas: np.ndarray
    """(n,) replicas."""
    stores: np.ndarray
    """(n,) stores."""
    seconds: Floats
    """(n,) seconds per step."""

    def index_of(self, num_replicas: int, num_stores: int) -> int | None:
        """Return the index of a size, None if it is not trusted."""
        matches = np.flatnonzero((self.replicas == num_replicas) & (self.stores == num_stores))
        return int(matches[0]) if len(matches) else None

    def at(self, selected: np.ndarray) -> KindModel:
        """Return the predictions at some sizes only."""
        names = ("replicas", "stores", "seconds")
        return replace(self, **{name: getattr(self, name)[selected] for name in names})


def build_kind(version: int, seconds: Floats, allowed: np.ndarray) -> KindModel:
    """Return the model of a kind.

    Args:
        version: of the measurements.
        seconds: (sizes,) per step at each possible size; nan if it is not trusted.
        allowed: possible (stores, replicas).
    """
    trusted = np.isfinite(seconds)
    replicas, stores = (part[trusted] for part in allowed_sizes(allowed))
    return KindModel(version=version, replicas=replicas, stores=stores, seconds=seconds[trusted])
