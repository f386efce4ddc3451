"""When a run of replicas is saved: each of them is told after every step, one of them writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from trainer.checkpoint import newest_checkpoint


class Saves(Protocol):
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


class LastSave:
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
