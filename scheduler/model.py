"""Throughput of both pools as functions of their resources, and the time of a whole job.

Letters: r replicas, s stores, c cores of a replica, n samples of a step, j
segment jobs at once, w workers of each, S rows of a segment, K segments, u
seconds to train one segment once.

Training is synchronous with a fixed global batch, so more replicas share the
same work (strong scaling):

    T(r, c, s) = a (n / n0) A(c) / r     forward, backward and update of the step's samples
               + k (r - 1)               partial gradient sums of the other replicas
               + e / s                   rows through the stores, none when s = 0
               + b                       what no resource shortens
    samples/s  = n / T

The split into computation, synchronisation, lookup and a constant is DLRover-RM's
(2024, the section on resource-performance modelling); A is Amdahl's law (1967);
1/r, r - 1 and 1 are the terms of Gunther's universal scalability law (2007).
Past the r where T stops falling a further replica is left idle, so throughput
never falls as resources grow and each further one adds less.

Preprocessing of one segment, with Amdahl's law over workers, and of all:

    t(w) = t0 + S / rho (sigma + (1 - sigma) / w)
    T_pre(j, w) = ceil(K / j) t(w)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingModel:
    """Coefficients of the time of one step."""

    batch_samples: int
    """n0, samples of the global batch that `compute_sec` belongs to."""
    compute_sec: float
    """a, seconds of one step's computation on one core."""
    sync_sec: float
    """k, seconds that each further replica adds."""
    lookup_sec: float
    """e, seconds of one step's row transfers through one store."""
    fixed_sec: float
    """b, seconds that no resource shortens."""
    parallel_share: float
    """Share of the computation that cores divide, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingModel:
    """Coefficients of the time of one segment job."""

    rows_per_worker_sec: float
    """rho, raw rows per second of one worker of one core or more."""
    startup_sec: float
    """t0, seconds before the first row."""
    serial_share: float
    """sigma, share of a segment's work that workers do not divide, in [0, 1]."""


def core_time(cpus: float, parallel_share: float) -> float:
    """Return A(c), the time on c cores relative to one core.

    Below one core all work is stretched; above it only the parallel share shrinks.

    Example:
        >>> core_time(0.5, 0.9), core_time(1.0, 0.9), round(core_time(9.0, 0.9), 9)
        (2.0, 1.0, 0.2)
    """
    if cpus < 1.0:
        return 1.0 / cpus
    return 1.0 - parallel_share + parallel_share / cpus


def useful_replicas(model: TrainingModel, cpus: float) -> float:
    """Return the number of replicas after which a further one makes no step shorter.

    T(r + 1) < T(r) exactly when a A / (r (r + 1)) > k.
    """
    if model.sync_sec <= 0.0:
        return np.inf
    ratio = model.compute_sec * core_time(cpus, model.parallel_share) / model.sync_sec
    return max(1.0, float(np.ceil((np.sqrt(1.0 + 4.0 * ratio) - 1.0) / 2.0)))


def step_sec(
    model: TrainingModel, num_replicas: ArrayLike, cpus: float, num_stores: ArrayLike
) -> Floats:
    """Return the seconds of one full step, T.

    Args:
        model: coefficients.
        num_replicas: (...), at least 1.
        cpus: cores of one replica.
        num_stores: (...), 0 while the tables lie in the one replica.
    """
    replicas = np.minimum(np.asarray(num_replicas, float), useful_replicas(model, cpus))
    stores = np.asarray(num_stores, float)
    compute = model.compute_sec * core_time(cpus, model.parallel_share) / replicas
    sync = model.sync_sec * (replicas - 1.0)
    lookup = np.where(stores > 0, model.lookup_sec / np.maximum(stores, 1.0), 0.0)
    return compute + sync + lookup + model.fixed_sec


def samples_per_sec(
    model: TrainingModel, num_replicas: ArrayLike, cpus: float, num_stores: ArrayLike
) -> Floats:
    """Return the samples per second of full steps; grows with r, c and s >= 1, ever less."""
    return model.batch_samples / step_sec(model, num_replicas, cpus, num_stores)


def segment_sec(
    model: PreprocessingModel, segment_rows: float, workers: ArrayLike, cpus: float
) -> Floats:
    """Return t(w), the seconds of one segment job.

    A worker computes in one thread: cores beyond the first do not help it.

    Args:
        model: coefficients.
        segment_rows: S.
        workers: (...) w, at least 1.
        cpus: cores of one worker.
    """
    share = model.serial_share + (1.0 - model.serial_share) / np.asarray(workers, float)
    return model.startup_sec + segment_rows / (model.rows_per_worker_sec * min(cpus, 1.0)) * share


@dataclass(frozen=True, slots=True)
class Timeline:
    """When both pools are held, in seconds from the start; arrays broadcast together.

    Attributes:
        built_sec: the last segment is committed; the preprocessing pool goes.
        first_sec: the first segment is committed; the training pool comes.
        end_sec: the last step is committed.
        waiting_sec: time that the training pool had no segment to train.
    """

    built_sec: Floats
    first_sec: Floats
    end_sec: Floats
    waiting_sec: Floats


def timeline(
    segment: Floats,
    num_segments: int,
    segment_jobs: ArrayLike,
    train_segment_sec: ArrayLike,
    epochs: int,
) -> Timeline:
    """Follow K equal segments through both pools.

    Segments come in waves of j; the first epoch trains each as it is committed:
    with W = ceil(K / j), training ends its first epoch at the later of
    t + K u (it never waits again after the first wave) and
    W t + (K - (W - 1) j) u (it waits for the last wave).

    Args:
        segment: (...) t, seconds of one segment job.
        num_segments: K.
        segment_jobs: (...) j, at least 1.
        train_segment_sec: (...) u.
        epochs: passes over the data; all but the first find everything built.
    """
    jobs = np.asarray(segment_jobs, float)
    waves = np.ceil(num_segments / jobs)
    built = waves * segment
    unit = np.asarray(train_segment_sec, float)
    work = num_segments * unit
    last_wave = (num_segments - (waves - 1.0) * jobs) * unit
    followed = np.maximum(segment + work, built + last_wave)
    return Timeline(
        built, segment, followed + (epochs - 1) * work, np.maximum(followed - segment - work, 0.0)
    )
