"""Section `schedule` of the job file: pools, budget, workers, and daily retraining."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Literal

from schemas.errors import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGateConfig:
    """Limits that a model must meet on the newest evaluation range to be promoted."""

    max_ne: float | None = 1.0
    """Highest NE; always predicting the mean label has 1. No limit when null."""
    min_auc: float | None = 0.5
    """Lowest AUC; random predictions have 0.5."""
    max_calibration_error: float | None = 0.25
    """Largest distance of calibration from 1."""
    max_ne_increase: float | None = 0.01
    """Largest relative increase of NE over the last promoted model."""
    max_auc_decrease: float | None = 0.01
    """Largest relative decrease of AUC from the last promoted model."""
    max_calibration_drift: float | None = 0.1
    """Largest increase of the distance of calibration from 1 over the last promoted model."""
    min_samples: int = 1
    """Fewest evaluation samples; with fewer, no model is promoted."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, *(limit.name for limit in fields(self)))
        check_at_least(self, 1, "min_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainConfig:
    """Daily retraining by `python -m scheduler retrain`."""

    input: str | None = None
    """Folder of the raw files of one day, relative to the job file; `{date}` stands for the day."""
    output: str | None = None
    """Output folder, relative to the job file."""
    expire_days: int | None = None
    """Rows that no segment of this many days used are dropped; none when null."""
    refused_days: Literal["train", "skip"] = "train"
    """Whether later runs train the segment of a day whose model was rejected."""
    keep: int | None = 7
    """Newest promoted runs kept on disk, with later rejected ones; all when null."""
    tries: int = 3
    """Attempts of each stage; a stage that reports a permanent failure is not retried."""
    gate: ModelGateConfig = field(default_factory=ModelGateConfig)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "expire_days", "keep", "tries")


_GIB = 1 << 30
UNLIMITED_CPUS, UNLIMITED_MEMORY = math.inf, 1 << 62
"""Budget of a job file without one: the limits of the machine apply."""
MAX_STORES = 16
"""Most stores of one job: rows are moved between stores in this many ranges."""
MAX_TIME_COST_EXPONENT = 100.0
"""Beyond it, cost has hardly any influence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Resources of one process of a pool."""

    cpus: float = 1.0
    memory: int = 2 * _GIB
    """Bytes; a text such as `2GiB` in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingPoolConfig:
    """Limits of the pool that builds segments."""

    worker: WorkerConfig = field(default_factory=WorkerConfig)
    min_workers: int = 1
    max_workers: int = 64
    """Most workers, over all segment jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoolConfig:
    """Limits of the pool that trains."""

    replica: WorkerConfig = field(default_factory=WorkerConfig)
    store: WorkerConfig = field(default_factory=WorkerConfig)
    min_replicas: int = 1
    max_replicas: int = 16
    max_stores: int = 16
    """Most stores, up to MAX_STORES; none are used when one process holds the tables."""

    def __post_init__(self) -> None:
        if self.max_stores > MAX_STORES:
            raise ValueError(
                f"max_stores must be at most {MAX_STORES}, got {self.max_stores}; lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Limit of all pools of the job together, and its prices."""

    cpus: float = UNLIMITED_CPUS
    """Cores; all of the machine when left out."""
    memory: int = UNLIMITED_MEMORY
    """Bytes; a text such as `64GiB` in the file; all of the machine when left out."""
    cpu_hour_price: float = 0.04
    """Price of one core for one hour, in any currency."""
    gib_hour_price: float = 0.005
    """Price of one GiB of memory for one hour, in the same currency."""
    time_cost_exponent: float | None = None
    """k in time^k x cost, which the planner minimises without a deadline: 0 takes the cheapest
    plan; larger values suit reserved capacity, whose idle time is paid for as well. The
    scheduler's default when null."""

    def __post_init__(self) -> None:
        if not (self.cpus > 0 and self.memory > 0):
            raise ValueError(
                f"cpus and memory must be above 0, got {self.cpus:g} and {self.memory}; raise them"
            )
        exponent = self.time_cost_exponent
        if exponent is not None and not 0.0 <= exponent <= MAX_TIME_COST_EXPONENT:
            raise ValueError(
                f"time_cost_exponent must be in [0, {MAX_TIME_COST_EXPONENT:g}], got "
                f"{exponent:g}; write 1 for time x cost"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Pools, budget and driver of the job."""

    driver: Literal["process", "kubernetes"] = "process"
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    preprocessing: PreprocessingPoolConfig = field(default_factory=PreprocessingPoolConfig)
    training: TrainingPoolConfig = field(default_factory=TrainingPoolConfig)
    deadline: timedelta | None = None
    """Time limit from start to trained model; the cheapest plan that meets it is taken. When null,
    `budget.time_cost_exponent` weighs time against cost."""
    priority: int = 0
    """Larger goes first when jobs share a budget."""
    retrain: RetrainConfig = field(default_factory=RetrainConfig)
