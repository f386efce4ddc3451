"""The log of a root on disk: what happened to its days, each line synced before it is built on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from scheduler.machine.log import whole_bytes
from scheduler.retrain.records import Record, body_of, record_of
from scheduler.retrain.state import State, after
from schemas.errors import SchemaError
from schemas.manifest import canonical_json, sync_directory

STATE = "state.jsonl"
"""Name of the log in the root."""


class Log:
    """A log that is read and then written; a context."""

    def __init__(self, path: Path) -> None:
        """Remember where it lies."""
        self._path = path
        self._file: int | None = None
        self.state = State()

    def __enter__(self) -> Log:
        """Read it, and open it behind its last whole line; what was torn is taken off.

        Raises:
            SchemaError: a line other than the last is no record.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            whole, newline = whole_bytes(self._path.read_bytes())
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
            self._write(b"\n" if newline else b"")
            sync_directory(self._path.parent)
            self.state = read_state(self._path)
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        assert self._file is not None, "the log is open"
        os.close(self._file)

    def append(self, record: Record) -> None:
        """Write a record; on return it is on disk and in the state."""
        state = after(self.state, record)
        self._write(f"{canonical_json(body_of(record))}\n".encode())
        self.state = state

    def _write(self, content: bytes) -> None:
        assert self._file is not None, "the log is open"
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)


def read_state(path: Path) -> State:
    """Return where a log leads; a torn last line is left out, and no log is an empty one.

    Raises:
        SchemaError: another line is no record, or of a run that was never begun.
    """
    if not path.exists():
        return State()
    content = path.read_bytes()
    whole, _ = whole_bytes(content)
    state = State()
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            state = after(state, record_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SchemaError(
                f"line must be a record, got {line[:80]!r} ({error!r}); restore the file",
                file=str(path),
                place=str(number),
            ) from error
    return state
