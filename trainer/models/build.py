"""Build the model of a job."""

from __future__ import annotations

from torch import nn

from schemas.config.train import TrainConfig
from trainer.data.decode import BatchSpec
from trainer.embedding.kernels.compiled import interactions_of
from trainer.models import attention, dcn, deepfm, dlrm, wide_deep
from trainer.models.dlrm import DedupDlrm


def uses_shared_features(config: TrainConfig) -> bool:
    """Return whether the model reads `Batch.shared`."""
    model = config.model
    return model.name == "dlrm" and model.dedup_compute and config.device == "cpu"


def build_model(config: TrainConfig, spec: BatchSpec, embedding: nn.Module) -> nn.Module:
    """Build `train.model` over an embedding module; it maps a batch to (B,) logits.

    Args:
        config: train section of the job.
        spec: columns of a batch.
        embedding: `trainer.embedding.module.Embedding`, in `config.dtype`.
    """
    num_dense = len(spec.dense)
    match config.model.name:
        case "attention":
            return attention.build(config, spec.sparse, num_dense, embedding)
        case "dcn":
            return dcn.build(config, num_dense, embedding)
        case "deepfm":
            return deepfm.build(config, num_dense, embedding)
        case "wide_deep":
            return wide_deep.build(config, spec.sparse, num_dense, embedding)
        case "dlrm":
            model = dlrm.build(config, num_dense, embedding)
            if uses_shared_features(config):
                return DedupDlrm(model, interactions_of(config.kernels))
            return model
