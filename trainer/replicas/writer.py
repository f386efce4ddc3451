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
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedRandom
from pathlib import Path

from schemas.errors import SchemaError
from schemas.events import LEDGER, METRICS, SPLITS, LedgerEntry, Split, StepMetric, to_line

REMEMBERED = 64
"""Steps whose lines a replica can still write."""
_BLOCK = 1 << 16
"""Bytes that are read at once from the end of a file."""


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
    """Write a line as a whole: one call may write a part of it, such as to an almost full disk."""
    left = memoryview(line)
    try:
        while left:
            left = left[os.write(file.fileno(), left) :]
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
    keep, last = 0, -1
    for start, line in _from_end(number):
        if line.endswith(b"\n"):
            step = int(json.loads(line)[key])
            if most is None or step <= most:
                keep, last = start + len(line), step
                break
    if keep != os.fstat(number).st_size:
        os.ftruncate(number, keep)
    os.lseek(number, keep, os.SEEK_SET)
    return last


def _from_end(number: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each line of an open file starts, and the line; the last line comes first."""
    start, rest = os.fstat(number).st_size, b""
    while start:
        size = min(start, _BLOCK)
        start -= size
        block = os.pread(number, size, start) + rest
        lines, end = block.splitlines(keepends=True), start + len(block)
        if start:
            rest = lines.pop(0)  # it may begin before this block
        for line in reversed(lines):
            end -= len(line)
            yield end, line
