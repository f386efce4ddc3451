"""Pooled look-ups of one step, and their gradients.

The gradient of a pooled output is kept as it is. The row update sums it over the readers of each
row and changes the row in the same pass, so the gradient of a row is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import Inverse
from presage.trainer.data.shared import SharedFeatures
from presage.trainer.embedding.kernels import compiled
from presage.trainer.embedding.kernels.interface import (
    ArenaRows,
    FeatureBags,
    GroupSamples,
    VectorGradients,
)

T = TypeVar("T")


class Pooling:
    """Pools rows and collects the gradients of its vectors.

    Outputs depend on `autograd_anchor`, which requires grad, since rows themselves do not.
    """

    def __init__(self, batch: CollatedBatch, rows: Mapping[str, ArenaRows], *, mean: bool) -> None:
        """Look up nothing yet; `mean` divides by the length of each bag."""
        self.batch, self.rows = batch, rows
        self._mean = mean and any(t.longest_bag > 1 for t in batch.lookups.values())
        self._layout = batch.layout
        self._scales: torch.Tensor | None = None
        self.keys = batch.layout.keys
        """Features in the order of the output."""
        self.gradients: VectorGradients | None = None
        """The gradient of each vector, None before a backward."""
        self.autograd_anchor = torch.empty(0, requires_grad=True)

    def pool(self) -> torch.Tensor:
        """Return (num_samples, num_features * dim), features in the order of `keys`."""
        return call_with_gradients(self.autograd_anchor, self.pool_values, self.add_gradient)

    def pool_values(self) -> torch.Tensor:
        """Return the output of `pool` without autograd."""
        layout = self._layout
        self._reset_scales()
        pooled = self._pool(layout.keys, layout.num_samples, self._inverse_of_groups())
        return pooled.flatten(1)

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple."""
        parts = call_with_gradients(
            self.autograd_anchor, self._pool_unique, self._add_unique_gradients
        )
        vectors: dict[str, torch.Tensor] = {}
        for members, part in zip(self._members(), parts, strict=True):
            vectors.update(zip(members, part.unbind(1), strict=True))
        return vectors

    def _pool_unique(self) -> tuple[torch.Tensor, ...]:
        """Return (num_bags, num_features, dim) for each of `_members`, without autograd."""
        layout = self._layout
        self._reset_scales()
        counts = [layout.num_samples, *(group.num_tuples for group in layout.groups.values())]
        identity = {group: None for group in (None, *layout.groups)}
        return tuple(
            self._pool(members, count, identity)
            for members, count in zip(self._members(), counts, strict=True)
        )

    def pool_shared(self, shared: SharedFeatures) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pooled rows of shared and of per-sample features.

        Returns:
            (num_shared_rows, num_shared_features, dim) and
            (num_samples, num_per_sample_features, dim).
        """
        return call_with_gradients(
            self.autograd_anchor,
            partial(self._pool_shared, shared),
            partial(self._add_shared_gradients, shared),
        )

    def _pool_shared(self, shared: SharedFeatures) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of `pool_shared` without autograd."""
        inverse = self._inverse_of_groups()
        self._reset_scales()
        return (
            self._pool(shared.shared_features, shared.num_rows, {**inverse, **shared.tuples}),
            self._pool(shared.per_sample_features, self._layout.num_samples, inverse),
        )

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add the gradient of an output of `pool`."""
        layout = self._layout
        dim = gradient.shape[1] // len(layout.keys)
        outputs = gradient.contiguous().view(layout.num_samples, len(layout.keys), dim)
        bags = gradient.new_empty(layout.num_vectors - layout.num_outputs, dim)
        if layout.groups:
            groups = self.batch.groups
            members = [
                self._group_samples(name, layout.keys, groups[name]) for name in layout.groups
            ]
            compiled.segment_sum(members, outputs, bags)
        self._accumulate(outputs, bags)

    def _add_unique_gradients(self, *gradients: torch.Tensor) -> None:
        """Add the gradients of the outputs of `_pool_unique`."""
        ungrouped, *groups = gradients
        layout, dim = self._layout, ungrouped.shape[2]
        outputs = ungrouped.new_zeros(layout.num_samples, len(layout.keys), dim)
        outputs[:, : ungrouped.shape[1]] = ungrouped  # other columns have no readers
        bags = torch.cat([ungrouped.new_empty(0, dim), *(g.reshape(-1, dim) for g in groups)])
        self._accumulate(outputs, bags)

    def _add_shared_gradients(
        self, shared: SharedFeatures, of_rows: torch.Tensor, of_samples: torch.Tensor
    ) -> None:
        """Add the gradients of the outputs of `_pool_shared`."""
        layout, dim = self._layout, of_samples.shape[2]
        num_bags = layout.num_vectors - layout.num_outputs
        of_rows, of_samples = of_rows.contiguous(), of_samples.contiguous()
        if len(layout.groups) == 1 and list(shared.tuples.values()) == [None]:
            self._accumulate(of_samples, of_rows.view(num_bags, dim))
            return
        bags = of_samples.new_empty(num_bags, dim)
        sample_groups: list[GroupSamples] = []
        row_groups: list[GroupSamples] = []
        for name, group in layout.groups.items():
            if name not in shared.tuples:
                inverse = self.batch.groups[name]
                sample_groups.append(self._group_samples(name, shared.per_sample_features, inverse))
            elif (inverse := shared.tuples[name]) is not None:
                row_groups.append(self._group_samples(name, shared.shared_features, inverse))
            else:  # the only group of the shared rows
                first = group.first - layout.num_outputs
                count = group.num_tuples * group.num_features
                bags[first : first + count] = of_rows.view(count, dim)
        if sample_groups:
            compiled.segment_sum(sample_groups, of_samples, bags)
        if row_groups:
            compiled.segment_sum(row_groups, of_rows, bags)
        self._accumulate(of_samples, bags)

    def _accumulate(self, outputs: torch.Tensor, bags: torch.Tensor) -> None:
        previous = self.gradients
        if previous is not None:
            outputs, bags = outputs + previous.outputs, bags + previous.bags
        self.gradients = VectorGradients(
            outputs=outputs,
            num_features=len(self._layout.keys),
            bags=bags,
            scales=self._scales,
        )

    def _members(self) -> list[tuple[str, ...]]:
        """Return the ungrouped features, then those of each group, in the order of `keys`."""
        groups = (None, *self._layout.groups)
        group_of = self._layout.group_of
        return [tuple(f for f in self.keys if group_of[f] == group) for group in groups]

    def _inverse_of_groups(self) -> dict[str | None, Inverse | None]:
        """Return the inverse of each dedup group; None: sample i has bag i."""
        return {None: None, **self.batch.groups}

    def _reset_scales(self) -> None:
        block = next(iter(self.rows.values())).block
        self._scales = block.new_ones(self._layout.num_vectors) if self._mean else None

    def _pool(
        self, features: Sequence[str], count: int, inverse_of: Mapping[str | None, Inverse | None]
    ) -> torch.Tensor:
        """Return (count, num_features, dim).

        Args:
            features: pooled side by side.
            count: samples, shared rows or tuples of the output.
            inverse_of: by dedup group, from these to bags; None: the identity.
        """
        first = next(iter(self.rows.values()))
        out = first.block.new_empty(count, len(features), first.dim)
        tables = {f: (t, x) for t, x in self.batch.lookups.items() for f in x.features}
        bags: list[FeatureBags] = []
        for column, feature in enumerate(features):
            table, lookup = tables[feature]
            inverse = inverse_of[self._layout.group_of[feature]]
            _, bag_slice = lookup.slices_of(feature)
            first_vector, stride = self._layout.of(feature)
            rows = self.rows[table]
            bags.append(
                FeatureBags(
                    block=rows.block,
                    row_positions=rows.positions,
                    positions=lookup.positions,
                    offsets=lookup.bag_offsets[bag_slice.start : bag_slice.stop + 1],
                    per_sample_weights=lookup.per_sample_weights,
                    order=None if inverse is None else inverse.order,
                    sample_offsets=None if inverse is None else inverse.offsets,
                    first_vector=first_vector,
                    vector_stride=stride,
                    column=column,
                )
            )
        if bags:
            compiled.pool(bags, out, self._scales)
        return out

    def _group_samples(self, group: str, features: Sequence[str], inverse: Inverse) -> GroupSamples:
        layout = self._layout.groups[group]
        return GroupSamples(
            order=inverse.order,
            sample_offsets=inverse.offsets,
            column=features.index(self.keys[layout.column]),
            num_features=layout.num_features,
            first_vector=layout.first - self._layout.num_outputs,
        )


class _GradientsTo(torch.autograd.Function):
    """Calls one function forward and another with the gradients of its outputs."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        _, function, add_gradients = args  # the first requires grad: autograd calls the backward
        ctx.add_gradients = add_gradients
        return function()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator's type)
        return ctx.add_gradients(*grads), None, None


def call_with_gradients(
    anchor: torch.Tensor,
    function: Callable[[], T],
    add_gradients: Callable[..., torch.Tensor | None],
) -> T:
    """Call a function, and in the backward pass another with the gradients of its outputs.

    Args:
        anchor: requires grad, since rows themselves do not.
        function: returns one or more tensors, without autograd.
        add_gradients: receives the gradient of each output, and returns that of the anchor.
    """
    return _GradientsTo.apply(anchor, function, add_gradients)
