"""What is true of a kind of job: its speed and its busy cores at every size.

A policy never sees this, only noisy measurements at the sizes that it has tried. Tables
come from a file of measurements (`fit`'s, with two more columns, the mean of cores that
one replica and one store keep busy), and sizes between the measured ones are
interpolated, speeds by their logarithm; sizes outside cannot be had. Without a file,
three kinds follow the published shape of one model (`scheduler/defaults.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import griddata

from scheduler.defaults import EXCHANGE_SHARE, TREE_SHARE
from scheduler.measurements import read_measurements
from scheduler.model import Floats, TrainingSetting
from schemas.errors import SchemaError

REPLICA_BUSY, STORE_BUSY = "replica_busy_cpus", "store_busy_cpus"
LEAST_BUSY = 0.05
"""Cores that a process keeps busy at least: a reading of none is a gap in the measurement."""
MADE_REPLICAS, MADE_STORES = 16, 8
MADE: Mapping[str, tuple[float, float, float]] = {
    "even": (0.8, 0.1, 0.1),
    "stores": (0.4, 0.2, 0.4),
    "compute": (0.95, 0.03, 0.02),
}
"""Kinds without a file: shares of computation, look-up and meeting in a step of one and one."""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind. Arrays are (stores + 1, replicas + 1); nan where a size cannot be had.

    Attributes:
        kind: its name.
        speed: samples a second.
        replica_busy: cores that one replica keeps busy.
        store_busy: cores that one store keeps busy.
        batch_samples: samples of a step.
    """

    kind: str
    speed: Floats
    replica_busy: Floats
    store_busy: Floats
    batch_samples: float

    @property
    def allowed(self) -> np.ndarray:
        """Return which sizes can be had, (stores + 1, replicas + 1)."""
        return np.isfinite(self.speed)

    def nearest(self, num_replicas: int, num_stores: int) -> tuple[int, int]:
        """Return the replicas and stores that can be had and are nearest by ratio."""
        stores, replicas = np.nonzero(self.allowed)
        away = np.abs(np.log2((1 + replicas) / (1 + num_replicas)))
        away += 0.5 * np.abs(np.log2((1 + stores) / (1 + num_stores)))
        best = int(away.argmin())
        return int(replicas[best]), int(stores[best])


def read_tables(path: Path) -> dict[str, Table]:
    """Read the tables of all kinds that can be interpolated.

    Raises:
        SchemaError: the file is none of measurements, lacks busy cores, or holds too few sizes.
    """
    found: dict[str, Table] = {}
    for kind, rows in read_measurements(path).rows.items():
        for name in (REPLICA_BUSY, STORE_BUSY, "batch_size"):
            if any(not row.get(name) for row in rows):
                raise SchemaError(
                    f"measurements must have {name} in every row to simulate with, got none for "
                    f"job {kind!r}; measure it",
                    file=str(path),
                )
        found[kind] = table_of(kind, rows)
    return found


def table_of(kind: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of measurements of one kind.

    Raises:
        SchemaError: they lie on a line, so that nothing can be interpolated.
    """
    points = np.array([[float(r["num_stores"]), float(r["num_replicas"])] for r in rows])
    if len(points) < 3 or np.linalg.matrix_rank(points - points[0]) < 2:
        raise SchemaError(
            f"job must be measured at three sizes or more, not in one line, got {len(points)} of "
            f"{kind!r}; vary stores and replicas"
        )
    highest = points.max(axis=0).astype(int)
    stores, replicas = np.mgrid[0 : highest[0] + 1, 0 : highest[1] + 1].astype(float)
    grid = np.stack([stores, replicas], axis=-1)

    def spread(name: str) -> Floats:
        values = np.array([float(row[name]) for row in rows])
        lowest = 1e-9 if name == "samples_per_sec" else LEAST_BUSY
        logs = np.log(np.maximum(values, lowest))
        return np.exp(np.asarray(griddata(points, logs, grid, method="linear"), np.float64))

    return Table(
        kind,
        spread("samples_per_sec"),
        spread(REPLICA_BUSY),
        spread(STORE_BUSY),
        float(rows[0]["batch_size"]),
    )


def made_tables() -> dict[str, Table]:
    """Return three kinds of the published shape, which differ in what they are bound by."""
    return {kind: _made(kind, *shares) for kind, shares in MADE.items()}


def _made(kind: str, compute: float, lookup: float, meeting: float) -> Table:
    stores, replicas = np.mgrid[0 : MADE_STORES + 1, 0 : MADE_REPLICAS + 1].astype(float)
    had = (stores > 0) & (replicas > 0)
    setting = TrainingSetting(
        num_replicas=np.maximum(replicas, 1.0).ravel(),
        num_stores=np.maximum(stores, 1.0).ravel(),
    )
    terms = (compute, 0.0, 0.0, EXCHANGE_SHARE, TREE_SHARE, lookup, 0.0, meeting, 0.0)
    seconds = (setting.design() @ np.array(terms)).reshape(stores.shape)
    at_work = compute / np.maximum(replicas, 1.0), (lookup + meeting) / np.maximum(stores, 1.0)
    busy = [np.where(had, np.maximum(LEAST_BUSY, 2.0 * part / seconds), np.nan) for part in at_work]
    return Table(kind, np.where(had, 256.0 / seconds, np.nan), busy[0], busy[1], 256.0)
