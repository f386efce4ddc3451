"""The interface between the embedding and its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.lookup import Inverse

Transposed = tuple[NDArray[np.int64], NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]
"""Distinct values, the position of each value in them, the order and its cuts."""


@dataclass(frozen=True, slots=True)
class ArenaRows:
    """The rows of one table that a step reads, where they lie.

    Attributes:
        values: (n, dim), with other rows between them.
        state: (n, state_width).
        places: (num_rows,) int32, where each row lies; None: in order.
    """

    values: torch.Tensor
    state: torch.Tensor
    places: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values) if self.places is None else len(self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBags:
    """The bags of one feature.

    Attributes:
        rows: of its table.
        positions: (num_values,) int32 into `rows`, of all features of the table.
        offsets: (num_bags + 1,) int32, where the bags of this feature lie in `positions`.
        factors: (num_values,) weight of each look-up, None for ones.
        column: of the feature in the output.
        place: of its first bag, see `Places.of`.
        place_step: from a bag's place to the next one's.
        order: (num_samples,) int32, samples sorted by their bag; None: sample i has bag i.
        sample_offsets: (num_bags + 1,) int32, where each bag's samples lie in `order`.
    """

    rows: ArenaRows
    positions: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor | None
    column: int
    place: int
    place_step: int
    order: torch.Tensor | None
    sample_offsets: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSamples:
    """Which samples have which bag of the features of one dedup group.

    Attributes:
        order: (num_samples,) int32, samples sorted by their bag.
        sample_offsets: (num_bags + 1,) int32, where each bag's samples lie in `order`.
        column: of the group's first feature in the output.
        num_features: of the group.
        place: its first place, counted behind those of the output.
    """

    order: torch.Tensor
    sample_offsets: torch.Tensor
    column: int
    num_features: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """The rows of one table that a step reads, and who reads them.

    Attributes:
        rows: updated in place.
        readers: (num_values,) int32, places sorted by the row that they read.
        reader_offsets: (num_rows + 1,) int32, where each row's readers lie.
        factors: (num_values,) weight of each reader, None for ones.
        more: (num_rows, dim) gradient that came another way, None for zeros.
    """

    rows: ArenaRows
    readers: torch.Tensor
    reader_offsets: torch.Tensor
    factors: torch.Tensor | None
    more: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceGradients:
    """The gradient of each place.

    Attributes:
        outputs: (num_samples, num_vectors, dim), place p of the output at [p // num_features,
            p % num_features]; other vectors are read by no one.
        num_features: places of a sample in the output.
        bags: (num_places - num_samples * num_features, dim).
        scales: (num_places,) factor of each, None for ones.
    """

    outputs: torch.Tensor
    num_features: int
    bags: torch.Tensor
    scales: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        """Places of the output."""
        return len(self.outputs) * self.num_features


@dataclass(frozen=True, slots=True)
class RowSums:
    """The gradients of rows, summed over some leaves of a step, all tables together.

    The rows of a step have numbers: those of the first table in ascending order, then those of the
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """One step of an update rule; see `trainer.embedding.optimizer.update_rows`."""

    name: str
    """sgd, adagrad, rowwise_adagrad, adam; or sum: values become the gradient."""
    learning_rate: float = 0.0
    """Step size, with Adam's bias corrections in it."""
    eps: float = 0.0
    """Added to the root."""
    beta1: float = 0.0
    """Adam's decay of the mean."""
    beta2: float = 0.0
    """Adam's decay of the squares."""


class Kernels(Protocol):
    """Pooled look-ups of all tables of a step, their backward, and the transpose of both."""

    def transpose(self, values: NDArray[np.int64]) -> Transposed:
        """Return what `trainer.data.lookup.transpose` says, in integers of 32 or 64 bits."""
        ...

    def pool(
        self, features: Sequence[FeatureBags], out: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Write the sum or mean of each bag's rows to all samples that have it.

        Args:
            features: one per column of `out`, in that order.
            out: (num_samples, num_features, dim).
            scales: (num_places,), made one over each bag's length: means; None: sums.
        """
        ...

    def contract(
        self, groups: Sequence[GroupSamples], gradient: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sum the gradients of the samples that share a bag.

        Args:
            groups: dedup groups.
            gradient: (num_samples, num_features, dim).
            out: (num_places - num_outputs, dim).
        """
        ...

    def update(self, tables: Sequence[TableRows], gradients: PlaceGradients, rule: RowRule) -> None:
        """Sum the gradients of each row over its readers, in order, and update it."""
        ...

    def merge(self, left: RowSums, right: RowSums) -> RowSums:
        """Return the sums of the rows of either, left added to right where a row is in both."""
        ...


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of each of n rows, or of n samples: perhaps one by itself, then a block.

    Attributes:
        first: (n, dim) or None.
        rest: (n, num_rest, dim).
    """

    first: torch.Tensor | None
    rest: torch.Tensor

    @property
    def count(self) -> int:
        """Vectors of each."""
        return self.rest.shape[1] + (self.first is not None)

    @property
    def own_width(self) -> int:
        """Numbers of the first vector, and of the products of two of each one's vectors."""
        first = 0 if self.first is None else self.rest.shape[2]
        return first + self.count * (self.count - 1) // 2


class Interactions(Protocol):
    """Products between vectors of samples and of the rows that they share."""

    def interact(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        row_out: torch.Tensor,
        own_out: torch.Tensor,
    ) -> None:
        """Write the products of two vectors of a row, and of a sample and its row.

        With x the m vectors of a row and v the k of a sample:

            row_out = [x_0 if rows.first, x_a . x_b for a < b]
            own_out = [v_0 if own.first, v_a . v_b for a < b, v_a . x_b for all a, b]

        Args:
            rows: of num_rows rows.
            own: of num_samples samples.
            inverse: which row a sample has.
            row_out: (num_rows, rows.own_width).
            own_out: (num_samples, own.own_width + k * m).
        """
        ...

    def interact_back(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        gradients: tuple[torch.Tensor, torch.Tensor],
        to: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors.

        Args:
            rows: of num_rows rows.
            own: of num_samples samples.
            inverse: which row a sample has.
            gradients: of `row_out` and `own_out`.
            to: gradients of `rows` and `own`.
        """
        ...
