"""A search of all bytes of all files below a directory for one id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def found_in(directory: Path, value: int | str) -> list[str]:
    """Name each file below a directory that holds an id, in whatever form.

    Parquet files are also read column by column, so that compression and encodings hide nothing,
    and their minima and maxima are looked at; `.npy` files are read as their numbers, `.zst` files
    as what they compress.

    Args:
        directory: what is searched, hidden files too.
        value: the id; distinctive, since a part of a longer text or number counts.
    """
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink())
    return [str(p.relative_to(directory)) for p in files if holds(p, value)]


def holds(path: Path, value: int | str) -> bool:
    """Tell whether a file holds an id: as text, as little-endian int64, or as a decoded value."""
    needles = [str(value).encode()]
    if isinstance(value, int):
        needles.append(int(value).to_bytes(8, "little", signed=True))
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = pa.CompressedInputStream(pa.py_buffer(data), "zstd").read()
    if any(needle in data for needle in needles) or str(value) in path.name:
        return True
    if path.suffix == ".parquet":
        return any(_is(found, value) for found in parquet_values(path))
    if path.suffix == ".npy":
        return bool(np.any(np.load(path, allow_pickle=False) == value))
    return False


def parquet_values(path: Path) -> Iterator[Any]:
    """Yield every distinct value of every column of a Parquet file, and its statistics."""
    file = pq.ParquetFile(path)
    for column in file.read().columns:
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


def _is(found: Any, value: int | str) -> bool:
    if isinstance(found, str):
        return str(value) in found
    return type(found) is type(value) and found == value
