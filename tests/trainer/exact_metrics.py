"""Metrics of whole arrays, from the sums that evaluations add up batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.trainer.evaluation.metrics import auc_by_key, loss_sums


def columns(*arrays: ArrayLike | None) -> list[NDArray[np.float64]]:
    """Return float64 columns; ones for weights that are not given."""
    ones = np.ones(len(np.asarray(arrays[0])))
    return [ones if array is None else np.asarray(array, np.float64) for array in arrays]


def normalized_entropy(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
) -> float:
    return loss_sums(*columns(labels, logits, weights)).normalized_entropy


def calibration(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    return loss_sums(*columns(labels, logits, weights)).calibration


def auc(labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> float:
    return gauc(labels, scores, np.zeros(len(np.asarray(scores)), np.int64), weights)


def gauc(
    labels: ArrayLike, scores: ArrayLike, keys: NDArray[Any], weights: ArrayLike | None = None
) -> float:
    y, s, w = columns(labels, scores, weights)
    return auc_by_key(y, s, keys, w).mean
