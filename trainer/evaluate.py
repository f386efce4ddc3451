"""Metrics on the evaluation split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn

from schemas.config.job import Job, load_job
from schemas.config.train import EVALUATE, TrainConfig
from schemas.dataset import Dataset, open_dataset, select_segments, select_segments_by_hash
from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from schemas.run_log import RUN_FILE
from trainer.checkpoint.load import (
    check_model,
    load_checkpoint,
    made_of,
    newest_checkpoint,
    verified,
)
from trainer.components import (
    Components,
    build_components,
    order_of,
    uses_shared_features,
)
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.reader import Reader
from trainer.device import device_of, to_device
from trainer.embedding.module import Embedding
from trainer.metrics import KeyedAuc, LossSums, ScatteredAuc, ScoreTable, SessionAuc, loss_sums
from trainer.recovery import Watchdog
from trainer.run import (
    check_meaning,
    check_run,
    read_identity,
)
from trainer.stores.api import RowReader


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
    """AUC per group, weighted by samples."""
    session_auc: float | None
    """AUC per session, weighted by samples."""
    calibration: float | None
    """Sum of predictions over sum of labels."""
    auc_error: float | None
    """Bound of the error of `auc`, without rounding."""
    num_sessions: int | None
    """Sessions that have both classes."""
    num_one_class_sessions: int | None
    """Sessions without an AUC, with one class only."""


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


def columns_of(dataset: Dataset, config: TrainConfig) -> MetricColumns:
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


def evaluate_run(
    job_path: Path, dataset_path: Path, run: Path, segments: Sequence[str] | None = None
) -> Evaluation:
    """Evaluate the newest checkpoint of a run.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: run folder.
        segments: ids or days of the segments to evaluate, trained or not; None: those that the
            run trained.

    Raises:
        SchemaError: job, dataset or run are invalid, or the run has no checkpoint.
    """
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    device_of(job.train.device)
    identity = read_identity(run)
    if segments is not None:
        dataset = select_segments(dataset, segments)
        check_meaning(run / RUN_FILE, identity, dataset)
    else:
        if identity.chosen:
            dataset = select_segments_by_hash(dataset, identity.segments)
        check_run(run, dataset, job.train)
    spec = spec_of(dataset, job.train.dtype)
    components = build_components(spec, job.train)
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise SchemaError("run has no checkpoint; train again", file=str(run))
    fingerprint = made_of(job, dataset)
    manifest = verified(checkpoint, fingerprint if segments is None else None)
    check_model(manifest.made_of, fingerprint, str(checkpoint / MANIFEST))
    load_checkpoint(checkpoint, manifest, components, with_optimizer=False)
    return evaluate_components(job, dataset, components)


def evaluate_components(
    job: Job,
    dataset: Dataset,
    components: Components,
    watchdog: Watchdog | None = None,
    rows: RowReader | None = None,
) -> Evaluation:
    """Evaluate the current model and rows of a run."""
    columns = columns_of(dataset, job.train)
    spec = spec_of(dataset, job.train.dtype, columns.kept)
    reader = Reader(
        dataset, order_of(job, dataset), spec, find_shared=uses_shared_features(job.train)
    )
    device = device_of(job.train.device)
    batches = (to_device(batch, device) for batch in reader.evaluation_batches())
    if watchdog is not None:
        batches = watchdog.each(EVALUATE, batches)
    rows = rows or components.store
    return evaluate(components.model, components.embedding, rows, batches, columns)


def evaluate(
    model: nn.Module,
    embedding: Embedding,
    rows: RowReader,
    batches: Iterable[Batch],
    columns: MetricColumns,
) -> Evaluation:
    """Score batches without training; no row is created.

    Args:
        model: built over `embedding`.
        embedding: of the model.
        rows: all trained rows.
        batches: of the evaluation split, in stored order.
        columns: of the batches' kept columns.
    """
    metrics = _Metrics(columns)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            embedding.open_copies(batch, rows)
            metrics.add(batch, model(batch))
    model.train()
    return metrics.finish()


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
        sessions = self._sessions.finish() if self._columns.session is not None else None
        session_sums = sessions or KeyedAuc()
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
