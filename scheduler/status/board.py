"""What is shown, kept up to date from a scheduler's log, in a thread or a process of its own.

The log is the only thing that is shared with the scheduler, and it is only read: who looks on
neither slows a decision nor stops one, whichever driver carries it out.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

from scheduler.machine.codec import decision_of
from scheduler.machine.events import Event
from scheduler.machine.handle import handle
from scheduler.machine.log import record_of
from scheduler.machine.state import State
from scheduler.status.journal import Journal, record
from scheduler.status.view import View, view_of
from schemas.errors import SchemaError
from schemas.events import Decision


class Board:
    """The newest view of one log; any thread may ask."""

    def __init__(self, path: Path) -> None:
        """Remember where the log lies.

        Args:
            path: of a log that is written, or was; before it exists nothing has happened.
        """
        self._path = path
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._line = 0
        self._state = State()
        self._journal = Journal()
        self._expected = deque[Decision]()
        self._view: View | None = None

    def view(self) -> View:
        """Return the view of all whole lines that the log has now.

        Raises:
            SchemaError: a line is none of a log, or this code decides otherwise.
        """
        with self._lock:
            news = self._news()
            for line in news:
                self._take(line)
            if news or self._view is None:
                self._view = view_of(self._state, self._journal)
            return self._view

    def _news(self) -> list[bytes]:
        """Return the whole lines that were not taken in yet."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._start_over()  # another log lies there
                file.seek(self._at)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SchemaError(
                f"log must be readable, got {error}; check the path", file=str(self._path)
            ) from error
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

    def _take(self, line: bytes) -> None:
        """Fold one line, which counts as read only when it was understood."""
        number = self._line + 1
        try:
            body: Any = json.loads(line)
            found = record_of(body)
        except (ValueError, KeyError, TypeError) as error:
            raise self._wrong(f"be an event or a decision, got {line[:80]!r}", number) from error
        if isinstance(found, Event):
            if self._expected:
                raise self._wrong("be the decision that follows, got the next event", number)
            before = self._state
            self._state, actions = handle(before, found)
            decisions = [decision_of(action, self._state.now_sec) for action in actions]
            self._journal = record(self._journal, before, found, self._state, decisions)
            self._expected.extend(decisions)
        elif not self._expected or self._expected[0] != found:
            raise self._wrong("be the decision that follows, got another", number)
        else:
            self._expected.popleft()
        self._at += len(line)
        self._line = number

    def _wrong(self, must: str, line: int) -> SchemaError:
        return SchemaError(
            f"line must {must}; look with the code that wrote the log",
            file=str(self._path),
            place=str(line),
        )
