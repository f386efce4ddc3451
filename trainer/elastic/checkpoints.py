"""Log lines and checkpoints of a run of several replicas."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from io import BufferedRandom
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import numpy as np

from schemas.arrays import Array
from schemas.config.job import Job
from schemas.config.train import CheckpointConfig
from schemas.errors import SchemaError
from schemas.run_log import LEDGER, METRICS, SPLITS, LedgerEntry, StepMetric, StepSplit, to_line
from trainer.checkpoint.load import fingerprint_of, newest_checkpoint, step_of
from trainer.checkpoint.manager import BackgroundSaver, RunState, claim_leftovers, dense_bytes
from trainer.checkpoint.manifest import has_files, step_of_newest
from trainer.checkpoint.snapshot import (
    DATA_OFFSET,
    SnapshotMemory,
    copy_bytes,
    free_bytes,
    memory_path,
    no_room,
)
from trainer.components import build_components, layouts_of
from trainer.data.decode import spec_of
from trainer.elastic.context import ReplicaContext
from trainer.embedding.changes import Changes
from trainer.follow import Span
from trainer.stores.api import RowsLostError


def copy_bytes_of(job: Job, span: Span, first: int) -> int:
    """Return the size of the largest copy for a checkpoint of replicas; 0 if none is due.

    Args:
        job: of the run.
        span: what may be trained.
        first: first step to be trained.
    """
    every = job.train.checkpoint.every_steps
    if every is None:
        return 0
    spec = spec_of(span.dataset, job.train.dtype)
    layouts = layouts_of(spec, job.train)
    components = build_components(spec, job.train)
    steps = range(first, span.horizon.end_step)
    rows = copy_bytes(span.dataset, span.order, layouts, steps, every, None)
    return dense_bytes(components) + rows


def check_room(config: CheckpointConfig, num_bytes: int) -> None:
    """Raise SchemaError if the directory of copies has no room for `num_bytes`; 0: no copy."""
    directory = Path(config.copy_to)
    if num_bytes and DATA_OFFSET + num_bytes > free_bytes(directory):
        raise no_room(directory, DATA_OFFSET + num_bytes)


class ReplicaCheckpoints(Protocol):
    """Checkpoints of a run, as one of its replicas saves them."""

    def after(self, train_step: int, saved: int, *, writes: bool) -> None:
        """Save if a checkpoint is due.

        Args:
            train_step: the next step.
            saved: step of the newest checkpoint that a replica knows to be durable; -1: none.
            writes: whether this replica is the writer.
        """
        ...

    def finish(self, train_step: int) -> bool:
        """Save the state before a step unless it is saved; return whether rows were flushed.

        Raises:
            SchemaError: the disk is full.
        """
        ...

    def release(self) -> None:
        """Release the memory of copies for another writer, in the background."""
        ...

    def close(self) -> None:
        """Release resources after copies in progress are written."""
        ...


class FinalCheckpoint:
    """Saves once, after the last step."""

    def __init__(self, run: Path, save: Callable[[int], None]) -> None:
        """Save nothing yet.

        Args:
            run: run folder.
            save: flushes rows and saves the state before a step.
        """
        self._run, self._save = run, save

    def after(self, train_step: int, saved: int, *, writes: bool) -> None:
        """Do nothing."""

    def finish(self, train_step: int) -> bool:
        """Save unless another replica has."""
        if step_of_newest(self._run) == train_step:
            return False
        self._save(train_step)
        return True

    def release(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


_BLOCK = 1 << 16
"""Bytes per read from the end of a file."""
LINES = "lines"
"""Name of the remembered lines among the arrays of a state."""


class LogWriter:
    """Log lines of committed steps: remembered by all replicas until they are durable.

    One replica writes them. It may die between two lines, or before others can read its lines. The
    next writer truncates a torn line and adds the missing ones.
    """

    def __init__(self, run: Path) -> None:
        """Write nothing yet.

        Args:
            run: run folder with existing log files.
        """
        self._run = run
        self._lines: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._splits: list[StepSplit] = []
        self.written = -1
        """Last step in the file when this replica wrote to it last."""

    def remember(self, metric: StepMetric, entries: Sequence[LedgerEntry]) -> None:
        """Keep the lines of a committed step.

        Args:
            metric: of the step.
            entries: one per replica that computed microbatches.
        """
        ledger = "".join(f"{to_line(entry)}\n" for entry in entries)
        self._lines[metric.step] = (ledger.encode(), f"{to_line(metric)}\n".encode())

    def remember_splits(self, splits: Iterable[StepSplit]) -> None:
        """Keep the lines of new splits."""
        self._splits.extend(splits)

    def forget(self, logged: int) -> None:
        """Drop the lines of steps up to one, which are durable."""
        while self._lines and next(iter(self._lines)) <= logged:
            self._lines.popitem(last=False)
        self._splits = [split for split in self._splits if split.fixed_at > logged]

    def to_arrays(self) -> dict[str, Array]:
        """Return the remembered lines for a replica that joins: it may be the next writer."""
        lines = [[step, *(line.decode() for line in each)] for step, each in self._lines.items()]
        body = {"lines": lines, "splits": [asdict(split) for split in self._splits]}
        return {LINES: np.frombuffer(json.dumps(body).encode(), np.uint8)}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Remember what `to_arrays` of another replica returned, instead of earlier lines."""
        body = json.loads(arrays[LINES].tobytes())
        lines = (
            (step, (ledger.encode(), metric.encode())) for step, ledger, metric in body["lines"]
        )
        self._lines = OrderedDict(lines)
        self._splits = [
            StepSplit(**{**split, "leaves": {n: (a, b) for n, (a, b) in split["leaves"].items()}})
            for split in body["splits"]
        ]

    def write(self) -> None:
        """Write every remembered line that is not in the files.

        The splits and the ledger are written first: a step is complete when its metric is written.

        Raises:
            SchemaError: the disk is full, or a missing step is not remembered.
        """
        with (self._run / METRICS).open("r+b") as metrics, (self._run / LEDGER).open("r+b") as book:
            fcntl.flock(metrics, fcntl.LOCK_EX)
            self._write_splits()
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

    def _write_splits(self) -> None:
        if not self._splits:
            return
        with (self._run / SPLITS).open("a+b") as file:
            last = _truncate(file.fileno(), None, "fixed_at")
            newest = takewhile(
                lambda line: json.loads(line)["fixed_at"] == last,
                (line for _, line in _lines_from_end(file.fileno())),
            )
            written = set(newest)
            for split in self._splits:
                line = f"{to_line(split)}\n".encode()
                if split.fixed_at >= last and line not in written:
                    _append(file, line)


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


