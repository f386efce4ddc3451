"""One global batch as tensors, deduplicated or expanded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from schemas.jagged import Array
from schemas.order import Step
from trainer.inverse import Inverse
from trainer.lookup import TableLookup
from trainer.places import Places, places_of
from trainer.sides import Sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step.

    Attributes:
        step: which blocks these are.
        num_samples: B.
        labels: (B,).
        weights: (B,), ones where samples carry none.
        dense: (B, num_dense), in schema order, nulls as 0.
        sparse: rows of tables, a key per sparse feature in schema order; deduplicated: one bag per
            unique tuple and inverse indices; expanded: one bag per sample.
        lookups: by table, the distinct rows of the step and who looks them up.
        groups: by dedup group, its inverse; empty when expanded.
        group_of: by sparse feature, its dedup group or None.
        sides: what samples share, None when it was not asked for or nothing is deduplicated.
        kept: by column that was asked for, (B,) int64: keys and times of samples, for evaluation.
    """

    step: Step
    num_samples: int
    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    lookups: Mapping[str, TableLookup]
    groups: Mapping[str, Inverse]
    group_of: Mapping[str, str | None]
    sides: Sides | None = None
    kept: Mapping[str, Array] = field(default_factory=dict)

    @property
    def places(self) -> Places:
        """Return where the pooled vector of each bag lies; `lookups` speak of these places."""
        num_tuples = {group: len(i.offsets) - 1 for group, i in self.groups.items()}
        return places_of(self.group_of, num_tuples, self.num_samples)

    @property
    def dense_features(self) -> torch.Tensor:
        """Return `dense`, by the name that TorchRec's batches have for it."""
        return self.dense

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """Return `sparse`, by the name that TorchRec's batches have for it."""
        return self.sparse

    def inverse_of(self, feature: str) -> torch.Tensor:
        """Return (B,) int64, the bag of `feature` that each sample has."""
        group = self.group_of[feature]
        if group is None:
            return torch.arange(self.num_samples, device=self.labels.device)
        return self.groups[group].indices

    def jagged_of(self, feature: str) -> JaggedTensor:
        """Return the bags of one feature, one per unique tuple, or per sample when expanded."""
        return self.sparse[feature]
