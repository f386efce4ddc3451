"""A start from similar past jobs: what they took over what was assumed of them.

A job that was never run is assumed to take the defaults, times what similar jobs took
over theirs. Ratios are averaged as logs; a job counts less the more doublings its
features are away and the more jobs came after it, and the defaults count as one more
job, so that few and distant neighbours move little.

Source: DLRover-RM (2024, the section on warm starting) smooths the final sizes of the
most similar jobs; smoothing what they taught of the model instead leaves the choice of
sizes, and the limits, to the same code as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.defaults import default_segments, default_training
from scheduler.fit import ASSUMED_SPREAD, Fit
from scheduler.memory import dense_multiplications
from scheduler.model import Floats, TrainingSetting
from scheduler.past import PastJob
from scheduler.snapshot import Snapshot

WIDTH = 2.0
"""Doublings over which a neighbour's weight falls to 61 %."""
OTHER_MODEL = 2.0
"""Doublings that another kind of model counts for."""
FADING = 0.95
"""Weight of a job over that of the next later one."""
DEFAULT_WEIGHT = 0.3
"""Weight of the defaults, where a job like this one that ended last has 1."""
SMALLEST = 0.01
"""Ratio that a term which took nothing counts as."""
MIN_WEIGHT = 0.05
"""Neighbours below it are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Coefficients before anything of the job was measured."""

    training: tuple[float, ...]
    """Of a step."""
    segments: tuple[float, ...]
    """Of a segment job."""
    spread: float
    """Log error that they may have."""
    neighbours: tuple[tuple[str, float], ...]
    """Names and weights of the jobs that decided them, the heaviest first."""


def features_of(snapshot: Snapshot) -> dict[str, float]:
    """Return the numbers by which jobs are compared."""
    facts, train = snapshot.facts, snapshot.job.train
    numbers = {
        "num_samples": facts.num_samples,
        "batch_samples": train.batch_samples,
        "table_rows": sum(facts.table_rows.values()),
        "rows_per_step": facts.rows_per_step,
        "lookups_per_sample": facts.lookups_per_sample,
        "row_bytes": facts.row_bytes,
        "embedding_dim": train.embedding_dim,
        "multiplications": dense_multiplications(facts, train),
    }
    return {name: max(float(value), 1e-6) for name, value in numbers.items()}


def warm_start(snapshot: Snapshot, past: Sequence[PastJob]) -> WarmStart:
    """Return what past jobs suggest; without any, the defaults.

    Args:
        snapshot: of the job that begins.
        past: oldest first.
    """
    weights = np.array([similarity(snapshot, job) for job in past], np.float64)
    weights *= FADING ** np.arange(len(past))[::-1]
    built = np.array([bool(job.segments) for job in past], bool)
    segments = [job.segments for job in past if job.segments]
    steps = np.log(np.array([job.step_ratio for job in past], np.float64))
    training = default_training(snapshot.facts, snapshot.job.train)
    order = np.argsort(-weights, kind="stable")
    return WarmStart(
        training=_scaled(training, [job.training for job in past], weights),
        segments=_scaled(default_segments(), segments, weights[built]),
        spread=_spread(steps, weights),
        neighbours=tuple(
            (past[i].name, float(weights[i])) for i in order if weights[i] >= MIN_WEIGHT
        ),
    )


def similarity(snapshot: Snapshot, job: PastJob) -> float:
    """Return the weight of a past job for this one: 1 when nothing tells them apart."""
    own = features_of(snapshot)
    both = [name for name in own if name in job.features]
    away = [np.log2(own[name] / job.features[name]) for name in both]
    if job.model != snapshot.job.train.model.name:
        away.append(OTHER_MODEL)
    return float(np.exp(-0.5 * np.sum(np.square(away)) / WIDTH**2))


def remember(snapshot: Snapshot, training: Fit, segments: Fit) -> PastJob:
    """Return what a finished job teaches.

    Raises:
        ValueError: none of its steps was measured.
    """
    if not training.num_cells:
        raise ValueError("job must have a measured step to be remembered, got none; run it")
    assumed = default_training(snapshot.facts, snapshot.job.train)
    measured = TrainingSetting.of_columns(np.array([training.lowest, training.highest]))
    ratios = training.seconds(measured) / Fit(coefficients=assumed).seconds(measured)
    return PastJob(
        name=snapshot.job.name,
        model=snapshot.job.train.model.name,
        features=features_of(snapshot),
        training=_ratios(training.coefficients, assumed),
        segments=_ratios(segments.coefficients, default_segments()) if segments.num_cells else (),
        step_ratio=float(np.exp(np.log(ratios).mean())),
    )


def _ratios(values: Sequence[float], assumed: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b if b > 0 else 1.0 for a, b in zip(values, assumed, strict=True))


def _scaled(
    assumed: Sequence[float], ratios: Sequence[Sequence[float]], weights: Floats
) -> tuple[float, ...]:
    """Return assumed coefficients times the smoothed ratios."""
    if not ratios:
        return tuple(assumed)
    logs = np.log(np.maximum(ratios, SMALLEST))
    mean = weights @ logs / (DEFAULT_WEIGHT + weights.sum())
    return tuple((np.array(assumed) * np.exp(mean)).tolist())


def _spread(logs: Floats, weights: Floats) -> float:
    """Return the log error of the smoothed ratio: that of the defaults, less what is known.

    The defaults' own part shrinks with the weight of the neighbours; what these differ by
    does not.
    """
    total = DEFAULT_WEIGHT + weights.sum()
    mean = weights @ logs / total
    differ = np.sqrt(weights @ (logs - mean) ** 2 / total) if len(logs) else 0.0
    return float(ASSUMED_SPREAD * DEFAULT_WEIGHT / total + differ)
