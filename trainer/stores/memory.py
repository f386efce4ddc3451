"""A store in memory: what `plain` trains on."""

from __future__ import annotations

import numpy as np

from schemas.jagged import Array
from trainer.stores.store import ArrayStore, TableLayout


class _Memory:
    """Arrays that grow by copying; pages that no row has reached cost nothing."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._arrays: dict[str, Array] = {}

    def __call__(self, name: str, num_rows: int, width: int) -> Array:
        larger = np.empty((num_rows, width), self._dtype)
        if name in self._arrays:
            larger[: len(self._arrays[name])] = self._arrays[name]
        self._arrays[name] = larger
        return larger


def memory_store(layout: TableLayout) -> ArrayStore:
    """Return an empty store in memory."""
    return ArrayStore(layout, _Memory(layout.dtype))
