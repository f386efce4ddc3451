"""Command-line options of `train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Command-line options of `train`."""

    embedding: str = "plain"
    """plain: all rows in memory; cached: the planned cache in front of a store; lru: an LRU cache
    in front of the same store; uncached: that store without a cache."""
    expanded: bool = False
    """Undo the deduplication, for comparison."""
    steps: int | None = None
    """Stop before this step; None for the whole run."""
    resume: bool = False
    """Resume from the newest checkpoint of the run."""
    stores: int | None = None
    """Store processes to start on this machine; None for those of the job."""
    follow: bool = False
    """Train on committed segments while later ones are built, until the dataset is sealed."""
    fast: bool = False
    """Compute all samples of a step at once; equal to microbatches up to rounding."""
    start_from: Path | Location | None = None
    """Run whose newest checkpoint a new run starts from."""
    rows_only: bool = False
    """With `start_from`: take its rows alone, and begin with new dense layers."""
    output: Location | None = None
    """URL of the run; None if it stays in its folder."""
    segments: tuple[str, ...] | None = None
    """Ids or days of the segments to train on; None for all that are not trained yet."""
    expire_days: int | None = None
    """Drop rows that no segment of the last so many days uses; None keeps all."""

    def __post_init__(self) -> None:
        if self.expire_days is not None and self.start_from is None:
            raise ValueError(
                f"--expire-days {self.expire_days} needs --start-from; name the run whose rows "
                "expire"
            )
        if self.rows_only and self.start_from is None:
            raise ValueError("--rows-only needs --start-from; name the run whose rows to take")
        if self.follow and (self.start_from is not None or self.segments is not None):
            raise ValueError(
                "--follow excludes --start-from and --segments; leave --follow out, and train "
                "the next day as the next run"
            )
        if self.stores is not None and self.embedding == "plain":
            raise ValueError(
                f"--stores {self.stores} has no effect with --embedding plain, which has all rows "
                "in memory; use --embedding cached"
            )
