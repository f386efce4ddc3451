"""What a dataset prints: tables of text, its first samples, and its first batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.layout import TRAIN

if TYPE_CHECKING:
    import torch

    from presage.batch import Batch

T = TypeVar("T")

WIDTH = 100
"""Longest line."""
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


class Listing(tuple[T, ...]):
    """A tuple of dataclasses that prints as a table."""

    def values(self, name: str) -> list[Any]:
        """Return an attribute of each item."""
        return [getattr(item, name) for item in self]

    def __repr__(self) -> str:
        """Return a line for each item, below the names of the attributes."""
        if not self:
            return "(none)"
        names = [f.name for f in fields(self[0])]  # type: ignore[arg-type]
        return align([names, *([_text(getattr(item, n)) for n in names] for item in self)])


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def align(rows: Sequence[Sequence[str]], indent: int = 0) -> str:
    """Return rows of cells as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((" " * indent + line).rstrip() for line in lines)


def columns_text(table: pa.Table) -> str:
    """Return a line for each column: name, type and values, cut at `WIDTH`."""
    rows = [(f.name, _type_text(f.type), _values_text(table[f.name])) for f in table.schema]
    return "\n".join(line[:WIDTH] for line in align(rows, 2).splitlines())


def _values_text(column: pa.ChunkedArray) -> str:
    return "  ".join(_value_text(value) for value in column.to_pylist())


def _value_text(value: object) -> str:
    if isinstance(value, list) and len(value) > 3:
        return f"[{', '.join(map(str, value[:2]))}, ... {len(value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _type_text(kind: pa.DataType) -> str:
    return str(kind).replace("large_list<item: ", "list<")


def format_bytes(num_bytes: int) -> str:
    """Return a size in decimal units.

    Example:
        >>> format_bytes(999), format_bytes(3_397_790)
        ('999 bytes', '3.4 MB')
    """
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} bytes"


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
        )
        return loader.first_batch()

    def __repr__(self) -> str:
        """Return the samples, a line for each column, and the shapes of the batch."""
        count = self.samples.num_rows
        return f"first {count} samples\n{columns_text(self.samples)}\n{self._batch_text()}"

    def _batch_text(self) -> str:
        try:
            batch = self.batch
        except ModuleNotFoundError as error:
            return f"no batch: {error.name} is not installed; install Presage's extra trainer"
        except SchemaError as error:
            return f"no batch: {error}"
        return f"first {batch}"


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
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
