"""Rows that collections update in the backward pass, as FBGEMM's fused optimizers do.

`FusedRows` selects rows from where they are: memory, or a source such as
`presage.trainer.own_loops.EmbeddingRows`. With several ranks of torch.distributed, every rank has
all rows and updates them by the mean gradient of all ranks. `FusedRows.defer` keeps gradients for
an optimizer, which updates the rows later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from presage.schemas.arrays import Array
from presage.schemas.config.train import SparseOptimizerConfig
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import inverse_of
from presage.trainer.embedding.cache import RowsOfTables
from presage.trainer.embedding.kernels import compiled
from presage.trainer.embedding.kernels.interface import (
    ArenaRows,
    RowRule,
    TableRows,
    VectorGradients,
    no_gradients,
    rule_at,
    state_width,
    without_readers,
)
from presage.trainer.embedding.module import MicrobatchLookups, arena_rows
from presage.trainer.embedding.pooling import call_with_gradients
from presage.trainer.embedding.ranks import (
    RowGradients,
    average_over_ranks,
    sum_gradients,
    world_size,
)
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsAndRecords,
    TableLayout,
    WriteBack,
    empty_records,
)

_GRADIENT = 2.0**-100
"""Gradient of the anchor: its square is 0, so it does not count in norms of gradients."""
ApplyGradients = Callable[[Mapping[str, ArenaRows], RowRule], None]
"""Sums the gradients of each row of a step and applies a rule to these rows, by table."""


class ExternalRows(Protocol):
    """Holds the rows of collections outside of them, as `own_loops.EmbeddingRows` does."""

    version: int
    """Positions of rows that were selected under another version must not be used."""

    @property
    def train_step(self) -> int:
        """Steps that were begun since the start of the run."""
        ...

    def add_tables(
        self, layouts: Mapping[str, TableLayout], features: Mapping[str, Sequence[str]]
    ) -> None:
        """Add the tables of a collection, and the features that look into each."""
        ...

    def select(self, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return rows in place, valid until others of their tables are selected."""
        ...

    def read(self, rows: RowsOfTables) -> dict[str, Records]:
        """Return copies of rows; none is created."""
        ...

    def write(self, table: str, rows: NDArray[np.int64], records: Records) -> None:
        """Overwrite distinct rows."""
        ...


