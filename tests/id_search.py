"""A search of all bytes of all files below a directory for one id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def files_with_id(directory: Path, value: int | str) -> list[str]:
    """Return the files below a directory, including hidden ones, that contain an id in any form.

    Besides the raw bytes, the decoded values and statistics of Parquet files are searched, the
    numbers of `.npy` files, and the decompressed content of `.zst` files.

    Args:
        directory: to search.
        value: the id; must be distinctive, since a part of a longer text or number matches.
    """
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink())
    return [str(p.relative_to(directory)) for p in files if holds(p, value)]


def holds(path: Path, value: int | str) -> bool:
    """Return whether a file contains an id as text, as little-endian int64, or decoded."""
    needles = [str(value).encode()]
    if isinstance(value, int):
        needles.append(int(value).to_bytes(8, "little", signed=True))
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = pa.CompressedInputStream(pa.py_buffer(data), "zstd").read()
    if any(needle in data for needle in needles) or str(value) in path.name:
        return True
    if path.suffix == ".parquet":
        return any(_matches(stored, value) for stored in parquet_values(path))
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        parts = [array[name] for name in array.dtype.names] if array.dtype.names else [array]
        return any(bool(np.any(part == value)) for part in parts)
    return False


def parquet_values(path: Path) -> Iterator[Any]:
    """Yield the distinct values of every column of a Parquet file, and its statistics."""
    file = pq.ParquetFile(path)
    for column in file.read().flatten().columns:
        array = column.combine_chunks()
        while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            array = array.flatten()
        yield from array.unique().to_pylist()
        if "gaps" in file.schema_arrow.names:  # differences of ascending numbers
            for gaps in (file.read(["gaps"])["gaps"]).to_pylist():
                yield from np.cumsum(gaps).tolist()
    for group in range(file.metadata.num_row_groups):
        for index in range(file.metadata.num_columns):
            statistics = file.metadata.row_group(group).column(index).statistics
            if statistics is not None and statistics.has_min_max:
                yield from (statistics.min, statistics.max)


def _matches(stored: Any, value: int | str) -> bool:
    if isinstance(stored, str):
        return str(value) in stored
    return type(stored) is type(value) and stored == value
