"""The kernels in C++, on tensors in host memory and as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch  # loads the OpenMP that the modules use

from presage.trainer.data.lookup import Inverse
from presage.trainer.embedding.kernels import embedding, interaction
from presage.trainer.embedding.kernels.interface import (
    FeatureBags,
    GroupSamples,
    RowRule,
    RowSums,
    TableRows,
    VectorGradients,
    Vectors,
)


def pool(features: Sequence[FeatureBags], out: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Write the sum or mean of each bag's rows to all samples of the bag.

    Args:
        features: one per column of `out`, in that order.
        out: (num_samples, num_features, dim).
        scales: (num_vectors,), set to one over each bag's length, for means; None: sums.
    """
    embedding.pool(features, out, scales, torch.get_num_threads())


def segment_sum(groups: Sequence[GroupSamples], gradient: torch.Tensor, out: torch.Tensor) -> None:
    """Sum the gradients of the samples of each bag.

    Args:
        groups: dedup groups.
        gradient: (num_samples, num_features, dim).
        out: (num_vectors - num_outputs, dim).
    """
    embedding.segment_sum(groups, gradient, out, torch.get_num_threads())


def update(tables: Sequence[TableRows], gradients: VectorGradients, rule: RowRule) -> None:
    """Sum the gradients of each row over its readers, in order, and update it."""
    embedding.update(tables, gradients, rule, torch.get_num_threads())


def merge(left: RowSums, right: RowSums) -> RowSums:
    """Return the union of rows; for a row of both, left plus right."""
    capacity = len(left.rows) + len(right.rows)
    rows = left.rows.new_empty(capacity)
    sums = left.sums.new_empty(capacity, left.sums.shape[1])
    count = embedding.merge(left.rows, left.sums, right.rows, right.sums, rows, sums)
    return RowSums(rows[:count], sums[:count])


class CompiledInteractions:
    """Dot products between vectors of samples and of the shared rows, in host memory."""

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
            inverse: from samples to rows.
            row_out: (num_rows, rows.own_width).
            own_out: (num_samples, own.own_width + k * m).
        """
        interaction.interact(
            (rows.first, rows.rest, row_out),
            (own.first, own.rest, own_out),
            inverse.order,
            inverse.offsets,
            torch.get_num_threads(),
        )

    def interact_back(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        gradients: tuple[torch.Tensor, torch.Tensor],
        out: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors.

        Args:
            rows: of num_rows rows.
            own: of num_samples samples.
            inverse: from samples to rows.
            gradients: of `row_out` and `own_out`.
            out: receives the gradients of `rows` and `own`.
        """
        of_rows, of_own = gradients
        interaction.interact_back(
            (rows.first, rows.rest, of_rows),
            (own.first, own.rest, of_own),
            (out[0].first, out[0].rest, of_rows),
            (out[1].first, out[1].rest, of_own),
            inverse.order,
            inverse.offsets,
            torch.get_num_threads(),
        )
