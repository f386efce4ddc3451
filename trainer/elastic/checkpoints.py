"""Checkpoints and log lines of a run of several replicas."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Protocol

from schemas.arrays import Array
from schemas.config.job import Job
from schemas.config.train import CheckpointConfig
from schemas.errors import SchemaError
from schemas.run_log import LEDGER, METRICS, SPLITS, LedgerEntry, StepMetric, StepSplit, to_line
from trainer.checkpoint.incremental import Changes
from trainer.checkpoint.load import made_of, newest_checkpoint
from trainer.checkpoint.manager import BesideSaver, TrainState, claim_leftovers, dense_bytes
from trainer.checkpoint.snapshot import (
    START,
    CopyMemory,
    copy_bytes,
    free_bytes,
    memory_path,
    too_small,
)
from trainer.components import build_parts, layouts_of, memory_stores
from trainer.data.decode import spec_of
from trainer.elastic.context import ReplicaContext
from trainer.follow import Span
from trainer.stores.api import RowsLostError


def copy_bytes_of(job: Job, span: Span, first: int) -> int:
    """Return the bytes of the largest copy of a checkpoint of replicas; 0 where none is due.

    Args:
        job: of the run.
        span: what may be trained by now.
        first: step that is to be trained.
    """
    every = job.train.checkpoint.every_steps
    if every is None:
        return 0
    spec = spec_of(span.dataset, job.train.dtype)
    layouts = layouts_of(spec, job.train)
    parts = build_parts(spec, job.train, memory_stores(spec, job.train))
    steps = range(first, span.horizon.until)
    rows = copy_bytes(span.dataset, span.order, layouts, steps, every, None)
    return dense_bytes(parts) + rows


def check_room(config: CheckpointConfig, num_bytes: int) -> None:
    """Refuse a machine without room for a copy.

    Args:
        config: says where copies go.
        num_bytes: of the largest one; 0 where there is none.

    Raises:
        SchemaError: names the missing bytes.
    """
    directory = Path(config.copy_to)
    if num_bytes and START + num_bytes > free_bytes(directory):
        raise too_small(directory, START + num_bytes)


class ReplicaCheckpoints(Protocol):
    """Saves a run, as one of its replicas."""

    def after(self, train_step: int, *, writes: bool) -> None:
        """Save where it is due.

        Args:
            train_step: all steps before it are committed.
            writes: whether this replica writes the run's files.
        """
        ...

    def finish(self, train_step: int) -> bool:
        """Have the state before a step on the disk; return whether that brought all rows to stores.

        Raises:
            SchemaError: the disk is full.
        """
        ...

    def let_go(self) -> None:
        """Give back what another replica may need; nobody waits for it."""
        ...

    def close(self) -> None:
        """Give back what was taken; what was copied is still written."""
        ...


class FinalCheckpoint:
    """Saves everything once, after the last step."""

    def __init__(self, run: Path, save: Callable[[int], None]) -> None:
        """Keep the parts.

        Args:
            run: run folder.
            save: brings all rows to their stores and writes the state before a step.
        """
        self._run, self._save = run, save

    def after(self, train_step: int, *, writes: bool) -> None:
        """Do nothing."""

    def finish(self, train_step: int) -> bool:
        """Save, unless another replica has."""
        if newest_step(self._run) == train_step:
            return False
        self._save(train_step)
        return True

    def let_go(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def newest_step(run: Path) -> int | None:
    """Return the step of the newest complete checkpoint of a run."""
    newest = newest_checkpoint(run)
    return None if newest is None else int(newest.name)


# The lines of committed steps, kept by all replicas and written by one of them.
#
# Who writes may die at any moment, also between two lines. All replicas remember the last steps;
# whoever writes next looks at what is there, drops what is torn and adds what is missing.

REMEMBERED_STEPS = 64
"""Steps whose lines a replica can still write."""
_BLOCK = 1 << 16
"""Bytes that are read at once from the end of a file."""


class LogWriter:
    """The lines of a run, as one replica knows them."""

    def __init__(self, run: Path) -> None:
        """Remember the folder.

        Args:
            run: run folder; its lines are there already, perhaps none.
        """
        self._run = run
        self._lines: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._splits: deque[StepSplit] = deque(maxlen=REMEMBERED_STEPS)

    def remember(self, metric: StepMetric, entries: Sequence[LedgerEntry]) -> None:
        """Keep the lines of a committed step.

        Args:
            metric: of the step.
            entries: one per replica that computed leaves.
        """
        ledger = "".join(f"{to_line(entry)}\n" for entry in entries)
        self._lines[metric.step] = (ledger.encode(), f"{to_line(metric)}\n".encode())
        while len(self._lines) > REMEMBERED_STEPS:
            self._lines.popitem(last=False)

    def remember_splits(self, splits: Iterable[StepSplit]) -> None:
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


# Checkpoints of replicas beside training: the writer copies, its agent brings copies to the disk.
#
# All replicas hold the same rows and take note of those that change, so whoever becomes the
# writer goes on from the newest complete checkpoint. The copies of a run have one place on a
# machine. A replica that no longer writes gives it back, and where it died its agent does, when
# it has written what it holds. Until then, and where a new writer does not know all that changed
# since that checkpoint, everything is saved while training waits: no checkpoint depends on
# another's agent.

logger = logging.getLogger(__name__)

_HAND_OVER_SEC = 1.0
"""Wait for the agent of the writer before, which ends in half of it where it has nothing to do."""


class ReplicaState(TrainState):
    """What is saved of a replica; where caches stand is not: they are planned anew."""

    def plan(self, train_step: int) -> Mapping[str, Array]:
        """Return nothing."""
        return {}


class BackgroundCheckpoints:
    """Saves every so many steps: beside training, or whole where that cannot be."""

    def __init__(
        self, setting: ReplicaContext, copy_bytes: int, save_whole: Callable[[int], None]
    ) -> None:
        """Follow the rows from now on.

        Args:
            setting: of the run, whose rows are not begun with yet.
            copy_bytes: of the largest copy.
            save_whole: brings all rows to their stores and writes the state before a step.
        """
        self._setting = setting
        self._run, self._config = setting.run, setting.job.train.checkpoint
        self._copy_bytes = copy_bytes
        self._save_whole = save_whole
        self._layouts = {table: store.layout for table, store in setting.parts.stores.items()}
        self._changes = Changes(self._layouts)
        setting.rows.track_changes(self._changes)
        self._begun: tuple[BesideSaver, ReplicaState] | None = None
        self._has_told = False

    def after(self, train_step: int, *, writes: bool) -> None:
        """Copy what changed where it is due and this replica writes."""
        if not writes:
            self.let_go()
        every = self._config.every_steps
        if every is None or train_step % every:
            return
        newest = newest_step(self._run)
        if newest is not None:
            self._changes.forget(newest)
        if writes:
            self._save(train_step, newest, BesideSaver.save)

    def finish(self, train_step: int) -> bool:
        """Have the state before a step on the disk; return whether that brought all rows to stores.

        Raises:
            SchemaError: the disk is full.
        """
        newest = newest_step(self._run)
        return newest != train_step and self._save(train_step, newest, BesideSaver.finish)

    def let_go(self) -> None:
        """Give the place of copies back; nobody waits until what was copied is written."""
        if self._begun is not None:
            threading.Thread(target=_close, args=self._begun, name="let go", daemon=True).start()
            self._begun = None

    def close(self) -> None:
        """End the agent, when it has written what is under way, and give the place back."""
        if self._begun is not None:
            _close(*self._begun)
            self._begun = None

    def _save(
        self, train_step: int, newest: int | None, save: Callable[[BesideSaver, int], None]
    ) -> bool:
        """Save as `save` does, or whole where that cannot be; return whether it was whole."""
        if self._setting.rows.known <= (newest or 0):
            try:
                saver, _ = self._begun = self._begun or self._begin()
                saver.go_on_from(newest or 0)
                save(saver, train_step)
            except RowsLostError:
                raise
            except (SchemaError, OSError) as error:
                self.let_go()
                self._tell(train_step, error)
            else:
                self._has_told = False
                return False
        self._save_whole(train_step)
        return True

    def _begin(self) -> tuple[BesideSaver, ReplicaState]:
        """Take the place of copies and start an agent.

        Raises:
            SchemaError: another agent still holds it, or it is too small.
            FileExistsError: another replica was faster.
        """
        setting = self._setting
        claim_leftovers(self._run, self._config, resume=True, wait_sec=_HAND_OVER_SEC)
        newest = newest_step(self._run)
        memory = CopyMemory(memory_path(Path(self._config.copy_to), self._run))
        state = ReplicaState(
            setting.parts,
            setting.rows.source,
            self._changes,
            lambda: made_of(setting.job, setting.span.dataset),
        )
        saver = BesideSaver(
            self._run,
            memory,
            state,
            layouts=self._layouts,
            first_step=newest or 0,
            loaded=newest is not None,
            config=self._config,
        )
        try:
            saver.start(self._copy_bytes)
        except BaseException:
            state.close()
            raise
        return saver, state

    def _tell(self, train_step: int, error: Exception) -> None:
        if not self._has_told:
            logger.warning(
                "checkpoint is saved while training waits, as are those that follow until its "
                "copy has a place train_step=%s: %s",
                train_step,
                error,
            )
        self._has_told = True


def _close(saver: BesideSaver, state: ReplicaState) -> None:
    saver.close()
    state.close()
