"""A store in memory-mapped files: tables larger than memory, with a cache in front.

The operating system writes pages back when it likes; a run that dies starts
from its checkpoint, never from these files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from schemas.jagged import Array
from trainer.stores.store import ArrayStore, TableLayout


class _MappedFiles:
    """One sparse file per array, made longer and mapped again when it grows."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._directory = directory
        self._dtype = np.dtype(dtype)

    def __call__(self, name: str, num_rows: int, width: int) -> Array:
        if width == 0:
            return np.empty((num_rows, 0), self._dtype)
        path = self._directory / f"{name}.bin"
        with path.open("ab") as file:
            file.truncate(num_rows * width * self._dtype.itemsize)
        return np.memmap(path, self._dtype, mode="r+", shape=(num_rows, width))


def mmap_store(layout: TableLayout, directory: Path) -> ArrayStore:
    """Return an empty store in files below `directory`, replacing those of an earlier run."""
    folder = directory / layout.table
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.bin"):
        path.unlink()
    return ArrayStore(layout, _MappedFiles(folder, layout.dtype))
