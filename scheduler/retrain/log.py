"""The log of a root on disk: what happened to its days, each line synced before it is built on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from scheduler.lines import Lines, whole_bytes
from scheduler.retrain.records import Record, body_of, record_of
from scheduler.retrain.state import State, after
from schemas.errors import SchemaError

STATE = "state.jsonl"
"""Name of the log in the root."""


class Log(Lines):
    """A log that is read and then written; a context."""

    def __init__(self, path: Path) -> None:
        """Remember where it lies."""
        super().__init__(path)
        self._path = path
        self.state = State()

    def __enter__(self) -> Self:
        """Open it behind its last whole line, and read it; what was torn is taken off.

        Raises:
            SchemaError: a line other than the last is no record.
        """
        super().__enter__()
        try:
            self.state = read_state(self._path)
        except BaseException:
            self.__exit__()
            raise
        return self

    def append(self, record: Record) -> None:
        """Write a record; on return it is on disk and in the state."""
        state = after(self.state, record)
        self.write([body_of(record)])
        self.state = state


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
