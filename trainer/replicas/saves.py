"""Checkpoints of a run of replicas: the one that writes saves everything while the others wait.

Not beside training: the agent of a writer that is cut off and comes back holds the memory for
copies, so the next writer had no place for its own (schedules 0 and 5 of the chaos test).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import newest_checkpoint


class Saves:
    """Writes a checkpoint where it is due."""

    def __init__(self, run: Path, every_steps: int | None, save: Callable[[int], None]) -> None:
        """Keep the parts.

        Args:
            run: run folder.
            every_steps: steps between checkpoints; None for the last one alone.
            save: brings all rows to their stores and writes the state before a step.
        """
        self._run, self._every_steps, self._save = run, every_steps, save

    def after(self, train_step: int, *, writes: bool) -> None:
        """Save where it is due.

        Args:
            train_step: all steps before it are committed.
            writes: whether this replica writes the run's files.
        """
        every = self._every_steps
        if writes and every is not None and train_step % every == 0:
            self._save(train_step)

    def finish(self, train_step: int) -> bool:
        """Have the state before a step on the disk; return whether this replica has saved it.

        Raises:
            SchemaError: the disk is full.
        """
        newest = newest_checkpoint(self._run)
        if newest is not None and int(newest.name) == train_step:
            return False
        self._save(train_step)
        return True
