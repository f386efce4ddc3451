"""The equations of throughput: the terms of a training step and of a segment job.

Letters: r replicas of c cores, s stores of d cores, n samples of a step, U distinct rows that it
touches, F rows that it fetches from the stores, B bytes that it moves to and from them (U, F and B
are known ahead from the oracle). A step takes

    T = a1 n / (r c) + a2 n / (r min(c, 1))     forward and backward: threads divide a1 only
      + u U / c                                 update of the rows, done by every replica
      + k1 (r - 1) + k2 log2 r                  synchronisation: one message each, tree rounds
      + e1 F / (s d) + e2 B / s + e3 B r / s    embedding: look-up, transfer, contention at a store
      + b                                       fixed

where the terms of e vanish if s = 0. Training is synchronous with a fixed global batch, so more
replicas share the same work. A segment job of S rows, with w workers of c cores and j such jobs at
once, takes

    t = t0 + p1 S / min(c, 1) + p2 S / (w min(c, 1)) + p3 S (j - 1)

for start-up, serial work, work that workers divide (each computes in one thread), and contention
between jobs. All coefficients are at least 0.

Source: compute, update, synchronisation and embedding are the terms of DLRover-RM (2024, the
section on resource-performance modelling), there for asynchronous parameter servers; r - 1 is
Gunther's coherency (universal scalability law, 2007).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(ABC):
    """Inputs of an equation: numbers or arrays that broadcast together, loads before sizes."""

    NUM_LOADS: ClassVar[int] = 0
    """Number of loads: leading fields that vary a little from step to step."""

    def columns(self) -> Floats:
        """Return (n, num_fields) values, one row per setting."""
        values = [np.asarray(getattr(self, field.name), np.float64) for field in fields(self)]
        return np.stack(np.broadcast_arrays(*values), axis=-1).reshape(-1, len(values))

    def rounded(self) -> Floats:
        """Return the columns with loads rounded to steps of 6 % (a twelfth of a doubling)."""
        columns = self.columns()
        loads = columns[:, : self.NUM_LOADS]
        columns[:, : self.NUM_LOADS] = np.round(12.0 * np.log2(1.0 + loads))
        return columns

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
    """n, samples of the global batch."""

    def rounded(self) -> Floats:
        """Return the columns with loads rounded; loads of stores are 0 without stores."""
        columns = Setting.rounded(self)
        columns[columns[:, 4] == 0, 1:3] = 0.0
        return columns

    def design(self) -> Floats:
        """Return (n, 9): each term of a step without its coefficient."""
        rows, fetched, moved, r, s, c, d, n = self.columns().T
        has_stores = s > 0
        per_store = has_stores / np.where(has_stores, s, 1.0)
        terms = (
            n / (r * c),
            n / (r * np.minimum(c, 1.0)),
            rows / c,
            r - 1.0,
            np.log2(r),
            fetched * per_store / d,
            moved * per_store,
            moved * r * per_store,
            np.ones_like(r),
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
        work = rows / np.minimum(c, 1.0)
        return np.stack((np.ones_like(w), work, work / w, rows * (j - 1.0)), axis=1)
