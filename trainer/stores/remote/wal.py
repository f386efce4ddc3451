"""The write-ahead log of a shard: an append-only file of checksummed records.

A record is a header (magic, CRC-32 of everything that follows, payload length) and its payload.
A killed process leaves at most one torn record, the last one, which was never acknowledged: it is
truncated. Damage before an intact record raises an error, so that no acknowledged write is dropped
silently.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.local_files import sync_directory
from trainer.stores.api import TableLayout
from trainer.stores.remote.ownership import Ranges, ShardControl, control_from_json
from trainer.stores.remote.wire import layouts_from_json, record_width

MAGIC = b"PRL1"
_HEADER = struct.Struct("<4sI")
_LENGTH = struct.Struct("<Q")
_FRONT = _HEADER.size + _LENGTH.size

Buffer = bytes | bytearray | memoryview


class RecordLog:
    """A file of records; appending one is atomic."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        """Open or create the file.

        Args:
            path: the file.
            sync: fsync each record. Without it, records survive the death of the process at once,
                but that of the machine only after `flush_to_disk`.
        """
        self.path = path
        self._sync = sync
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.num_bytes = os.fstat(self._file).st_size

    def append(self, parts: Sequence[Buffer]) -> None:
        """Append one record with the concatenated parts as payload.

        Raises:
            SchemaError: the disk is full; the file is unchanged.
        """
        length = _LENGTH.pack(sum(len(part) for part in parts))
        crc = zlib.crc32(length)
        for part in parts:
            crc = zlib.crc32(part, crc)
        self.append_raw([_HEADER.pack(MAGIC, crc), length, *parts])

    def append_raw(self, parts: Sequence[Buffer]) -> None:
        """Append whole records with their headers, or a part of them; raises as `append`."""
        try:
            self._write(parts)
            if self._sync:
                os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self.num_bytes)
            raise SchemaError(
                f"no room on disk for a record: {error.strerror}; free some and retry, nothing "
                "before the record is lost",
                file=str(self.path),
            ) from error
        self.num_bytes += sum(len(part) for part in parts)

    def _write(self, parts: Sequence[Buffer]) -> None:
        pending = [memoryview(part) for part in parts if len(part)]
        while pending:
            written = os.writev(self._file, pending)
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if written:
                pending[0] = pending[0][written:]

    def flush_to_disk(self) -> None:
        """Wait until all records are on the device."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_records(path: Path) -> Iterator[memoryview]:
    """Yield the payload of each record; a torn last record is truncated.

    Raises:
        SchemaError: a record before an intact one is damaged.
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
            _check_damage(data, view, end, path)
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


def _check_damage(data: mmap.mmap, view: memoryview, start: int, path: Path) -> None:
    at = data.find(MAGIC, start + 1)
    while at >= 0:
        if (intact := _payload(view, at)) is not None:
            intact.release()
            raise SchemaError(
                "damaged record before an intact one; restore the file, or resume the run from "
                "its checkpoint with an empty directory",
                file=str(path),
                location=f"byte {start}",
            )
        at = data.find(MAGIC, at + 1)


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """The tables of the log; its first record.

    Attributes:
        layouts: tables by name, all of one shape.
    """

    layouts: Mapping[str, TableLayout]

    def to_buffers(self) -> list[Buffer]:
        """Return the payload."""
        return _payload_buffers(
            {"op": "open", "layouts": [asdict(each) for each in self.layouts.values()]}
        )


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """A new control state.

    Attributes:
        control: the state.
        dropped: slots whose rows are deleted.
    """

    control: ShardControl
    dropped: Ranges = ()

    def to_buffers(self) -> list[Buffer]:
        """Return the payload."""
        return _payload_buffers(
            {"op": "control", "dropped": self.dropped, **self.control.to_json()}
        )


@dataclass(frozen=True, slots=True)
class RowsEntry:
    """Written rows.

    Attributes:
        tables: table to its rows; `steps` and `block` are concatenated over tables.
        steps: (n,) int64, step of each record.
        block: (n, record_width).
        counted: whether it is a message of a trainer, which `ShardControl.sequence` counts.
    """

    tables: Mapping[str, NDArray[np.int64]]
    steps: NDArray[np.int64]
    block: Array
    counted: bool = False

    def to_buffers(self) -> list[Buffer]:
        """Return the payload."""
        counts = [[table, len(rows)] for table, rows in self.tables.items()]
        rows = np.concatenate([*self.tables.values()])
        header = {"op": "rows", "tables": counts, "counted": self.counted}
        return _payload_buffers(header, rows, self.steps, self.block)


Entry = OpenEntry | ControlEntry | RowsEntry


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a log; a torn last record is truncated.

    Raises:
        SchemaError: a record before an intact one is damaged.
    """
    layouts: Mapping[str, TableLayout] = {}
    for payload in read_records(path):
        size = 4 + int.from_bytes(payload[:4], "little")
        header = json.loads(bytes(payload[4:size]))
        if header["op"] == "open":
            layouts = layouts_from_json(header["layouts"])
            yield OpenEntry(layouts)
        elif header["op"] == "control":
            dropped = tuple((int(first), int(end)) for first, end in header["dropped"])
            yield ControlEntry(control_from_json(header), dropped)
        else:
            yield _rows_entry(header, payload, size, next(iter(layouts.values())))


