"""The rows that one leaf looks up, and what came back for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer.batch import Batch
from trainer.kernels.contract import (
    ArenaRows,
    Kernels,
    PlaceGradients,
    RowRule,
    RowSums,
    TableRows,
)
from trainer.pooling import Pooling
from trainer.taking import take_unsorted


class OpenLeaf:
    """Look-ups of a leaf among the rows of its step; leaves may be used by several threads."""

    def __init__(
        self,
        kernels: Kernels,
        batch: Batch,
        rows: Mapping[str, ArenaRows],
        places: Mapping[str, torch.Tensor] | None,
        *,
        mean: bool,
    ) -> None:
        """Keep what is needed.

        Args:
            kernels: what computes.
            batch: look-ups of the leaf.
            rows: by table, the rows of the step where they lie.
            places: by table, which of them are the leaf's; None: all, in order.
            mean: divide by the length of each bag.
        """
        self.batch = batch
        self.rows = _placed(rows, places)
        self.pooling = Pooling(kernels, batch, mean=mean)
        self._kernels = kernels
        self._step_rows = rows
        self._places = places
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def ends(self) -> list[torch.Tensor]:
        """Tensors that a backward must reach for `take`."""
        return [self.pooling.way_back, *self._copies.values()]

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of `ends`, for a backward that leaves them nowhere."""
        for copy, gradient in zip(self._copies.values(), gradients[1:], strict=True):
            copy.grad = gradient

    def unpooled(self, table: str, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a feature and where its bags begin."""
        lookup = self.batch.lookups[table]
        values, bags = lookup.part(feature)
        offsets = lookup.bag_offsets[bags.start : bags.stop + 1]
        positions = lookup.positions[values].long()
        return take_unsorted(self._copy_of(table), positions), (offsets - offsets[0]).long()

    def update(self, rows: Mapping[str, ArenaRows], rule: RowRule) -> None:
        """Sum the gradients of each row over its readers and apply a rule to it, in place.

        Args:
            rows: by table, what is updated, for each row of the leaf.
            rule: what the gradients do.
        """
        pooled = self.pooling.gradients
        tables: list[TableRows] = []
        for table in self._asked():
            lookup, copy = self.batch.lookups[table], self._copies.get(table)
            tables.append(
                TableRows(
                    rows=rows[table],
                    readers=lookup.readers,
                    reader_offsets=_none_of(lookup.reader_offsets, pooled),
                    factors=lookup.reader_factors,
                    more=None if copy is None else copy.grad,
                )
            )
        if tables:
            none = no_gradients(tables[0].rows.values)
            self._kernels.update(tables, pooled or none, rule)

    def sums(self) -> RowSums:
        """Return the gradients of the leaf's rows."""
        asked = self._asked()
        counts = [len(self.rows[table]) for table in asked]
        like = next(iter(self.rows.values())).values
        sums = like.new_empty(sum(counts), like.shape[1])
        parts = zip(asked, sums.split(counts), strict=True)
        self.update({t: ArenaRows(part, part[:, :0]) for t, part in parts}, RowRule(name="sum"))
        none = torch.empty(0, dtype=torch.int32)
        return RowSums(torch.cat([none, *self._numbers(asked)]), sums)

    def _numbers(self, tables: Sequence[str]) -> list[torch.Tensor]:
        """Return the numbers of the leaf's rows among those of the step, table by table."""
        first, firsts = 0, dict[str, int]()
        for table, rows in self._step_rows.items():
            firsts[table] = first
            first += len(rows)
        if self._places is None:
            return [
                torch.arange(firsts[t], firsts[t] + len(self.rows[t]), dtype=torch.int32)
                for t in tables
            ]
        return [self._places[table] + firsts[table] for table in tables]

    def _asked(self) -> list[str]:
        """Return the tables that a gradient came back for."""
        if self.pooling.gradients is not None:
            return list(self.batch.lookups)
        found = [t for t, copy in self._copies.items() if copy.grad is not None]
        return [table for table in self.batch.lookups if table in found]

    def _copy_of(self, table: str) -> torch.Tensor:
        """Return the rows of a table, in order, with a gradient of their own."""
        if table not in self._copies:
            rows = self.rows[table]
            copy = rows.values if rows.places is None else rows.values[rows.places]
            self._copies[table] = copy.detach().requires_grad_()
        return self._copies[table]


def no_gradients(like: torch.Tensor) -> PlaceGradients:
    """Return the gradients of no place.

    Args:
        like: (n, dim).
    """
    none = like[:0]
    return PlaceGradients(outputs=none[:, None], num_features=1, bags=none, scales=None)


def _none_of(reader_offsets: torch.Tensor, pooled: PlaceGradients | None) -> torch.Tensor:
    """Return offsets that leave all readers out where nothing came back for them."""
    return torch.zeros_like(reader_offsets) if pooled is None else reader_offsets


def _placed(
    rows: Mapping[str, ArenaRows], places: Mapping[str, torch.Tensor] | None
) -> dict[str, ArenaRows]:
    """Return where the rows of a leaf lie, of those of its step."""
    if places is None:
        return dict(rows)
    return {
        table: ArenaRows(
            found.values,
            found.state,
            places[table] if found.places is None else found.places[places[table]],
        )
        for table, found in rows.items()
    }
