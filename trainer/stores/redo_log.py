"""An append-only file of checksummed records: what a store process replays after it died.

A record is a header (magic, CRC-32 of all that follows, bytes of the payload)
and the payload. A process that is killed leaves at most one torn record, the
last, which nobody was told of; it is cut off. Damage before a good record is
refused by name: acknowledged writes are never dropped in silence.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.errors import SchemaError

MAGIC = b"PRL1"
_HEADER = struct.Struct("<4sI")
_LENGTH = struct.Struct("<Q")
_FRONT = _HEADER.size + _LENGTH.size

Buffer = bytes | bytearray | memoryview


class RedoLog:
    """Appends records; each is whole or absent."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        """Open at the end, made when missing.

        Args:
            path: the file.
            sync: wait after each record until it lies on the device. Without, records survive the
                death of the process at once, and that of the machine from `flush_to_disk` on.
        """
        self._path = path
        self._sync = sync
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._end = os.fstat(self._file).st_size

    @property
    def num_bytes(self) -> int:
        """Bytes of whole records."""
        return self._end

    def append(self, parts: Sequence[Buffer]) -> None:
        """Append one record, its payload given in parts.

        Raises:
            SchemaError: there is no room; the file is as it was.
        """
        length = _LENGTH.pack(sum(len(part) for part in parts))
        crc = zlib.crc32(length)
        for part in parts:
            crc = zlib.crc32(part, crc)
        try:
            self._write([_HEADER.pack(MAGIC, crc), length, *parts])
            if self._sync:
                os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise SchemaError(
                f"disk must have room for a record, got {error.strerror}; free some and go on, "
                "the record was not taken and nothing before it is lost",
                file=str(self._path),
            ) from error
        self._end += _FRONT + sum(len(part) for part in parts)

    def _write(self, parts: Sequence[Buffer]) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            written = os.writev(self._file, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def flush_to_disk(self) -> None:
        """Wait until all records lie on the device."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def replay(path: Path) -> Iterator[memoryview]:
    """Yield the payload of each record, and cut a torn last one off.

    Raises:
        SchemaError: a record before a good one is damaged.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    end = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with memoryview(data) as view:
            while (payload := _payload(view, end)) is not None:
                end += _FRONT + len(payload)
                with payload:
                    yield payload
            _refuse_damage(data, view, end, path)
        size = len(data)
    if end < size:
        os.truncate(path, end)


def _payload(view: memoryview, start: int) -> memoryview | None:
    if start + _FRONT > len(view):
        return None
    magic, crc = _HEADER.unpack_from(view, start)
    (length,) = _LENGTH.unpack_from(view, start + _HEADER.size)
    end = start + _FRONT + length
    if magic != MAGIC or end > len(view):
        return None
    with view[start + _HEADER.size : end] as checked:
        return view[start + _FRONT : end] if zlib.crc32(checked) == crc else None


def _refuse_damage(data: mmap.mmap, view: memoryview, start: int, path: Path) -> None:
    at = data.find(MAGIC, start + 1)
    while at >= 0:
        if (good := _payload(view, at)) is not None:
            good.release()
            raise SchemaError(
                "record must have its checksum, got other bytes before a good record; "
                "restore the file, or go on from the run's checkpoint with an empty directory",
                file=str(path),
                place=f"byte {start}",
            )
        at = data.find(MAGIC, at + 1)