class FusedRows:
    """Rows of equal width, selected in the forward pass and updated in the backward pass."""

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        optimizer: SparseOptimizerConfig | None,
        *,
        seed: int,
        dtype: str,
        source: ExternalRows | None,
    ) -> None:
        """Create empty tables.

        Args:
            tables: of one width.
            optimizer: update rule, whose state is stored with each row; None: row-wise Adagrad.
            seed: of the rows' initial values.
            dtype: float32 or float64.
            source: of the rows; None for memory.
        """
        self._num_rows = {table.name: table.num_embeddings for table in tables}
        self.optimizer = optimizer = optimizer or SparseOptimizerConfig()
        self.dtype: torch.dtype = getattr(torch, dtype)
        dim = tables[0].embedding_dim
        width = state_width(optimizer, dim)
        self.layouts = {
            table: TableLayout(table=table, dim=dim, state_width=width, dtype=dtype, seed=seed)
            for table in self._num_rows
        }
        if source is not None:
            source.add_tables(self.layouts, {t.name: t.feature_names for t in tables})
        self._memory = memory_store(self.layouts)  # stays empty with a source
        self._source = source
        self._num_selects = 0
        self._num_updates = 0
        self._group: dist.ProcessGroup | None = None
        self._deferred: dict[str, nn.Parameter] | None = None
        self._deferred_rows: dict[str, NDArray[np.int64]] = {}
        self._deferred_version = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: the rows, but neither ranks nor gradients.

        Raises:
            ValueError: the rows are those of a source.
        """
        if self._source is not None:
            raise ValueError(
                "collection with a source cannot be copied or pickled: table "
                f"{next(iter(self.layouts))!r}; make the copy without source, and set its rows by "
                "presage.trainer.embedding.collections.set_rows"
            )
        rows = {table: self.contents(table) for table in self.layouts}
        cleared = {"_group": None, "_deferred": None, "_deferred_rows": {}}
        return self.__dict__ | cleared | {"_memory": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.replace_rows(state["_memory"], self._num_updates)

    def gather(
        self, rows: RowsOfTables, *, in_place: bool
    ) -> tuple[tuple[int, int], dict[str, ArenaRows]]:
        """Return rows, and a version for `update`.

        Args:
            rows: table to distinct ascending rows.
            in_place: for an update; otherwise these are copies, and no row is created.

        Raises:
            ValueError: a row is beyond its table.
        """
        for table, table_rows in rows.items():
            limit = self._num_rows[table]
            if len(table_rows) and table_rows[-1] >= limit:
                raise ValueError(
                    f"ids must be below num_embeddings, got {table_rows[-1]} for table {table!r} "
                    f"with num_embeddings={limit}; hash them, or enlarge the table"
                )
        if not in_place:
            copies = {t: arena_rows(GatheredRows(r)) for t, r in self.read(rows).items()}
            return self._version(), copies
        if self._group is None and world_size() > 1:
            # created by all ranks in their first forward pass; rows are in CPU memory
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "every rank belongs to it"
            self._group = group
        selected = self._select(rows)
        return self._version(), selected

    def update(
        self,
        version: tuple[int, int],
        rows: RowsOfTables,
        gathered: Mapping[str, ArenaRows],
        apply: ApplyGradients,
    ) -> bool:
        """Update the rows of a step by their gradients, or keep these for `update_deferred`.

        Args:
            version: from `gather`; rows are selected again if other rows were since.
            rows: table to the rows of the step.
            gathered: from `gather`.
            apply: sums the gradients of each row, and applies a rule.

        Returns:
            Whether the anchor gets a gradient: rows were updated, or DistributedDataParallel waits
            for it.

        Raises:
            ValueError: the step of the rows has ended.
        """
        self._check_step(version[1])
        if self._group is None and self._deferred is None:
            rule = rule_at(self.optimizer, self._num_updates)
            apply(gathered if version[0] == self._num_selects else self._select(rows), rule)
            self._num_updates += 1
            return True
        sums = {t: g.block.new_empty(len(g), g.dim) for t, g in gathered.items()}
        apply({t: ArenaRows(each, each.shape[1]) for t, each in sums.items()}, RowRule(name="sum"))
        gradients = {table: RowGradients(rows[table], sums[table]) for table in rows}
        if self._group is not None:
            gradients = average_over_ranks(gradients, self._group)
        if self._deferred is None:
            self._update_by(gradients)
            return True
        self._defer(self._deferred, gradients)
        return self._group is not None

    def defer(self) -> list[nn.Parameter]:
        """Keep gradients from now on, and return a tensor for each table whose `grad` has them."""
        self._deferred = {
            table: nn.Parameter(torch.empty(0, layout.dim, dtype=self.dtype))
            for table, layout in self.layouts.items()
        }
        return list(self._deferred.values())

    def update_deferred(self) -> None:
        """Update rows by the gradients that were kept.

        Raises:
            ValueError: the step of the rows has ended.
        """
        gradients = {
            table: RowGradients(self._deferred_rows[table], parameter.grad)
            for table, parameter in (self._deferred or {}).items()
            if parameter.grad is not None
        }
        if gradients:
            self._check_step(self._deferred_version)
            self._update_by(gradients)

    def _defer(
        self, deferred: Mapping[str, nn.Parameter], gradients: Mapping[str, RowGradients]
    ) -> None:
        """Add gradients to those that are kept."""
        for table, new in gradients.items():
            parameter = deferred[table]
            if parameter.grad is not None:
                new = sum_gradients([RowGradients(self._deferred_rows[table], parameter.grad), new])
            self._deferred_rows[table] = new.rows
            parameter.grad = None  # torch checks that it has the shape of the parameter
            parameter.data = new.sums
            parameter.grad = new.sums
        self._deferred_version = self._version()[1]

    def _update_by(self, gradients: Mapping[str, RowGradients]) -> None:
        selected = self._select({table: each.rows for table, each in gradients.items()})
        tables = [without_readers(selected[table], each.sums) for table, each in gradients.items()]
        rule = rule_at(self.optimizer, self._num_updates)
        compiled.update(tables, no_gradients(next(iter(gradients.values())).sums), rule)
        self._num_updates += 1

    def _check_step(self, version: int) -> None:
        if version != self._version()[1]:
            raise ValueError(
                "backward pass reaches rows of a step that has ended; call backward, and step of a "
                "RowOptimizer, before rows.advance(batch) of the next batch and before rows.save"
            )

    def _select(self, rows: RowsOfTables) -> dict[str, ArenaRows]:
        self._num_selects += 1
        if self._source is not None:
            selected = self._source.select(rows)
        else:
            selected = {table: self._memory.gather(table, ids) for table, ids in rows.items()}
        return {table: arena_rows(each) for table, each in selected.items()}

    def _version(self) -> tuple[int, int]:
        return self._num_selects, 0 if self._source is None else self._source.version

    def read(self, rows: RowsOfTables) -> dict[str, Records]:
        """Return copies of rows; none is created."""
        return self._memory.fetch(0, rows) if self._source is None else self._source.read(rows)

    def _write(self, table: str, rows: NDArray[np.int64], records: Records) -> None:
        if self._source is not None:
            self._source.write(table, rows, records)
        else:
            self._memory.write(0, {table: WriteBack(rows, records)})

    def set_rows(self, table: str, rows: NDArray[np.int64], values: Array) -> None:
        """Set the values of rows and clear their optimizer state."""
        layout = self.layouts[table]
        records = empty_records(layout, len(rows))
        records.values[:], records.state[:] = values, 0
        self._write(table, rows, records)
        self._num_selects += 1

    def contents(self, table: str) -> RowsAndRecords:
        """Return copies of all rows of a table ever updated, ascending; none of a source."""
        count = len(self._memory.tables[table])
        rows, records = np.empty(count, np.int64), empty_records(self.layouts[table], count)
        first = 0
        for chunk_rows, chunk in self._memory.contents(table):
            chosen = slice(first, first + len(chunk_rows))
            rows[chosen] = chunk_rows
            records.put(chosen, chunk)
            first = chosen.stop
        return rows, records

    def fingerprint(self) -> dict[str, Any]:
        """Return what the rows of a state must have in common with these."""
        tables = {table: asdict(layout) for table, layout in self.layouts.items()}
        return {"optimizer": self.optimizer.name, "tables": tables}

    @property
    def num_updates(self) -> int:
        """Updates so far, which Adam counts."""
        return self._num_updates

    @property
    def source_step(self) -> int | None:
        """Steps that the source has begun; None without a source."""
        return None if self._source is None else self._source.train_step

    def replace_rows(self, rows: Mapping[str, RowsAndRecords], num_updates: int) -> None:
        """Replace all rows; those of a source that are not given keep their values."""
        self._memory = memory_store(self.layouts)
        for table, (table_rows, records) in rows.items():
            self._write(table, table_rows, records)
        self._num_updates = num_updates
        self._num_selects += 1

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of later updates."""
        self.optimizer = replace(self.optimizer, learning_rate=rate)


