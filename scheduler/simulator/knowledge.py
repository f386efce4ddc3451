"""Measurements of each kind of job, and models fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import nnls

from scheduler.elasticity import Headroom
from scheduler.model.fit import Window, fit_window, merge_windows, observe
from scheduler.model.terms import Floats, TrainingSetting
from scheduler.planner.correction import MAX_GROWTH
from scheduler.simulator.views import JobView, Measured, Sizes, Snapshot

# What was measured of each kind of job, and models fitted to it.
#
# All policies that predict learn from the measurements of all jobs of a kind, which is more than
# the published peers had: each began anew with every job.

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
        return merge_windows(doubted.window, heard.window)

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


# What our policy thinks of a kind: steps, and cores that are busy, at the sizes that are trusted.
#
# Seconds of a step are those of `fit` and `predict_seconds`. Cores that a process keeps busy
# follow what it computes,
#
#     busy = a + b v / n                          v samples a second, n processes of its pool
#
# fitted to all jobs of the kind, or, where those differ less so, to what they are of the cores
# that were asked for.

MOST = 0.9
"""Share of past jobs that kept no more cores busy than what a new one is given."""
LATEST_ROWS = 512
"""Measurements of cores of a kind that are fitted, the latest ones."""
MIN_ROWS = 5
"""Measurements of cores before they say anything of a new job."""


def fit_ours(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds of a step at each size; nan where they are none, or out of reach."""
    replicas, stores = sizes_of(allowed)
    fit = fit_window(window, TrainingSetting)
    setting = setting_of(replicas, stores, batch_samples)
    most_replicas, most_stores = window.columns()[:, 3:5].max(axis=0)
    # Few measurements may leave no term that counts at the smallest sizes.
    seconds = np.where(fit.is_determined(setting), fit.seconds(setting), np.nan)
    # What was measured needs no model.
    for cell in window.cells.values():
        here = (replicas == round(cell.columns[3])) & (stores == round(cell.columns[4]))
        seconds[here] = np.median(cell.seconds)
    near = (replicas <= MAX_GROWTH * most_replicas) & (stores <= MAX_GROWTH * most_stores)
    return np.where(near, seconds, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is known of a kind at the sizes that are trusted; arrays have one entry per size."""

    version: int = 0
    """Of the knowledge that it was made from."""
    replicas: np.ndarray
    """(n,) of each size."""
    stores: np.ndarray
    """(n,) of each size."""
    seconds: Floats
    """(n,) of a step."""
    replica_busy: Floats
    """(n,) cores that one replica of a usual job keeps busy."""
    store_busy: Floats
    """(n,) cores that one store keeps busy."""
    relative: bool = False
    """Whether these are shares of the cores that its user asked for."""
    most: tuple[float, float]
    """Replica's and store's cores over these, that MOST of all jobs do not exceed."""
    headroom: Headroom = field(default_factory=Headroom)
    """Of its processes."""

    def place(self, num_replicas: int, num_stores: int) -> int | None:
        """Return the index of a size, None where it is not trusted."""
        found = np.flatnonzero((self.replicas == num_replicas) & (self.stores == num_stores))
        return int(found[0]) if len(found) else None


def kind_of(
    version: int,
    seconds: Floats,
    allowed: np.ndarray,
    cores: list[tuple[float, ...]],
    headroom: Headroom,
) -> Kind:
    """Return what is known of a kind.

    Args:
        version: of what it is made from.
        seconds: (sizes,) of a step at each allowed size; nan where it is not trusted.
        allowed: (stores, replicas) that can be had.
        cores: of each measurement, as `Heard.cores` has them.
        headroom: of its processes.
    """
    trusted = np.isfinite(seconds)
    replicas, stores = (part[trusted] for part in sizes_of(allowed))
    by_size = np.zeros(allowed.shape)
    by_size[allowed] = 1.0 / np.where(trusted, seconds, np.inf)
    seconds = seconds[trusted]
    rows = np.array(cores[-LATEST_ROWS:])
    measured = by_size[rows[:, 1].astype(int), rows[:, 0].astype(int)]
    rows, measured = rows[measured > 0], measured[measured > 0]
    found = Kind(
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
        return found
    rates = measured[:, None] / rows[:, :2], 1.0 / seconds / np.stack([replicas, stores])
    plain, shares = (
        [_busy(rates[0][:, pool], busy[:, pool], rates[1][pool]) for pool in (0, 1)]
        for busy in (rows[:, 2:4], rows[:, 2:4] / rows[:, 4:6])
    )
    relative = sum(part[2] for part in shares) < sum(part[2] for part in plain)
    first, second = shares if relative else plain
    return replace(
        found,
        relative=relative,
        replica_busy=first[0],
        store_busy=second[0],
        most=(first[1], second[1]),
    )


def _busy(rates: Floats, busy: Floats, wanted: Floats) -> tuple[Floats, float, float]:
    """Return cores kept busy at wanted rates, and how measurements lie about that.

    Returns:
        (n,) cores; what MOST measurements do not exceed over them; and the log of that over
        what most of them exceed.
    """
    scale = max(float(rates.mean()), 1e-12)
    terms = np.stack([np.ones_like(rates), rates / scale], axis=1)
    found = nnls(terms / busy[:, None], np.ones(len(busy)))[0]
    ratios = busy / (terms @ found)
    low, high = np.quantile(ratios, [1.0 - MOST, MOST])
    cores = found[0] + found[1] * wanted / scale
    return cores, float(high), float(np.log(high / low))
