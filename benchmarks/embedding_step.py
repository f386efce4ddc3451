"""Steps of look-ups with a chosen skew, as our kernel takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas import order
from trainer.data.collate import Batch
from trainer.data.lookup import TableLookup, table_lookup, vector_layout
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.kernels.interface import ArenaRows, Kernels, TableRows
from trainer.embedding.pooling import Pooling

SKEWS = ("uniform", "mild", "heavy")
HOT_ROWS, HOT_SHARE = 0.01, 0.92
"""Heavy skew: this share of the rows takes that share of the look-ups."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step looks up.

    Attributes:
        name: features x ids of a bag.
        num_samples: of a step.
        num_rows: of the table of each feature.
        length: ids of a bag.
    """

    name: str
    num_samples: int
    num_rows: tuple[int, ...]
    length: int


def shapes(num_samples: int) -> tuple[Shape, Shape]:
    """Return the two shapes that are measured."""
    sizes = np.geomspace(3, 1_000_000, 26).round().astype(int)
    return (
        Shape("26x1", num_samples, tuple(sizes.tolist()), 1),
        Shape("1x35", num_samples, (1_000_000,), 35),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """The ids of one step, and their look-ups into whole tables.

    Attributes:
        shape: what it looks up.
        ids: by feature, (num_samples, length).
        batch: look-ups whose positions are rows of whole tables.
        rows: by table, the distinct rows.
    """

    shape: Shape
    ids: tuple[NDArray[np.int64], ...]
    batch: Batch
    rows: Mapping[str, torch.Tensor]

    @property
    def tables(self) -> dict[str, int]:
        """Return the rows of each table."""
        return dict(zip(self.batch.lookups, self.shape.num_rows, strict=True))

    @property
    def num_lookups(self) -> int:
        """Return the look-ups of the step."""
        return sum(part.size for part in self.ids)

    @property
    def num_distinct(self) -> int:
        """Return the distinct rows of the step."""
        return sum(len(part) for part in self.rows.values())

    def pooling(self, kernels: Kernels) -> Pooling:
        """Return the pooling of this step."""
        return Pooling(kernels, self.batch, mean=False)

    def transpose(self) -> None:
        """Find again what the reader's thread finds for each batch."""
        _lookups(self.ids, self.batch, kernels_of("compiled"))

    def table_rows(self, rows: Mapping[str, ArenaRows]) -> list[TableRows]:
        """Return what is updated, whole tables in place."""
        return [
            TableRows(
                rows=rows[table],
                readers=lookup.readers,
                reader_offsets=lookup.reader_offsets,
                per_sample_weights=None,
                extra_gradient=None,
            )
            for table, lookup in self.batch.lookups.items()
        ]


def step_of(shape: Shape, skew: str, rng: np.random.Generator) -> Step:
    """Draw a step.

    Args:
        shape: what it looks up.
        skew: one of `SKEWS`.
        rng: decides the ids.
    """
    count = shape.num_samples * shape.length
    ids = tuple(
        draw(num_rows, count, skew, rng).reshape(shape.num_samples, shape.length)
        for num_rows in shape.num_rows
    )
    names = [f"f{i:02d}" for i in range(len(ids))]
    batch = Batch(
        step=order.Step(0, 0, 0, np.arange(1)),
        num_samples=shape.num_samples,
        labels=torch.zeros(shape.num_samples),
        weights=torch.ones(shape.num_samples),
        dense=torch.zeros(shape.num_samples, 0),
        sparse=KeyedJaggedTensor.empty(),
        lookups={},
        groups={},
        group_of=dict.fromkeys(names),
    )
    found = _lookups(ids, batch, kernels_of("compiled"))
    rows = {table: torch.from_numpy(lookup.rows).int() for table, lookup in found.items()}
    return Step(shape, ids, replace(batch, lookups=found), rows)


def _lookups(
    ids: tuple[NDArray[np.int64], ...], batch: Batch, kernels: Kernels
) -> dict[str, TableLookup]:
    places = vector_layout(batch.group_of, {}, batch.num_samples)
    return {
        name: table_lookup(
            (name,),
            [part.ravel()],
            [np.full(len(part), part.shape[1], np.int64)],
            [places.of(name)],
            transpose=kernels.transpose,
        )
        for name, part in zip(batch.group_of, ids, strict=True)
    }


def draw(num_rows: int, count: int, skew: str, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ids; rows that are hot lie anywhere in the table.

    Args:
        num_rows: of the table.
        count: ids.
        skew: one of `SKEWS`.
        rng: decides the ids.
    """
    if skew == "uniform" or num_rows < 10:
        return rng.integers(0, num_rows, count)
    if skew == "mild":
        ranks = (num_rows * rng.random(count) ** 1.5).astype(np.int64)
        return rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]
    cumulative = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -_exponent(num_rows))
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return rng.permutation(num_rows)[ranks]


def _exponent(num_rows: int) -> float:
    """Return the exponent of the power law whose hottest rows take their share."""
    low, high = 0.5, 2.5
    ranks, hot = np.arange(1, num_rows + 1, dtype=np.float64), max(1, round(num_rows * HOT_ROWS))
    for _ in range(25):
        middle = (low + high) / 2
        weights = ranks**-middle
        if weights[:hot].sum() / weights.sum() < HOT_SHARE:
            low = middle
        else:
            high = middle
    return low
