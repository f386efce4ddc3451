"""Checkpoints of replicas beside training: the writer copies, its agent brings copies to the disk.

All replicas hold the same rows and take note of those that change, so whoever becomes the writer
goes on from the newest complete checkpoint. The copies of a run have one place on a machine. A
replica that no longer writes gives it back, and where it died its agent does, when it has written
what it holds. Until then, and where a new writer does not know all that changed since that
checkpoint, everything is saved while training waits: no checkpoint depends on another's agent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from schemas.errors import SchemaError
from schemas.jagged import Array
from trainer.flash.changes import Changes
from trainer.flash.fits import made_of
from trainer.flash.memory import CopyMemory, memory_path
from trainer.flash.saver import BesideSaver
from trainer.replicas.saves import newest_step
from trainer.replicas.setting import Setting
from trainer.saving import TrainState, claim_leftovers
from trainer.stores.failures import StoreLostError

logger = logging.getLogger(__name__)

_HAND_OVER_SEC = 1.0
"""Wait for the agent of the writer before, which ends in half of it where it has nothing to do."""


class ReplicaState(TrainState):
    """What is saved of a replica; where caches stand is not: they are planned anew."""

    def plan(self, train_step: int) -> Mapping[str, Array]:
        """Return nothing."""
        return {}


class BesideSaves:
    """Saves every so many steps: beside training, or whole where that cannot be."""

    def __init__(
        self, setting: Setting, copy_bytes: int, save_whole: Callable[[int], None]
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
        setting.rows.follow(self._changes)
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
            except StoreLostError:
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
