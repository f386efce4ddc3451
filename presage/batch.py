"""The batch of `DataLoader`: tensors under the names that TorchRec's models and pipelines read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils.data._utils.collate import default_collate_fn_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from presage.display import align
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.history_batch import HistoryBatch


@dataclass(frozen=True, kw_only=True, repr=False)
class Batch(Pipelineable):
    """The samples of one step that belong to one rank.

    Attributes:
        dense_features: (B, num_dense), in schema order, nulls as 0.
        sparse_features: rows of tables, a key per sparse feature in schema order; deduplicated: one
            bag per unique tuple and inverse indices; otherwise one bag per sample.
        labels: (B,).
        weights: (B,), ones if samples have no weight; 0 for padding and for deleted samples.
        kept: by column, (B,) int64 that are equal iff its values are; times in microseconds.
        num_padding: samples at the end that only make ranks equal.
        global_weight: sum of the weights of this step over all ranks, or 1 if it is 0.
        epoch: pass over the split, from 0.
        step: step within the epoch, from 0.
        overlaps_next: (num_values,) bool, whether one of the next `overlap_steps` global batches
            looks up the row of each entry of `sparse_features.values()`; None if not requested.
        overlaps_previous: the same for the `overlap_steps` global batches before.
        histories: by name, the events that the samples see, if requested.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    kept: Mapping[str, torch.Tensor]
    num_padding: int
    global_weight: float
    epoch: int
    step: int
    overlaps_next: torch.Tensor | None = None
    overlaps_previous: torch.Tensor | None = None
    histories: Mapping[str, HistoryBatch] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples without padding."""
        return len(self.labels) - self.num_padding

    def mean_loss(self, losses: torch.Tensor, averaging_ranks: int = 1) -> torch.Tensor:
        """Return the part of this rank in the weighted mean loss of the global batch.

        The parts of all ranks sum to the loss of one process with the whole batch, and so do their
        gradients, whatever samples a rank has.

        Args:
            losses: (B,), of each sample.
            averaging_ranks: ranks over which gradients are averaged: the world size under
                `DistributedDataParallel` and TorchRec's `DistributedModelParallel`, 1 where they
                are summed.
        """
        return (losses * self.weights).sum() * (averaging_ranks / self.global_weight)

    def __repr__(self) -> str:
        """Return the shape of each tensor, a line each."""
        padding = f" and {self.num_padding:,} of padding" if self.num_padding else ""
        count = f"{self.num_samples:,} samples{padding}"
        return f"batch of {count}, epoch {self.epoch}, step {self.step}\n{_tensors_text(self)}"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device; the KeyedJaggedTensor itself if it is there already.

        Another KeyedJaggedTensor has lost the look-ups of `DataLoader(lookups=True)`.
        """
        device, sparse = torch.device(device), self.sparse_features
        if sparse.device() != device:
            sparse = sparse.to(device, non_blocking)
        return self._replace(lambda tensor: tensor.to(device, non_blocking=non_blocking), sparse)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, for copies to a GPU that do not block."""
        return self._replace(torch.Tensor.pin_memory, self.sparse_features.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until the work queued on a stream is done."""
        sparse = self.sparse_features
        inverse = sparse.inverse_indices_or_none()  # TorchRec's record_stream leaves it out
        tensors = [self.dense_features, self.labels, self.weights, *self.kept.values()]
        tensors += self._overlaps().values()
        tensors += [tensor for history in self.histories.values() for tensor in history.tensors]
        for tensor in tensors if inverse is None else [*tensors, inverse[1]]:
            tensor.record_stream(stream)
        sparse.record_stream(stream)  # type: ignore[arg-type]  # any stream, as its base class says

    def _replace(
        self, function: Callable[[torch.Tensor], torch.Tensor], sparse: KeyedJaggedTensor
    ) -> Batch:
        return replace(
            self,
            dense_features=function(self.dense_features),
            sparse_features=sparse,
            labels=function(self.labels),
            weights=function(self.weights),
            kept={name: function(values) for name, values in self.kept.items()},
            **{name: function(values) for name, values in self._overlaps().items()},
            histories={n: history.map_tensors(function) for n, history in self.histories.items()},
        )

    def _overlaps(self) -> dict[str, torch.Tensor]:
        masks = {"overlaps_next": self.overlaps_next, "overlaps_previous": self.overlaps_previous}
        return {name: mask for name, mask in masks.items() if mask is not None}


def _tensors_text(batch: Batch) -> str:
    """Return a line for each tensor of a batch; one for features whose tensors are alike."""
    names = ("labels", "weights", "dense_features")
    rows = [(name, _shape(getattr(batch, name))) for name in names]
    keys: dict[str, list[str]] = {}
    for key, jagged in batch.sparse_features.to_dict().items():
        shapes = f"values {_shape(jagged.values())}, lengths {_shape(jagged.lengths())}"
        keys.setdefault(shapes, []).append(key)
    rows += [(f"sparse_features: {_short(own)}", shapes) for shapes, own in keys.items()]
    inverse = batch.sparse_features.inverse_indices_or_none()
    if inverse is not None:
        rows.append(("sparse_features, inverse indices", _shape(inverse[1])))
    rows += [(name, _shape(mask)) for name, mask in batch._overlaps().items()]
    for name, history in batch.histories.items():
        values = f"{', '.join(history.values)} {_shape(history.ticks)[len('int64 ') :]}"
        rows.append((f"histories: {name}", f"{values}, starts {_shape(history.starts)}"))
    return align(rows, 2)


def _short(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _refuse_to_collate(batches: list[Batch], *, collate_fn_map: object = None) -> None:
    """Name the argument that is missing: torch would collate a list of one of our batches."""
    raise ValueError(
        "a batch of presage.DataLoader is not to be batched again; pass batch_size=None to "
        "torch.utils.data.DataLoader"
    )


default_collate_fn_map[Batch] = _refuse_to_collate


def batch_of(
    collated: CollatedBatch, *, num_padding: int, total_weight: float, epoch: int, step: int
) -> Batch:
    """Return what training loops need of a batch of the reader."""
    return Batch(
        dense_features=collated.dense,
        sparse_features=collated.sparse,
        labels=collated.labels,
        weights=collated.weights,
        kept={name: torch.from_numpy(values) for name, values in collated.kept.items()},
        num_padding=num_padding,
        global_weight=total_weight or 1.0,
        epoch=epoch,
        step=step,
        histories=collated.histories,
    )
