"""What was measured of each kind of job, and models fitted to it.

All policies that predict learn from the measurements of all jobs of a kind, which is
more than the published peers had: each began anew with every job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.cells import Window, observe, over
from scheduler.model import Floats, TrainingSetting
from scheduler.simulator.views import JobView, Measured, Sizes, Snapshot

REFIT = 1.25
"""Measurements over those of the last fit, at which a kind is fitted again."""
REFIT_CELLS = 1.1
"""Sizes that were measured over those of the last fit, likewise."""
SAMPLED = ((1, 1), (1, 3), (2, 5), (3, 3), (1, 6), (3, 1), (5, 5), (2, 9), (4, 12))
"""Replicas and stores at which the first jobs of a kind run, one after the other, to be measured:
Optimus measures some sizes before it fits, and so do we."""
MIN_CELLS = 7
"""Sizes of a kind that are measured so before its predictions count."""
TICK = 0.0
"""When all of it was measured: a kind of job does not age."""


def sizes_of(allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the replicas and the stores of all sizes that can be had, (n,) each."""
    stores, replicas = np.nonzero(allowed)
    return replicas, stores


def setting_of(replicas: np.ndarray, stores: np.ndarray, batch_samples: float) -> TrainingSetting:
    """Return the settings of sizes; cores are those that each process keeps busy by itself."""
    return TrainingSetting(num_replicas=replicas, num_stores=stores, batch_samples=batch_samples)


@dataclass(slots=True)
class Heard:
    """Measurements of one kind.

    Attributes:
        window: of steps.
        cores: replicas, stores, cores that each kept busy, and cores that were asked for.
    """

    window: Window = field(default_factory=Window)
    cores: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])

    def add(self, measured: Measured, request: Sizes, batch: float) -> None:
        """Add one measurement."""
        replicas, stores = np.array([measured.num_replicas]), np.array([measured.num_stores])
        setting = setting_of(replicas, stores, batch)
        self.window = observe(self.window, setting, [measured.step_sec], TICK)
        sizes = float(measured.num_replicas), float(measured.num_stores)
        busy = measured.replica_busy, measured.store_busy
        self.cores.append((*sizes, *busy, request.replica_cpus, request.store_cpus))


class Knowledge:
    """Measurements by kind, and seconds of a step that a model predicts at every size."""

    def __init__(self, fit: Callable[[Window, np.ndarray, float], Floats]) -> None:
        """Begin with nothing.

        Args:
            fit: measurements, allowed sizes and batch to (n,) seconds of a step; nan where
                it does not dare.
        """
        self.fit = fit
        self.heard: dict[str, Heard] = {}
        self.doubted: dict[str, Heard] = {}
        self.fitted: dict[str, tuple[int, int]] = {}
        self.seconds: dict[str, Floats] = {}
        self.versions: dict[str, int] = {}

    def take_in(self, snapshot: Snapshot, doubted: Collection[int] = ()) -> None:
        """Add what was measured since the last decision.

        Args:
            snapshot: with the measurements.
            doubted: jobs that may be slowed down by their cores: what is measured of them counts
                only at sizes, and while there are cores, of which nothing else is known.
        """
        requests = {view.job: view.request for view in snapshot.jobs}
        for measured in snapshot.measured:
            into = self.doubted if measured.job in doubted else self.heard
            heard = into.setdefault(measured.kind, Heard())
            heard.add(measured, requests[measured.job], snapshot.batch_samples[measured.kind])
        for kind in sorted({measured.kind for measured in snapshot.measured}):
            self._refit(kind, snapshot)

    def _refit(self, kind: str, snapshot: Snapshot) -> None:
        """Fit a kind again where much more is known of it than at its last fit."""
        window, count = self.window(kind), self._count(kind)
        before, cells = self.fitted.get(kind, (0, 0))
        if count < REFIT * max(before, 1e-9) and len(window) <= REFIT_CELLS * cells:
            return
        self.fitted[kind] = count, len(window)
        self.versions[kind] = self.versions.get(kind, 0) + 1
        batch = snapshot.batch_samples[kind]
        self.seconds[kind] = self.fit(window, snapshot.allowed[kind], batch)

    def _count(self, kind: str) -> int:
        """Return how often a kind was measured: a cell forgets, this does not."""
        return sum(len(one[kind].cores) for one in (self.heard, self.doubted) if kind in one)

    def window(self, kind: str) -> Window:
        """Return the steps of a kind: at each size those that are not in doubt, if there are."""
        doubted, heard = self.doubted.get(kind, Heard()), self.heard.get(kind, Heard())
        return over(doubted.window, heard.window)

    def cores(self, kind: str, least: int) -> list[tuple[float, ...]]:
        """Return the cores of a kind: those not in doubt, if there are as many as `least`."""
        doubted, heard = self.doubted.get(kind, Heard()), self.heard.get(kind, Heard())
        return heard.cores if len(heard.cores) >= least else doubted.cores + heard.cores

    def sample(self, view: JobView, allowed: np.ndarray) -> Sizes | None:
        """Return the sizes at which a new job is to be measured; None when enough are known."""
        if len(self.window(view.kind)) >= MIN_CELLS:
            return None
        replicas, stores = SAMPLED[view.job % len(SAMPLED)]
        known = stores < allowed.shape[0] and replicas < allowed.shape[1]
        if not known or not allowed[stores, replicas]:
            return view.request
        return replace(view.request, num_replicas=replicas, num_stores=stores)

    def predicted(self, kind: str, allowed: Mapping[str, np.ndarray]) -> Floats:
        """Return (n,) seconds of a step at each allowed size; nan where nothing is known."""
        known = self.seconds.get(kind)
        return np.full(int(allowed[kind].sum()), np.nan) if known is None else known
