"""Snapshots of training state in shared memory, taken at a step boundary."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.run_next_uses import SharedNextUses, most_cached_rows
from presage.schemas.errors import SchemaError
from presage.schemas.machine import free_bytes
from presage.schemas.storage.locks import lock_file
from presage.trainer.checkpoint.format import ROW_FILES, ArraySpec
from presage.trainer.stores.store import Records, RowsAndRecords, RowsInPlace, TableLayout

# ---- Memory that outlives the process that filled it: a file in /dev/shm or on a disk ----
#
# The trainer fills and commits it; the agent writes committed snapshots to disk. The agent inherits
# the open file, and with it the trainer's lock, which is held while one of the two runs. So another
# process can tell leftover memory, which it may remove, from memory in use. The name of the file
# depends on the run.

FILLING, COMMITTED, WRITTEN, FAILED = 0, 1, 2, 3
"""State of a snapshot in memory."""
DATA_OFFSET = 64
"""Start of the snapshot; the state is before it."""
WAIT_SEC = 60.0
"""Longest wait at the start of a run for the agent of an earlier process."""
_PAGE = 4096
_NOT_MAPPED = "memory is mapped before it is used"


def memory_path(directory: Path, run: Path) -> Path:
    """Return the path of a run's memory, unique to the run."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return directory / f"presage-{os.getuid()}-{name}"


