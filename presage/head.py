"""The first samples of a dataset and its first training batch, to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

import pyarrow as pa

from presage.display import align, columns_text
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.layout import TRAIN

if TYPE_CHECKING:
    import torch

    from presage.batch import Batch


class Head:
    """The first samples and the first batch; prints both.

    Attributes:
        samples: first samples, with all columns.
    """

    def __init__(self, samples: pa.Table, dataset: Dataset, split: str | None) -> None:
        """Store the arguments; the batch is read when it is first used."""
        self.samples = samples
        self._dataset = dataset
        self._split = split

    @cached_property
    def batch(self) -> Batch:
        """First batch of the job's size, of the training split unless evaluation is selected.

        Raises:
            ModuleNotFoundError: torch is not installed.
            SchemaError: the job cannot be trained, for instance without a label.
        """
        # The import of torchrec uses a deprecated function of torch, which warns.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        loader_class = import_module("presage.loader").DataLoader
        loader = loader_class(
            self._dataset,
            batch_samples=self._dataset.job.train.batch_samples,
            split=self._split or TRAIN,
            read_ahead=1,
        )
        with closing(iter(loader)) as batches:
            return next(batches)

    def __repr__(self) -> str:
        """Return the samples, a line for each column, and the shapes of the batch."""
        count = self.samples.num_rows
        return f"first {count} samples\n{columns_text(self.samples)}\n{self._batch_text()}"

    def _batch_text(self) -> str:
        try:
            batch = self.batch
        except ModuleNotFoundError as error:
            return f"no batch: {error.name} is not installed; run pip install presage[trainer]"
        except SchemaError as error:
            return f"no batch: {error}"
        return f"first batch of {batch.num_samples:,} samples\n{batch_text(batch)}"


def batch_text(batch: Batch) -> str:
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
    return align(rows, 2)


def _short(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
