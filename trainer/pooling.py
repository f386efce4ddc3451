"""The pooled look-ups of one step, and what came back for them.

The gradient of a pooled output is kept where it is: the update sums it over
the readers of each row and changes the row in the same pass, so that the
gradient of a row is never stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from trainer.batch import Batch
from trainer.kernels.contract import FeatureBags, GroupSamples, Kernels, PlaceGradients
from trainer.lookup import TableLookup


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

    @property
    def keys(self) -> tuple[str, ...]:
        """Features in the order of the output."""
        return self._places.keys

    @property
    def gradients(self) -> PlaceGradients | None:
        """The gradient of each place, None when no backward came by."""
        return self._gradients

    def __call__(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return (num_samples, num_features * dim), features in the order of `keys`.

        Args:
            weights: by table, (num_rows, dim).
        """
        return _Pool.apply(self, tuple(weights), *weights.values())

    def pool(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the output without a way back."""
        first = next(iter(weights.values()))
        places, dim = self._places, first.shape[1]
        out = first.new_empty(places.num_samples, len(places.keys), dim)
        self._scales = first.new_ones(places.num_places) if self._mean else None
        table_of = {f: t for t, lookup in self._batch.lookups.items() for f in lookup.features}
        bags = [
            self._bags(feature, self._batch.lookups[table_of[feature]], weights[table_of[feature]])
            for feature in places.keys
        ]
        self._kernels.pool(bags, out, self._scales)
        return out.flatten(1)

    def unique(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple.

        Args:
            weights: by table, (num_rows, dim).
        """
        parts = _PoolUnique.apply(self, tuple(weights), *weights.values())
        found: dict[str, torch.Tensor] = {}
        for members, part in zip(self._members(), parts, strict=True):
            found.update(zip(members, part.unbind(1), strict=True))
        return found

    def pool_unique(self, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return (num_bags, num_features, dim) by `_members`, without a way back."""
        first = next(iter(weights.values()))
        places = self._places
        self._scales = first.new_ones(places.num_places) if self._mean else None
        tables = {f: (t, x) for t, x in self._batch.lookups.items() for f in x.features}
        counts = [places.num_samples, *(block.num_tuples for block in places.groups.values())]
        found: list[torch.Tensor] = []
        for members, count in zip(self._members(), counts, strict=True):
            out = first.new_empty(count, len(members), first.shape[1])
            bags = [
                replace(
                    self._bags(feature, tables[feature][1], weights[tables[feature][0]]),
                    column=column,
                    order=None,
                    sample_offsets=None,
                )
                for column, feature in enumerate(members)
            ]
            if bags:
                self._kernels.pool(bags, out, self._scales)
            found.append(out)
        return tuple(found)

    def add_unique(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Take the gradients of what `pool_unique` returned."""
        own, *groups = gradients
        places, dim = self._places, own.shape[2]
        outputs = own.new_zeros(places.num_samples, len(places.keys), dim)
        outputs[:, : own.shape[1]] = own  # features of no group come first; no one reads the rest
        bags = torch.cat([own.new_empty(0, dim), *(g.reshape(-1, dim) for g in groups)])
        self._keep(outputs.view(-1, dim), bags)

    def _members(self) -> list[tuple[str, ...]]:
        """Return the features of no group, then those of each group, in the order of `keys`."""
        groups = (None, *self._places.groups)
        of = self._places.group_of
        return [tuple(f for f in self.keys if of[f] == group) for group in groups]

    def add(self, gradient: torch.Tensor) -> None:
        """Take the gradient of an output; several outputs of one step add up."""
        places = self._places
        dim = gradient.shape[1] // len(places.keys)
        outputs = gradient.contiguous().view(-1, dim)
        bags = gradient.new_empty(places.num_places - places.num_outputs, dim)
        if places.groups:
            wide = outputs.view(places.num_samples, -1, dim)
            self._kernels.contract(self._groups(), wide, bags)
        self._keep(outputs, bags)

    def _keep(self, outputs: torch.Tensor, bags: torch.Tensor) -> None:
        earlier = self._gradients
        if earlier is not None:
            outputs, bags = outputs + earlier.outputs, bags + earlier.bags
        self._gradients = PlaceGradients(outputs=outputs, bags=bags, scales=self._scales)

    def _bags(self, feature: str, lookup: TableLookup, weight: torch.Tensor) -> FeatureBags:
        _, bags = lookup.part(feature)
        place, step = self._places.of(feature)
        group = self._places.group_of[feature]
        inverse = None if group is None else self._batch.groups[group]
        return FeatureBags(
            weight=weight,
            positions=lookup.positions,
            offsets=lookup.bag_offsets[bags.start : bags.stop + 1],
            factors=lookup.factors,
            column=self._places.keys.index(feature),
            place=place,
            place_step=step,
            order=None if inverse is None else inverse.order,
            sample_offsets=None if inverse is None else inverse.offsets,
        )

    def _groups(self) -> list[GroupSamples]:
        return [
            GroupSamples(
                order=self._batch.groups[name].order,
                sample_offsets=self._batch.groups[name].offsets,
                column=block.column,
                num_features=block.num_features,
                place=block.first - self._places.num_outputs,
            )
            for name, block in self._places.groups.items()
        ]


class _PoolUnique(torch.autograd.Function):
    """As `_Pool`, with one output for each dedup group."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        pooling, tables, *weights = args
        ctx.pooling, ctx.num_weights = pooling, len(weights)
        return pooling.pool_unique(dict(zip(tables, weights, strict=True)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.pooling.add_unique(grads)
        return None, None, *([None] * ctx.num_weights)


class _Pool(torch.autograd.Function):
    """The output depends on the weights; their gradient stays with the pooling."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        pooling, tables, *weights = args
        ctx.pooling, ctx.num_weights = pooling, len(weights)
        return pooling.pool(dict(zip(tables, weights, strict=True)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.pooling.add(grads[0])
        return None, None, *([None] * ctx.num_weights)
