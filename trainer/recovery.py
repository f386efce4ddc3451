"""Graceful shutdown on SIGTERM and SIGINT, and time limits of each phase."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO, TypeVar, cast

from schemas.config.limits import DRAIN
from schemas.run_log import EXIT_HUNG

# Ending when asked: SIGTERM and SIGINT finish the step, save, and leave a run to be resumed.
#
# A signal only makes a note, and the loop looks at it between two steps. Where nothing can be
# lost (start-up, waiting, evaluation) it interrupts at once. A second one ends the process as it
# stands.

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


# Nothing waits for ever: each phase has a limit, and one that passes it ends the process loudly.
#
# A thread looks at what the others are in. When a limit is over, the stacks of all threads go to
# stderr and to a file of the run, one line names phase, step and rank, and the process ends with
# `EXIT_HUNG`, without waiting for anything: what hangs may hold any lock.

T = TypeVar("T")
_NONE = object()
_LOOK_SEC = 1.0
_LATE_SEC = 5.0
"""Looks that come so much too late mean that the process was stopped; that time does not count."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a process is in.

    Attributes:
        phase: name, of the limits.
        step: of the run, or the batch of an evaluation.
        since: when it was entered.
        limit: seconds that it may take.
    """

    phase: str
    step: int
    since: float
    limit: float


class Watchdog:
    """Ends the process when a phase takes longer than its limit; a context in which it looks."""

    def __init__(
        self,
        limits: Mapping[str, float],
        *,
        rank: str = "0",
        clock: Callable[[], float] = time.monotonic,
        expire: Callable[[Watched], None] | None = None,
    ) -> None:
        """Keep the parts; nothing is watched yet.

        Args:
            limits: seconds by phase.
            rank: which of the processes this is.
            clock: seconds.
            expire: called instead of ending the process.
        """
        self.step = 0  # set by the caller: what is counted now
        self._limits = limits
        self._rank = rank
        self._clock = clock
        self._expire = expire or self._end
        self._phases: list[Watched] = []  # of the main thread; the innermost counts
        self._drain: Watched | None = None
        self._ended = threading.Event()
        self._folder: Path | None = None
        self._look_sec = min(_LOOK_SEC, *(limit / 4 for limit in limits.values()))
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def write_to(self, folder: Path) -> None:
        """Leave stacks in this folder, too."""
        self._folder = folder

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Limit what runs inside; phases may lie in one another, and the innermost counts.

        Args:
            phase: name, of the limits.

        Raises:
            KeyError: there is no such limit.
        """
        self._phases.append(Watched(phase, self.step, self._clock(), self._limits[phase]))
        try:
            yield
        finally:
            self._phases.pop()

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """Yield items, each limited until the next one is asked for, and counted from 0."""
        found = iter(items)
        for self.step in itertools.count():
            with self(phase):
                item = next(found, _NONE)
                if item is _NONE:
                    return
                yield cast(T, item)

    def drain(self) -> None:
        """Limit all that is left to be done."""
        self._drain = Watched(DRAIN, self.step, self._clock(), self._limits[DRAIN])

    def overdue(self, stopped: float = 0.0) -> Watched | None:
        """Return what has passed its limit.

        Args:
            stopped: seconds that the process did not run, and that are not held against it.
        """
        now = self._clock()
        for watched in (*self._phases[-1:], self._drain):
            if watched is not None and now - watched.since - stopped > watched.limit:
                return watched
        return None

    def _look(self) -> None:
        stopped, of, before = 0.0, None, self._clock()
        while not self._ended.wait(self._look_sec):
            now = self._clock()
            late, before = now - before - self._look_sec, now
            current = self._phases[-1:]
            stopped = (stopped if current == of else 0.0) + (late if late > _LATE_SEC else 0.0)
            of = current
            found = self.overdue(stopped)
            if found is not None:
                self._expire(found)
                return

    def _end(self, found: Watched) -> None:
        where = None if self._folder is None else self._folder / f"stacks-{self._rank}.txt"
        text = self.describe(found, where)
        with suppress(OSError):
            if where is not None:
                with where.open("w", encoding="utf-8") as file:
                    _dump(text, file)
        with suppress(OSError, ValueError):
            _dump(text, sys.__stderr__ or sys.stderr)
        os._exit(EXIT_HUNG)

    def describe(self, found: Watched, where: Path | None) -> str:
        """Return the line that says what took too long."""
        stacks = "above" if where is None else f"in {where}"
        inside = self._phases[-1:] if found.phase == DRAIN else []
        inner = "".join(f", in phase={watched.phase!r}" for watched in inside)
        return (
            f"phase must end within {found.limit:g} s, got phase={found.phase!r}, "
            f"step={found.step}, rank={self._rank!r} after {self._clock() - found.since:.1f} s"
            f"{inner}; see what each thread waits for {stacks}, raise train.limits.{found.phase} "
            "if it is only slow, and train on with --resume"
        )


def _dump(text: str, file: TextIO) -> None:
    """Write the stacks of all threads, and the line last, where a reader looks first."""
    faulthandler.dump_traceback(file, all_threads=True)
    file.write(f"error: {text}\n")
    file.flush()
