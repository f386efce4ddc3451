"""Log lines of committed steps: metrics and ledger of a run."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedRandom
from pathlib import Path

import numpy as np

from presage.schemas.arrays import Array
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import LEDGER, METRICS, LedgerEntry, StepMetric, to_line
from presage.schemas.storage.locks import lock_file

_BLOCK = 1 << 12
LOCK_SEC = 10.0
"""Longest wait for the former writer of a log."""
LINES = "lines"
"""Name of the remembered lines among the arrays of a state."""


class LogWriter:
    """Log lines of committed steps: remembered by all replicas until they are durable.

    One replica writes them. It may die between two lines, or before others can read its lines. The
    next writer truncates a torn line and adds the missing ones.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lines: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self.written = -1
        """Last step in the file when this replica wrote to it last."""

    def remember(self, metric: StepMetric, entries: Sequence[LedgerEntry]) -> None:
        """Keep the lines of a committed step."""
        ledger = "".join(f"{to_line(entry)}\n" for entry in entries)
        self._lines[metric.step] = (ledger.encode(), f"{to_line(metric)}\n".encode())

    def forget(self, logged: int) -> None:
        """Drop the lines of steps up to one, which are durable."""
        while self._lines and next(iter(self._lines)) <= logged:
            self._lines.popitem(last=False)

    def to_arrays(self) -> dict[str, Array]:
        """Return the remembered lines for a replica that joins: it may be the next writer."""
        lines = [[step, *(line.decode() for line in each)] for step, each in self._lines.items()]
        return {LINES: np.frombuffer(json.dumps(lines).encode(), np.uint8)}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Remember what `to_arrays` of another replica returned, instead of earlier lines."""
        lines = json.loads(arrays[LINES].tobytes())
        self._lines = OrderedDict(
            (step, (ledger.encode(), metric.encode())) for step, ledger, metric in lines
        )

    def write(self) -> None:
        """Write every remembered line that is not in the files.

        The ledger is written first: a step is complete when its metric is written.

        Raises:
            SchemaError: the disk is full, a missing step is not remembered, or the former writer
                does not end its lines.
        """
        with (self._run / METRICS).open("r+b") as metrics, (self._run / LEDGER).open("r+b") as book:
            if not lock_file(metrics, LOCK_SEC):
                raise SchemaError(
                    f"log of the run is locked by its former writer after {LOCK_SEC:g} s; end that "
                    "process, which may be stopped, and continue with --resume",
                    file=metrics.name,
                )
            self.written = _truncate(metrics.fileno(), None)
            new = {step: lines for step, lines in self._lines.items() if step > self.written}
            if not new:
                return
            if min(new) != self.written + 1:
                raise SchemaError(
                    f"lines between step {self.written} and {min(new)} are missing; resume the run",
                    file=metrics.name,
                )
            _truncate(book.fileno(), self.written)
            for step, (ledger, metric) in new.items():
                for file, line in ((book, ledger), (metrics, metric)):
                    _append(file, line)
                self.written = step


def _append(file: BufferedRandom, line: bytes) -> None:
    """Write a whole line; one `os.write` may write a part of it."""
    remaining = memoryview(line)
    try:
        while remaining:
            remaining = remaining[os.write(file.fileno(), remaining) :]
    except OSError as error:
        raise SchemaError(
            f"no room on disk for the line of a step: {error.strerror}; free some and continue "
            "with --resume",
            file=file.name,
        ) from error


def _truncate(number: int, max_step: int | None) -> int:
    """Truncate torn lines and those of later steps, seek to the end, return the last step or -1.

    Args:
        number: file descriptor.
        max_step: the last step to keep; None: all.
    """
    keep, last = _end_of_lines(number, max_step)
    if keep != os.fstat(number).st_size:
        os.ftruncate(number, keep)
    os.lseek(number, keep, os.SEEK_SET)
    return last


def _end_of_lines(number: int, max_step: int | None) -> tuple[int, int]:
    """Return the offset behind the last line of at most a step, and its step; 0 and -1 for none."""
    for start, line in _lines_from_end(number):
        step = step_of_line(line)
        if step < math.inf and (max_step is None or step <= max_step):
            return start + len(line), int(step)
    return 0, -1


def _lines_from_end(number: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of an open file, the last line first."""
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


def truncate_logs(run: Path, train_step: int) -> None:
    """Remove the lines of steps from `train_step` on, which will be trained again.

    A log that loses lines is another file: that tells an upload to compare the committed ones.
    """
    for name in (METRICS, LEDGER):
        with (run / name).open("a+b") as file:
            end, _ = _end_of_lines(file.fileno(), train_step - 1)
            file.seek(0)
            kept = file.read(end) if end < os.fstat(file.fileno()).st_size else None
        if kept is not None:
            replace_bytes(run / name, kept)


def step_of_line(line: bytes) -> float:
    """Return the step of a line, infinity if it is torn or unreadable."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def steps_with_lines(run: Path) -> tuple[int, Path]:
    """Return how many steps from 0 on have all their lines, and the file that ends first.

    A step has its lines if the metrics have one and the ledger has as many of its samples.
    """
    num_samples_of = dict[int, int]()
    for step, num_samples in _read_counts(run / LEDGER):
        num_samples_of[step] = num_samples_of.get(step, 0) + num_samples
    count = 0
    for step, num_samples in _read_counts(run / METRICS):
        if step != count:
            break
        if num_samples_of.get(step) != num_samples:
            return count, run / LEDGER
        count += 1
    return count, run / METRICS


def _read_counts(path: Path) -> Iterator[tuple[int, int]]:
    """Yield step and samples of each line up to the first that is torn or unreadable."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                body = json.loads(line)
                counts = int(body["step"]), int(body["num_samples"])
            except (ValueError, TypeError, KeyError):
                return
            if not line.endswith(b"\n"):
                return
            yield counts
