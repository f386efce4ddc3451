"""The part of the job file that thins out negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.hashing import MAX_ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Which negatives of the training range are kept, and with what weight."""

    negatives: float
    """Share of the negatives that is kept, in (0, 1]; a kept one weighs 1 / share."""
    unit: Literal["session", "sample"] = "session"
    """`session`: the negatives of a session key are all kept or all dropped; `sample`: each has a
    draw of its own."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.negatives <= 1:
            raise ValueError(
                f"negatives must be in (0, 1], got {self.negatives}; write 0.1 to keep a tenth"
            )
        if not 0 <= self.seed <= MAX_ROW:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}; lower it")
