"""The kernels as torch operators: the fallback without a compiler, and the reference in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from trainer.data.lookup import transpose
from trainer.embedding.kernels.interface import (
    FeatureBags,
    GroupSamples,
    RowRule,
    RowSums,
    TableRows,
    Transposed,
    VectorGradients,
)
from trainer.embedding.optimizer import update_rows


class TorchKernels:
    """Sums by torch's embedding_bag, in which one thread sums each row in order."""

    def transpose(self, values: NDArray[np.int64]) -> Transposed:
        """Sort by numpy."""
        return transpose(values)

    def pool(
        self, features: Sequence[FeatureBags], out: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Write the sum or mean of each bag's rows to all samples of the bag."""
        for f in features:
            positions = f.positions
            if f.rows.positions is not None:
                positions = f.rows.positions[positions]
            bags = _sums(f.rows.values, positions, f.offsets, f.per_sample_weights)
            if scales is not None:
                one_over = 1 / f.offsets.diff().clamp(min=1).to(out.dtype)
                scales[f.first_vector :: f.vector_stride][: len(one_over)] = one_over
                bags *= one_over.unsqueeze(1)
            if f.order is None or f.sample_offsets is None:
                out[:, f.column] = bags
                continue
            samples = bags.repeat_interleave(f.sample_offsets.diff(), 0)
            out[:, f.column].index_copy_(0, f.order.long(), samples)

    def segment_sum(
        self, groups: Sequence[GroupSamples], gradient: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sum the gradients of the samples of each bag."""
        for g in groups:
            wide = gradient[:, g.column : g.column + g.num_features].flatten(1)
            bags = _sums(wide.contiguous(), g.order, g.sample_offsets)
            end = g.first_vector + len(bags) * g.num_features
            out[g.first_vector : end] = bags.view(-1, out.shape[1])

    def update(
        self, tables: Sequence[TableRows], gradients: VectorGradients, rule: RowRule
    ) -> None:
        """Sum the gradients of each row over its readers, in order, and update it."""
        dim = gradients.outputs.shape[2]
        outputs = gradients.outputs[:, : gradients.num_features]
        if outputs.shape[1] < gradients.num_features:  # missing columns have no readers
            outputs = F.pad(outputs, (0, 0, 0, gradients.num_features - outputs.shape[1]))
        vectors = torch.cat([outputs.reshape(-1, dim), gradients.bags])
        if gradients.scales is not None:
            vectors *= gradients.scales.unsqueeze(1)
        for t in tables:
            gradient = _sums(vectors, t.readers, t.reader_offsets, t.per_sample_weights)
            if t.extra_gradient is not None:
                gradient += t.extra_gradient
            rows, positions = t.rows, t.rows.positions
            if positions is None:
                update_rows(rule, rows.values, rows.state, gradient)
                continue
            values, state = rows.values[positions], rows.state[positions]
            update_rows(rule, values, state, gradient)
            rows.values[positions], rows.state[positions] = values, state

    def merge(self, left: RowSums, right: RowSums) -> RowSums:
        """Return the union of rows; for a row of both, left plus right."""
        rows, positions = torch.cat([left.rows, right.rows]).unique(return_inverse=True)
        sums = left.sums.new_zeros(len(rows), left.sums.shape[1])
        sums[positions[: len(left.rows)]] = left.sums
        sums.index_add_(0, positions[len(left.rows) :], right.sums)
        return RowSums(rows, sums)


def _sums(
    source: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums of rows of `source`, `indices` split at `offsets`."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return source.new_zeros(len(offsets) - 1, source.shape[1])
    return F.embedding_bag(
        indices[first:last],
        source,
        offsets - first,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=None if per_sample_weights is None else per_sample_weights[first:last],
    )
