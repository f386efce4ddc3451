"""Metrics of whole arrays, from the sums that evaluations add up batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics import keyed_auc, loss_sums


def normalized_entropy(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
) -> float:
    return loss_sums(labels, logits, weights).normalized_entropy


def calibration(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    return loss_sums(labels, logits, weights).calibration


def auc(labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> float:
    return gauc(labels, scores, np.zeros(len(np.asarray(scores)), np.int64), weights)


def gauc(
    labels: ArrayLike, scores: ArrayLike, keys: NDArray[Any], weights: ArrayLike | None = None
) -> float:
    return keyed_auc(labels, scores, keys, weights).mean
