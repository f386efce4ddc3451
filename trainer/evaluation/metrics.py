"""Metrics of an evaluation, in float64, batch by batch in bounded memory.

Labels are 0 or 1; one between them counts partly as both. A metric without a value (no sample, or
one class only) is NaN, as is one with a NaN prediction; results have None for NaN.

Normalised entropy and calibration are sums. AUC keeps distinct scores; beyond 2**20 of them,
neighbours are merged, which bounds the error. AUC within groups needs all samples of a group: those
of a session are consecutive and evaluated when the next one starts, others go to temporary files.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import IO, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.hashing import as_bits, splitmix64
from presage.trainer.data.collate import CollatedBatch

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Metrics of a model on the evaluation split; None if undefined.

    Every metric is weighted by the samples' weights.
    """

    num_samples: int
    """Samples of the evaluation split."""
    ne: float | None
    """Normalised entropy: log loss divided by that of the mean label."""
    auc: float | None
    """Area under the ROC curve."""
    gauc: float | None
    """AUC within each group, averaged over groups by the weight of their samples."""
    session_auc: float | None
    """AUC within each session, averaged over sessions by the weight of their samples."""
    calibration: float | None
    """Sum of predictions over sum of labels."""
    auc_error: float | None
    """Bound of the error of `auc`, without rounding."""
    num_sessions: int | None
    """Sessions that have both classes."""
    num_one_class_sessions: int | None
    """Sessions without an AUC, with one class only."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that the summary of a run contains."""
        names = ("ne", "auc", "gauc", "session_auc", "calibration", "auc_error")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricColumns:
    """The columns that metrics read; None if samples lack them."""

    gauc: str | None
    """Key of the groups of GAUC."""
    session: str | None
    """Session key."""
    time: str | None
    """Time, which separates sessions of one key; None without a session gap."""
    gap: int | None
    """Longest pause within a session, in microseconds."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Distinct columns."""
        columns = (self.gauc, self.session, self.time)
        return tuple(dict.fromkeys(c for c in columns if c is not None))


def columns_of(dataset: OpenDataset, config: TrainConfig) -> MetricColumns:
    """Return the columns of metrics; session AUC needs its columns in the dataset."""
    session = dataset.job.data.session
    has_key = session.key in dataset.features
    needs_time = session.gap is not None
    has_session = has_key and (not needs_time or session.time in dataset.features)
    return MetricColumns(
        gauc=config.metrics.gauc_key or (session.key if has_key else None),
        session=session.key if has_session else None,
        time=session.time if has_session and needs_time else None,
        gap=None if session.gap is None else session.gap // timedelta(microseconds=1),
    )


class Metrics:
    """All metrics, batch by batch."""

    def __init__(self, columns: MetricColumns) -> None:
        self._columns = columns
        self._num_samples = 0
        self._sums = LossSums()
        self._scores = StreamingAuc()
        self._groups = GroupAuc()
        self._sessions = SessionAuc(columns.gap)

    def add(self, batch: CollatedBatch, logits: torch.Tensor) -> None:
        """Add the predictions of a batch."""
        columns, kept = self._columns, batch.kept
        arrays = (_float(batch.labels), _float(logits), _float(batch.weights))
        self._num_samples += batch.num_samples
        self._sums += loss_sums(*arrays)
        self._scores.add(*arrays)
        if columns.gauc is not None:
            self._groups.add(kept[columns.gauc], *arrays)
        if columns.session is not None:
            times = None if columns.time is None else kept[columns.time]
            self._sessions.add(kept[columns.session], *arrays, times)

    def finish(self) -> Evaluation:
        """Return the metrics of all batches."""
        sessions = self._sessions.finish() if self._columns.session is not None else None
        session_sums = sessions or AucSums()
        return Evaluation(
            num_samples=self._num_samples,
            ne=_defined(self._sums.normalized_entropy),
            auc=_defined(self._scores.auc),
            gauc=_defined(self._groups.finish().mean),
            session_auc=_defined(session_sums.mean),
            calibration=_defined(self._sums.calibration),
            auc_error=self._scores.error if self._num_samples else None,
            num_sessions=None if sessions is None else session_sums.num_keys,
            num_one_class_sessions=None if sessions is None else session_sums.num_one_class,
        )