def _rows_entry(
    header: Mapping[str, Any], payload: memoryview, start: int, layout: TableLayout
) -> RowsEntry:
    counts = header["tables"]
    count = sum(n for _, n in counts)
    # copies: the file is unmapped after the replay
    numbers = np.frombuffer(payload, np.int64, 2 * count, start).copy()
    width = record_width(layout)
    block = np.frombuffer(payload, layout.dtype, count * width, start + 16 * count).copy()
    tables: dict[str, NDArray[np.int64]] = {}
    end = 0
    for table, n in counts:
        tables[table] = numbers[end : end + n]
        end += n
    block = block.reshape(count, width)
    return RowsEntry(tables, numbers[count:], block, bool(header["counted"]))


def _payload_buffers(header: dict[str, Any], *arrays: Array) -> list[Buffer]:
    text = json.dumps(header, sort_keys=True).encode()
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    return [len(text).to_bytes(4, "little") + text, *(a.view(np.uint8).data for a in flat)]


_NAME_DIGITS = 8
_FLUSH_BYTES = 64 << 20
"""Bytes of a new log after which they are flushed, so that calls do not wait for the disk later."""
_COPY_BYTES = 4 << 20


class LogRewrite:
    """A new log that will replace another one; a context that removes it unless it is complete.

    Records that are appended to the old log meanwhile are copied behind those of the new one. So
    these may be of any time since the start: replayed in order, later records win.
    """

    def __init__(self, path: Path, old: RecordLog | None) -> None:
        """Create the file under a temporary name.

        Args:
            path: of the new log.
            old: the log to be replaced; it is not appended to during this call.
        """
        self.path, self.old = path, old
        self._partial = path.with_suffix(".partial")
        self._partial.unlink(missing_ok=True)
        self._log = RecordLog(self._partial, sync=False)
        self._source = None if old is None else old.path.open("rb", buffering=0)
        self._copied = 0 if old is None else old.num_bytes
        self._flushed = 0

    def append(self, entry: Entry) -> None:
        """Append a record of the state.

        Raises:
            SchemaError: the disk is full.
        """
        self._log.append(entry.to_buffers())
        if self._log.num_bytes - self._flushed > _FLUSH_BYTES:
            self.flush_to_disk()

    def copy_appended(self) -> None:
        """Copy what was appended to the old log since the last call; raises as `append`."""
        if self.old is None or self._source is None:
            return
        end = self.old.num_bytes
        while self._copied < end:
            size = min(end - self._copied, _COPY_BYTES)
            self._log.append_raw([os.pread(self._source.fileno(), size, self._copied)])
            self._copied += size

    def flush_to_disk(self) -> None:
        """Wait until all records are on the device."""
        self._log.flush_to_disk()
        self._flushed = self._log.num_bytes

    def complete(self) -> None:
        """Copy the last records and give the log its name; raises as `append`."""
        self.copy_appended()
        self.flush_to_disk()
        self._partial.rename(self.path)
        sync_directory(self.path.parent)

    def __enter__(self) -> LogRewrite:
        return self

    def __exit__(self, *error: object) -> None:
        self._log.close()
        if self._source is not None:
            self._source.close()
        self._partial.unlink(missing_ok=True)


