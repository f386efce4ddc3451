"""Metrics of an evaluation: exact, in float64, over all samples at once.

Labels are 0 or 1; a label between them counts in part as each. Where a metric
has no value (no sample, or only one class) it is NaN, and so it is when a
prediction is NaN; a run's summary writes NaN as null.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def normalized_entropy(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Divide the log loss by the one of always predicting the base rate.

    Computed from logits, so that it stays exact where a probability would round to 0 or 1.

    Args:
        labels: (num_samples,).
        logits: (num_samples,), log odds.
        weights: (num_samples,), not negative, or None for equal ones.

    Returns:
        0 for perfect predictions, 1 for the base rate; NaN with one class only, no sample, or a
        logit that is not finite.

    Raises:
        ValueError: the arrays differ in length.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook" (2014).
    """
    x = _column("logits", logits)
    positive, negative = _class_weights(labels, weights, len(x))
    num_positive, num_negative = positive.sum(), negative.sum()
    if not (num_positive > 0 and num_negative > 0 and np.isfinite(x).all()):
        return float("nan")
    # log(1 + exp(-x)) is the loss of a positive, log(1 + exp(x)) that of a negative.
    loss = positive @ np.logaddexp(0, -x) + negative @ np.logaddexp(0, x)
    total = num_positive + num_negative
    entropy = num_positive * np.log(num_positive / total)
    entropy += num_negative * np.log(num_negative / total)
    return float(loss / -entropy)


def calibration(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Divide the predicted positives by the true ones.

    Args:
        labels: (num_samples,).
        logits: (num_samples,), log odds.
        weights: (num_samples,), not negative, or None for equal ones.

    Returns:
        1 when predictions are right on average, more when they are too high; NaN without a
        positive.

    Raises:
        ValueError: the arrays differ in length.
    """
    x = _column("logits", logits)
    positive, negative = _class_weights(labels, weights, len(x))
    if not positive.sum() > 0 or np.isnan(x).any():
        return float("nan")
    predicted = (positive + negative) @ np.exp(-np.logaddexp(0, -x))
    return float(predicted / positive.sum())


def auc(labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return how often a positive scores higher than a negative; a tie counts half.

    Args:
        labels: (num_samples,).
        scores: (num_samples,), of any scale; higher means more likely positive.
        weights: (num_samples,), not negative, or None for equal ones; a pair counts with the
            product of its weights.

    Returns:
        The area under the ROC curve; NaN with one class only or no sample.

    Raises:
        ValueError: the arrays differ in length.
    """
    s = _column("scores", scores)
    positive, negative = _class_weights(labels, weights, len(s))
    if np.isnan(s).any():
        return float("nan")
    return float(_auc_of_keys(np.zeros(len(s), np.int64), 1, s, positive, negative)[0])


def gauc(
    labels: ArrayLike,
    scores: ArrayLike,
    keys: NDArray[Any],
    weights: ArrayLike | None = None,
) -> float:
    """Average the AUC within each key, weighted by the samples of the key.

    Keys with one class only are left out. Prefix sums run over all samples: with weights that
    are whole numbers they are exact, with others they are rounded relative to the total.

    Args:
        labels: (num_samples,).
        scores: (num_samples,), compared within a key only.
        keys: (num_samples,), of any type that sorts.
        weights: (num_samples,), not negative, or None for equal ones.

    Returns:
        The average; NaN when no key has both classes.

    Raises:
        ValueError: the arrays differ in length.

    Source: Zhu et al., "Optimized cost per click in Taobao display advertising" (2017).
    """
    s = _column("scores", scores)
    positive, negative = _class_weights(labels, weights, len(s))
    _check_length("keys", len(keys), len(s))
    if np.isnan(s).any():
        return float("nan")
    names, key_index = np.unique(keys, return_inverse=True)
    areas = _auc_of_keys(key_index, len(names), s, positive, negative)
    sizes = np.bincount(key_index, positive + negative, minlength=len(names))
    known = ~np.isnan(areas)
    if not known.any():
        return float("nan")
    return float(areas[known] @ sizes[known] / sizes[known].sum())


def _auc_of_keys(
    key_index: NDArray[np.integer],
    num_keys: int,
    scores: Floats,
    positive: Floats,
    negative: Floats,
) -> Floats:
    """Return the AUC of each key, NaN for a key that lacks a class.

    A tie is a run of equal scores within a key. Each of its positives beats the negatives of
    the ties below it, and half of those in its own tie.

    Args:
        key_index: (num_samples,) in [0, num_keys).
        num_keys: number of keys.
        scores: (num_samples,), without NaN.
        positive: (num_samples,), weight of each sample as a positive.
        negative: (num_samples,), weight of each sample as a negative.
    """
    order = np.lexsort((scores, key_index))
    key, score = key_index[order], scores[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (key[1:] != key[:-1]) | (score[1:] != score[:-1])
    tie = np.cumsum(is_first) - 1
    key_of_tie = key[is_first]
    positive_of_tie = np.bincount(tie, positive[order])
    negative_of_tie = np.bincount(tie, negative[order])
    # Negatives below each tie: all that come before it, less those of the keys before its own.
    num_positive = np.bincount(key_of_tie, positive_of_tie, minlength=num_keys)
    num_negative = np.bincount(key_of_tie, negative_of_tie, minlength=num_keys)
    before_tie = np.cumsum(negative_of_tie) - negative_of_tie
    before_key = np.cumsum(num_negative) - num_negative
    below = before_tie - before_key[key_of_tie]
    won = positive_of_tie * (below + negative_of_tie / 2)
    pairs = num_positive * num_negative
    areas = np.full(num_keys, np.nan)
    np.divide(np.bincount(key_of_tie, won, minlength=num_keys), pairs, areas, where=pairs > 0)
    return areas


def _class_weights(
    labels: ArrayLike, weights: ArrayLike | None, num_samples: int
) -> tuple[Floats, Floats]:
    """Return the weight of each sample as a positive and as a negative."""
    y = _column("labels", labels)
    w = np.ones(len(y)) if weights is None else _column("weights", weights)
    _check_length("labels", len(y), num_samples)
    _check_length("weights", len(w), num_samples)
    return w * y, w * (1 - y)


def _column(name: str, values: ArrayLike) -> Floats:
    column = np.asarray(values, np.float64)
    if column.ndim != 1:
        raise ValueError(
            f"{name} must be a flat array, got {name}.shape={column.shape!r}; flatten it"
        )
    return column


def _check_length(name: str, length: int, num_samples: int) -> None:
    if length != num_samples:
        raise ValueError(
            f"{name} must have one entry per prediction, got len({name})={length} and "
            f"{num_samples} predictions; pass arrays of the same samples"
        )
