"""Memory that outlives the process that filled it: a file in /dev/shm, or in another directory.

The trainer fills it and commits; its agent writes what was committed to disk. The agent inherits
the open file and with it the trainer's lock, which holds while one of the two lives: so others can
tell a leftover, which they may remove, from memory in use, which they must not. The file's name is
that of the run.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError

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
