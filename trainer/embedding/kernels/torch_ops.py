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
    PlaceGradients,
    RowRule,
    RowSums,
    TableRows,
    Transposed,
)
from trainer.embedding.optimizer import update_rows


class TorchKernels:
    """Sums by torch's embedding_bag, whose rows are each summed by one thread in order."""

    def transpose(self, values: NDArray[np.int64]) -> Transposed:
        """Sort by numpy."""
        return transpose(values)

    def pool(
        self, features: Sequence[FeatureBags], out: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Write the sum or mean of each bag's rows to all samples that have it."""
        for f in features:
            rows, positions = f.rows, f.positions
            positions = positions if rows.places is None else rows.places[positions]
            bags = _sums(rows.values, positions, f.offsets, f.factors)
            if scales is not None:
                one_over = 1 / f.offsets.diff().clamp(min=1).to(out.dtype)
                scales[f.place :: f.place_step][: len(one_over)] = one_over
                bags *= one_over.unsqueeze(1)
            if f.order is None or f.sample_offsets is None:
                out[:, f.column] = bags
                continue
            samples = bags.repeat_interleave(f.sample_offsets.diff(), 0)
            out[:, f.column].index_copy_(0, f.order.long(), samples)

    def contract(
        self, groups: Sequence[GroupSamples], gradient: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sum the gradients of the samples that share a bag."""
        for g in groups:
            wide = gradient[:, g.column : g.column + g.num_features].flatten(1)
            bags = _sums(wide.contiguous(), g.order, g.sample_offsets)
            out[g.place : g.place + len(bags) * g.num_features] = bags.view(-1, out.shape[1])

    def update(self, tables: Sequence[TableRows], gradients: PlaceGradients, rule: RowRule) -> None:
        """Sum the gradients of each row over its readers, in order, and update it."""
        dim = gradients.outputs.shape[2]
        outputs = gradients.outputs[:, : gradients.num_features]
        if outputs.shape[1] < gradients.num_features:  # the others are read by no one
            outputs = F.pad(outputs, (0, 0, 0, gradients.num_features - outputs.shape[1]))
        places = torch.cat([outputs.reshape(-1, dim), gradients.bags])
        if gradients.scales is not None:
            places *= gradients.scales.unsqueeze(1)
        for t in tables:
            gradient = _sums(places, t.readers, t.reader_offsets, t.factors)
            if t.more is not None:
                gradient += t.more
            rows, at = t.rows, t.rows.places
            if at is None:
                update_rows(rule, rows.values, rows.state, gradient)
                continue
            values, state = rows.values[at], rows.state[at]
            update_rows(rule, values, state, gradient)
            rows.values[at], rows.state[at] = values, state

    def merge(self, left: RowSums, right: RowSums) -> RowSums:
        """Return the sums of the rows of either, left added to right where a row is in both."""
        rows, places = torch.cat([left.rows, right.rows]).unique(return_inverse=True)
        sums = left.sums.new_zeros(len(rows), left.sums.shape[1])
        sums[places[: len(left.rows)]] = left.sums
        sums.index_add_(0, places[len(left.rows) :], right.sums)
        return RowSums(rows, sums)


def _sums(
    source: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums of rows of `source`, `indices` cut at `offsets`."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return source.new_zeros(len(offsets) - 1, source.shape[1])
    return F.embedding_bag(
        indices[first:last],
        source,
        offsets - first,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=None if factors is None else factors[first:last],
    )
