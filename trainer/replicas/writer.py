"""The lines of committed steps, kept by all replicas and written by one of them.

Who writes may die at any moment, also between two lines. All replicas remember
the last steps; whoever writes next looks at what is there, drops what is torn and
adds what is missing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from io import BufferedRandom
from pathlib import Path

from schemas.errors import SchemaError
from schemas.events import LEDGER, METRICS, SPLITS, LedgerEntry, Split, StepMetric, to_line

REMEMBERED = 64
"""Steps whose lines a replica can still write."""
_TAIL = 1 << 16


class Writer:
    """The lines of a run, as one replica knows them."""

    def __init__(self, run: Path) -> None:
        """Remember the folder.

        Args:
            run: run folder; its lines are there already, perhaps none.
        """
        self._run = run
        self._lines: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._splits: deque[Split] = deque(maxlen=REMEMBERED)

    def remember(self, metric: StepMetric, entries: Sequence[LedgerEntry]) -> None:
        """Keep the lines of a committed step.

        Args:
            metric: of the step.
            entries: one per replica that computed leaves.
        """
        ledger = "".join(f"{to_line(entry)}\n" for entry in entries)
        self._lines[metric.step] = (ledger.encode(), f"{to_line(metric)}\n".encode())
        while len(self._lines) > REMEMBERED:
            self._lines.popitem(last=False)

    def remember_splits(self, splits: Iterable[Split]) -> None:
        """Keep the lines of splits that were fixed."""
        self._splits.extend(splits)

    def write_splits(self) -> None:
        """Write every remembered split that is not there yet.

        Raises:
            SchemaError: the disk is full.
        """
        if not self._splits:
            return
        with (self._run / SPLITS).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            last = _cut(file.fileno(), None, "fixed_at")
            for split in self._splits:
                if split.fixed_at >= last:
                    _append(file, f"{to_line(split)}\n".encode())
        self._splits.clear()

    def write(self) -> None:
        """Write every remembered step that is not there yet.

        A step is there when its metric is: the ledger's lines are written before.

        Raises:
            SchemaError: the disk is full, or steps are missing that nobody remembers.
        """
        with (self._run / METRICS).open("r+b") as metrics, (self._run / LEDGER).open("r+b") as book:
            fcntl.flock(metrics, fcntl.LOCK_EX)
            last = _cut(metrics.fileno(), None)
            new = {step: lines for step, lines in self._lines.items() if step > last}
            if not new:
                return
            if min(new) != last + 1:
                raise SchemaError(
                    f"lines must follow step {last}, got {min(new)} for the next; resume the run",
                    file=metrics.name,
                )
            _cut(book.fileno(), last)
            for ledger, metric in new.values():
                for file, line in ((book, ledger), (metrics, metric)):
                    _append(file, line)


def _append(file: BufferedRandom, line: bytes) -> None:
    try:
        os.write(file.fileno(), line)
    except OSError as failed:
        raise SchemaError(
            f"disk must have room for the line of a step, got {failed.strerror}; free some and "
            "train on with --resume",
            file=file.name,
        ) from failed


def _cut(number: int, most: int | None, key: str = "step") -> int:
    """Drop a torn line and those of later steps, go to the end, and return the last step or -1.

    Args:
        number: of an open file.
        most: the last step that stays; all when None.
        key: of a line's step.
    """
    end = os.fstat(number).st_size
    start = max(0, end - _TAIL)
    tail = os.pread(number, end - start, start)
    if start:
        tail = tail[tail.index(b"\n") + 1 :]
    lines = tail.split(b"\n")
    torn, lines = lines[-1], lines[:-1]
    keep = end - len(torn)
    while lines and most is not None and json.loads(lines[-1])[key] > most:
        keep -= len(lines.pop()) + 1
    if keep != end:
        os.ftruncate(number, keep)
    os.lseek(number, keep, os.SEEK_SET)
    return int(json.loads(lines[-1])[key]) if lines else -1
