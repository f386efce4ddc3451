"""Going back to the newest checkpoint when rows were lost, as often as the run gets on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from schemas.events import METRICS
from trainer.beginning import resumable_checkpoint
from trainer.checkpoint import step_of
from trainer.stores.failures import StoreLostError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MOST_IN_VAIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollbacks:
    """What going back has cost."""

    num_rollbacks: int = 0
    """Times that the run went back to a checkpoint."""
    recomputed_steps: int = 0
    """Committed steps that were trained again."""


def with_rollbacks(
    run: Path,
    checkpoint: Path | None,
    attempt: Callable[[Path | None], T],
    settle: Callable[[], None] = lambda: None,
) -> tuple[T, Rollbacks]:
    """Train, again from the newest checkpoint whenever a store lost rows.

    Args:
        run: run folder.
        checkpoint: to begin with; None for the beginning.
        attempt: trains from a checkpoint to the end, with stores of its own.
        settle: waits until the checkpoints of the attempt before are all on the disk.

    Returns:
        (what the attempt returned that came to its end, what the others cost).

    Raises:
        StoreLostError: rows were lost three times without a step committed in between that was
            not committed before.
    """
    found, furthest, in_vain = Rollbacks(), -1, 0
    while True:
        try:
            return attempt(checkpoint), found
        except StoreLostError as error:
            committed = len((run / METRICS).read_text(encoding="utf-8").splitlines())
            in_vain = 0 if committed > furthest else in_vain + 1
            furthest = max(furthest, committed)
            if in_vain == _MOST_IN_VAIN:
                raise
            settle()
            checkpoint = resumable_checkpoint(run)
            first = step_of(checkpoint)
            found = Rollbacks(
                num_rollbacks=found.num_rollbacks + 1,
                recomputed_steps=found.recomputed_steps + committed - first,
            )
            logger.warning("rows were lost: back to step %s of %s: %s", first, committed, error)
