"""Rows that collections update in the backward pass, as FBGEMM's fused optimizers do.

`FusedRows` selects rows from where they are: memory, or a source such as
`trainer.rows.EmbeddingRows`. With several ranks of torch.distributed, every rank has all rows and
updates them by the mean gradient of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from schemas.arrays import Array
from schemas.config.train import SparseOptimizerConfig
from trainer.data.collate import Batch
from trainer.data.lookup import inverse_of
from trainer.embedding.cache import RowsOfTables
from trainer.embedding.kernels import compiled
from trainer.embedding.kernels.interface import (
    ArenaRows,
    RowRule,
    TableRows,
    VectorGradients,
    no_gradients,
    rule_at,
    state_width,
    without_readers,
)
from trainer.embedding.module import MicrobatchLookups, arena_rows
from trainer.embedding.pooling import call_with_gradients
from trainer.embedding.ranks import RowGradients, average_over_ranks, world_size
from trainer.stores.api import GatheredRows, Records, TableLayout, WriteBack
from trainer.stores.local import memory_store

ApplyGradients = Callable[[Mapping[str, ArenaRows], RowRule], None]
"""Sums the gradients of each row of a step and applies a rule to these rows, by table."""


class ExternalRows(Protocol):
    """Holds the rows of collections outside of them, such as `trainer.rows.EmbeddingRows`."""

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
        self._optimizer = optimizer = optimizer or SparseOptimizerConfig()
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

    def gather(self, rows: RowsOfTables) -> tuple[tuple[int, int], dict[str, ArenaRows]]:
        """Return rows in place, and a version for `update`.

        Without gradients, these are copies, and no row is created.

        Args:
            rows: table to distinct ascending rows.

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
        if not torch.is_grad_enabled():
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
    ) -> None:
        """Update the rows of a step by their gradients.

        Args:
            version: from `gather`; rows are selected again if other rows were since.
            rows: table to the rows of the step.
            gathered: from `gather`.
            apply: sums the gradients of each row, and applies a rule.

        Raises:
            ValueError: the step of the rows has ended.
        """
        if version[1] != self._version()[1]:
            raise ValueError(
                "backward pass reaches rows of a step that has ended; call backward before "
                "rows.advance(batch) of the next batch and before rows.save"
            )
        rule = rule_at(self._optimizer, self._num_updates)
        if self._group is not None:
            self._update_over_ranks(rows, gathered, apply, rule)
        else:
            apply(gathered if version[0] == self._num_selects else self._select(rows), rule)
        self._num_updates += 1

    def _update_over_ranks(
        self,
        rows: RowsOfTables,
        gathered: Mapping[str, ArenaRows],
        apply: ApplyGradients,
        rule: RowRule,
    ) -> None:
        """Update the rows of all ranks by their mean gradient."""
        sums = {t: g.values.new_empty(len(g), g.values.shape[1]) for t, g in gathered.items()}
        apply({t: ArenaRows(each, each[:, :0]) for t, each in sums.items()}, RowRule(name="sum"))
        own = {table: RowGradients(rows[table], sums[table]) for table in rows}
        means = average_over_ranks(own, self._group)
        selected = self._select({table: mean.rows for table, mean in means.items()})
        tables = [without_readers(selected[table], mean.sums) for table, mean in means.items()]
        compiled.update(tables, no_gradients(tables[0].values), rule)

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
        state = np.zeros((len(rows), self.layouts[table].state_width), values.dtype)
        self._write(table, rows, Records(values, state))
        self._num_selects += 1

    def state(self) -> dict[str, Any]:
        """Return every row ever updated, with its optimizer state; no rows of a source."""
        if self._source is not None:
            return {"num_updates": self._num_updates, "train_step": self._source.train_step}
        tables: dict[str, dict[str, torch.Tensor]] = {}
        for table in self.layouts:
            no_rows = np.zeros(0, np.int64)
            parts = [(no_rows, self.read({table: no_rows})[table]), *self._memory.contents(table)]
            arrays = {
                "rows": [rows for rows, _ in parts],
                "values": [records.values for _, records in parts],
                "state": [records.state for _, records in parts],
            }
            tables[table] = {n: torch.from_numpy(np.concatenate(a)) for n, a in arrays.items()}
        return {"num_updates": self._num_updates, "tables": tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Write the rows of `state`; others keep their values.

        Raises:
            ValueError: the rows are in a checkpoint of a source, which is not loaded.
        """
        rows_at = None if self._source is None else self._source.train_step
        if "tables" not in state and state["train_step"] != rows_at:
            raise ValueError(
                f"state_dict has no rows, which a source held before step {state['train_step']}; "
                "make the collection with source, and call its load before load_state_dict"
            )
        for table, arrays in state.get("tables", {}).items():
            records = Records(arrays["values"].numpy(), arrays["state"].numpy())
            self._write(table, arrays["rows"].numpy(), records)
        self._num_updates = state["num_updates"]
        self._num_selects += 1


class PooledStep:
    """Pooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: Batch, *, mean: bool) -> None:
        self._rows = rows
        self._step_rows = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._version, self._gathered = rows.gather(self._step_rows)
        self._lookups = MicrobatchLookups(batch, self._gathered, None, mean=mean)
        self.keys = self._lookups.keys

    def outputs(self) -> tuple[torch.Tensor]:
        """Return (num_samples, num_features * dim), features in the order of `keys`."""
        return (self._lookups.pool_values(),)

    def update(self, *gradients: torch.Tensor) -> None:
        """Update rows by the gradients of the outputs."""
        self._lookups.add_gradient(gradients[0])
        self._rows.update(self._version, self._step_rows, self._gathered, self._lookups.update)


class SequenceStep:
    """Unpooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: Batch) -> None:
        self._rows = rows
        self._lookups = batch.lookups
        self._step_rows = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._version, self._gathered = rows.gather(self._step_rows)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return by table (num_values, dim), features one after the other."""
        outputs: list[torch.Tensor] = []
        for table, lookup in self._lookups.items():
            rows, positions = self._gathered[table], lookup.positions
            if rows.positions is not None:
                positions = rows.positions.index_select(0, positions)
            outputs.append(rows.values.index_select(0, positions))
        return tuple(outputs)

    def update(self, *gradients: torch.Tensor) -> None:
        """Update rows by the gradients of the outputs."""
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
                tables.append(
                    TableRows(own.values, own.state, own.positions, readers, inverse.offsets)
                )
                first += len(positions)
            compiled.update(tables, vector_gradients, rule)

        self._rows.update(self._version, self._step_rows, self._gathered, apply)


def fused_outputs(step: PooledStep | SequenceStep, anchor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a step's outputs; their backward updates its rows."""
    if not torch.is_grad_enabled():
        return step.outputs()
    return call_with_gradients(anchor, step.outputs, step.update)
