"""Checkpoints of a run of replicas: one of them copies and has an agent, the others are ready to.

All replicas hold the same rows and take note of those that change, so whoever becomes the writer
goes on from the newest complete checkpoint. It knows what changed since, unless it joined later:
then it saves everything once. The run's copies have one place in memory; a new writer waits, by
leaving checkpoints out, until the agent of the one before has written what was there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.job import Job
from schemas.job_train import CheckpointConfig
from trainer.checkpoint import newest_checkpoint
from trainer.decode import spec_of
from trainer.flash.changes import Changes
from trainer.flash.memory import WAIT_SEC, CopyMemory, free_bytes, memory_path, too_small
from trainer.flash.saver import BesideSaver
from trainer.flash.space import copy_bytes
from trainer.parts import Parts, build_parts, layouts_of, memory_stores, order_of
from trainer.saving import MadeOf, TrainState, claim_leftovers, dense_bytes
from trainer.sources import RowSource

logger = logging.getLogger(__name__)


class Saves(Protocol):
    """Saves a run, as one of its replicas."""

    def loaded(self, train_step: int) -> None:
        """Take note that the state before a step came from another replica."""
        ...

    def after(self, train_step: int, *, writes: bool) -> None:
        """Take note that all steps before one are committed, and whether this replica writes."""
        ...

    def finish(self, train_step: int) -> None:
        """Have the state before a step on the disk.

        Raises:
            SchemaError: the disk is full.
        """
        ...

    def close(self) -> None:
        """Give back what was taken; what was copied is still written."""
        ...


class WholeSaves:
    """Writes everything while training waits."""

    def __init__(
        self, run: Path, every_steps: int | None, last: int, save: Callable[[int], None]
    ) -> None:
        """Keep the parts.

        Args:
            run: run folder.
            every_steps: steps between checkpoints; None for the last one alone.
            last: the step after the last one.
            save: writes the state before a step.
        """
        self._run, self._every_steps, self._last, self._save = run, every_steps, last, save

    def loaded(self, train_step: int) -> None:
        """Do nothing."""

    def after(self, train_step: int, *, writes: bool) -> None:
        """Save where it is due."""
        every = self._every_steps
        if writes and every is not None and train_step % every == 0 and train_step < self._last:
            self._save(train_step)

    def finish(self, train_step: int) -> None:
        """Save, unless another replica has: all have the same bits."""
        if newest_step(self._run) != train_step:
            self._save(train_step)

    def close(self) -> None:
        """Do nothing."""


class BesideSaves:
    """Copies where it writes, and an agent brings copies to the disk beside training."""

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        parts: Parts,
        source: RowSource,
        made_of: MadeOf,
        *,
        first_step: int,
        copy_bytes: int,
        save_whole: Callable[[int], None],
    ) -> None:
        """Follow the rows from now on.

        Args:
            run: run folder.
            config: of the job, with a number of steps.
            parts: what is trained.
            source: of its rows.
            made_of: what the run is.
            first_step: the first step that is trained; with a checkpoint before it, unless it is 0.
            copy_bytes: of the largest copy.
            save_whole: writes all rows as a checkpoint before a step.
        """
        assert config.every_steps is not None, "who saves beside training does so every so often"
        self._run, self._config, self._every_steps = run, config, config.every_steps
        self._layouts = {table: store.layout for table, store in parts.stores.items()}
        self._changes = Changes(self._layouts)
        source.follow(self._changes)
        self._state = TrainState(parts, source, self._changes, made_of)
        self._known = first_step  # changes since this step are all known
        self._copy_bytes = copy_bytes
        self._save_whole = save_whole
        self._saver: BesideSaver | None = None

    def loaded(self, train_step: int) -> None:
        """Forget: rows changed without notice."""
        self._changes.forget(train_step)
        self._known = train_step

    def after(self, train_step: int, *, writes: bool) -> None:
        """Copy what changed where this replica writes; forget what is saved where not."""
        if not writes and self._saver is not None:
            # another is the writer; it waits for the memory, and nobody waits for this agent
            threading.Thread(target=self._saver.close, name="hand over").start()
            self._saver = None
        if train_step % self._every_steps:
            return
        if not writes:
            self._forget(newest_step(self._run) or 0)
        elif self._begun(train_step, WAIT_SEC if self._config.late == "wait" else 0.0):
            assert self._saver is not None, "it was begun"
            self._saver.save(train_step)

    def finish(self, train_step: int) -> None:
        """Have the state before a step on the disk.

        Raises:
            SchemaError: it cannot be written, or another process holds the memory.
        """
        if newest_step(self._run) == train_step:
            return
        if not self._begun(train_step, WAIT_SEC):
            raise SchemaError(
                f"run must have its last checkpoint, got an agent that still writes after "
                f"{WAIT_SEC:g} s; go on with --resume",
                file=str(self._run),
            )
        assert self._saver is not None, "it was begun"
        if newest_step(self._run) != train_step:
            self._saver.finish(train_step)

    def close(self) -> None:
        """End the agent and give the memory back."""
        if self._saver is not None:
            self._saver.close()
        self._state.close()

    def _begun(self, train_step: int, wait_sec: float) -> bool:
        """Become the one who saves; return whether the memory is free for it."""
        if self._saver is not None:
            return True
        try:
            claim_leftovers(self._run, self._config, resume=True, wait_sec=wait_sec)
        except SchemaError:
            logger.warning(
                "checkpoint is skipped, the one of the writer before is still being written "
                "train_step=%s",
                train_step,
            )
            return False
        newest = newest_step(self._run)
        if self._known and (newest is None or newest < self._known):
            self._save_whole(train_step)
            newest = train_step
        self._forget(newest or 0)
        saver = BesideSaver(
            self._run,
            CopyMemory(memory_path(Path(self._config.copy_to), self._run)),
            self._state,
            layouts=self._layouts,
            first_step=newest or 0,
            loaded=newest is not None,
            config=self._config,
        )
        saver.start(self._copy_bytes)
        self._saver = saver
        return True

    def _forget(self, train_step: int) -> None:
        """Forget what a complete checkpoint has."""
        if train_step > self._known:
            self._changes.forget(train_step)
            self._known = train_step


def copy_bytes_of(job: Job, dataset: Dataset, steps: range) -> int:
    """Return the bytes of the largest copy of a checkpoint of a run with all rows in memory.

    Args:
        job: of the run.
        dataset: open dataset.
        steps: to be trained.

    Raises:
        SchemaError: they are more than the memory for copies has.
    """
    config = job.train.checkpoint
    if config.every_steps is None:
        return 0
    spec = spec_of(dataset, job.train.dtype)
    layouts = layouts_of(spec, job.train)
    parts = build_parts(spec, job.train, memory_stores(spec, job.train))
    rows = copy_bytes(dataset, order_of(job, dataset), layouts, steps, config.every_steps, None)
    wanted, directory = dense_bytes(parts) + rows, Path(config.copy_to)
    if wanted > free_bytes(directory):
        raise too_small(directory, wanted)
    return wanted


def newest_step(run: Path) -> int | None:
    """Return the step of the newest complete checkpoint of a run."""
    newest = newest_checkpoint(run)
    return None if newest is None else int(newest.name)
