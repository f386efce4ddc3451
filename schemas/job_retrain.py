"""The `schedule.retrain` section of the job file: a day after the other, each judged."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGateConfig:
    """What a model must be like to be promoted, on the newest held-back range."""

    max_ne: float | None = 1.0
    """Highest NE; that of always predicting the mean label is 1. No limit when null."""
    min_auc: float | None = 0.5
    """Lowest AUC; that of a coin is 0.5."""
    max_calibration_error: float | None = 0.25
    """Farthest that calibration may be from 1."""
    max_ne_increase: float | None = 0.01
    """Most that NE may lie above that of the last promoted model, as a share of it."""
    max_auc_decrease: float | None = 0.01
    """Most that AUC may lie below that of the last promoted model, as a share of it."""
    max_calibration_drift: float | None = 0.1
    """Most that calibration may be farther from 1 than that of the last promoted model."""
    min_samples: int = 1
    """Fewest samples that are held back; with fewer nothing can be said of a model."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value < 0:
                raise ValueError(f"{limit.name} must be at least 0, got {value}; raise it")
        if self.min_samples < 1:
            raise ValueError(f"min_samples must be at least 1, got {self.min_samples}; raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainConfig:
    """How `python -m scheduler retrain` goes on from day to day."""

    input: str | None = None
    """Folder of the raw files of one day, relative to the job file; `{date}` stands for the day."""
    output: str | None = None
    """Folder of it all, relative to the job file."""
    expire_days: int | None = None
    """Rows that no segment of so many days used are dropped; none are when null."""
    refused_days: Literal["train", "skip"] = "train"
    """Whether later runs train the segment of a day whose own model was turned down."""
    keep: int | None = 7
    """Newest promoted runs that are kept on disk, with what was turned down since; all when
    null."""
    tries: int = 3
    """Times that a stage is started before the command gives up; a stage that says that it cannot
    do its work is started once."""
    gate: ModelGateConfig = field(default_factory=ModelGateConfig)
    """What a model must be like to be promoted."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("expire_days", "keep", "tries"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; raise it")
