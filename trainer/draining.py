"""Ending when asked: SIGTERM and SIGINT finish the step, save, and leave a run to be resumed.

A signal only makes a note, and the loop looks at it between two steps. Where nothing can be lost
(start-up, waiting, evaluation) it interrupts at once. A second one ends the process as it stands.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DrainInterrupt(BaseException):
    """Ends a run that was asked to end, wherever nothing is lost; no error.

    Attributes:
        reason: the signal's name.
        message: what is left; empty when nothing was begun.
    """

    def __init__(self, reason: str) -> None:
        """Keep the reason."""
        super().__init__(reason)
        self.reason = reason
        self.message = ""


class Drain:
    """Whether the process was asked to end."""

    def __init__(self, on_ask: Callable[[], None] = lambda: None) -> None:
        """Start unasked.

        Args:
            on_ask: called once, when it is asked for the first time.
        """
        self.on_ask = on_ask
        self._reason: str | None = None
        self._asked = threading.Event()
        self._at_once = False

    @property
    def asked(self) -> bool:
        """Whether it was asked: no step is to be begun."""
        return self._asked.is_set()

    def ask(self, reason: str) -> None:
        """Ask to end, as a signal does.

        Raises:
            DrainInterrupt: the main thread is where nothing can be lost.
        """
        self._reason = reason
        self._asked.set()
        self.on_ask()
        if self._at_once:
            raise DrainInterrupt(reason)

    def check(self) -> None:
        """Raise `DrainInterrupt` when it was asked."""
        if self.asked:
            raise DrainInterrupt(self._reason or "")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal interrupt what runs inside, where nothing can be lost."""
        before, self._at_once = self._at_once, True
        try:
            self.check()
            yield
        finally:
            self._at_once = before

    def sleep(self, seconds: float) -> None:
        """Wait, at most until it is asked."""
        self._asked.wait(seconds)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT while the body runs; only the main thread can."""
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.ask(signal.Signals(number).name)


@contextmanager
def told(message: str) -> Iterator[None]:
    """Let what interrupts the body say what is left, unless something inside knows better."""
    try:
        yield
    except DrainInterrupt as interrupt:
        interrupt.message = interrupt.message or message
        raise
