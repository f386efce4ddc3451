"""Which rows of a step the steps around it use, too, from the index.

TorchRec's `PECEmbeddingCollection` searches for this overlap online, one step ahead.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.dataset.accesses import DECODED_CACHE_BYTES, TableAccesses
from presage.schemas.dataset.checked_files import DecodedListCache
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import SharedNextUses
from presage.schemas.oracle.next_uses import NEVER
from presage.trainer.data.collate import features_of_tables
from presage.trainer.data.decode import BatchSpec
from presage.trainer.data.kjt_lookups import slots_of_lookups
from presage.trainer.slots.slot_map import SlotMap


class StepOverlaps:
    """Overlap of the rows of a step with those of the steps around it. Not thread-safe.

    Memory: that of `TableAccesses` and `NextUses`, and 12 bytes for each row of the last steps that
    is used again soon.
    """

    def __init__(
        self, dataset: OpenDataset, order: Order, spec: BatchSpec, overlap_steps: int
    ) -> None:
        """Link the next uses of the tables that a batch looks up.

        Args:
            dataset: has the index of the order.
            order: of the steps.
            spec: sparse features of a batch.
            overlap_steps: steps before a step, and after it, that are compared with it.

        Raises:
            SchemaError: the dataset has no index of the order; the message says how to build it.
        """
        shared, cache = SharedNextUses(dataset, order), DecodedListCache(DECODED_CACHE_BYTES)
        features = features_of_tables(spec)
        self._uses = [shared.of(table) for table in features]
        self._accesses = [
            TableAccesses(dataset, table, order, cache, uses.numbering)
            for table, uses in zip(features, self._uses, strict=True)
        ]
        counts = (len(accesses.rows) for accesses in self._accesses)
        self._first_keys = [0, *accumulate(counts)]
        """Of each table; the key of a row is its number among those of all tables."""
        self._table_of = {f: i for i, names in enumerate(features.values()) for f in names}
        self._overlap_steps = overlap_steps
        self._reused: dict[int, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
        """Keys and distances of the rows of the last steps that are used again soon."""

    def masks(
        self, train_step: int, sparse: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each row of a batch is one of the next steps, and one of the last steps.

        Args:
            train_step: step of the batch.
            sparse: its rows, those of one rank or of all.

        Returns:
            (num_values,) bool, twice.

        Raises:
            SchemaError: the index lacks a row.
        """
        last = range(max(0, train_step - self._overlap_steps), train_step)
        for step in last:  # those of other worker processes, and those before a loaded state
            if step not in self._reused:
                self._read(step)
        self._reused = {step: self._reused[step] for step in last}
        again = [keys[step + d == train_step] for step, (keys, d) in self._reused.items()]
        keys, is_next = self._read(train_step)
        is_previous = np.isin(keys, np.concatenate([keys[:0], *again]), assume_unique=True)
        found = self._find(train_step, keys, sparse)
        return torch.from_numpy(is_next[found]), torch.from_numpy(is_previous[found])

    def _read(self, train_step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ascending keys of a step's rows, and which are used soon; remember these."""
        tables = zip(self._accesses, self._uses, self._first_keys[:-1], strict=True)
        keys, distances = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for accesses, uses, first in tables:
            numbers, of_table = accesses.entries(train_step, uses[train_step])
            keys.append(numbers + first)
            distances.append(of_table)
        step_keys, d = np.concatenate(keys), np.concatenate(distances)
        is_soon = (d != NEVER) & (d <= self._overlap_steps)
        self._reused[train_step] = step_keys[is_soon], d[is_soon]
        return step_keys, is_soon

    def _find(
        self, train_step: int, keys: NDArray[np.int64], sparse: KeyedJaggedTensor
    ) -> NDArray[np.int64]:
        """Return the position of each row of a batch among a step's keys."""
        starts = np.searchsorted(keys, self._first_keys)
        tables = zip(
            self._accesses, np.split(keys, starts[1:-1]), self._first_keys[:-1], strict=True
        )
        slots = SlotMap(starts)
        slots.add(
            np.arange(len(keys), dtype=np.int32),
            np.concatenate([accesses.rows[own - first] for accesses, own, first in tables]),
        )
        keys_of_batch = sparse.keys()
        of_keys = [self._table_of[name] for name in keys_of_batch]
        slot_of_value, offsets = slots_of_lookups(
            slots, sparse, of_keys, f"index of step {train_step}"
        )
        return slot_of_value + np.repeat(starts[of_keys], np.diff(offsets))