class PooledStep:
    """Pooled look-ups of one forward pass."""

    def __init__(
        self, rows: FusedRows, batch: CollatedBatch, *, mean: bool, in_place: bool
    ) -> None:
        self._rows = rows
        self._step_rows = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._version, self._gathered = rows.gather(self._step_rows, in_place=in_place)
        self._lookups = MicrobatchLookups(batch, self._gathered, None, mean=mean)
        self.keys = self._lookups.keys

    def outputs(self) -> tuple[torch.Tensor]:
        """Return (num_samples, num_features * dim), features in the order of `keys`."""
        return (self._lookups.pool_values(),)

    def update(self, *gradients: torch.Tensor) -> bool:
        """Update rows by the gradients of the outputs in one backward pass."""
        self._lookups.gradients = None  # those of an earlier backward pass
        self._lookups.add_gradient(gradients[0])
        update = self._lookups.update
        return self._rows.update(self._version, self._step_rows, self._gathered, update)


class SequenceStep:
    """Unpooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: CollatedBatch, *, in_place: bool) -> None:
        self._rows = rows
        self._lookups = batch.lookups
        self._step_rows = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._version, self._gathered = rows.gather(self._step_rows, in_place=in_place)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return by table (num_values, dim), features one after the other."""
        outputs: list[torch.Tensor] = []
        for table, lookup in self._lookups.items():
            rows, positions = self._gathered[table], lookup.positions
            if rows.positions is not None:
                positions = rows.positions.index_select(0, positions)
            outputs.append(rows.values.index_select(0, positions))
        return tuple(outputs)

    def update(self, *gradients: torch.Tensor) -> bool:
        """Update rows by the gradients of the outputs in one backward pass."""
        vectors = torch.cat(list(gradients))
        vector_gradients = VectorGradients(
            outputs=vectors[:, None], num_features=1, bags=vectors[:0], scales=None
        )

        def apply(rows: Mapping[str, ArenaRows], rule: RowRule) -> None:
            tables: list[TableRows] = []
            first = 0
            for table, lookup in self._lookups.items():
                positions = lookup.positions.numpy().astype("int64")
                inverse = inverse_of(positions, len(lookup.rows))
                own, readers = rows[table], inverse.order + first
                tables.append(TableRows(own.block, own.positions, readers, inverse.offsets))
                first += len(positions)
            compiled.update(tables, vector_gradients, rule)

        return self._rows.update(self._version, self._step_rows, self._gathered, apply)


def fused_outputs(
    step: PooledStep | SequenceStep, anchor: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """Return a step's outputs.

    Args:
        step: the look-ups.
        anchor: (1,), requires grad, since rows do not, and gets a gradient when they are updated.
            None: without gradients.
    """
    if anchor is None:
        return step.outputs()

    def update(*gradients: torch.Tensor) -> torch.Tensor | None:
        return anchor.new_tensor([_GRADIENT]) if step.update(*gradients) else None

    return call_with_gradients(anchor, step.outputs, update)