class ShardLog:
    """The directory of logs: the newest is the state; locked by one process."""

    def __init__(self, directory: Path, *, sync: bool) -> None:
        """Open nothing yet; see `load`.

        Args:
            directory: of the logs.
            sync: fsync each record.
        """
        self.directory = directory
        self._sync = sync
        self._generation = 0
        self._log: RecordLog | None = None
        self._lock: int | None = None

    def load(self) -> Iterator[Entry]:
        """Lock the directory, yield the entries of its newest log, and open it for appending.

        Raises:
            SchemaError: another process has the directory, or its log is damaged.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_directory(self.directory)
        for leftover in self.directory.glob("*.partial"):
            leftover.unlink()
        logs = sorted(self.directory.glob("log-*.bin"))
        if not logs:
            return
        yield from read_entries(logs[-1])
        for old in logs[:-1]:
            old.unlink()
        self._generation = int(logs[-1].stem.removeprefix("log-"))
        self._log = RecordLog(logs[-1], sync=self._sync)

    @property
    def num_bytes(self) -> int:
        """Bytes of the log."""
        return 0 if self._log is None else self._log.num_bytes

    def append(self, entry: Entry) -> None:
        """Append one record.

        Raises:
            SchemaError: the disk is full; the log is unchanged.
        """
        assert self._log is not None, "a store has a log once it is open"
        self._log.append(entry.to_buffers())

    def flush_to_disk(self) -> None:
        """Wait until all records are on the device."""
        assert self._log is not None, "a store has a log once it is open"
        self._log.flush_to_disk()

    def replace(self, entries: Iterable[Entry]) -> None:
        """Write a new log and delete the old one.

        Raises:
            SchemaError: the disk is full; the old log stays.
        """
        with self.rewrite() as rewrite:
            for entry in entries:
                rewrite.append(entry)
            self.switch_to(rewrite)
        self.remove_before(rewrite)

    def rewrite(self) -> LogRewrite:
        """Start a new log to `switch_to`; the current one may be appended to meanwhile."""
        path = self.directory / f"log-{self._generation + 1:0{_NAME_DIGITS}}.bin"
        return LogRewrite(path, self._log)

    def is_current(self, rewrite: LogRewrite) -> bool:
        """Return whether the log that was current when the rewrite started still is."""
        return rewrite.old is self._log

    def switch_to(self, rewrite: LogRewrite) -> None:
        """Append to a new log from now on; the old one must not be appended to meanwhile.

        Raises:
            SchemaError: the disk is full; the old log stays.
        """
        rewrite.complete()
        if self._log is not None:
            self._log.close()
        self._log = RecordLog(rewrite.path, sync=self._sync)
        self._generation += 1

    def remove_before(self, rewrite: LogRewrite) -> None:
        """Delete the logs that a new one has replaced."""
        for old in self.directory.glob("log-*.bin"):
            if old.name < rewrite.path.name:
                old.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the log and unlock the directory."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock_directory(directory: Path) -> int:
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise SchemaError(
            "directory is in use by another store process; end it or use another --directory",
            file=str(directory),
        ) from error
    return file
