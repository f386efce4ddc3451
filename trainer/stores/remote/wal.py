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
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.storage.local_files import sync_directory
from presage.schemas.typed_values import from_json
from presage.trainer.stores.remote.ownership import ShardControl
from presage.trainer.stores.store import Records, TableLayout

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
        whole = [_HEADER.pack(MAGIC, crc), length, *parts]
        try:
            self._write(whole)
            if self._sync:
                os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self.num_bytes)
            raise SchemaError(
                f"no room on disk for a record: {error.strerror}; free some and retry, nothing "
                "before the record is lost",
                file=str(self.path),
            ) from error
        self.num_bytes += sum(len(part) for part in whole)

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
class RowsEntry:
    """Rows written by one message.

    Attributes:
        tables: table to its rows.
        train_step: of the records.
        records: of the rows of all tables.
    """

    tables: Mapping[str, NDArray[np.int64]]
    train_step: int
    records: Records


Entry = ShardControl | RowsEntry


def entry_to_buffers(entry: Entry) -> list[Buffer]:
    """Return the payload of an entry."""
    header: dict[str, Any]
    arrays: list[Array] = []
    if isinstance(entry, RowsEntry):
        counts = [[table, len(rows)] for table, rows in entry.tables.items()]
        header = {"op": "rows", "tables": counts, "step": entry.train_step}
        arrays = [np.concatenate([*entry.tables.values()]), entry.records.block]
    else:
        header = {"op": "control", **asdict(entry)}
    text = json.dumps(header, sort_keys=True).encode()
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return [len(text).to_bytes(4, "little") + text, *(array.data for array in flat)]


def read_entries(paths: Sequence[Path]) -> Iterator[Entry]:
    """Yield the entries of files that follow each other; a torn last record is truncated.

    Raises:
        SchemaError: a record before an intact one is damaged.
    """
    layouts: Mapping[str, TableLayout] = {}
    for payload in chain.from_iterable(map(read_records, paths)):
        size = 4 + int.from_bytes(payload[:4], "little")
        header = json.loads(bytes(payload[4:size]))
        if header.pop("op") == "control":
            try:
                control = from_json(ShardControl, header)
            except ValueError as error:
                raise SchemaError(
                    "log was written by another version; start the store with an empty --directory"
                ) from error
            layouts = control.layouts
            yield control
        else:
            yield _rows_entry(header, payload, size, next(iter(layouts.values())))


def _rows_entry(
    header: Mapping[str, Any], payload: memoryview, start: int, layout: TableLayout
) -> RowsEntry:
    # copies: the file is unmapped after the replay
    count, width = sum(n for _, n in header["tables"]), layout.width
    rows = np.frombuffer(payload, np.int64, count, start).copy()
    block = np.frombuffer(payload, layout.dtype, count * width, start + 8 * count).copy()
    tables: dict[str, NDArray[np.int64]] = {}
    end = 0
    for table, n in header["tables"]:
        tables[table] = rows[end : end + n]
        end += n
    return RowsEntry(tables, int(header["step"]), Records(block.reshape(count, width), layout.dim))


_BASE, _LOG = "base-{:08}.bin", "log-{:08}.bin"
_FLUSH_BYTES = 64 << 20
"""Bytes of a base after which they are flushed, so that calls do not wait for the disk later."""


class ShardLog:
    """The files of a store, in a directory that is locked by one process.

    `base-N.bin` is the state at some time, `log-N.bin` and all later ones have the entries since.
    A base may be written while its log is appended to: replayed in order, later entries win.
    """

    def __init__(self, directory: Path, *, sync: bool) -> None:
        """Open nothing yet; see `load`."""
        self.directory = directory
        self.number = 0
        """Number of the current log."""
        self._sync = sync
        self._log: RecordLog | None = None
        self._lock: int | None = None

    def load(self) -> Iterator[Entry]:
        """Lock the directory, yield all entries, and open the newest log for appending.

        Raises:
            SchemaError: another process has the directory, or a file is damaged.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_directory(self.directory)
        for leftover in self._files("base", ".partial"):
            leftover.unlink()
        bases = self._files("base")
        if not bases:
            return
        self._remove_before(bases[-1])
        logs = self._files("log")
        yield from read_entries([bases[-1], *logs])
        self._open(int((logs or bases)[-1].stem.partition("-")[2]))

    @property
    def num_bytes(self) -> int:
        """Bytes of the newest log."""
        return 0 if self._log is None else self._log.num_bytes

    def append(self, entry: Entry) -> None:
        """Append one record.

        Raises:
            SchemaError: the disk is full; the log is unchanged.
        """
        assert self._log is not None, "a store has a log once it is open"
        self._log.append(entry_to_buffers(entry))

    def flush_to_disk(self) -> None:
        """Wait until all records are on the device."""
        assert self._log is not None, "a store has a log once it is open"
        self._log.flush_to_disk()

    def begin_log(self) -> int:
        """Append to the next log from now on; return its number, for `write_base`."""
        self._open(self.number + 1)
        return self.number

    def write_base(self, number: int, entries: Iterable[Entry]) -> int:
        """Write the state at the start of the current log, and delete older files.

        Args:
            number: of the log.
            entries: of any time since; nothing is written if they raise.

        Returns:
            Bytes of the state.

        Raises:
            SchemaError: the disk is full; the older files stay.
        """
        path = self.directory / _BASE.format(number)
        partial = path.with_suffix(".partial")
        base, flushed = RecordLog(partial, sync=False), 0
        try:
            for entry in entries:
                base.append(entry_to_buffers(entry))
                if base.num_bytes - flushed > _FLUSH_BYTES:
                    base.flush_to_disk()
                    flushed = base.num_bytes
            base.flush_to_disk()
            partial.rename(path)
            sync_directory(self.directory)
        finally:
            base.close()
            partial.unlink(missing_ok=True)
        self._remove_before(path)
        return base.num_bytes

    def close(self) -> None:
        """Close the log and unlock the directory."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self, number: int) -> None:
        log = RecordLog(self.directory / _LOG.format(number), sync=self._sync)
        sync_directory(self.directory)
        if self._log is not None:
            self._log.close()
        self._log, self.number = log, number

    def _files(self, kind: str, suffix: str = ".bin") -> list[Path]:
        """Return the files of a kind, in order; others in the directory are not ours."""
        name = re.compile(rf"{kind}-[0-9]{{8,}}{re.escape(suffix)}")
        return sorted(path for path in self.directory.iterdir() if name.fullmatch(path.name))

    def _remove_before(self, base: Path) -> None:
        number = base.stem.partition("-")[2]
        for old in [*self._files("base"), *self._files("log")]:
            if old.stem.partition("-")[2] < number:
                old.unlink(missing_ok=True)


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
