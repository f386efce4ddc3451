"""The bytes in which tasks send each other rows and samples, and rows by their targets.

On a runner of Beam the shuffle carries elements of at most 8 MiB, unless a single row is larger.
Local builds have files of their own (`exchange.py`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from presage.pipelines.samples.tuples import Tuples, drop_unused_tuples

ELEMENT_BYTES = 8 << 20
"""Maximum size of an element in a runner's shuffle, unless it is one row."""

_SIZE = struct.Struct(">Q")  # bytes of encoded tables before compression
_CODEC = "lz4"
_ELEMENT = b"element"


SourceRows = tuple[str, pa.Table]
"""Name of a source or side table, and raw rows of it."""
Element = Tuples | SourceRows | pa.Table
"""What one task sends to another."""


def to_ipc(element: Element) -> bytes:
    """Return an element as concatenated Arrow IPC streams, compressed together by LZ4.

    Compressing each buffer by itself, as Arrow does, takes four times as long to read for 60
    columns of 1,800 rows.
    """
    tables: list[pa.Table] = []
    if isinstance(element, Tuples):
        names = {"groups": list(element.uniques)}
        tables = [with_references(element), *element.uniques.values()]
    elif isinstance(element, tuple):
        names, tables = {"source": element[0]}, [element[1]]
    else:
        names, tables = {}, [element]
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(use_threads=False)
    metadata = {**(tables[0].schema.metadata or {}), _ELEMENT: json.dumps(names)}
    tables[0] = tables[0].replace_schema_metadata(metadata)
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    content = sink.getvalue()
    return _SIZE.pack(content.size) + pa.compress(content, _CODEC, asbytes=True)


def from_ipc(data: bytes) -> Any:
    """Undo `to_ipc`."""
    (size,) = _SIZE.unpack_from(data)
    compressed = pa.py_buffer(data).slice(_SIZE.size)
    source = pa.BufferReader(pa.decompress(compressed, size, _CODEC))
    tables: list[pa.Table] = []
    while source.tell() < size:
        tables.append(pa.ipc.open_stream(source).read_all())
    metadata = dict(tables[0].schema.metadata)
    names = json.loads(metadata.pop(_ELEMENT))
    first = tables[0].replace_schema_metadata(metadata or None)
    if "groups" in names:
        return without_references(first, dict(zip(names["groups"], tables[1:], strict=True)))
    return (names["source"], first) if "source" in names else first


def elements_of(rows: Tuples | pa.Table) -> Iterator[bytes]:
    """Yield samples or rows as elements of at most `ELEMENT_BYTES`, but at least one row each."""
    content = to_ipc(rows)
    count = rows.num_samples if isinstance(rows, Tuples) else rows.num_rows
    if len(content) <= ELEMENT_BYTES or count == 1:
        yield content
        return
    for start, end in ((0, count // 2), (count // 2, count)):
        if isinstance(rows, Tuples):
            yield from elements_of(drop_unused_tuples(rows.take(np.arange(start, end))))
        else:
            yield from elements_of(rows.slice(start, end - start))


def group_rows(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, pa.Table]]:
    """Yield (target, rows of the target) in ascending order of targets; rows keep their order."""
    if not table.num_rows:
        return
    order = np.argsort(target, kind="stable")
    sorted_rows, sorted_target = table.take(pa.array(order)), target[order]
    cuts = np.flatnonzero(np.diff(sorted_target, prepend=-1))
    for start, end in zip(cuts, [*cuts[1:], len(target)], strict=True):
        yield int(sorted_target[start]), sorted_rows.slice(start, end - start)


def encode_by_target(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield (target, encoded rows of the target), like `group_rows`."""
    for index, rows in group_rows(table, target):
        for content in elements_of(rows):
            yield index, content


SHUFFLE = "shuffle"
"""Directory of shuffle files below a segment being built; removed before the commit."""

_REFERENCE = "_reference_"


class ReceivedSamples:
    """The samples of elements, as a reiterable."""

    def __init__(self, sent: Iterable[bytes]) -> None:
        self._sent = sent
        self._digests: list[bytes] = []

    def __iter__(self) -> Iterator[Tuples]:
        """Read the elements; raise RuntimeError if they come in another order than before."""
        return map(from_ipc, check_same_order(self._sent, self._digests))


def check_same_order(messages: Iterable[bytes], digests: list[bytes]) -> Iterator[bytes]:
    """Yield messages; raise RuntimeError if their order differs from that of an earlier iteration.

    Runners allow repeated iterations over grouped values, but guarantee no order.

    `digests` are those of earlier iterations, and are extended.
    """
    for index, message in enumerate(messages):
        digest = hashlib.sha256(message).digest()
        if index == len(digests):
            digests.append(digest)
        if digest != digests[index]:
            raise RuntimeError("the runner changed the order of samples between reads; try again")
        yield message


def with_references(samples: Tuples) -> pa.Table:
    """Return samples with the rows of their tuples as columns."""
    table = samples.samples
    for group, references in samples.references.items():
        column = pa.array(references.astype("int32"))
        table = table.append_column(_REFERENCE + group, column)
    return table


def without_references(table: pa.Table, uniques: dict[str, pa.Table]) -> Tuples:
    """Undo `with_references`."""
    hidden = [_REFERENCE + group for group in uniques]
    references = {g: table[_REFERENCE + g].to_numpy().astype("int64") for g in uniques}
    return Tuples(table.drop_columns(hidden) if hidden else table, references, uniques)
