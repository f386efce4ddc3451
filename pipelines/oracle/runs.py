"""Scratch files of an external sort: columns in buckets, each bucket mapped into memory alone.

One file per writer, one record batch per bucket: whoever works on a bucket
opens the files of all writers and reads its own batch of each, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.segments.partial import whole

Columns = Mapping[str, NDArray[Any]]


def write_run(path: Path, batches: Iterable[Columns], schema: pa.Schema) -> None:
    """Write batches of columns as they come; the file has its name when it is whole."""
    with (
        whole(path) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for columns in batches:
            arrays = [pa.array(columns[name]) for name in schema.names]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def write_buckets(
    path: Path, bucket: NDArray[np.integer], columns: Columns, num_buckets: int
) -> None:
    """Write rows by bucket, those of a bucket in the order in which they stand.

    Args:
        path: the file.
        bucket: (n,) bucket of each row, in [0, num_buckets).
        columns: (n,) arrays by name.
        num_buckets: batches of the file, empty ones too.
    """
    small = bucket.astype(np.uint16 if num_buckets <= 1 << 16 else np.int64)
    order = np.argsort(small, kind="stable")  # of 16 bits: a radix sort
    cuts = np.searchsorted(small[order], np.arange(num_buckets + 1))
    ordered = {name: column[order] for name, column in columns.items()}
    schema = pa.schema([(name, pa.from_numpy_dtype(c.dtype)) for name, c in columns.items()])
    parts = (
        {name: column[cuts[i] : cuts[i + 1]] for name, column in ordered.items()}
        for i in range(num_buckets)
    )
    write_run(path, parts, schema)


def read_bucket(path: Path, index: int) -> dict[str, NDArray[Any]]:
    """Return one bucket of a file: read-only arrays over mapped memory."""
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(index)
    return {name: batch[name].to_numpy() for name in batch.schema.names}


def chunks(paths: Iterable[Path], index: int, most: int) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield a bucket of many files, joined to chunks of about `most` rows."""
    held: list[dict[str, NDArray[Any]]] = []
    rows = 0
    for path in paths:
        held.append(read_bucket(path, index))
        rows += len(next(iter(held[-1].values())))
        if rows >= most:
            yield _joined(held)
            held, rows = [], 0
    if held:
        yield _joined(held)


def _joined(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