def _float(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().astype(np.float64)


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Fields that are additive over disjoint sets of samples or keys."""

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums(_Sums):
    """Additive sums for normalised entropy and calibration.

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

    @property
    def normalized_entropy(self) -> float:
        """Log loss divided by that of predicting the base rate; NaN if undefined.

        Source: He et al., "Practical lessons from predicting clicks on ads at Facebook" (2014).
        """
        if not (self.positive > 0 and self.negative > 0 and np.isfinite(self.loss)):
            return float("nan")
        total = self.positive + self.negative
        entropy = self.positive * np.log(self.positive / total)
        entropy += self.negative * np.log(self.negative / total)
        return float(self.loss / -entropy)

    @property
    def calibration(self) -> float:
        """Predicted positives divided by true ones; NaN without a positive."""
        return self.predicted / self.positive if self.positive > 0 else float("nan")


def loss_sums(labels: Floats, logits: Floats, weights: Floats) -> LossSums:
    """Return the sums over some samples.

    Computed from logits, since probabilities may round to 0 or 1.

    Args:
        labels: (num_samples,).
        logits: (num_samples,), log odds.
        weights: (num_samples,), not negative.
    """
    positive, negative = weights * labels, weights * (1 - labels)
    loss = predicted = float("nan")
    if not np.isnan(logits).any():
        # log(1 + exp(-x)) is the loss of a positive, log(1 + exp(x)) that of a negative.
        below = np.logaddexp(0, -logits)
        predicted = float((positive + negative) @ np.exp(-below))
        if np.isfinite(logits).all():
            loss = float(positive @ below + negative @ np.logaddexp(0, logits))
    return LossSums(
        positive=float(positive.sum()),
        negative=float(negative.sum()),
        loss=loss,
        predicted=predicted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AucSums(_Sums):
    """Sums of the AUC within keys; those of disjoint keys are additive.

    Attributes:
        area: sum over keys of AUC times weight.
        weight: of the samples of keys that have both classes.
        num_keys: keys that have both classes.
        num_one_class: keys without an AUC, with one class only.
    """

    area: float = 0.0
    weight: float = 0.0
    num_keys: int = 0
    num_one_class: int = 0

    @property
    def mean(self) -> float:
        """Average over keys, weighted by their samples; NaN if none has both classes.

        Source: Zhu et al., "Optimized cost per click in Taobao display advertising" (2017).
        """
        return self.area / self.weight if self.num_keys else float("nan")


def auc_by_key(labels: Floats, scores: Floats, keys: NDArray[Any], weights: Floats) -> AucSums:
    """Return the AUC within each key, summed.

    Prefix sums run over all samples: they are exact for integer weights, and rounded relative to
    the total otherwise.

    Args:
        labels: (num_samples,).
        scores: (num_samples,), compared within a key only.
        keys: (num_samples,), of any type that sorts.
        weights: (num_samples,), not negative.
    """
    positive, negative = weights * labels, weights * (1 - labels)
    names, key_index = np.unique(keys, return_inverse=True)
    areas = _auc_of_keys(key_index, len(names), scores, positive, negative)
    sizes = np.bincount(key_index, positive + negative, minlength=len(names))
    has_area = ~np.isnan(areas)
    num_keys = int(has_area.sum())
    area = float("nan") if np.isnan(scores).any() else float(areas[has_area] @ sizes[has_area])
    return AucSums(
        area=area,
        weight=float(sizes[has_area].sum()),
        num_keys=num_keys,
        num_one_class=len(names) - num_keys,
    )


def _auc_of_keys(
    key_index: NDArray[np.integer],
    num_keys: int,
    scores: Floats,
    positive: Floats,
    negative: Floats,
) -> Floats:
    """Return the AUC of each key, NaN for one without positives or negatives.

    A tie is a run of equal scores within a key. Each of its positives wins against the negatives
    of lower ties, and half of those in its own tie.

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
    # Negatives below each tie: all before it, minus those of earlier keys.
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


MAX_SCORES = 1 << 20
"""Distinct scores kept for AUC; 24 bytes each, about 150 MB at most while they are sorted."""
MAX_SAMPLES = 1 << 20
"""Samples of groups in memory, 32 bytes each; others go to temporary files."""
NUM_FILES = 64
"""Temporary files; one at a time is read into memory."""
_SAMPLE = np.dtype([("key", np.int64), ("label", "f8"), ("score", "f8"), ("weight", "f8")])


class StreamingAuc:
    """AUC over all samples, added batch by batch, with a bound of its error."""

    def __init__(self, max_scores: int = MAX_SCORES) -> None:
        """Start empty; keeps at most `max_scores` distinct scores."""
        self._max_scores = max_scores
        self._shift = 0
        self._keys = np.zeros(0, np.int64)
        self._weights = np.zeros((0, 2))
        self._pending: list[tuple[NDArray[np.int64], Floats]] = []
        self._num_pending = 0
        self._has_nan = False

    def add(self, labels: Floats, scores: Floats, weights: Floats) -> None:
        """Add samples: (n,) labels from 0 to 1, scores and weights."""
        self._has_nan |= bool(np.isnan(scores).any())
        classes = np.stack([weights * labels, weights * (1 - labels)], axis=1)
        self._pending.append((ordered_bits(scores) >> self._shift, classes))
        self._num_pending += len(scores)
        if self._num_pending >= self._max_scores:
            self._merge()

    @property
    def auc(self) -> float:
        """Probability that a positive scores higher than a negative; a tie counts half."""
        self._merge()
        positive, negative = self._weights.T
        pairs = positive.sum() * negative.sum()
        if self._has_nan or not pairs > 0:
            return float("nan")
        below = np.cumsum(negative) - negative
        return float(positive @ (below + negative / 2) / pairs)

    @property
    def error(self) -> float:
        """Bound of the error of `auc`, without rounding: half the pairs of merged scores."""
        self._merge()
        positive, negative = self._weights.T
        pairs = positive.sum() * negative.sum()
        return float(positive @ negative / 2 / pairs) if self._shift and pairs > 0 else 0.0

    def _merge(self) -> None:
        """Sum equal scores; drop low bits of all scores while too many are distinct."""
        keys = np.concatenate([self._keys, *(k for k, _ in self._pending)])
        weights = np.concatenate([self._weights, *(w for _, w in self._pending)])
        order = np.argsort(keys, kind="stable")
        self._keys, self._weights = _sum_by_key(keys[order], weights[order])
        self._pending, self._num_pending = [], 0
        while len(self._keys) > self._max_scores:
            self._shift += 1
            self._keys, self._weights = _sum_by_key(self._keys >> 1, self._weights)


def ordered_bits(scores: Floats) -> NDArray[np.int64]:
    """Return integers with the order of float64 scores; both zeros are equal.

    Example:
        >>> bits = ordered_bits(np.array([-np.inf, -1.5, -0.0, 0.0, 2.0]))
        >>> bool((np.diff(bits) >= 0).all()), int(bits[2]), int(bits[3])
        (True, 0, 0)
    """
    bits = (scores + 0.0).view(np.int64)
    return np.where(bits < 0, ~bits | np.int64(-(2**63)), bits)


def _sum_by_key(keys: NDArray[np.int64], weights: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return the distinct keys of sorted ones and the sums of their weights."""
    if not len(keys):
        return keys, weights
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return keys[first], np.add.reduceat(weights, first, axis=0)


class SessionAuc:
    """AUC within consecutive sessions; keeps the samples of the current one."""

    def __init__(self, gap: int | None = None) -> None:
        """Start empty.

        Args:
            gap: a longer pause of the same key starts a new session; None for no limit.
        """
        self._gap = gap
        self._total = AucSums()
        self._open: tuple[NDArray[Any], ...] = ()

    def add(
        self,
        keys: NDArray[np.int64],
        labels: Floats,
        scores: Floats,
        weights: Floats,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Add the next samples, (n,) each; `times` in the unit of the gap."""
        time = keys if times is None else times
        columns: Any = (keys, time, labels, scores, weights)
        if self._open:
            columns = [np.concatenate(pair) for pair in zip(self._open, columns, strict=True)]
        key, time, *values = columns
        starts = key[1:] != key[:-1]
        if self._gap is not None:
            starts |= np.diff(time) > self._gap
        session = np.append(0, np.cumsum(starts))[: len(key)]
        last = int(np.searchsorted(session, session[-1])) if len(session) else 0
        self._total += _within(session[:last], *(c[:last] for c in values))
        self._open = tuple(c[last:] for c in columns)

    def finish(self) -> AucSums:
        """Return the AUC within all sessions, including the current one, which is closed."""
        if self._open:
            keys, _, *columns = self._open
            self._total += _within(np.zeros(len(keys), np.int64), *columns)
            self._open = ()
        return self._total


def _within(keys: NDArray[np.int64], labels: Floats, scores: Floats, weights: Floats) -> AucSums:
    return auc_by_key(labels, scores, keys, weights)


class GroupAuc:
    """AUC within groups whose samples come in any order."""

    def __init__(self, max_samples: int = MAX_SAMPLES, num_files: int = NUM_FILES) -> None:
        self._max_samples = max_samples
        self._num_files = num_files
        self._files: list[IO[bytes]] = []
        self._pending: list[NDArray[np.void]] = []
        self._num_pending = 0

    def add(self, keys: NDArray[np.int64], labels: Floats, scores: Floats, weights: Floats) -> None:
        """Add samples, (n,) each."""
        samples = np.empty(len(keys), _SAMPLE)
        for name, column in zip(_SAMPLE.names or (), (keys, labels, scores, weights), strict=True):
            samples[name] = column
        self._pending.append(samples)
        self._num_pending += len(samples)
        if self._num_pending > self._max_samples:
            self._spill()

    def finish(self) -> AucSums:
        """Return the AUC within all groups."""
        if not self._files:
            return _of_samples(np.concatenate([np.empty(0, _SAMPLE), *self._pending]))
        self._spill()
        total = AucSums()
        for file in self._files:
            file.seek(0)
            total += _of_samples(np.frombuffer(file.read(), _SAMPLE))
            file.close()
        self._files = []
        return total

    def _spill(self) -> None:
        """Append pending samples to the unnamed temporary files."""
        if not self._files:
            self._files = [tempfile.TemporaryFile() for _ in range(self._num_files)]  # noqa: SIM115
        samples = np.concatenate([np.empty(0, _SAMPLE), *self._pending])
        file_of_sample = splitmix64(as_bits(samples["key"])) % np.uint64(self._num_files)
        for number, file in enumerate(self._files):
            file.write(samples[file_of_sample == number].tobytes())
        self._pending, self._num_pending = [], 0


def _of_samples(samples: NDArray[np.void]) -> AucSums:
    return auc_by_key(samples["label"], samples["score"], samples["key"], samples["weight"])
