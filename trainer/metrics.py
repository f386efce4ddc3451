"""Metrics of an evaluation: exact, in float64; `metric_streams.py` has them batch by batch.

Labels are 0 or 1; a label between them counts in part as each. Where a metric
has no value (no sample, or only one class) it is NaN, and so it is when a
prediction is NaN; a run's summary writes NaN as null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What NE and calibration are made of; the sums of parts add up to those of the whole.

    Attributes:
        positive: weight of the positives.
        negative: weight of the negatives.
        loss: weighted log loss.
        predicted: weighted predicted probability.
    """

    positive: float = 0.0
    negative: float = 0.0
    loss: float = 0.0
    predicted: float = 0.0

    def __add__(self, other: LossSums) -> LossSums:
        """Return the sums over both."""
        return LossSums(
            positive=self.positive + other.positive,
            negative=self.negative + other.negative,
            loss=self.loss + other.loss,
            predicted=self.predicted + other.predicted,
        )

    @property
    def normalized_entropy(self) -> float:
        """The log loss over that of always predicting the base rate; NaN where undefined."""
        if not (self.positive > 0 and self.negative > 0 and np.isfinite(self.loss)):
            return float("nan")
        total = self.positive + self.negative
        entropy = self.positive * np.log(self.positive / total)
        entropy += self.negative * np.log(self.negative / total)
        return float(self.loss / -entropy)

    @property
    def calibration(self) -> float:
        """Predicted positives over true ones; NaN without a positive."""
        return self.predicted / self.positive if self.positive > 0 else float("nan")


def loss_sums(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> LossSums:
    """Return the sums over some samples.

    Computed from logits, so that they stay exact where a probability would round to 0 or 1.

    Args:
        labels: (num_samples,).
        logits: (num_samples,), log odds.
        weights: (num_samples,), not negative, or None for equal ones.

    Raises:
        ValueError: the arrays differ in length.
    """
    x = _column("logits", logits)
    positive, negative = _class_weights(labels, weights, len(x))
    loss = predicted = float("nan")
    if not np.isnan(x).any():
        # log(1 + exp(-x)) is the loss of a positive, log(1 + exp(x)) that of a negative.
        below = np.logaddexp(0, -x)
        predicted = float((positive + negative) @ np.exp(-below))
        if np.isfinite(x).all():
            loss = float(positive @ below + negative @ np.logaddexp(0, x))
    return LossSums(
        positive=float(positive.sum()),
        negative=float(negative.sum()),
        loss=loss,
        predicted=predicted,
    )


def normalized_entropy(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Divide the log loss by the one of always predicting the base rate.

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
    return loss_sums(labels, logits, weights).normalized_entropy


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
    return loss_sums(labels, logits, weights).calibration


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedAuc:
    """AUC within each of some keys; those of other keys add up.

    Attributes:
        area: sum over keys of AUC times weight.
        weight: of the samples of keys that have both classes.
        num_keys: keys that have both classes.
        num_one_class: keys left out, for they have one class.
    """

    area: float = 0.0
    weight: float = 0.0
    num_keys: int = 0
    num_one_class: int = 0

    def __add__(self, other: KeyedAuc) -> KeyedAuc:
        """Return what holds for the keys of both."""
        return KeyedAuc(
            area=self.area + other.area,
            weight=self.weight + other.weight,
            num_keys=self.num_keys + other.num_keys,
            num_one_class=self.num_one_class + other.num_one_class,
        )

    @property
    def mean(self) -> float:
        """The average over keys, weighted by their samples; NaN when none has both classes."""
        return self.area / self.weight if self.num_keys else float("nan")


def keyed_auc(
    labels: ArrayLike,
    scores: ArrayLike,
    keys: NDArray[Any],
    weights: ArrayLike | None = None,
) -> KeyedAuc:
    """Return the AUC within each key, added up.

    Prefix sums run over all samples: with weights that are whole numbers they are exact, with
    others they are rounded relative to the total.

    Args:
        labels: (num_samples,).
        scores: (num_samples,), compared within a key only.
        keys: (num_samples,), of any type that sorts.
        weights: (num_samples,), not negative, or None for equal ones.

    Raises:
        ValueError: the arrays differ in length.
    """
    s = _column("scores", scores)
    positive, negative = _class_weights(labels, weights, len(s))
    _check_length("keys", len(keys), len(s))
    names, key_index = np.unique(keys, return_inverse=True)
    areas = _auc_of_keys(key_index, len(names), s, positive, negative)
    sizes = np.bincount(key_index, positive + negative, minlength=len(names))
    known = ~np.isnan(areas)
    num_keys = int(known.sum())
    area = float("nan") if np.isnan(s).any() else float(areas[known] @ sizes[known])
    return KeyedAuc(
        area=area,
        weight=float(sizes[known].sum()),
        num_keys=num_keys,
        num_one_class=len(names) - num_keys,
    )


def gauc(
    labels: ArrayLike,
    scores: ArrayLike,
    keys: NDArray[Any],
    weights: ArrayLike | None = None,
) -> float:
    """Average the AUC within each key, weighted by the samples of the key.

    Keys with one class only are left out.

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
    return keyed_auc(labels, scores, keys, weights).mean


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
