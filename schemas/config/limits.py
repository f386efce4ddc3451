"""Time and memory limits in the job file, and the settings of `train --follow`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta

WAIT, SAVE, EVALUATE, START, DRAIN = "wait", "save", "evaluate", "start", "drain"
"""Activities of a trainer besides the phases of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Longest time of each activity of a trainer; beyond it, the trainer reports and exits."""

    start: timedelta = timedelta(minutes=30)
    """Start until the first step: kernels, stores, the checkpoint, the plan."""
    read: timedelta = timedelta(minutes=10)
    """Phase of a step: its batch from the dataset's files."""
    fetch: timedelta = timedelta(minutes=10)
    """Phase of a step: its rows from the stores."""
    forward: timedelta = timedelta(minutes=10)
    """Phase of a step."""
    backward: timedelta = timedelta(minutes=10)
    """Phase of a step."""
    sync: timedelta = timedelta(minutes=10)
    """Phase of a step: partial sums from the other replicas."""
    update: timedelta = timedelta(minutes=10)
    """Phase of a step."""
    save: timedelta = timedelta(minutes=30)
    """One checkpoint."""
    evaluate: timedelta = timedelta(minutes=10)
    """One batch of the evaluation split."""
    wait: timedelta = timedelta(hours=1)
    """Until the pipeline commits the next segment or seals the dataset."""
    drain: timedelta = timedelta(seconds=30)
    """From SIGTERM or SIGINT to the end of the process."""

    def __post_init__(self) -> None:
        _check_positive(self)

    def seconds(self) -> dict[str, float]:
        """Return each limit in seconds, by name."""
        return {field.name: getattr(self, field.name).total_seconds() for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlLimitsConfig:
    """Limits of one SQL statement of the job on one chunk of rows (at most 65,536)."""

    time: timedelta = timedelta(minutes=5)
    """Until its last row."""
    memory: int = 4 << 30
    """Most bytes that DuckDB uses, and of the result; nothing is spilled to disk."""

    def __post_init__(self) -> None:
        if self.time <= timedelta():
            raise ValueError("time must be longer than 0s; write 60s")
        if self.memory < 16 << 20:
            raise ValueError(f"memory must be at least 16MiB, got {self.memory}; write 1GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowConfig:
    """Training on committed segments while later ones are built."""

    poll: timedelta = timedelta(seconds=1)
    """Interval of polling the dataset while there is nothing to train."""

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(config: LimitsConfig | FollowConfig) -> None:
    for field in fields(config):
        if getattr(config, field.name) <= timedelta():
            raise ValueError(f"{field.name} must be longer than 0s; write 30s")
