"""Sizes of both pools, one or many as arrays: their resources, memory, limits, and text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from presage.scheduler.model.plan_inputs import DataFacts
from presage.scheduler.model.throughput import Floats, Ints
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig
from presage.schemas.config.train import TrainConfig
from presage.schemas.errors import PlanError

GIB = 1 << 30
MIB = 1 << 20
SEGMENT_BATCHES = 64
"""Fewest batches of a segment: it holds at least one window, which is widened to so many."""


@dataclass(frozen=True, slots=True)
class Grid:
    """n candidates, as (n,) int64 arrays."""

    segment_jobs: Ints
    workers_per_job: Ints
    num_replicas: Ints
    num_stores: Ints

    @classmethod
    def of_rows(cls, rows: Ints) -> Grid:
        """Return the candidates of (n, 4) rows."""
        return cls(*rows.T)

    def __getitem__(self, mask: NDArray[np.bool_]) -> Grid:
        columns = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid(*(column[mask] for column in columns))

    def __len__(self) -> int:
        return len(self.segment_jobs)

    @property
    def num_workers(self) -> Ints:
        """Pipeline workers of all segment jobs."""
        return self.segment_jobs * self.workers_per_job

    def sizes_at(self, index: int) -> PoolSizes:
        """Return the sizes of one candidate."""
        return PoolSizes(
            segment_jobs=int(self.segment_jobs[index]),
            workers_per_job=int(self.workers_per_job[index]),
            num_replicas=int(self.num_replicas[index]),
            num_stores=int(self.num_stores[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes of both pools."""

    segment_jobs: int
    workers_per_job: int
    num_replicas: int
    num_stores: int

    @property
    def grid(self) -> Grid:
        """The sizes as a grid of one candidate."""
        sizes = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid.of_rows(np.array([sizes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedWorker(WorkerConfig):
    """A process that is booked with fewer or more cores than the job file requests.

    Predictions use `cpus`, the cores of the file, with which its steps take as long.
    """

    booked: float


def booked_cpus(process: WorkerConfig) -> float:
    """Return the booked cores of a process."""
    return process.booked if isinstance(process, BookedWorker) else process.cpus


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a pool, one entry per candidate."""

    cpus: Floats
    memory_bytes: Ints

    def hour_price(self, budget: BudgetConfig) -> Floats:
        """Return the price of one hour."""
        return self.cpus * budget.cpu_hour_price + self.memory_bytes / GIB * budget.gib_hour_price


def preprocessing_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return the resources of the preprocessing pool."""
    worker = config.preprocessing.worker
    cpus = np.asarray(grid.num_workers * worker.cpus, np.float64)
    return Resources(cpus, grid.num_workers * worker.memory)


def training_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return the resources of the training pool."""
    replica, store = config.training.replica, config.training.store
    cpus = grid.num_replicas * booked_cpus(replica) + grid.num_stores * booked_cpus(store)
    memory = grid.num_replicas * replica.memory + grid.num_stores * store.memory
    return Resources(np.asarray(cpus, np.float64), memory)


def total_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return the resources of both pools together."""
    first, second = preprocessing_resources(grid, config), training_resources(grid, config)
    return Resources(first.cpus + second.cpus, first.memory_bytes + second.memory_bytes)


def num_segments(num_samples: int, batch_samples: int) -> int:
    """Return how many segments the data forms, at least 1."""
    return max(1, num_samples // (SEGMENT_BATCHES * batch_samples))


def budget_excess(grid: Grid, config: ScheduleConfig) -> Floats:
    """Return (n,) the share of the budget by which candidates exceed it, 0 if they fit.

    Both pools count, because they run at once while training follows the build. Cores are compared
    with a tolerance of 1e-9, as they are sums of fractions.
    """
    total = total_resources(grid, config)
    cpus, memory = total.cpus - 1e-9, total.memory_bytes
    shares = np.maximum(cpus / config.budget.cpus, memory / config.budget.memory)
    return np.maximum(shares - 1.0, 0.0)


def cross(first: Ints, second: Ints) -> Grid:
    """Return the cross product of (n, 2) preprocessing and (m, 2) training pools."""
    left = np.repeat(first, len(second), axis=0)
    right = np.tile(second, (len(first), 1))
    return Grid(left[:, 0], left[:, 1], right[:, 0], right[:, 1])


# Memory of each kind of process, predicted from its contents.

TRAINER_BASE_BYTES = 930 * MIB
"""Measured: `trainer train schemas/demo/job.yaml` on 20,000 samples peaked at 1,016 MiB, of which
the terms below explain 91; the imports alone take 693 (torch 2.13, 2 threads, 2026-11-21)."""
STORE_BASE_BYTES = 70 * MIB
"""Measured: 64 MiB resident after `import pyarrow.flight`, the same day."""
WORKER_BASE_BYTES, WORKER_COPIES = 350 * MIB, 1.2
"""Bytes of a worker without rows, and copies of its rows: with them, no build of the grid
(benchmarks/pools.md) needs more. Builds of 100,000 to a million demo samples by one worker peaked
at 0.4 to 1.0 GB, half a copy of the rows."""
HEADROOM = 1.2
"""Assumed: allocators and peaks take a fifth more than the arrays themselves."""
ROW_NUMBER_BYTES = 8
"""One int64 per touched row: its number in the table."""
ROW_STATE_VALUES = {"rowwise_adagrad": 1}
"""State values per embedding row."""
VALUE_STATE_VALUES = {"adagrad": 1, "adam": 2}
"""State values per value of an embedding row."""
DENSE_COPIES = {"sgd": 2, "adam": 4}
"""Value, gradient, and for Adam two moments, of each dense parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes of one trainer replica."""

    base_bytes: int
    """Interpreter and libraries."""
    table_bytes: int
    """All tables with optimizer state, or the cache in front of the stores."""
    dense_bytes: int
    """Dense parameters, gradients and optimizer state."""
    batch_bytes: int
    """Inputs, rows, activations and their gradients of the replica's share of a batch."""

    @property
    def total_bytes(self) -> int:
        """Predicted peak."""
        arrays = self.table_bytes + self.dense_bytes + self.batch_bytes
        return self.base_bytes + math.ceil(HEADROOM * arrays)


def value_bytes(train: TrainConfig) -> int:
    """Return the bytes of one parameter."""
    return 8 if train.dtype == "float64" else 4


def bytes_per_row(train: TrainConfig) -> int:
    """Return the bytes of one embedding row with its optimizer state and its number."""
    name = train.sparse_optimizer.name
    state = ROW_STATE_VALUES.get(name, 0) + VALUE_STATE_VALUES.get(name, 0) * train.embedding_dim
    return (train.embedding_dim + state) * value_bytes(train) + ROW_NUMBER_BYTES


def tables_bytes(facts: DataFacts, train: TrainConfig) -> int:
    """Return the bytes of all touched rows: rows x ((dim + state) x value + number)."""
    return sum(facts.table_rows.values()) * bytes_per_row(train)


def layer_widths(facts: DataFacts, train: TrainConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the widths of the bottom and of the top MLP, inputs included.

    The inputs of the top MLP are DLRM's products, or the vectors themselves.
    """
    dim, features = train.embedding_dim, facts.num_sparse + 1
    bottom = (facts.num_dense, *train.model.bottom_layers, dim)
    over_vectors = train.model.name in ("dcn", "deepfm", "wide_deep")
    inputs = features * dim if over_vectors else dim + features * (features - 1) // 2
    return bottom, (inputs, *train.model.top_layers, 1)


def cross_parameters(facts: DataFacts, train: TrainConfig) -> int:
    """Return the weights of the cross network: two matrices of `cross_rank` in each layer."""
    if train.model.name != "dcn":
        return 0
    inputs = (facts.num_sparse + 1) * train.embedding_dim
    return 2 * inputs * train.model.cross_rank * train.model.cross_layers


def dense_parameters(facts: DataFacts, train: TrainConfig) -> int:
    """Return the number of weights and biases; an attention model has four square matrices more."""
    encoder = 4 * train.embedding_dim**2 if train.model.name == "attention" else 0
    stacks = layer_widths(facts, train)
    return (
        encoder
        + cross_parameters(facts, train)
        + sum((a + 1) * b for stack in stacks for a, b in pairwise(stack))
    )


def encoder_multiplications(train: TrainConfig) -> float:
    """Return the multiplications of an attention model's encoder for one full history."""
    if train.model.name != "attention":
        return 0.0
    dim = train.embedding_dim  # projections, scores and sums of each entry
    return float(train.model.max_history * (4 * dim * dim + 2 * dim))


def dense_multiplications(facts: DataFacts, train: TrainConfig) -> float:
    """Return the multiplications of one sample's forward pass, interactions included."""
    features = facts.num_sparse + 1
    encoder = encoder_multiplications(train)
    layers = sum(a * b for stack in layer_widths(facts, train) for a, b in pairwise(stack))
    crossed = cross_parameters(facts, train)
    return float(layers + features * features * train.embedding_dim + encoder + crossed)


def batch_bytes(facts: DataFacts, train: TrainConfig, num_replicas: int) -> int:
    """Return the bytes of a replica's share of one batch, and of the inputs of the next one.

    Rows are not divided, because a replica's blocks may touch every row of the batch.
    """
    samples = train.batch_samples / num_replicas
    pooled = facts.num_sparse * train.embedding_dim
    widths = sum(sum(stack) for stack in layer_widths(facts, train))
    activations = 2 * samples * (pooled + widths) * value_bytes(train)  # and their gradients
    rows = 2 * facts.rows_per_step * train.embedding_dim * value_bytes(train)
    inputs = 2 * samples * facts.row_bytes
    return math.ceil(activations + rows + inputs)


def cache_rows(facts: DataFacts, train: TrainConfig) -> int:
    """Return the rows of the cache: the limit, or the need according to the oracle.

    Without an index this is a bound: the rows of all steps of the lookahead. Belady's plan without
    a limit keeps every row that is used again.
    """
    limit, touched = train.cache.rows, sum(facts.table_rows.values())
    if limit is not None:
        return min(limit, touched)
    if train.cache.policy == "belady":
        return touched
    if facts.window_rows is not None:
        return facts.window_rows
    steps = train.cache.lookahead + train.cache.prefetch_steps
    return min(touched, math.ceil(steps * facts.rows_per_step))


def trainer_memory(
    facts: DataFacts,
    train: TrainConfig,
    num_replicas: int,
    num_stores: int,
    base_bytes: int = TRAINER_BASE_BYTES,
) -> TrainerMemory:
    """Return the memory of one replica.

    Args:
        facts: sizes of the data.
        train: the job's training section.
        num_replicas: replicas that share a batch.
        num_stores: 0 if the replica holds the tables.
        base_bytes: bytes before it holds anything, measured if there is a history.
    """
    rows = cache_rows(facts, train) * bytes_per_row(train)
    return TrainerMemory(
        base_bytes=base_bytes,
        table_bytes=tables_bytes(facts, train) if num_stores == 0 else rows,
        dense_bytes=dense_parameters(facts, train)
        * DENSE_COPIES[train.dense_optimizer.name]
        * value_bytes(train),
        batch_bytes=batch_bytes(facts, train, num_replicas),
    )


def store_bytes(facts: DataFacts, train: TrainConfig, num_stores: int) -> int:
    """Return the bytes of one of several stores that share all tables by hash slot."""
    return STORE_BASE_BYTES + math.ceil(HEADROOM * tables_bytes(facts, train) / num_stores)


def stores_needed(facts: DataFacts, train: TrainConfig, store_memory: int) -> int | None:
    """Return the fewest stores that hold the tables, None if no number does.

    ceil(tables / (memory - base)), at least 1.
    """
    room = store_memory - STORE_BASE_BYTES
    if room <= 0:
        return None
    return max(1, math.ceil(HEADROOM * tables_bytes(facts, train) / room))


def worker_bytes(facts: DataFacts, segment_rows: float, workers_per_job: int) -> int:
    """Return the bytes of one pipeline worker: base, and some copies of its rows.

    A worker holds its shard of the segment, and at least the part that it writes, which contains
    the largest session.
    """
    part = min(segment_rows, max(facts.part_rows or 0.0, facts.session_rows))
    rows = max(segment_rows / workers_per_job, part)
    return WORKER_BASE_BYTES + math.ceil(WORKER_COPIES * rows * facts.row_bytes)


# Limits.


def preprocessing_sizes(facts: DataFacts, config: ScheduleConfig, segments: int) -> Ints:
    """Return (n, 2) jobs and workers of each within the pool's limits, fewest workers first.

    Only (0, 0) without a segment.

    Raises:
        PlanError: no size is possible; the message names the limit to raise.
    """
    pool = config.preprocessing
    if not segments:
        return np.zeros((1, 2), np.int64)
    sizes = [
        (jobs, workers)
        for jobs in range(1, min(segments, pool.max_workers) + 1)
        for workers in range(1, pool.max_workers // jobs + 1)
        if jobs * workers >= pool.min_workers
    ]
    if not sizes:
        raise PlanError(
            "preprocessing.max_workers must be at least 1 and min_workers, got "
            f"max_workers={pool.max_workers} and min_workers={pool.min_workers}; raise it"
        )
    shard_rows = facts.num_samples / segments
    fitting = [s for s in sizes if worker_bytes(facts, shard_rows, s[1]) <= pool.worker.memory]
    if not fitting:
        least = worker_bytes(facts, shard_rows, pool.max_workers)
        raise PlanError(
            "preprocessing.worker.memory is too small for a worker's shard: "
            f"{mib(pool.worker.memory)} with at most {pool.max_workers} workers; "
            f"use at least {mib(least)}, or more workers"
        )
    return np.array(sorted(fitting, key=lambda s: (s[0] * s[1], s[0])), np.int64)


def training_sizes(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, base_bytes: int
) -> Ints:
    """Return (n, 2) replicas and stores within the pool's limits, fewest processes first.

    Without stores every replica holds all rows.

    Raises:
        PlanError: no size is possible; the message names the limit to raise.
    """
    pool = config.training
    if not 1 <= pool.min_replicas <= pool.max_replicas:
        raise PlanError(
            "training.max_replicas must be at least 1 and min_replicas, got "
            f"max_replicas={pool.max_replicas} and min_replicas={pool.min_replicas}; raise it"
        )
    least = stores_needed(facts, train, pool.store.memory)
    stores = [0, *([] if least is None else range(least, pool.max_stores + 1))]
    counts = range(pool.min_replicas, pool.max_replicas + 1)
    needed = {
        (replicas, served): trainer_memory(facts, train, replicas, served, base_bytes).total_bytes
        for replicas in counts
        for served in (0, 1)
    }
    sizes = [
        (replicas, count)
        for replicas in counts
        for count in stores
        if needed[replicas, min(count, 1)] <= pool.replica.memory
    ]
    if not sizes:
        raise _no_training_size(facts, train, config, base_bytes)
    return np.array(sorted(sizes, key=sum), np.int64)


def budget_error(first: Ints, second: Ints, config: ScheduleConfig) -> PlanError:
    """Return the error that names the smallest budget that works."""
    grid = cross(first, second)
    total = total_resources(grid, config)
    cpus, memory = math.ceil(total.cpus[0] * 1000 - 1e-6) / 1000, int(total.memory_bytes[0])
    return PlanError(
        f"budget does not hold the smallest pools: cpus={config.budget.cpus:g} and "
        f"memory={mib(config.budget.memory)}; use at least cpus={cpus:g} and "
        f"memory={mib(memory)} (workers={grid.num_workers[0]}, "
        f"replicas={grid.num_replicas[0]}, stores={grid.num_stores[0]})"
    )


def _no_training_size(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, base_bytes: int
) -> PlanError:
    pool = config.training
    hint = "" if facts.measured else "; with --dataset only touched rows count"
    alone = trainer_memory(facts, train, pool.max_replicas, 0, base_bytes).total_bytes
    served = trainer_memory(facts, train, pool.max_replicas, 1, base_bytes).total_bytes
    if served > pool.replica.memory:
        return PlanError(
            "training.replica.memory is too small for a replica: "
            f"{mib(pool.replica.memory)}; use at least {mib(min(alone, served))}{hint}"
        )
    needed = stores_needed(facts, train, pool.store.memory)
    return PlanError(
        f"training.max_stores is too small for the tables: {pool.max_stores} of "
        f"{mib(pool.store.memory)}; use {needed or 'larger'} stores, "
        f"or replica.memory={mib(alone)}{hint}"
    )


# Text.


def mib(num_bytes: float) -> str:
    """Return bytes in the notation of the job file, rounded up.

    Example:
        >>> mib(3 * 2**20 - 1)
        '3MiB'
    """
    return f"{-int(-num_bytes // MIB)}MiB"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "store"), counted(0, "store"), counted(1200, "plan")
        ('1 store', '0 stores', '1,200 plans')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_sizes(sizes: PoolSizes) -> str:
    """Return the sizes of both pools as text, or of training if only that is left."""
    training = describe_training(sizes)
    return f"{describe_preprocessing(sizes)}, {training}" if sizes.segment_jobs else training


def describe_preprocessing(sizes: PoolSizes) -> str:
    """Return the size of the preprocessing pool as text."""
    jobs = counted(sizes.segment_jobs, "segment job")
    return f"{jobs} x {counted(sizes.workers_per_job, 'worker')}"


def describe_training(sizes: PoolSizes) -> str:
    """Return the size of the training pool as text."""
    stores = counted(sizes.num_stores, "store")
    return f"{counted(sizes.num_replicas, 'replica')} and {stores}"
