"""Metrics on the evaluation split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import nn

from schemas.config.train import TrainConfig
from schemas.dataset import Dataset
from trainer.data.collate import Batch
from trainer.embedding.module import Embedding
from trainer.metrics import KeyedAuc, LossSums, ScatteredAuc, ScoreTable, SessionAuc, loss_sums
from trainer.stores.api import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a model is worth on samples it was not trained on; None where undefined.

    Every metric is weighted by the samples' weights.
    """

    num_samples: int
    """Samples of the evaluation split."""
    ne: float | None
    """Normalised entropy: log loss over that of the mean label."""
    auc: float | None
    """Area under the ROC curve."""
    gauc: float | None
    """AUC per group, weighted by samples."""
    session_auc: float | None
    """AUC per session, weighted by samples."""
    calibration: float | None
    """Sum of predictions over sum of labels."""
    auc_error: float | None
    """The most that `auc` is off by, beside rounding."""
    num_sessions: int | None
    """Sessions that have both classes."""
    num_one_class_sessions: int | None
    """Sessions that `session_auc` leaves out, for they have one class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricColumns:
    """The columns that metrics read, as far as the samples have them."""

    gauc: str | None
    """Groups samples for GAUC."""
    session: str | None
    """Equal within a session."""
    time: str | None
    """Tells sessions of one key apart, None where no gap does."""
    gap: int | None
    """Longest pause within a session, in microseconds."""

    @property
    def kept(self) -> tuple[str, ...]:
        """All of them, each once."""
        wanted = (self.gauc, self.session, self.time)
        return tuple(dict.fromkeys(c for c in wanted if c is not None))


def columns_of(dataset: Dataset, config: TrainConfig) -> MetricColumns:
    """Return what metrics read: there is no session AUC where its columns are not stored."""
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


class _Metrics:
    """All metrics, batch by batch."""

    def __init__(self, columns: MetricColumns) -> None:
        self._columns = columns
        self._num_samples = 0
        self._sums = LossSums()
        self._scores = ScoreTable()
        self._groups = ScatteredAuc()
        self._sessions = SessionAuc(columns.gap)

    def add(self, batch: Batch, logits: torch.Tensor) -> None:
        columns, kept = self._columns, batch.kept
        found = (_float(batch.labels), _float(logits), _float(batch.weights))
        self._num_samples += batch.num_samples
        self._sums += loss_sums(*found)
        self._scores.add(*found)
        if columns.gauc is not None:
            self._groups.add(kept[columns.gauc], *found)
        if columns.session is not None:
            times = None if columns.time is None else kept[columns.time]
            self._sessions.add(kept[columns.session], *found, times)

    def finish(self) -> Evaluation:
        sessions = self._sessions.finish() if self._columns.session is not None else None
        found = sessions or KeyedAuc()
        return Evaluation(
            num_samples=self._num_samples,
            ne=_defined(self._sums.normalized_entropy),
            auc=_defined(self._scores.auc),
            gauc=_defined(self._groups.finish().mean),
            session_auc=_defined(found.mean),
            calibration=_defined(self._sums.calibration),
            auc_error=self._scores.error if self._num_samples else None,
            num_sessions=None if sessions is None else found.num_keys,
            num_one_class_sessions=None if sessions is None else found.num_one_class,
        )


def evaluate(
    model: nn.Module,
    embedding: Embedding,
    stores: Mapping[str, Store],
    batches: Iterable[Batch],
    columns: MetricColumns,
) -> Evaluation:
    """Score batches without training; no row is created.

    Args:
        model: built over `embedding`.
        embedding: that it looks rows up in.
        stores: by table, they hold everything trained.
        batches: of the evaluation split, in stored order.
        columns: what of the batches' kept columns is what.
    """
    metrics = _Metrics(columns)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            embedding.open_copies(batch, stores)
            metrics.add(batch, model(batch))
    model.train()
    return metrics.finish()


def _float(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().astype(np.float64)


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