class SnapshotMemory:
    """The memory of a run's snapshots, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._mapped: mmap.mmap | None = None

    def create(self, num_bytes: int) -> None:
        """Create the memory and reserve its pages.

        Raises:
            SchemaError: there is too little; names the missing bytes.
            FileExistsError: another process has created it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            file = os.open(self.path, flags, 0o600)
            is_locked = lock_file(file, WAIT_SEC, shared=True)
            if is_locked and os.fstat(file).st_nlink:
                break
            os.close(file)  # another process took it as a leftover before it was locked
        self._file = file
        if num_bytes > free_bytes(self.path.parent):
            self.remove()
            raise no_room(self.path.parent, DATA_OFFSET + num_bytes)
        try:
            self.reserve(num_bytes)
        except OSError as error:
            self.remove()
            raise no_room(
                self.path.parent, DATA_OFFSET + num_bytes, error.strerror or ""
            ) from error

    def inherit(self, file: int) -> None:
        """Map the memory that the parent process created; `file` is its descriptor."""
        self._file = file
        self.remap()

    @property
    def file(self) -> int:
        """Descriptor of the open file."""
        return self._file

    @property
    def num_bytes(self) -> int:
        """Capacity for a snapshot."""
        return os.fstat(self._file).st_size - DATA_OFFSET

    def reserve(self, num_bytes: int) -> None:
        """Grow to a capacity of at least `num_bytes`, with allocated pages.

        Raises:
            OSError: there is no room; the memory is unchanged.
        """
        old_size = os.fstat(self._file).st_size
        size = -(-(DATA_OFFSET + num_bytes) // _PAGE) * _PAGE
        if size > old_size:
            try:
                os.posix_fallocate(self._file, old_size, size - old_size)
            except OSError:
                os.ftruncate(self._file, old_size)
                raise
        if size > old_size or self._mapped is None:
            self.remap()

    def remap(self) -> None:
        """Map the whole file, with its pages."""
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._mapped = mmap.mmap(self._file, 0, flags=flags)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The bytes of a snapshot, a view."""
        assert self._mapped is not None, _NOT_MAPPED
        return np.frombuffer(self._mapped, np.uint8)[DATA_OFFSET:]

    @property
    def state(self) -> int:
        """One of `FILLING`, `COMMITTED`, `WRITTEN` and `FAILED`."""
        assert self._mapped is not None, _NOT_MAPPED
        return self._mapped[0]

    @state.setter
    def state(self, state: int) -> None:
        assert self._mapped is not None, _NOT_MAPPED
        self._mapped[0] = state

    def close(self) -> None:
        """Close the file, which stays."""
        self._mapped = None
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def remove(self) -> None:
        """Remove the file, before its lock is released, and close it."""
        if self._file >= 0 and os.fstat(self._file).st_nlink:
            self.path.unlink(missing_ok=True)
        self.close()


def claim_memory(path: Path, *, wait_sec: float = WAIT_SEC) -> SnapshotMemory | None:
    """Lock and return the memory that earlier processes left, None if there is none.

    Waits while a process still uses it, such as an agent that writes its last snapshot.

    Raises:
        SchemaError: a process still uses it after the wait.
    """
    deadline = time.monotonic() + wait_sec
    while True:
        memory = SnapshotMemory(path)
        try:
            memory._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if lock_file(memory._file):
            stat = os.fstat(memory._file)
            if stat.st_nlink and stat.st_size > DATA_OFFSET:
                memory.remap()
                return memory
            memory.remove()
            return None
        memory.close()
        if time.monotonic() > deadline:
            raise SchemaError(
                f"another process still trains the run after {wait_sec:g} s; end it, or wait until "
                "it has written its checkpoint",
                file=str(path),
            )
        time.sleep(0.05)


def no_room(directory: Path, num_bytes: int, reason: str = "") -> SchemaError:
    """Return the error for a directory that has no room for a snapshot."""
    free = free_bytes(directory)
    return SchemaError(
        f"snapshots of checkpoints need {num_bytes} bytes in {directory}, where {free} are free: "
        f"{reason or f'{max(0, num_bytes - free)} are missing'}; enlarge it, save more often "
        "(train.checkpoint.every_steps), or set train.checkpoint.copy_to to a directory of a disk"
    )


# ---- The size of snapshots ----

_CACHED_ROW_BYTES, _SLOT_BYTES = 40, 8
"""Bytes of the plan's state per row in a planned cache, and per slot."""
_OVERHEAD_BYTES = 1 << 20
"""The header, and padding of arrays."""


def copy_bytes(
    dataset: OpenDataset,
    shared: SharedNextUses,
    layouts: Mapping[str, TableLayout],
    steps: range,
    every_steps: int,
    cache: CacheConfig | None,
) -> int:
    """Return the bytes of the rows in the largest snapshot of a run."""
    total = _OVERHEAD_BYTES
    if not shared.is_indexed:  # as a run without a plan may be: all rows may change in an interval
        return total + sum(
            _num_rows(dataset, table) * layout.row_bytes for table, layout in layouts.items()
        )
    num_rows = {table: _num_rows(dataset, table) for table in layouts}
    for table, layout in layouts.items():
        changed = max_changed_rows(shared.of(table).last_uses(every_steps), steps, every_steps)
        total += min(changed, num_rows[table]) * layout.row_bytes
    if cache is not None:
        cached = cache.rows
        if cached is None or cache.policy == "ttl":  # else rows stay until it is full
            cached = most_cached_rows(map(shared.of, layouts), cache, steps.start)
        total += min(cached, sum(num_rows.values())) * _CACHED_ROW_BYTES
        total += sum(min(cached, rows) for rows in num_rows.values()) * _SLOT_BYTES
    return total


def max_changed_rows(last_uses: NDArray[np.int64], steps: range, every_steps: int) -> int:
    """Return the largest number of rows that change between two checkpoints.

    Args:
        last_uses: (num_steps,) rows of each step that are not used again before a checkpoint.
        steps: to be trained; the interval in which they end counts as a whole.
        every_steps: steps between checkpoints.

    Example:
        >>> last_uses = np.array([1, 2, 2, 1])
        >>> [max_changed_rows(last_uses, range(first, 4), 3) for first in (0, 1)]
        [5, 4]
    """
    end = -(-steps.stop // every_steps) * every_steps
    last_uses = last_uses[steps.start : end]
    intervals = np.arange(steps.start, steps.start + len(last_uses)) // every_steps
    changed = np.bincount(intervals - steps.start // every_steps, last_uses)
    return int(changed.max(initial=0))


def _num_rows(dataset: OpenDataset, table: str) -> int:
    counts = (segment.manifest.tables.get(table) for segment in dataset.segments)
    return sum(each.num_unique_rows for each in counts if each is not None)


# ---- The layout of a snapshot ----
#
#     8 bytes, little-endian: length of the header
#     header: JSON with the fields of `SnapshotHeader`, and type, shape and offset of each array
#         after the header, padded with spaces to 64 bytes
#     arrays, each starting at a multiple of 64 bytes

_ALIGNMENT = 64
DENSE, PLAN, ROWS = "dense/", "plan/", "rows/"
"""Prefixes of the names of arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """Description of a snapshot."""

    train_step: int
    """The next step to train."""
    since: int | None
    """Step of the checkpoint that it builds on; None: it has all rows."""
    fingerprint: Mapping[str, Any]
    layouts: Mapping[str, TableLayout]


def commit_snapshot(
    memory: SnapshotMemory,
    header: SnapshotHeader,
    dense: Mapping[str, Array],
    plan: Mapping[str, Array],
    changed: Mapping[str, Sequence[RowsInPlace]],
) -> int:
    """Copy a state into memory and commit it; return its bytes.

    Raises:
        OSError: there is no room.
    """
    whole = {f"{DENSE}{name}": array for name, array in dense.items()}
    whole |= {f"{PLAN}{name}": array for name, array in plan.items()}
    specs = {name: ArraySpec.of(array) for name, array in whole.items()}
    for table, parts in changed.items():
        specs |= _row_specs(table, header.layouts[table], sum(len(rows) for rows, _ in parts))
    head, offsets, end = _encode_header(header, specs)
    memory.reserve(end)
    memory.state = FILLING
    data = memory.bytes
    data[: len(head)] = np.frombuffer(head, np.uint8)
    views = {name: _view(data, offsets[name], spec) for name, spec in specs.items()}
    for name, array in whole.items():
        views[name][...] = array
    for table, parts in changed.items():
        rows, block = (views[f"{ROWS}{table}/{name}"] for name in ROW_FILES)
        start = 0
        for changed_rows, gathered in parts:
            stop = start + len(changed_rows)
            rows[start:stop] = changed_rows
            _gather(gathered.records.block, gathered.positions, block[start:stop])
            start = stop
    memory.state = COMMITTED
    return end


class Snapshot:
    """A committed snapshot, read in place."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._data = memory.bytes
        size = int.from_bytes(self._data[:8].tobytes(), "little")
        body = json.loads(self._data[8 : 8 + size].tobytes())
        self.header = SnapshotHeader(
            train_step=body["train_step"],
            since=body["since"],
            fingerprint=body["fingerprint"],
            layouts={table: TableLayout(**each) for table, each in body["layouts"].items()},
        )
        self._arrays = {
            name: (8 + size + offset, ArraySpec(np.dtype(dtype), tuple(shape)))
            for name, (dtype, shape, offset) in body["arrays"].items()
        }

    def arrays(self, prefix: str) -> dict[str, Array]:
        """Return the arrays whose names have a prefix, by name without it."""
        return {
            name.removeprefix(prefix): _view(self._data, offset, spec)
            for name, (offset, spec) in self._arrays.items()
            if name.startswith(prefix)
        }

    def rows(self, table: str) -> RowsAndRecords:
        """Return the rows of a table, unordered, and their records."""
        arrays = self.arrays(f"{ROWS}{table}/")
        return arrays["rows"], Records(arrays["records"], self.header.layouts[table].dim)


def _row_specs(table: str, layout: TableLayout, count: int) -> dict[str, ArraySpec]:
    dtype = np.dtype(layout.dtype)
    return {
        f"{ROWS}{table}/rows": ArraySpec(np.dtype(np.int64), (count,)),
        f"{ROWS}{table}/records": ArraySpec(dtype, (count, layout.width)),
    }


def _encode_header(
    header: SnapshotHeader, specs: Mapping[str, ArraySpec]
) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a snapshot, the offset of each array, and the end of the last."""
    sizes = [-(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT for spec in specs.values()]
    starts = dict(zip([*specs, ""], np.cumsum([0, *sizes]).tolist(), strict=True))
    body = {
        "train_step": header.train_step,
        "since": header.since,
        "fingerprint": header.fingerprint,
        "layouts": {table: asdict(layout) for table, layout in header.layouts.items()},
        "arrays": {n: [str(s.dtype), s.shape, starts[n]] for n, s in specs.items()},
    }
    text = json.dumps(body).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    offsets = {name: 8 + len(text) + start for name, start in starts.items()}
    return len(text).to_bytes(8, "little") + text, offsets, offsets[""]


def _view(data: NDArray[np.uint8], offset: int, spec: ArraySpec) -> Array:
    return data[offset : offset + spec.num_bytes].view(spec.dtype).reshape(spec.shape)


def _gather(source: Array, positions: NDArray[np.int32] | None, out: Array) -> None:
    if not out.size:
        return
    if positions is None:
        out[...] = source
    else:
        np.take(source, positions, axis=0, out=out, mode="clip")  # `raise` would copy twice
