"""Nothing waits for ever: each phase has a limit, and one that passes it ends the process loudly.

A thread looks at what the others are in. When a limit is over, the stacks of all threads go to
stderr and to a file of the run, one line names phase, step and rank, and the process ends with
`HUNG`, without waiting for anything: what hangs may hold any lock.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeVar, cast

from schemas.events import HUNG
from schemas.job_limits import DRAIN

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
        os._exit(HUNG)

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
