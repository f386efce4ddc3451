"""How samples cross the shuffle: in memory, by value, or as references to Arrow files."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from pipelines.samples.tuples import Tuples

# Arrow tables as bytes for a runner's shuffle, cut so that no element is too large for it.
#
# A message is what belongs together: any number of Arrow streams, one after the other. Packets of
# one message may arrive in any order, mixed with others.

PACKET_BYTES = 8 << 20
"""Most bytes of an element in a runner's shuffle."""

_HEAD = struct.Struct(">16sII")  # the message's digest, the packet's index, packets of the message


def encode_tables(*tables: pa.Table) -> bytes:
    """Return tables as LZ4 Arrow IPC streams, one after the other."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def decode_tables(data: bytes) -> list[pa.Table]:
    """Undo `to_message`."""
    source = pa.BufferReader(data)
    tables: list[pa.Table] = []
    while source.tell() < source.size():
        tables.append(pa.ipc.open_stream(source).read_all())
    return tables


def split_packets(message: bytes, limit: int = PACKET_BYTES) -> Iterator[bytes]:
    """Yield a message in packets.

    Args:
        message: any bytes.
        limit: most bytes of a packet, more than its head of 24.
    """
    size = limit - _HEAD.size
    digest = hashlib.sha256(message).digest()[:16]
    starts = range(0, max(1, len(message)), size)
    for index, start in enumerate(starts):
        yield _HEAD.pack(digest, index, len(starts)) + message[start : start + size]


def join_packets(arrived: Iterable[bytes]) -> Iterator[bytes]:
    """Yield messages from their packets, in any order; nothing is kept of a message once it is out.

    A message that was sent twice comes twice.

    Raises:
        ValueError: a packet of some message is missing.

    Example:
        >>> cut = [*packets(b"abcde", 26), *packets(b"xy", 26)]
        >>> list(messages(reversed(cut)))
        [b'xy', b'abcde']
    """
    pieces: dict[bytes, dict[int, bytes]] = {}
    counts: dict[bytes, Counter[int]] = {}
    for packet in arrived:
        digest, index, of = _HEAD.unpack_from(packet)
        if of == 1:
            yield packet[_HEAD.size :]
            continue
        found = pieces.setdefault(digest, {})
        found.setdefault(index, packet[_HEAD.size :])
        count = counts.setdefault(digest, Counter())
        count[index] += 1
        if len(count) == of:
            yield b"".join(found[i] for i in range(of))
            count.subtract(range(of))
            counts[digest] = +count
            pieces[digest] = {i: found[i] for i in counts[digest]}
    missing = sum(len(count) > 0 for count in counts.values())
    if missing:
        raise ValueError(f"every packet of a message must arrive, got {missing} broken messages")


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


def group_rows(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, pa.Table]]:
    """Yield (target, rows of that target), targets ascending, rows in order."""
    if not table.num_rows:
        return
    order = np.argsort(target, kind="stable")
    sorted_rows, sorted_target = table.take(pa.array(order)), target[order]
    cuts = np.flatnonzero(np.diff(sorted_target, prepend=-1))
    for start, end in zip(cuts, [*cuts[1:], len(target)], strict=True):
        yield int(sorted_target[start]), sorted_rows.slice(start, end - start)


def encode_by_target(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield (target, rows of that target as bytes), targets ascending, rows in order."""
    for part, rows in group_rows(table, target):
        for content in encode_rows(rows):
            yield part, content


def encode_rows(table: pa.Table) -> Iterator[bytes]:
    """Yield the rows as bytes, as few times as a runner's shuffle takes them; one row is whole."""
    content = to_bytes(table)
    if len(content) <= PACKET_BYTES or table.num_rows == 1:
        yield content
        return
    half = table.num_rows // 2
    yield from encode_rows(table.slice(0, half))
    yield from encode_rows(table.slice(half))


# How samples cross from the workers that make them to those that cluster them.
#
# By reference, where workers share a directory: a mapper writes one LZ4 Arrow file per chunk and
# table, one record batch per part, and sends references through the runner's shuffle. Only
# references that came through the committed grouping are read; what a failed attempt left behind
# goes with the directory at the commit.
#
# By value, where they do not: the runner's shuffle carries the tables themselves, as LZ4 Arrow
# IPC in packets of at most 8 MiB. In memory, where all is one process (`executor.py`). The
# dataset has the same bytes.

SHUFFLE = "shuffle"
"""Directory below a segment being built; gone before the commit."""

_REFERENCE = "_reference_"


class Reference(NamedTuple):
    """Where the samples of one part in one chunk lie.

    Attributes:
        name: of the chunk's files, unique over all attempts.
        batch: record batch in each of them.
        num_samples: rows.
    """

    name: str
    batch: int
    num_samples: int


