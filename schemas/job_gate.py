"""What a segment must be like to enter the dataset, beyond what `schema.pbtxt` says of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Limits on a segment as a whole; those on columns stand in the schema."""

    action: Literal["fail", "warn"] = "fail"
    """`fail`: a segment with findings stays out (exit code 3); `warn`: they are written down."""
    max_reject_fraction: float | None = 0.1
    """Most rejected rows, as a share of these and the rows that gave samples; no limit when null.
    It holds without a `gate`, too."""
    session_drift: float | None = None
    """Largest Jensen-Shannon divergence of samples per session from the segment before."""
    delay_drift: float | None = None
    """Largest Jensen-Shannon divergence of label delay (`label_time` less time) from it."""
    label_drift: float | None = None
    """Largest change of the mean label from it, as a share of the one before."""
    dedup_drift: float | None = None
    """Largest change of a group's dedup factor from it, as a share of the one before."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("max_reject_fraction", "session_drift", "delay_drift"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}; it is a share")
        for name in ("label_drift", "dedup_drift"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}; it is a share")
