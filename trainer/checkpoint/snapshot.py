"""Copies of training state in shared memory, taken at a step boundary."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.cache_plan import required_rows
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.oracle import NEVER
from schemas.order import Order
from trainer.checkpoint.format import Spec, spec_of_array
from trainer.embedding.changes import Changed
from trainer.stores.api import Records, TableLayout
from trainer.stores.remote.wire import record_bytes

# Memory that outlives the process that filled it: a file in /dev/shm, or in another directory.
#
# The trainer fills it and commits; its agent writes what was committed to disk. The agent
# inherits the open file and with it the trainer's lock, which holds while one of the two lives:
# so others can tell a leftover, which they may remove, from memory in use, which they must not.
# The file's name is that of the run.

FILLING, COMMITTED, WRITTEN, FAILED = 0, 1, 2, 3
"""State of what lies in the memory."""
START = 64
"""Where the copy begins; the state stands before it."""
WAIT_SEC = 60.0
"""How long a start waits for the agent of the run before, which may still be writing."""
_PAGE = 4096


def memory_path(directory: Path, run: Path) -> Path:
    """Return where a run's memory lies; no other run has the name."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return directory / f"presage-{os.getuid()}-{name}"


class CopyMemory:
    """The memory of a run, mapped."""

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is opened yet."""
        self.path = path
        self._file = -1
        self._mapped: mmap.mmap | None = None

    def create(self, num_bytes: int) -> None:
        """Make the memory and take its room.

        Raises:
            SchemaError: there is not enough; names the missing bytes.
            FileExistsError: another process has made it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            file = os.open(self.path, flags, 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file).st_nlink:
                break
            os.close(file)  # who looked for leftovers was faster
        self._file = file
        try:
            self.reserve(num_bytes)
        except OSError as error:
            self.remove()
            raise too_small(self.path.parent, START + num_bytes, error.strerror or "") from error

    def inherit(self, file: int) -> None:
        """Map the memory that the parent of this process made.

        Args:
            file: number of the open file.
        """
        self._file = file
        self.remap()

    @property
    def file(self) -> int:
        """Number of the open file."""
        return self._file

    @property
    def num_bytes(self) -> int:
        """Room for a copy."""
        return os.fstat(self._file).st_size - START

    def reserve(self, num_bytes: int) -> None:
        """Have room for a copy of so many bytes, with pages of its own.

        Raises:
            OSError: there is none; the memory is as it was.
        """
        held = os.fstat(self._file).st_size
        wanted = -(-(START + num_bytes) // _PAGE) * _PAGE
        if wanted > held:
            try:
                os.posix_fallocate(self._file, held, wanted - held)
            except OSError:
                os.ftruncate(self._file, held)
                raise
        if wanted > held or self._mapped is None:
            self.remap()

    def remap(self) -> None:
        """Map all of the file, with its pages."""
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._mapped = mmap.mmap(self._file, 0, flags=flags)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """Room for a copy, a view."""
        assert self._mapped is not None, "memory is mapped before it is used"
        return np.frombuffer(self._mapped, np.uint8)[START:]

    @property
    def state(self) -> int:
        """One of `FILLING`, `COMMITTED`, `WRITTEN` and `FAILED`."""
        assert self._mapped is not None, "memory is mapped before it is used"
        return self._mapped[0]

    @state.setter
    def state(self, state: int) -> None:
        assert self._mapped is not None, "memory is mapped before it is used"
        self._mapped[0] = state

    def close(self) -> None:
        """Let the memory go; the file stays."""
        self._mapped = None
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def remove(self) -> None:
        """Let the memory go, and give it back: it has its name while a lock of it is held."""
        if self._file >= 0 and os.fstat(self._file).st_nlink:
            self.path.unlink(missing_ok=True)
        self.close()


def claim(path: Path, *, wait_sec: float = WAIT_SEC) -> CopyMemory | None:
    """Return the memory that a run before left, None when there is none.

    Waits for processes that still use it: an agent that finishes its work ends soon.

    Raises:
        SchemaError: a process still uses it after the wait.
    """
    deadline = time.monotonic() + wait_sec
    while True:
        found = CopyMemory(path)
        try:
            found._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(found._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found.close()
        else:
            held = os.fstat(found._file)
            if held.st_nlink and held.st_size > START:
                found.remap()
                return found
            found.remove()
            return None
        if time.monotonic() > deadline:
            raise SchemaError(
                f"run must be trained by one process at a time, got another after {wait_sec:g} s; "
                "end it, or wait until it has written its checkpoint",
                file=str(path),
            )
        time.sleep(0.05)


def free_bytes(directory: Path) -> int:
    """Return the bytes that may be taken in a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def too_small(directory: Path, num_bytes: int, reason: str = "") -> SchemaError:
    """Return the refusal of memory that does not hold a checkpoint's copy."""
    free = free_bytes(directory)
    missing = f"{max(0, num_bytes - free)} are missing"
    return SchemaError(
        f"memory for the copy of a checkpoint must have {num_bytes} bytes, got {free} free: "
        f"{reason or missing} in {directory}; enlarge it, save more often (train.checkpoint."
        "every_steps), or set train.checkpoint.copy_to to a directory of a disk"
    )


_KEYFRAME_BYTES = 48
"""Of each row that a planned cache may hold."""
_FEW = 1 << 20
"""The header of a copy, and what arrays are rounded up by."""


def copy_bytes(
    dataset: Dataset,
    order: Order,
    layouts: Mapping[str, TableLayout],
    steps: range,
    every_steps: int,
    cache: CacheConfig | None,
) -> int:
    """Return the bytes of the largest copy of rows that a run will make.

    Args:
        dataset: open dataset.
        order: of the run.
        layouts: tables by name.
        steps: to be trained.
        every_steps: steps between checkpoints.
        cache: of a run that obeys a plan, whose state is copied, too.
    """
    total = _FEW
    try:
        index = dataset.index_for(order)
    except SchemaError:  # only a plan needs one: all rows of the dataset may have changed
        return total + sum(
            _num_rows(dataset, table) * record_bytes(layout) for table, layout in layouts.items()
        )
    for table, layout in layouts.items():
        distances = index.steps(table)
        found = map(distances.__getitem__, steps)
        total += most_changed(found, steps.start, every_steps) * record_bytes(layout)
        if cache is not None:
            found = map(distances.__getitem__, steps)
            total += required_rows(found, cache) * _KEYFRAME_BYTES if cache.rows is None else 0
            total += (cache.rows or 0) * _KEYFRAME_BYTES
    return total


def most_changed(
    distances: Iterable[NDArray[np.integer]], first_step: int, every_steps: int
) -> int:
    """Return the most rows that change between two checkpoints.

    A row is counted at its last use before a checkpoint.

    Args:
        distances: of each step from `first_step` on, to the next use of its rows.
        first_step: the first one.
        every_steps: steps between checkpoints.

    Example:
        >>> steps = [np.array([1, 2]), np.array([2]), np.array([1, 1])]
        >>> most_changed(steps, 0, 2), most_changed(steps, 0, 1)
        (2, 2)
    """
    most = count = 0
    for step, found in enumerate(distances, start=first_step):
        left = every_steps - step % every_steps  # steps to the next checkpoint
        count += int(((found == NEVER) | (found >= left)).sum())
        if left == 1:
            most, count = max(most, count), 0
    return max(most, count)


def _num_rows(dataset: Dataset, table: str) -> int:
    return sum(file.num_rows for s in dataset.segments for file in s.edge_files(table))


# What lies in memory between the step boundary that it was copied at and the disk.
#
# 8 bytes, little-endian: length of the header header: JSON; which arrays, where each lies, and
# what the checkpoint's manifest will say arrays, each begun at a multiple of 64 bytes

_ALIGNED = 64
DENSE, PLAN, ROWS = "dense/", "plan/", "rows/"
"""What the names of arrays begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a copy is."""

    train_step: int
    """The next step to train."""
    since: int | None
    """The checkpoint that it adds to; None: it is all there is."""
    made_of: Mapping[str, Any]
    """Of the manifest."""
    layouts: Mapping[str, TableLayout]
    """Tables by name."""


def copy_to(
    memory: CopyMemory,
    about: About,
    dense: Mapping[str, Array],
    plan: Mapping[str, Array],
    changed: Mapping[str, Sequence[Changed]],
) -> int:
    """Copy a state into memory and commit it; return its bytes.

    Args:
        memory: nothing in it is needed any more.
        about: what it is.
        dense: arrays by name.
        plan: arrays by name.
        changed: by table, rows and where they lie.

    Raises:
        OSError: there is no room.
    """
    whole = {f"{DENSE}{name}": array for name, array in dense.items()}
    whole |= {f"{PLAN}{name}": array for name, array in plan.items()}
    specs = {name: spec_of_array(array) for name, array in whole.items()}
    for table, parts in changed.items():
        specs |= _row_specs(table, about.layouts[table], sum(len(part.rows) for part in parts))
    header, places, end = _header(about, specs)
    memory.reserve(end)
    memory.state = FILLING
    data = memory.bytes
    data[: len(header)] = np.frombuffer(header, np.uint8)
    for name, array in whole.items():
        _view(data, places[name], specs[name])[...] = array
    for table, parts in changed.items():
        names = [f"{ROWS}{table}/{kind}" for kind in ("rows", "values", "state")]
        rows, values, state = (_view(data, places[name], specs[name]) for name in names)
        start = 0
        for part in parts:
            stop = start + len(part.rows)
            rows[start:stop] = part.rows
            _gather(part.gathered.records.values, part.gathered.positions, values[start:stop])
            _gather(part.gathered.records.state, part.gathered.positions, state[start:stop])
            start = stop
    memory.state = COMMITTED
    return end


class Snapshot:
    """A committed copy, read where it lies."""

    def __init__(self, memory: CopyMemory) -> None:
        """Read the header."""
        self._data = memory.bytes
        size = int.from_bytes(self._data[:8].tobytes(), "little")
        body = json.loads(self._data[8 : 8 + size].tobytes())
        layouts = {table: TableLayout(**each) for table, each in body["layouts"].items()}
        self.about = About(
            train_step=body["train_step"],
            since=body["since"],
            made_of=body["made_of"],
            layouts=layouts,
        )
        self._specs = {
            name: (Spec(np.dtype(dtype), tuple(shape)), place)
            for name, (dtype, shape, place) in body["arrays"].items()
        }

    def arrays(self, prefix: str) -> dict[str, Array]:
        """Return the arrays whose names begin with a prefix, without it."""
        return {
            name.removeprefix(prefix): _view(self._data, place, spec)
            for name, (spec, place) in self._specs.items()
            if name.startswith(prefix)
        }

    def rows(self, table: str) -> tuple[NDArray[np.int64], Records]:
        """Return a table's rows, in no order, and their records."""
        found = self.arrays(f"{ROWS}{table}/")
        return found["rows"], Records(found["values"], found["state"])


def _row_specs(table: str, layout: TableLayout, count: int) -> dict[str, Spec]:
    dtype = np.dtype(layout.dtype)
    return {
        f"{ROWS}{table}/rows": Spec(np.dtype(np.int64), (count,)),
        f"{ROWS}{table}/values": Spec(dtype, (count, layout.dim)),
        f"{ROWS}{table}/state": Spec(dtype, (count, layout.state_width)),
    }


def _header(about: About, specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a copy, where each array begins, and where the last one ends."""
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        offsets[name] = end
        end += -(-spec.num_bytes // _ALIGNED) * _ALIGNED
    room = 0
    while True:  # places have more digits the longer the header is
        places = {name: room + offset for name, offset in offsets.items()}
        body = {
            "train_step": about.train_step,
            "since": about.since,
            "made_of": about.made_of,
            "layouts": {table: asdict(layout) for table, layout in about.layouts.items()},
            "arrays": {n: [str(s.dtype), s.shape, places[n]] for n, s in specs.items()},
        }
        text = json.dumps(body).encode()
        if 8 + len(text) <= room:
            return len(text).to_bytes(8, "little") + text, places, room + end
        room = -(-(8 + len(text) + 16 * len(specs)) // _ALIGNED) * _ALIGNED


def _view(data: NDArray[np.uint8], place: int, spec: Spec) -> Array:
    return data[place : place + spec.num_bytes].view(spec.dtype).reshape(spec.shape)


def _gather(source: Array, places: NDArray[np.int32] | None, out: Array) -> None:
    if not out.size:
        return
    if places is None:
        out[...] = source
    else:
        np.take(source, places, axis=0, out=out, mode="clip")  # `raise` would copy twice
