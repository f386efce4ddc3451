"""Tables as bytes, cut by where they go."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pipelines.beam.packets import PACKET_BYTES


def to_bytes(table: pa.Table) -> bytes:
    """Return a table as LZ4 Arrow IPC bytes."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """Undo `to_bytes`."""
    return pa.ipc.open_stream(data).read_all()


def cut_by(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, pa.Table]]:
    """Yield (target, rows of that target), targets ascending, rows in order."""
    if not table.num_rows:
        return
    order = np.argsort(target, kind="stable")
    sorted_rows, sorted_target = table.take(pa.array(order)), target[order]
    cuts = np.flatnonzero(np.diff(sorted_target, prepend=-1))
    for start, end in zip(cuts, [*cuts[1:], len(target)], strict=True):
        yield int(sorted_target[start]), sorted_rows.slice(start, end - start)


def spread(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield (target, rows of that target as bytes), targets ascending, rows in order."""
    for part, rows in cut_by(table, target):
        for content in contents(rows):
            yield part, content


def contents(table: pa.Table) -> Iterator[bytes]:
    """Yield the rows as bytes, as few times as a runner's shuffle takes them; one row is whole."""
    content = to_bytes(table)
    if len(content) <= PACKET_BYTES or table.num_rows == 1:
        yield content
        return
    half = table.num_rows // 2
    yield from contents(table.slice(0, half))
    yield from contents(table.slice(half))
