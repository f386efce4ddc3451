"""Section `schedule` of the job file: pools, budget, workers, and daily retraining."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Literal

from presage.schemas.errors import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGateConfig:
    """Limits that a model must meet on the newest evaluation range to be promoted.

    Those that end in `increase`, `decrease` and `drift` compare with the last promoted model on the
    same range. The defaults are assumptions, not measurements: set them from the output of `--list`
    for your days. A limit that is null is not checked.
    """

    max_ne: float | None = 1.0
    """Highest NE; 1 is that of always predicting the mean label."""
    min_auc: float | None = 0.5
    """Lowest AUC; 0.5 is that of random predictions."""
    max_calibration_error: float | None = 0.25
    """Largest distance of calibration from 1."""
    max_ne_increase: float | None = 0.01
    """Largest increase of NE over the last promoted model's, relative to it."""
    max_auc_decrease: float | None = 0.01
    """Largest decrease of AUC below the last promoted model's, relative to it."""
    max_calibration_drift: float | None = 0.1
    """Largest increase of calibration's distance from 1 over the last promoted model's."""
    min_samples: int = 1
    """Least number of evaluation samples; with fewer, no model is promoted."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, *(limit.name for limit in fields(self)))
        check_at_least(self, 1, "min_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainConfig:
    """Daily retraining by `python -m presage.scheduler retrain` (`docs/retraining.md`).

    Example:
        schedule:
          retrain:
            input: logs/{date}
            output: retrained
            expire_days: 30
            refused_days: skip
            keep: 14
            tries: 5
            gate:
              max_ne: 0.95
              min_auc: 0.6
              max_calibration_error: 0.1
              max_ne_increase: 0.005
              max_auc_decrease: 0.002
              max_calibration_drift: 0.05
              min_samples: 10000
    """

    input: str | None = None
    """Raw files of one day, relative to the job file, or a URL; `{date}` is replaced by the day,
    such as 2026-04-09; `--input` overrides it."""
    output: str | None = None
    """Folder of dataset, runs, log and pointer, relative to the job file, or a URL; `--output`
    overrides it."""
    expire_days: int | None = None
    """Rows that no segment of this many days used are dropped; none are when null."""
    refused_days: Literal["train", "skip"] = "train"
    """Segments of days whose own model was refused: `train`: later runs train them, too; `skip`:
    they are skipped until the day is corrected or passes with `--again`."""
    keep: int | None = 7
    """Number of newest promoted runs that are kept, with the refused runs since the oldest of them;
    all when null."""
    tries: int = 3
    """Number of starts of a stage that is killed or hangs, before the command fails; a stage that
    reports a permanent failure is not retried."""
    gate: ModelGateConfig = field(default_factory=ModelGateConfig)
    """Limits that a model must meet to be promoted."""

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
    """Resources of one process of a pool.

    The reservation of a running trainer or store is lower while its steps need less, and on a
    cluster higher if they need more.
    """

    cpus: float = 1.0
    """Cores of each process; may be a fraction."""
    memory: int = 2 * _GIB
    """Memory of each process."""


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
    """Most replicas: a limit, not a request; the planner chooses the number, and the budget may
    hold fewer."""
    max_stores: int = 16
    """Most stores, a limit likewise, 16 at most; none are used while one process holds the
    tables."""

    def __post_init__(self) -> None:
        if self.max_stores > MAX_STORES:
            raise ValueError(
                f"max_stores must be at most {MAX_STORES}, got {self.max_stores}; lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Limit of all pools of the job together, and prices; an explicit limit is never exceeded."""

    cpus: float = UNLIMITED_CPUS
    """Cores of all pools together. By default those available to this process: its affinity mask,
    within its cgroup quota; in Pods 16."""
    memory: int = UNLIMITED_MEMORY
    """Memory of all pools together. By default that of the machine, within its cgroup limit; in
    Pods 64GiB."""
    cpu_hour_price: float = 0.04
    """Price of one core for one hour, in any currency."""
    gib_hour_price: float = 0.005
    """Price of one GiB of memory for one hour, in the same currency."""
    time_cost_exponent: float | None = None
    """k in [0, 100]: without a deadline, the planner minimises time^k x cost (0: the cheapest plan;
    larger values suit reserved capacity, whose idle time is paid for as well); 8 when null."""

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
    """Pools, budget and driver of the job.

    Example:
        schedule:
          driver: kubernetes
          budget: {cpus: 64, memory: 256GiB, cpu_hour_price: 0.03, gib_hour_price: 0.004,
                   time_cost_exponent: 1}
          preprocessing:
            worker: {cpus: 2, memory: 4GiB}
            min_workers: 1
            max_workers: 32
          training:
            replica: {cpus: 8, memory: 16GiB}
            store: {cpus: 2, memory: 32GiB}
            min_replicas: 1
            max_replicas: 8
            max_stores: 4
          deadline: 6h
          priority: 10
    """

    driver: Literal["process", "kubernetes"] = "process"
    """Where processes are started (`docs/scheduling.md`)."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Limit of all pools together, and prices."""
    preprocessing: PreprocessingPoolConfig = field(default_factory=PreprocessingPoolConfig)
    """Pool that builds segments."""
    training: TrainingPoolConfig = field(default_factory=TrainingPoolConfig)
    """Pool that trains."""
    deadline: timedelta | None = None
    """Time limit from start to trained model, met by the cheapest plan; when null,
    `budget.time_cost_exponent` weighs time against cost."""
    priority: int = 0
    """Jobs with higher priority go first when jobs share a budget; among equal ones the job with
    less time left."""
    retrain: RetrainConfig = field(default_factory=RetrainConfig)
    """Daily retraining."""
