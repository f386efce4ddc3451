"""Arrow tables as bytes for a runner's shuffle, cut so that no element is too large for it.

A message is what belongs together: any number of Arrow streams, one after the
other. Packets of one message may arrive in any order, mixed with others.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa

PACKET_BYTES = 8 << 20
"""Most bytes of an element in a runner's shuffle."""

_HEAD = struct.Struct(">16sII")  # the message's digest, the packet's index, packets of the message


def to_message(*tables: pa.Table) -> bytes:
    """Return tables as LZ4 Arrow IPC streams, one after the other."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_message(data: bytes) -> list[pa.Table]:
    """Undo `to_message`."""
    source = pa.BufferReader(data)
    tables: list[pa.Table] = []
    while source.tell() < source.size():
        tables.append(pa.ipc.open_stream(source).read_all())
    return tables


def packets(message: bytes, limit: int = PACKET_BYTES) -> Iterator[bytes]:
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


def messages(arrived: Iterable[bytes]) -> Iterator[bytes]:
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
