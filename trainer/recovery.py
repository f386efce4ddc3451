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
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TextIO, TypeVar, cast

from presage.schemas.config.train import DRAIN
from presage.schemas.run.records import EXIT_HUNG

# Graceful shutdown. The first SIGTERM or SIGINT sets a flag that the loop checks between two
# steps; where no work can be lost (start-up, waiting, evaluation) it interrupts at once. A second
# signal ends the process immediately.

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DrainInterrupt(BaseException):
    """Raised to end a run after a shutdown request; not an error.

    Attributes:
        reason: name of the signal.
        message: how to resume; empty if the run was not started.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.message = ""


class Drain:
    """A request to shut down."""

    def __init__(self) -> None:
        self.on_request: Callable[[], None] = lambda: None
        """Called when shutdown is requested; set by the caller."""
        self.reason: str | None = None
        """Name of the first signal; None before it."""
        # not an Event: its `set` waits for a lock that the interrupted `wait` may hold
        self._requests = SimpleQueue[None]()
        self._at_once = False

    @property
    def asked(self) -> bool:
        """Whether shutdown was requested; no step may start."""
        return self.reason is not None

    def ask(self, reason: str) -> None:
        """Request shutdown.

        Raises:
            DrainInterrupt: inside `at_once`.
        """
        self.reason = reason
        self._requests.put(None)
        self.on_request()
        if self._at_once:
            raise DrainInterrupt(reason)

    def check(self) -> None:
        """Raise `DrainInterrupt` if shutdown was requested."""
        if self.asked:
            raise DrainInterrupt(self.reason or "")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal interrupt the body immediately."""
        before, self._at_once = self._at_once, True
        try:
            self.check()
            yield
        finally:
            self._at_once = before

    def sleep(self, seconds: float) -> None:
        """Sleep until shutdown is requested, at most `seconds`."""
        with suppress(Empty):
            self._requests.get(timeout=seconds)
            self._requests.put(None)  # for other threads, and later calls

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while the body runs; main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.ask(signal.Signals(number).name)


def watch_stdin(drain: Drain) -> None:
    """Leave when stdin has the name of a signal, and exit when it ends."""

    def wait() -> None:
        while name := os.read(0, 1024):  # not sys.stdin: its lock would be held at exit
            if not drain.asked:
                os.kill(os.getpid(), signal.Signals[name.decode().split()[0]])  # to main thread
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


@contextmanager
def resume_hint(message: str) -> Iterator[None]:
    """Attach a resume message to a `DrainInterrupt` that has none."""
    try:
        yield
    except DrainInterrupt as interrupt:
        interrupt.message = interrupt.message or message
        raise


# Watchdog. Each phase has a time limit. When one is exceeded, a thread writes the stacks of all
# threads to stderr and to a file of the run, then one line with phase, step and rank, and ends the
# process with `EXIT_HUNG` without waiting, since a thread that hangs may hold any lock.

T = TypeVar("T")
_NONE = object()
_POLL_SEC = 1.0
_LATE_SEC = 5.0
"""A poll that is this late means that the process was suspended; that time is not counted."""


@dataclass(frozen=True, slots=True)
class ActivePhase:
    """A phase that has started.

    Attributes:
        phase: its name in `train.limits`.
        step: of the run, or the batch of an evaluation.
        since: start, in seconds of the clock.
        limit: seconds.
    """

    phase: str
    step: int
    since: float
    limit: float


class Watchdog:
    """Ends the process when a phase exceeds its limit; a context manager that owns its thread."""

    def __init__(
        self,
        limits: Mapping[str, float],
        *,
        rank: str = "0",
        clock: Callable[[], float] = time.monotonic,
        expire: Callable[[ActivePhase], None] | None = None,
    ) -> None:
        self.step = 0  # set by the caller
        self._limits = limits
        self._rank = rank
        self._clock = clock
        self._expire = expire or self._end
        self._phases: list[ActivePhase] = []  # of the main thread, innermost last
        self._drain: ActivePhase | None = None
        self._ended = threading.Event()
        self._folder: Path | None = None
        self._poll_sec = min(_POLL_SEC, *(limit / 4 for limit in limits.values()))
        self._thread = threading.Thread(target=self._poll, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def write_to(self, folder: Path) -> None:
        """Write stacks to a file in this folder, too."""
        self._folder = folder

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Limit the time of the body; of nested phases the innermost is limited.

        Raises:
            KeyError: no limit has this name.
        """
        self._phases.append(ActivePhase(phase, self.step, self._clock(), self._limits[phase]))
        try:
            yield
        finally:
            self._phases.pop()

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """Yield items, limiting the time of each; `step` counts them from 0."""
        iterator = iter(items)
        for self.step in itertools.count():
            with self(phase):
                item = next(iterator, _NONE)
                if item is _NONE:
                    return
                yield cast(T, item)

    def drain(self) -> None:
        """Limit the time until the process ends."""
        self._drain = ActivePhase(DRAIN, self.step, self._clock(), self._limits[DRAIN])

    def overdue(self, stopped: float = 0.0) -> ActivePhase | None:
        """Return the phase that exceeds its limit, None if all are within.

        Args:
            stopped: seconds in which the process was suspended, not counted.
        """
        now = self._clock()
        for watched in (*self._phases[-1:], self._drain):
            if watched is not None and now - watched.since - stopped > watched.limit:
                return watched
        return None

    def _poll(self) -> None:
        stopped, last_phase, before = 0.0, None, self._clock()
        while not self._ended.wait(self._poll_sec):
            now = self._clock()
            late, before = now - before - self._poll_sec, now
            current = self._phases[-1:]
            stopped = (stopped if current == last_phase else 0.0) + (
                late if late > _LATE_SEC else 0.0
            )
            last_phase = current
            overdue = self.overdue(stopped)
            if overdue is not None:
                self._expire(overdue)
                return

    def _end(self, overdue: ActivePhase) -> None:
        where = None if self._folder is None else self._folder / f"stacks-{self._rank}.txt"
        text = self.describe(overdue, where)
        with suppress(OSError):
            if where is not None:
                with where.open("w", encoding="utf-8") as file:
                    _dump(text, file)
        with suppress(OSError, ValueError):
            _dump(text, sys.__stderr__ or sys.stderr)
        os._exit(EXIT_HUNG)

    def describe(self, overdue: ActivePhase, where: Path | None) -> str:
        """Return the error message for a phase that exceeds its limit."""
        stacks = "above" if where is None else f"in {where}"
        inside = self._phases[-1:] if overdue.phase == DRAIN else []
        inner = "".join(f", in phase={watched.phase!r}" for watched in inside)
        return (
            f"phase did not end within {overdue.limit:g} s: phase={overdue.phase!r}, "
            f"step={overdue.step}, rank={self._rank!r} after {self._clock() - overdue.since:.1f} "
            f"s{inner}; see what each thread waits for {stacks}, raise "
            f"train.limits.{overdue.phase} if it is only slow, and continue with --resume"
        )


def _dump(text: str, file: TextIO) -> None:
    """Write the stacks of all threads, and the message last."""
    faulthandler.dump_traceback(file, all_threads=True)
    file.write(f"error: {text}\n")
    file.flush()
