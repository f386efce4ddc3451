"""The interface between the embedding and its kernels.

"Vectors" are pooled vectors and their gradients, with the indices of
`presage.trainer.data.lookup.VectorLayout`: those of the output first, then those of each dedup
group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from presage.schemas.config.train import SparseOptimizerConfig


@dataclass(frozen=True, slots=True)
class ArenaRows:
    """The rows of one table that a step reads, within a larger array.

    Attributes:
        block: (n, dim + state_width), the rows among others, each with its state.
        dim: width of the values.
        positions: (num_rows,) int32, index of each row in `block`; None: all, in order.
    """

    block: torch.Tensor
    dim: int
    positions: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.block if self.positions is None else self.positions)

    @property
    def values(self) -> torch.Tensor:
        """(n, dim), a view."""
        return self.block[:, : self.dim]


# The kernels take the following tuples as they are, with their fields in this order.


class FeatureBags(NamedTuple):
    """The bags of one feature.

    Attributes:
        block: (n, dim + state_width), rows of its table among others.
        row_positions: (num_rows,) int32, index of each row in `block`; None: all, in order.
        positions: (num_values,) int32 into the rows, of all features of the table.
        offsets: (num_bags + 1,) int32, offsets of this feature's bags in `positions`.
        per_sample_weights: (num_values,) weight of each look-up, None for ones.
        order: (num_samples,) int32, samples sorted by their bag; None: sample i has bag i.
        sample_offsets: (num_bags + 1,) int32, offsets of each bag's samples in `order`.
        first_vector: index of its first bag's vector.
        vector_stride: from a bag's vector to that of the next bag.
        column: of the feature in the output.
    """

    block: torch.Tensor
    row_positions: torch.Tensor | None
    positions: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    order: torch.Tensor | None
    sample_offsets: torch.Tensor | None
    first_vector: int
    vector_stride: int
    column: int


class GroupSamples(NamedTuple):
    """The samples of each bag of one dedup group.

    Attributes:
        order: (num_samples,) int32, samples sorted by their bag.
        sample_offsets: (num_bags + 1,) int32, offsets of each bag's samples in `order`.
        column: of the group's first feature in the output.
        num_features: of the group.
        first_vector: index of its first vector, relative to the end of the output.
    """

    order: torch.Tensor
    sample_offsets: torch.Tensor
    column: int
    num_features: int
    first_vector: int


class TableRows(NamedTuple):
    """The rows of one table that a step reads, updated in place, and their readers.

    Attributes:
        block, positions: as in `ArenaRows`.
        readers: (num_values,) int32, indices of vectors, sorted by the row that they read.
        reader_offsets: (num_rows + 1,) int32, offsets of each row's readers.
        per_sample_weights: (num_values,) weight of each reader, None for ones.
        extra_gradient: (num_rows, dim), added to that of the readers; None for zeros.
    """

    block: torch.Tensor
    positions: torch.Tensor | None
    readers: torch.Tensor
    reader_offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None = None
    extra_gradient: torch.Tensor | None = None


def without_readers(rows: ArenaRows, gradient: torch.Tensor) -> TableRows:
    """Return rows whose gradient, (num_rows, dim), has been summed over their readers."""
    none, offsets = torch.empty(0, dtype=torch.int32), torch.zeros(len(rows) + 1, dtype=torch.int32)
    return TableRows(rows.block, rows.positions, none, offsets, extra_gradient=gradient)


class VectorGradients(NamedTuple):
    """The gradient of each vector.

    Attributes:
        outputs: (num_samples, num_columns, dim); vector v of the output is [v // num_features,
            v % num_features]. Columns beyond num_features are not read.
        num_features: vectors of a sample in the output.
        bags: (num_vectors - num_samples * num_features, dim).
        scales: (num_vectors,) factor of each, None for ones.
    """

    outputs: torch.Tensor
    num_features: int
    bags: torch.Tensor
    scales: torch.Tensor | None


def no_gradients(like: torch.Tensor) -> VectorGradients:
    """Return gradients of no vectors, of the width of `like`."""
    empty = like[:0]
    return VectorGradients(outputs=empty[:, None], num_features=1, bags=empty, scales=None)


@dataclass(frozen=True, slots=True)
class RowSums:
    """Gradients of rows, summed over some microbatches of a step, for all tables.

    Rows of a step are numbered: those of the first table in ascending order, then those of the
    next one.

    Attributes:
        rows: (n,) int32, ascending numbers of rows of the step.
        sums: (n, dim), the gradient of each.
    """

    rows: torch.Tensor
    sums: torch.Tensor

    def over(self, weight: float) -> RowSums:
        """Return the sums divided by a number."""
        return RowSums(self.rows, self.sums / weight)


class RowRule(NamedTuple):
    """An update rule at one step; see `torch_ops.update_rows`."""

    name: str
    """sgd, adagrad, rowwise_adagrad, adam; or sum: values become the gradient."""
    learning_rate: float = 0.0
    """Step size, including Adam's bias corrections."""
    eps: float = 0.0
    """Added to the root."""
    beta1: float = 0.0
    """Adam's decay of the mean."""
    beta2: float = 0.0
    """Adam's decay of the squares."""


def state_width(config: SparseOptimizerConfig, dim: int) -> int:
    """Return the width of the optimizer state of a row of width `dim`."""
    return {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim, "adam": 2 * dim}[config.name]


def rule_at(config: SparseOptimizerConfig, train_step: int) -> RowRule:
    """Return the update rule of one step; steps count from 0.

    Adam's bias corrections depend on the step, not on the row, as in torch's SparseAdam: they
    are a factor of the learning rate.
    """
    rate = config.learning_rate
    if config.name == "adam":
        count = train_step + 1
        rate *= math.sqrt(1 - config.beta2**count) / (1 - config.beta1**count)
    return RowRule(
        name=config.name,
        learning_rate=rate,
        eps=config.eps,
        beta1=config.beta1,
        beta2=config.beta2,
    )


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of each of n rows or samples: an optional first one, then a block.

    Attributes:
        first: (n, dim) or None.
        rest: (n, num_rest, dim).
    """

    first: torch.Tensor | None
    rest: torch.Tensor

    @property
    def count(self) -> int:
        """Vectors of each row or sample."""
        return self.rest.shape[1] + (self.first is not None)

    @property
    def own_width(self) -> int:
        """Width of the first vector plus the number of pairs of vectors."""
        first = 0 if self.first is None else self.rest.shape[2]
        return first + self.count * (self.count - 1) // 2
