"""Rows of some tables whose update is part of the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.jagged import Array
from schemas.job_train import SparseOptimizerConfig
from trainer.embedding import arena_rows
from trainer.kernels.contract import ArenaRows, Kernels, PlaceGradients, TableRows
from trainer.optimizer import rule_at, state_width
from trainer.stores.memory import memory_store
from trainer.stores.store import ArrayStore, Lent, Records, TableLayout
from trainer.stores.together import fetch_rows


class FusedRows:
    """Rows of equal width, fetched for a step and updated when its gradient is known."""

    def __init__(
        self,
        num_rows: Mapping[str, int],
        dim: int,
        optimizer: SparseOptimizerConfig,
        kernels: Kernels,
        *,
        seed: int,
        dtype: str,
    ) -> None:
        """Begin with no row in memory.

        Args:
            num_rows: rows of each table; one costs nothing before it is looked up.
            dim: width of a row.
            optimizer: update rule, whose state lies beside each row.
            kernels: what computes.
            seed: of the rows' first values.
            dtype: float32 or float64.
        """
        self._num_rows, self._optimizer, self.kernels = dict(num_rows), optimizer, kernels
        self.dtype: torch.dtype = getattr(torch, dtype)
        width = state_width(optimizer, dim)
        self.stores: dict[str, ArrayStore] = {
            table: memory_store(
                TableLayout(table=table, dim=dim, state_width=width, dtype=dtype, seed=seed)
            )
            for table in num_rows
        }
        self._num_lent = 0
        self._num_updates = 0

    def lend(self, rows: Mapping[str, NDArray[np.int64]]) -> tuple[int, dict[str, ArenaRows]]:
        """Return where rows lie, and the number of this call, which `update` asks for.

        Where no gradient is wanted, these are copies, and no row is made.

        Args:
            rows: table to distinct ascending rows.

        Raises:
            ValueError: a row is beyond its table.
        """
        for table, wanted in rows.items():
            limit = self._num_rows[table]
            if len(wanted) and wanted[-1] >= limit:
                raise ValueError(
                    f"ids must be below num_embeddings, got {wanted[-1]} for table {table!r} with "
                    f"num_embeddings={limit}; hash them, or enlarge the table"
                )
        if not torch.is_grad_enabled():
            found = fetch_rows(self.stores, self._num_updates, rows)
            return self._num_lent, {table: arena_rows(Lent(r)) for table, r in found.items()}
        self._num_lent += 1
        return self._num_lent, self._lent(rows)

    def update(
        self,
        number: int,
        rows: Mapping[str, NDArray[np.int64]],
        lent: Mapping[str, ArenaRows],
        readers: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
        gradients: PlaceGradients,
    ) -> None:
        """Sum the gradients of rows over who reads them, and apply the update rule.

        Args:
            number: of the call that lent them; where others came since, rows may lie elsewhere.
            rows: table to the rows of the step.
            lent: where they lay.
            readers: table to readers, where each row's lie, and the factors of each.
            gradients: of each place that is read from.
        """
        if number != self._num_lent:
            lent = self._lent(rows)
        tables = [
            TableRows(
                rows=lent[table],
                readers=found,
                reader_offsets=offsets,
                factors=factors,
                more=None,
            )
            for table, (found, offsets, factors) in readers.items()
        ]
        self.kernels.update(tables, gradients, rule_at(self._optimizer, self._num_updates))
        self._num_updates += 1

    def _lent(self, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, ArenaRows]:
        return {table: arena_rows(self.stores[table].lend(found)) for table, found in rows.items()}

    def set_rows(self, table: str, rows: NDArray[np.int64], values: Array) -> None:
        """Give rows other values, and no optimizer state.

        Args:
            table: its name.
            rows: (n,), distinct.
            values: (n, dim).
        """
        store = self.stores[table]
        state = np.zeros((len(rows), store.layout.state_width), values.dtype)
        store.write(rows, Records(values, state))
        self._num_lent += 1

    def state(self) -> dict[str, Any]:
        """Return every row ever updated, with its optimizer state."""
        tables: dict[str, dict[str, torch.Tensor]] = {}
        for table, store in self.stores.items():
            none = np.zeros(0, np.int64)
            parts = [(none, store.fetch(none)), *store.contents()]
            arrays = {
                "rows": [rows for rows, _ in parts],
                "values": [records.values for _, records in parts],
                "state": [records.state for _, records in parts],
            }
            tables[table] = {n: torch.from_numpy(np.concatenate(a)) for n, a in arrays.items()}
        return {"num_updates": self._num_updates, "tables": tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the rows of `state` in the place of those with the same number."""
        for table, arrays in state["tables"].items():
            records = Records(arrays["values"].numpy(), arrays["state"].numpy())
            self.stores[table].write(arrays["rows"].numpy(), records)
        self._num_updates = state["num_updates"]
        self._num_lent += 1
