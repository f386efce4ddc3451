"""Pooled look-ups of one step, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.data.collate import Batch
from trainer.data.lookup import Inverse, TableLookup
from trainer.data.shared_features import Sides
from trainer.embedding.kernels.interface import (
    ArenaRows,
    FeatureBags,
    GroupSamples,
    Kernels,
    PlaceGradients,
)

# The pooled look-ups of one step, and what came back for them.
#
# The gradient of a pooled output is kept where it is: the update sums it over the readers of each
# row and changes the row in the same pass, so that the gradient of a row is never stored.


class Pooling:
    """Pools the rows of an open step and collects the gradients of its places."""

    def __init__(self, kernels: Kernels, batch: Batch, *, mean: bool) -> None:
        """Keep what is needed.

        Args:
            kernels: what computes.
            batch: look-ups of the step.
            mean: divide by the length of each bag.
        """
        self._kernels = kernels
        self._batch = batch
        self._mean = mean and any(t.longest_bag > 1 for t in batch.lookups.values())
        self._places = batch.places
        self._scales: torch.Tensor | None = None
        self._gradients: PlaceGradients | None = None
        self.way_back = torch.empty(0, requires_grad=True)

    @property
    def keys(self) -> tuple[str, ...]:
        """Features in the order of the output."""
        return self._places.keys

    @property
    def gradients(self) -> PlaceGradients | None:
        """The gradient of each place, None when no backward came by."""
        return self._gradients

    def __call__(self, rows: Mapping[str, ArenaRows]) -> torch.Tensor:
        """Return (num_samples, num_features * dim), features in the order of `keys`.

        Args:
            rows: by table, where the rows of the step lie.
        """
        return _Pool.apply(self, rows, self.way_back)

    def pool(self, rows: Mapping[str, ArenaRows]) -> torch.Tensor:
        """Return the output without a way back."""
        places = self._places
        self._begin(rows)
        return self._pooled(rows, places.keys, places.num_samples, self._samples_of()).flatten(1)

    def unique(self, rows: Mapping[str, ArenaRows]) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple.

        Args:
            rows: by table, where the rows of the step lie.
        """
        parts = _PoolUnique.apply(self, rows, self.way_back)
        found: dict[str, torch.Tensor] = {}
        for members, part in zip(self._members(), parts, strict=True):
            found.update(zip(members, part.unbind(1), strict=True))
        return found

    def pool_unique(self, rows: Mapping[str, ArenaRows]) -> tuple[torch.Tensor, ...]:
        """Return (num_bags, num_features, dim) by `_members`, without a way back."""
        places = self._places
        self._begin(rows)
        counts = [places.num_samples, *(block.num_tuples for block in places.groups.values())]
        each = {group: None for group in (None, *places.groups)}
        return tuple(
            self._pooled(rows, members, count, each)
            for members, count in zip(self._members(), counts, strict=True)
        )

    def add_unique(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Take the gradients of what `pool_unique` returned."""
        own, *groups = gradients
        places, dim = self._places, own.shape[2]
        outputs = own.new_zeros(places.num_samples, len(places.keys), dim)
        outputs[:, : own.shape[1]] = own  # features of no group come first; no one reads the rest
        bags = torch.cat([own.new_empty(0, dim), *(g.reshape(-1, dim) for g in groups)])
        self._keep(outputs, bags)

    def sided(
        self, rows: Mapping[str, ArenaRows], sides: Sides
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows share, (num_rows, num_row_features, dim), and what each sample has.

        Args:
            rows: by table, where the rows of the step lie.
            sides: of the batch.
        """
        return _PoolSides.apply(self, sides, rows, self.way_back)

    def pool_sides(
        self, rows: Mapping[str, ArenaRows], sides: Sides
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of `sided` without a way back."""
        own = self._samples_of()
        self._begin(rows)
        return (
            self._pooled(rows, sides.row_features, sides.num_rows, {**own, **sides.tuples}),
            self._pooled(rows, sides.sample_features, self._places.num_samples, own),
        )

    def add_sides(self, sides: Sides, of_rows: torch.Tensor, of_own: torch.Tensor) -> None:
        """Take the gradients of what `pool_sides` returned."""
        places, dim = self._places, of_own.shape[2]
        num_bags = places.num_places - places.num_outputs
        of_rows, of_own = of_rows.contiguous(), of_own.contiguous()
        if len(places.groups) == 1 and list(sides.tuples.values()) == [None]:
            self._keep(of_own, of_rows.view(num_bags, dim))
            return
        bags = of_own.new_empty(num_bags, dim)
        own, rows = [], []
        for name, block in places.groups.items():
            if name not in sides.tuples:
                own.append(self._samples(name, sides.sample_features, self._batch.groups[name]))
            elif (inverse := sides.tuples[name]) is not None:
                rows.append(self._samples(name, sides.row_features, inverse))
            else:
                first = block.first - places.num_outputs
                count = block.num_tuples * block.num_features
                bags[first : first + count] = of_rows.view(count, dim)  # the only group of rows
        if own:
            self._kernels.contract(own, of_own, bags)
        if rows:
            self._kernels.contract(rows, of_rows, bags)
        self._keep(of_own, bags)

    def _members(self) -> list[tuple[str, ...]]:
        """Return the features of no group, then those of each group, in the order of `keys`."""
        groups = (None, *self._places.groups)
        of = self._places.group_of
        return [tuple(f for f in self.keys if of[f] == group) for group in groups]

    def add(self, gradient: torch.Tensor) -> None:
        """Take the gradient of an output; several outputs of one step add up."""
        places = self._places
        dim = gradient.shape[1] // len(places.keys)
        outputs = gradient.contiguous().view(places.num_samples, len(places.keys), dim)
        bags = gradient.new_empty(places.num_places - places.num_outputs, dim)
        if places.groups:
            groups = self._batch.groups
            members = [self._samples(name, places.keys, groups[name]) for name in places.groups]
            self._kernels.contract(members, outputs, bags)
        self._keep(outputs, bags)

    def _keep(self, outputs: torch.Tensor, bags: torch.Tensor) -> None:
        earlier = self._gradients
        if earlier is not None:
            outputs, bags = outputs + earlier.outputs, bags + earlier.bags
        self._gradients = PlaceGradients(
            outputs=outputs,
            num_features=len(self._places.keys),
            bags=bags,
            scales=self._scales,
        )

    def _samples_of(self) -> Mapping[str | None, Inverse | None]:
        """Return by dedup group who has which of its bags; None: sample i has bag i."""
        return {None: None, **self._batch.groups}

    def _begin(self, rows: Mapping[str, ArenaRows]) -> None:
        """Make room for the scales of means."""
        first = next(iter(rows.values())).values
        self._scales = first.new_ones(self._places.num_places) if self._mean else None

    def _pooled(
        self,
        rows: Mapping[str, ArenaRows],
        features: Sequence[str],
        count: int,
        samples_of: Mapping[str | None, Inverse | None],
    ) -> torch.Tensor:
        """Return (count, num_features, dim).

        Args:
            rows: by table, where the rows of the step lie.
            features: pooled side by side.
            count: samples, rows or tuples that have bags.
            samples_of: by dedup group which bag each of them has; None: each its own.
        """
        values = next(iter(rows.values())).values
        out = values.new_empty(count, len(features), values.shape[1])
        tables = {f: (t, x) for t, x in self._batch.lookups.items() for f in x.features}
        bags: list[FeatureBags] = []
        for column, feature in enumerate(features):
            table, lookup = tables[feature]
            inverse = samples_of[self._places.group_of[feature]]
            bags.append(self._bags(feature, lookup, rows[table], column, inverse))
        if bags:
            self._kernels.pool(bags, out, self._scales)
        return out

    def _bags(
        self,
        feature: str,
        lookup: TableLookup,
        rows: ArenaRows,
        column: int,
        inverse: Inverse | None,
    ) -> FeatureBags:
        _, bags = lookup.part(feature)
        place, step = self._places.of(feature)
        return FeatureBags(
            rows=rows,
            positions=lookup.positions,
            offsets=lookup.bag_offsets[bags.start : bags.stop + 1],
            factors=lookup.factors,
            column=column,
            place=place,
            place_step=step,
            order=None if inverse is None else inverse.order,
            sample_offsets=None if inverse is None else inverse.offsets,
        )

    def _samples(self, group: str, features: Sequence[str], inverse: Inverse) -> GroupSamples:
        """Return who has which bag of a group, whose features are neighbours in `features`."""
        block = self._places.groups[group]
        return GroupSamples(
            order=inverse.order,
            sample_offsets=inverse.offsets,
            column=features.index(self.keys[block.column]),
            num_features=block.num_features,
            place=block.first - self._places.num_outputs,
        )


class _PoolSides(torch.autograd.Function):
    """As `_Pool`, with what rows share apart from what each sample has."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooling, sides, rows, _ = args
        ctx.pooling, ctx.sides = pooling, sides
        return pooling.pool_sides(rows, sides)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.pooling.add_sides(ctx.sides, *grads)
        return None, None, None, None


class _PoolUnique(torch.autograd.Function):
    """As `_Pool`, with one output for each dedup group."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        pooling, rows, _ = args
        ctx.pooling = pooling
        return pooling.pool_unique(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.pooling.add_unique(grads)
        return None, None, None


class _Pool(torch.autograd.Function):
    """The gradient of the output stays with the pooling; nothing goes back to the rows."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        pooling, rows, _ = args
        ctx.pooling = pooling
        return pooling.pool(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.pooling.add(grads[0])
        return None, None, None