class ShuffleTransport(Protocol):
    """A way for samples to cross."""

    element: ClassVar[type]
    """What the runner's shuffle carries; Beam has a coder for it."""

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, Any]]:
        """Yield (part, element) pairs for the samples of one chunk, cut by part.

        Args:
            parts: samples of each part, None where there are none; at least one is not None.
        """
        ...

    def receive(self, sent: Iterable[Any]) -> Iterable[Tuples]:
        """Return the samples of one part, read chunk by chunk each time they are gone through.

        Args:
            sent: its elements in any order, which can be gone through again and again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reiterable:
    """What a function yields, anew for each who goes through it."""

    make: Callable[[], Iterator[Tuples]]

    def __iter__(self) -> Iterator[Tuples]:
        """Yield everything from the beginning."""
        return self.make()


@dataclass(frozen=True, slots=True)
class ByReference:
    """Through files in a directory that all workers share.

    Attributes:
        root: directory of the segment being built.
        groups: names of the groups.
    """

    root: Path
    groups: tuple[str, ...]
    element: ClassVar[type] = Reference

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, Reference]]:
        """Write the samples, then yield their references."""
        name = uuid.uuid4().hex  # never in the dataset: only this attempt's references know it
        yield from write_chunk(self.root, name, parts).items()

    def receive(self, sent: Iterable[Reference]) -> Reiterable:
        """Read the samples, references in the order of their names."""
        references = sorted(sent)
        return Reiterable(lambda: (read_reference(self.root, r, self.groups) for r in references))


@dataclass(frozen=True, slots=True)
class ByValue:
    """Through the runner's shuffle.

    Attributes:
        groups: names of the groups.
    """

    groups: tuple[str, ...]
    element: ClassVar[type] = bytes

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, bytes]]:
        """Yield the samples of each part in packets."""
        for index, part in enumerate(parts):
            if part is not None:
                tables = (part.uniques[group] for group in self.groups)
                for packet in split_packets(encode_tables(_with_references(part), *tables)):
                    yield index, packet

    def receive(self, sent: Iterable[bytes]) -> Reiterable:
        """Join the packets; only messages of which some are still to come are kept."""
        seen: list[bytes] = []
        return Reiterable(
            lambda: (self._samples(m) for m in check_same_order(join_packets(sent), seen))
        )

    def _samples(self, message: bytes) -> Tuples:
        table, *uniques = decode_tables(message)
        return _without_references(table, dict(zip(self.groups, uniques, strict=True)))


@dataclass(frozen=True, slots=True)
class InMemory:
    """Within one process: nothing is written."""

    element: ClassVar[type] = Tuples

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, Tuples]]:
        """Yield the samples of each part, which hold no memory of the others."""
        alone = sum(part is not None for part in parts) == 1
        for index, part in enumerate(parts):
            if part is not None:
                yield index, part if alone else _copied(part)

    def receive(self, sent: Iterable[Tuples]) -> Iterable[Tuples]:
        """Return the samples as they were sent."""
        return list(sent)


def _copied(part: Tuples) -> Tuples:
    uniques = {g: table.take(pa.array(np.arange(len(table)))) for g, table in part.uniques.items()}
    return Tuples(part.take(np.arange(part.num_samples)).samples, part.references, uniques)


def check_same_order(arrived: Iterable[bytes], seen: list[bytes]) -> Iterator[bytes]:
    """Yield messages; raise when they come in another order than when they were first gone through.

    Runners promise that grouped values can be gone through again, and no order.

    Args:
        arrived: the messages.
        seen: their digests, as far as they have been gone through; added to.
    """
    for index, message in enumerate(arrived):
        digest = hashlib.sha256(message).digest()
        if index == len(seen):
            seen.append(digest)
        if digest != seen[index]:
            raise RuntimeError("samples must come in the same order again, got another; try again")
        yield message


def write_chunk(root: Path, name: str, parts: Sequence[Tuples | None]) -> dict[int, Reference]:
    """Write the samples of one chunk, cut by part.

    Args:
        root: directory of the segment being built.
        name: unique name of the chunk and the attempt.
        parts: samples of each part, None where there are none; at least one is not None.

    Returns:
        A reference for each part that has samples.
    """
    present = {index: part for index, part in enumerate(parts) if part is not None}
    (root / SHUFFLE).mkdir(parents=True, exist_ok=True)
    _write(root, f"{name}.samples", [_with_references(p) for p in present.values()])
    for group in next(iter(present.values())).uniques:
        _write(root, f"{name}.{group}", [p.uniques[group] for p in present.values()])
    return {
        index: Reference(name, batch, part.num_samples)
        for batch, (index, part) in enumerate(present.items())
    }


def _with_references(part: Tuples) -> pa.Table:
    table = part.samples
    for group, references in part.references.items():
        column = pa.array(references.astype("int32"))
        table = table.append_column(_REFERENCE + group, column)
    return table


def _write(root: Path, name: str, tables: Sequence[pa.Table]) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    schema = tables[0].schema
    with (
        pa.OSFile(str(root / SHUFFLE / f"{name}.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema, options=options) as writer,
    ):
        for table in tables:
            (batch,) = table.combine_chunks().to_batches()  # a part that is present has rows
            writer.write_batch(batch)


def read_reference(root: Path, reference: Reference, groups: Sequence[str]) -> Tuples:
    """Read the samples that a reference names.

    Args:
        root: directory of the segment being built.
        reference: from `write_chunk`.
        groups: names of the groups.
    """
    samples = _read(root, f"{reference.name}.samples", reference.batch)
    uniques = {g: _read(root, f"{reference.name}.{g}", reference.batch) for g in groups}
    return _without_references(samples, uniques)


def _without_references(table: pa.Table, uniques: dict[str, pa.Table]) -> Tuples:
    hidden = [_REFERENCE + group for group in uniques]
    references = {g: table[_REFERENCE + g].to_numpy().astype("int64") for g in uniques}
    return Tuples(table.drop_columns(hidden) if hidden else table, references, uniques)


def _read(root: Path, name: str, batch: int) -> pa.Table:
    with pa.memory_map(str(root / SHUFFLE / f"{name}.arrow")) as source:
        return pa.Table.from_batches([pa.ipc.open_file(source).get_batch(batch)])
