"""When a run saves: every N steps beside training, and everything on request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from presage.schemas.config.job import Job
from presage.schemas.config.train import CacheConfig, CheckpointConfig
from presage.schemas.errors import SchemaError
from presage.schemas.machine import free_bytes
from presage.trainer.checkpoint.files import has_files, step_of_newest
from presage.trainer.checkpoint.fingerprint import fingerprint_of
from presage.trainer.checkpoint.load import newest_checkpoint, step_of
from presage.trainer.checkpoint.manager import BackgroundSaver, claim_leftovers, dense_bytes
from presage.trainer.checkpoint.save import save_checkpoint
from presage.trainer.checkpoint.snapshot import DATA_OFFSET, copy_bytes, no_room
from presage.trainer.components import Components, build_components
from presage.trainer.data.decode import training_spec
from presage.trainer.embedding.changes import Changes
from presage.trainer.run.run_context import RunContext
from presage.trainer.steps import Span
from presage.trainer.stores.store import RowsLostError


def copy_bytes_of(
    job: Job,
    span: Span,
    first: int,
    components: Components | None = None,
    cache: CacheConfig | None = None,
) -> int:
    """Return the size of the largest copy for a checkpoint; 0 if none is made beside training.

    Args:
        job: of the run.
        span: what may be trained.
        first: first step to be trained.
        components: of the run; None: like those that the job builds.
        cache: of rows, whose plan is saved; None: no plan is saved.
    """
    every = job.train.checkpoint.every_steps
    if every is None:
        return 0
    if components is None:
        on_host = replace(job.train, device="cpu")  # a launcher may have no other device
        components = build_components(training_spec(span.dataset, job.train), on_host)
    steps, layouts = range(first, span.horizon.end_step), components.store.layouts
    rows = copy_bytes(span.dataset, span.next_uses, layouts, steps, every, cache)
    return dense_bytes(components) + rows


def check_room(config: CheckpointConfig, num_bytes: int) -> None:
    """Raise SchemaError if the directory of copies has no room for `num_bytes`; 0: no copy."""
    directory = Path(config.copy_to)
    if num_bytes and DATA_OFFSET + num_bytes > free_bytes(directory):
        raise no_room(directory, DATA_OFFSET + num_bytes)


logger = logging.getLogger(__name__)

_HAND_OVER_SEC = 1.0
"""Maximum wait for the agent of the previous writer; an idle one ends in half of it."""


def save_everything(context: RunContext, train_step: int) -> None:
    """Flush rows, save the state before a step, and let stores truncate their logs.

    Raises:
        SchemaError: the disk is full.
    """
    components = context.components
    context.rows.flush()
    save_checkpoint(
        context.run,
        train_step,
        components,
        keep=context.job.train.checkpoint.keep,
        cached=context.rows.cached(train_step),
        fingerprint=fingerprint_of(context.job, context.span.dataset),
    )
    components.store.notify_checkpoint(train_step)


class RunCheckpoints:
    """Saves every `every_steps` steps: changed rows beside training, or everything at once.

    Changed rows suffice if this process has tracked all changes since the newest durable checkpoint
    and has its files, and if no other process still holds the folder's memory for copies. Otherwise
    everything is saved while training waits. See docs/checkpoints.md.

    Without `every_steps` everything is saved, and only on request.
    """

    def __init__(
        self,
        context: RunContext,
        copy_bytes: int,
        save_all: Callable[[RunContext, int], None] = save_everything,
    ) -> None:
        """Track changes of rows from the first step on."""
        self._context = context
        self._run, self._config = context.run, context.job.train.checkpoint
        self._copy_bytes = copy_bytes
        self._save_all = save_all
        self._changes: Changes | None = None
        if self._config.every_steps is not None:
            self._changes = Changes(context.components.store.layouts, context.run)
            context.rows.track_changes(self._changes)
        self._dropped_before = 0
        self._active: BackgroundSaver | None = None
        self._releasing: threading.Thread | None = None
        self._warned = False
        self._reserved = False

    def reserve(self) -> None:
        """Create the memory of copies now, since no other process needs it.

        Nothing else is saved in place of a copy that fails then.

        Raises:
            SchemaError: there is too little.
        """
        self._reserved = True
        if self._changes is not None:
            self._active = self._start(self._changes)

    def is_due(self, train_step: int) -> bool:
        """Return whether the state before a step is to be saved."""
        every = self._config.every_steps
        return every is not None and not train_step % every

    def save_if_due(self, train_step: int, saved: int, *, writes: bool) -> None:
        """Copy changed rows if a checkpoint is due.

        Args:
            train_step: the next step.
            saved: step of the newest checkpoint that is known to be durable; -1: none.
            writes: whether this process is the writer.
        """
        if not writes:
            self.release()
        if self._changes is None or not self.is_due(train_step):
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
        if train_step in (self._context.first_step, step_of_newest(self._run)):
            return False
        return self._save(train_step, BackgroundSaver.finish)

    def release(self) -> None:
        """Release the memory of copies in the background, after they are written."""
        if self._active is not None:
            self._releasing = threading.Thread(
                target=self._active.close, name="release", daemon=True
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
        changes, since = self._changes, max(self._context.rows.tracked_since, self._dropped_before)
        if changes is not None and base >= since and (newest is None or has_files(newest)):
            try:
                saver = self._active = self._active or self._start(changes)
                saver.rebase_on(base)
                save(saver, train_step)
            except RowsLostError:
                raise
            except (SchemaError, OSError) as error:
                if self._reserved:
                    raise
                self.release()
                self._warn(train_step, error)
            else:
                self._warned = False
                return False
        self._save_all(self._context, train_step)
        return True

    def _start(self, changes: Changes) -> BackgroundSaver:
        """Create the memory of copies and start an agent.

        Raises:
            SchemaError: another agent still uses the memory, or there is not enough.
            FileExistsError: another replica created it first.
        """
        context = self._context
        claim_leftovers(self._run, self._config, resume=True, wait_sec=_HAND_OVER_SEC)
        newest = newest_checkpoint(self._run)
        saver = BackgroundSaver(
            self._run,
            context.components,
            context.rows,
            changes,
            lambda: fingerprint_of(context.job, context.span.dataset),
            self._config,
            None if newest is None else step_of(newest),
        )
        saver.start(self._copy_bytes)
        return saver

    def _warn(self, train_step: int, error: Exception) -> None:
        if not self._warned:
            logger.warning(
                "checkpoint is saved while training waits, as are those that follow until its "
                "copy has a place train_step=%s: %s",
                train_step,
                error,
            )
        self._warned = True
