"""The rows of a run in one of its processes."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.config.train import TrainConfig
from trainer.embedding.cache import CachedRows, PlannedCache, RowSource
from trainer.embedding.changes import Changes
from trainer.follow import Span, extend
from trainer.stores.api import Store


class RunRows:
    """Rows of one process, from a source that no other process uses.

    Attributes:
        source: of the rows of steps.
        written: the last step whose evicted rows are known to be in the stores; -1: not known.
        tracked_since: first step whose changes of rows are tracked.
    """

    source: RowSource
    written = -1
    tracked_since = 0

    def __init__(self, source: RowSource, store: Store, planned: TrainConfig | None = None) -> None:
        self.source = source
        self._store, self._planned = store, planned

    def track_changes(self, changes: Changes) -> None:
        """Record which rows change, from the first step on."""
        self.source.track_changes(changes)

    def start(self, train_step: int, span: Span) -> None:
        """Start with a step, from the checkpoint that the stores hold.

        Raises:
            RowsLostError: the stores hold another checkpoint.
        """
        self.tracked_since = train_step

    def cached(self, train_step: int) -> Mapping[str, CachedRows]:
        """Return the state of the cache before a step, for a checkpoint; {}: none is kept."""
        return self.source.cached(train_step) if isinstance(self.source, PlannedCache) else {}

    def settle(self, at: int | None = None) -> int:
        """Fix and return the step from which on more steps may be planned, or one before it.

        Args:
            at: step that another replica has fixed.
        """
        return self.source.settle(at) if isinstance(self.source, PlannedCache) else 0

    def extend(self, span: Span, train_step: int) -> None:
        """Extend the plan to the steps of a span, from a step on.

        Raises:
            PlanError: the cache is too small.
        """
        if self._planned is not None:
            extend(self.source, self._store, span, self._planned, train_step)

    def update_written(self, written: int, *, writes: bool) -> None:
        """Update `written` to that of all replicas, and whether this one is the writer."""

    def flush(self) -> None:
        """Write all rows to the stores; called by the writer."""
        self.source.flush()

    def close(self) -> None:
        """Stop background work and close connections."""
        self.source.close()
