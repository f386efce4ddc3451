"""Section `schedule` of the job file: pools, budget, workers, and daily retraining."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import timedelta
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


_GIB = 1 << 30
UNLIMITED_CPUS, UNLIMITED_MEMORY = math.inf, 1 << 62
"""A budget that the file does not name has no limit of its own: that of the machine counts."""
MAX_STORES = 16
"""Stores of one job: rows move between them in so many ranges."""
MAX_TIME_COST_EXPONENT = 100.0
"""Beyond, cost hardly counts any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What one process of a pool gets."""

    cpus: float = 1.0
    """Cores."""
    memory: int = 2 * _GIB
    """Bytes; a text such as `2GiB` in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingPoolConfig:
    """Limits of the pool that builds segments."""

    worker: WorkerConfig = field(default_factory=WorkerConfig)
    """Size of one pipeline worker."""
    min_workers: int = 1
    """Fewest workers."""
    max_workers: int = 64
    """Most workers, over all segment jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoolConfig:
    """Limits of the pool that trains."""

    replica: WorkerConfig = field(default_factory=WorkerConfig)
    """Size of one trainer replica."""
    store: WorkerConfig = field(default_factory=WorkerConfig)
    """Size of one embedding store."""
    min_replicas: int = 1
    """Fewest replicas."""
    max_replicas: int = 16
    """Most replicas."""
    max_stores: int = 16
    """Most stores, up to MAX_STORES; none are used while one process holds the tables."""

    def __post_init__(self) -> None:
        """Refuse more stores than slots can be dealt to."""
        if self.max_stores > MAX_STORES:
            raise ValueError(
                f"max_stores must be at most {MAX_STORES}, got {self.max_stores}; lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """What all pools of the job may use together."""

    cpus: float = UNLIMITED_CPUS
    """Cores; all of the machine when left out."""
    memory: int = UNLIMITED_MEMORY
    """Bytes; a text such as `64GiB` in the file; all of the machine when left out."""
    cpu_hour_price: float = 0.04
    """Price of one core for one hour, in any currency."""
    gib_hour_price: float = 0.005
    """Price of one GiB of memory for one hour, in the same currency."""
    haste: float | None = None
    """Per cent of cost that one per cent of time is worth where no deadline is set: 0 the cheapest
    plan, 1 the smallest time x cost, more where the budget is there whether it is used or not; the
    scheduler's own when null."""

    def __post_init__(self) -> None:
        """Refuse a budget of nothing, and a `haste` out of range."""
        if not (self.cpus > 0 and self.memory > 0):
            raise ValueError(
                f"cpus and memory must be above 0, got {self.cpus:g} and {self.memory}; raise them"
            )
        if self.haste is not None and not 0.0 <= self.haste <= MAX_TIME_COST_EXPONENT:
            raise ValueError(
                f"haste must be in [0, {MAX_TIME_COST_EXPONENT:g}], got {self.haste:g}; "
                "write 1 for time x cost"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What the job may run on."""

    driver: Literal["process", "kubernetes"] = "process"
    """Where processes are started."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Shared limit."""
    preprocessing: PreprocessingPoolConfig = field(default_factory=PreprocessingPoolConfig)
    """Pool that builds segments."""
    training: TrainingPoolConfig = field(default_factory=TrainingPoolConfig)
    """Pool that trains."""
    deadline: timedelta | None = None
    """Wanted time from start to trained model, met as cheaply as can be; when null,
    `budget.haste` weighs time and cost."""
    priority: int = 0
    """Larger goes first when jobs share a budget."""
    retrain: RetrainConfig = field(default_factory=RetrainConfig)
    """How the job is trained again, day by day."""
