"""Coefficients of the model from measurements, as far as these tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from scheduler.history import BuildRecord, RunRecord
from scheduler.model import Floats, PreprocessingModel, TrainingModel, core_time

PRIOR_WEIGHT = 0.03
"""Pull of the defaults' proportions, in relative errors: it decides only what data leave open."""
MAX_ERROR = 0.2
"""A fit whose mean relative error is larger is not called confident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFit:
    """A training model and what it rests on."""

    model: TrainingModel
    """Coefficients."""
    num_steps: int
    """Measured steps, 0 when all coefficients are defaults."""
    max_replicas: int
    """Most replicas of a measured run."""
    error: float
    """Mean relative error of the step times."""
    peak_rss_bytes: int
    """Largest resident memory of the runs, 0 when there is none."""


def comparable_runs(runs: Sequence[RunRecord], embedding: str) -> tuple[RunRecord, ...]:
    """Return the deduplicated runs with this embedding, or else with the other of plain, cached."""
    ours = [r for r in runs if not r.summary.expanded]
    same = tuple(r for r in ours if r.summary.embedding == embedding)
    return same or tuple(r for r in ours if r.summary.embedding in ("plain", "cached"))


def fit_training(prior: TrainingModel, runs: Sequence[RunRecord], cpus: float) -> TrainingFit:
    """Fit a, k and b to the steps of some runs; e and the parallel share stay.

    Each coefficient is a multiple x of its default, found by non-negative least
    squares on relative errors of the median step time of each (r, n). A weak pull
    keeps the multiples equal where measurements do not tell them apart: one
    replica at one batch size only scales the defaults.

    Args:
        prior: the defaults.
        runs: finished runs of the job.
        cpus: cores that their replicas had.
    """
    steps = [m for run in runs for m in run.metrics[1:] if m.samples_per_sec > 0]
    if not steps:
        return TrainingFit(model=prior, num_steps=0, max_replicas=0, error=0.0, peak_rss_bytes=0)
    design = np.array([(m.num_replicas, m.num_samples) for m in steps], float)
    seconds = np.array([m.num_samples / m.samples_per_sec for m in steps])
    cells, cell_of_step = np.unique(design, axis=0, return_inverse=True)
    medians = np.array([np.median(seconds[cell_of_step == i]) for i in range(len(cells))])
    terms = _terms(prior, cells, cpus)
    scale = float(np.median(medians / terms.sum(axis=1)))
    pull = PRIOR_WEIGHT / scale * np.eye(3)
    left = np.concatenate([terms / medians[:, None], pull])
    right = np.concatenate([np.ones(len(cells)), np.full(3, PRIOR_WEIGHT)])
    a, k, b = non_negative_least_squares(left, right).tolist()
    model = replace(
        prior,
        compute_sec=a * prior.compute_sec,
        sync_sec=k * prior.sync_sec,
        fixed_sec=b * prior.fixed_sec,
    )
    predicted = _terms(model, cells, cpus).sum(axis=1)[cell_of_step]
    return TrainingFit(
        model=model,
        num_steps=len(steps),
        max_replicas=int(design[:, 0].max()),
        error=float(np.mean(np.abs(predicted / seconds - 1.0))),
        peak_rss_bytes=max(run.summary.peak_rss_bytes for run in runs),
    )


def fit_preprocessing(
    prior: PreprocessingModel, builds: Sequence[BuildRecord], cpus: float
) -> PreprocessingModel:
    """Return the median start-up and rate of builds that ran with one worker.

    Args:
        prior: the defaults; the serial share stays.
        builds: finished builds of the job.
        cpus: cores that the worker had.
    """
    if not builds:
        return prior
    rate = float(np.median([b.rows_per_sec for b in builds]))
    return replace(
        prior,
        rows_per_worker_sec=rate / min(cpus, 1.0),
        startup_sec=float(np.median([b.startup_sec for b in builds])),
    )


def non_negative_least_squares(left: Floats, right: Floats) -> Floats:
    """Return the x >= 0 with the smallest |left x - right|, exactly: every support is tried.

    Args:
        left: (equations, few) of full column rank.
        right: (equations,).
    """
    width = left.shape[1]
    best, best_error = np.zeros(width), float(right @ right)
    for size in range(1, width + 1):
        for support in combinations(range(width), size):
            columns = list(support)
            solution = np.linalg.lstsq(left[:, columns], right, rcond=None)[0]
            error = float(np.sum((left[:, columns] @ solution - right) ** 2))
            if (solution >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(width), error
                best[columns] = solution
    return best


def _terms(model: TrainingModel, cells: Floats, cpus: float) -> Floats:
    """Return the seconds of computation, synchronisation and constant of each (r, n)."""
    replicas, samples = cells.T
    share = samples / model.batch_samples * core_time(cpus, model.parallel_share) / replicas
    return np.stack(
        [
            model.compute_sec * share,
            model.sync_sec * (replicas - 1.0),
            np.full(len(cells), model.fixed_sec),
        ],
        axis=1,
    )