def _truncate(number: int, max_step: int | None, key: str = "step") -> int:
    """Truncate a torn line and lines of later steps, seek to the end, return the last step or -1.

    Args:
        number: file descriptor.
        max_step: the last step to keep; None: all.
        key: of the step in a line.
    """
    keep, last = 0, -1
    for start, line in _lines_from_end(number):
        if line.endswith(b"\n"):
            step = int(json.loads(line)[key])
            if max_step is None or step <= max_step:
                keep, last = start + len(line), step
                break
    if keep != os.fstat(number).st_size:
        os.ftruncate(number, keep)
    os.lseek(number, keep, os.SEEK_SET)
    return last


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


logger = logging.getLogger(__name__)

_HAND_OVER_SEC = 1.0
"""Maximum wait for the agent of the previous writer; an idle one ends in half of it."""


class ReplicaState(RunState):
    """The state of a replica to be saved, without the cache plan, which is made again."""

    def plan(self, train_step: int) -> Mapping[str, Array]:
        """Return nothing."""
        return {}

    def on_saved(self, train_step: int) -> None:
        """Let stores truncate their logs; changes are dropped when all replicas drop them."""
        self.truncate_stores(train_step)


class BackgroundCheckpoints:
    """Saves every `every_steps` steps: changed rows beside training, or everything at once.

    All replicas hold the same rows, and track their changes since the newest checkpoint that is
    durable. So a new writer continues from it if it has its files. The copies of a run use one
    memory file per folder. A replica that is no longer the writer releases it; if it died, its
    agent does after writing its copies. Until then, and if the writer lacks files of the newest
    checkpoint or has not tracked all changes since, everything is saved while training waits. So no
    checkpoint depends on the agent of another replica.
    """

    def __init__(
        self, context: ReplicaContext, copy_bytes: int, save_all: Callable[[int], None]
    ) -> None:
        """Track changes of rows from the first step on.

        Args:
            context: of the replica, whose rows are not started yet.
            copy_bytes: of the largest copy.
            save_all: flushes rows and saves the state before a step.
        """
        self._context = context
        self._run, self._config = context.run, context.job.train.checkpoint
        self._copy_bytes = copy_bytes
        self._save_all = save_all
        self._layouts = context.components.store.layouts
        self._changes = Changes(self._layouts, context.run)
        self._dropped_before = 0
        context.rows.track_changes(self._changes)
        self._active: tuple[BackgroundSaver, ReplicaState] | None = None
        self._releasing: threading.Thread | None = None
        self._warned = False

    def after(self, train_step: int, saved: int, *, writes: bool) -> None:
        """Copy changed rows if a checkpoint is due and this replica is the writer."""
        if not writes:
            self.release()
        every = self._config.every_steps
        if every is None or train_step % every:
            return
        if saved > self._dropped_before:
            self._changes.drop_before(saved)
            self._dropped_before = saved
        if writes:
            self._save(train_step, BackgroundSaver.save)

    def finish(self, train_step: int) -> bool:
        """Save the state before a step unless it is saved; return whether rows were flushed.

        Raises:
            SchemaError: the disk is full.
        """
        return step_of_newest(self._run) != train_step and self._save(
            train_step, BackgroundSaver.finish
        )

    def release(self) -> None:
        """Release the memory of copies in the background, after they are written."""
        if self._active is not None:
            self._releasing = threading.Thread(
                target=_close, args=self._active, name="release", daemon=True
            )
            self._releasing.start()
            self._active = None

    def close(self) -> None:
        """Stop the agent after it has written its copies, and release their memory."""
        self.release()
        if self._releasing is not None:
            self._releasing.join()

    def _save(self, train_step: int, save: Callable[[BackgroundSaver, int], None]) -> bool:
        """Save with `save`, or everything if that is not possible; return whether it was all."""
        newest = newest_checkpoint(self._run)
        base = step_of(newest)
        if base >= max(self._context.rows.tracked_since, self._dropped_before) and (
            newest is None or has_files(newest)
        ):
            try:
                saver, _ = self._active = self._active or self._start()
                saver.rebase_on(base)
                save(saver, train_step)
            except RowsLostError:
                raise
            except (SchemaError, OSError) as error:
                self.release()
                self._warn(train_step, error)
            else:
                self._warned = False
                return False
        self._save_all(train_step)
        return True

    def _start(self) -> tuple[BackgroundSaver, ReplicaState]:
        """Create the memory of copies and start an agent.

        Raises:
            SchemaError: another agent still uses the memory, or there is not enough.
            FileExistsError: another replica created it first.
        """
        context = self._context
        claim_leftovers(self._run, self._config, resume=True, wait_sec=_HAND_OVER_SEC)
        newest = newest_checkpoint(self._run)
        memory = SnapshotMemory(memory_path(Path(self._config.copy_to), self._run))
        state = ReplicaState(
            context.components,
            context.rows.source,
            self._changes,
            lambda: fingerprint_of(context.job, context.span.dataset),
        )
        saver = BackgroundSaver(
            self._run,
            memory,
            state,
            layouts=self._layouts,
            first_step=step_of(newest),
            loaded=newest is not None,
            config=self._config,
        )
        try:
            saver.start(self._copy_bytes)
        except BaseException:
            state.close()
            raise
        return saver, state

    def _warn(self, train_step: int, error: Exception) -> None:
        if not self._warned:
            logger.warning(
                "checkpoint is saved while training waits, as are those that follow until its "
                "copy has a place train_step=%s: %s",
                train_step,
                error,
            )
        self._warned = True


def _close(saver: BackgroundSaver, state: ReplicaState) -> None:
    saver.close()
    state.close()
