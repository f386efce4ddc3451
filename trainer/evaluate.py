"""Metrics on the evaluation split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from schemas.dataset import Dataset
from schemas.job_train import TrainConfig
from trainer.batch import Batch
from trainer.embedding import Embedding
from trainer.metrics import auc, gauc, normalized_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a model is worth on samples it was not trained on; None where undefined."""

    num_samples: int
    """Samples of the evaluation split."""
    ne: float | None
    """Normalised entropy: log loss over that of the mean label."""
    auc: float | None
    """Area under the ROC curve."""
    gauc: float | None
    """AUC per group, weighted by samples."""


def gauc_key(dataset: Dataset, config: TrainConfig) -> str | None:
    """Return the column that groups samples for GAUC, None when the session key is not stored."""
    if config.metrics.gauc_key is not None:
        return config.metrics.gauc_key
    key = dataset.job.data.session.key
    return key if key in dataset.features else None


def evaluate(model: nn.Module, embedding: Embedding, batches: Iterable[Batch]) -> Evaluation:
    """Score batches without training; no row is created.

    Args:
        model: built over `embedding`.
        embedding: reads its rows from stores that hold everything trained.
        batches: of the evaluation split.
    """
    found: list[tuple[np.ndarray, ...]] = []
    model.eval()
    with torch.no_grad():
        for batch in batches:
            embedding.open(batch)
            logits = model(batch)
            keys = np.zeros(0, np.int64) if batch.keys is None else batch.keys
            found.append((_float(batch.labels), _float(logits), _float(batch.weights), keys))
    model.train()
    if not found:
        return Evaluation(num_samples=0, ne=None, auc=None, gauc=None)
    labels, logits, weights, keys = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Evaluation(
        num_samples=len(labels),
        ne=_defined(normalized_entropy(labels, logits, weights)),
        auc=_defined(auc(labels, logits, weights)),
        gauc=_defined(gauc(labels, logits, keys, weights)) if len(keys) else None,
    )


def _float(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.float64)


def _defined(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else float(value)
