"""What our policy thinks of a kind: steps, and cores that are busy, at the sizes that are trusted.

Seconds of a step are those of `fit` and `predict_seconds`. Cores that a process keeps busy
follow what it computes,

    busy = a + b v / n                          v samples a second, n processes of its pool

fitted to all jobs of the kind, or, where those differ less so, to what they are of the cores
that were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import nnls

from scheduler.cells import Window
from scheduler.cores import Headroom
from scheduler.fit import fit_window
from scheduler.model import Floats, TrainingSetting
from scheduler.outlook import REACH
from scheduler.simulator.knowledge import setting_of, sizes_of

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
    seconds = np.where(fit.knows(setting), fit.seconds(setting), np.nan)
    # What was measured needs no model.
    for cell in window.cells.values():
        here = (replicas == round(cell.columns[3])) & (stores == round(cell.columns[4]))
        seconds[here] = np.median(cell.seconds)
    near = (replicas <= REACH * most_replicas) & (stores <= REACH * most_stores)
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
