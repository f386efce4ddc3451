"""Memory of one process of each kind, in bytes, as sums of what it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from scheduler.snapshot import DataFacts
from schemas.job_train import TrainConfig

_MIB = 1 << 20

TRAINER_BASE_BYTES = 930 * _MIB
"""Measured: `trainer train schemas/demo/job.yaml` on 20,000 samples peaked at 1,016 MiB, of which
the terms below explain 91; the imports alone take 693 (torch 2.13, 2 threads, 2026-11-21)."""
STORE_BASE_BYTES = 70 * _MIB
"""Measured: 64 MiB resident after `import pyarrow.flight`, the same day."""
WORKER_BASE_BYTES = 250 * _MIB
"""Measured: `pipelines build schemas/demo/job.yaml` with the local runner peaked at 400 MiB for
20,000 samples and at 1,020 MiB for 100,000 (the same day); this is the intercept of both."""
WORKER_COPIES = 6.1
"""How often a worker holds its rows, as read, shuffled, sorted and written: the slope of both."""
HEADROOM = 1.2
"""Assumed: allocators and the moment of a peak take a fifth more than the arrays themselves."""
ROW_NUMBER_BYTES = 8
"""One int64 per touched row: which row of the table it is."""

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
        """Return the predicted peak."""
        held = self.table_bytes + self.dense_bytes + self.batch_bytes
        return self.base_bytes + math.ceil(HEADROOM * held)


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

    The top one is over DLRM's products, or over the vectors themselves.
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
    """Return the number of weights and biases; the history encoder has four square ones more."""
    encoder = 4 * train.embedding_dim**2 if train.model.name == "attention" else 0
    stacks = layer_widths(facts, train)
    return (
        encoder
        + cross_parameters(facts, train)
        + sum((a + 1) * b for stack in stacks for a, b in pairwise(stack))
    )


def dense_multiplications(facts: DataFacts, train: TrainConfig) -> float:
    """Return the multiplications of one sample's forward pass, interactions included."""
    features = facts.num_sparse + 1
    encoder = 0
    if train.model.name == "attention":  # projections of every entry, then scores and sums
        dim = train.embedding_dim
        encoder = train.model.max_history * (4 * dim * dim + 2 * dim)
    layers = sum(a * b for stack in layer_widths(facts, train) for a, b in pairwise(stack))
    crossed = cross_parameters(facts, train)
    return float(layers + features * features * train.embedding_dim + encoder + crossed)


def batch_bytes(facts: DataFacts, train: TrainConfig, num_replicas: int) -> int:
    """Return the working set of a replica's share of one batch, and of the next one's inputs.

    A replica's blocks may touch every row of the batch, so rows are not divided.
    """
    samples = train.batch_samples / num_replicas
    pooled = facts.num_sparse * train.embedding_dim
    widths = sum(sum(stack) for stack in layer_widths(facts, train))
    activations = 2 * samples * (pooled + widths) * value_bytes(train)  # and their gradients
    rows = 2 * facts.rows_per_step * train.embedding_dim * value_bytes(train)
    inputs = 2 * samples * facts.row_bytes
    return math.ceil(activations + rows + inputs)


def cache_rows(facts: DataFacts, train: TrainConfig) -> int:
    """Return the rows of the plan's caches: the limit, or what the oracle says the plan needs.

    Without an index a bound: the rows of all steps that it looks ahead. Belady's plan
    without a limit keeps what is used again, however late.
    """
    limit, touched = train.cache.rows, facts.table_rows.values()
    if limit is not None:
        return sum(min(limit, rows) for rows in touched)
    if train.cache.policy == "belady":
        return sum(touched)
    if facts.window_rows is not None:
        return facts.window_rows
    steps = train.cache.lookahead + train.cache.prefetch_steps
    return min(sum(touched), math.ceil(steps * facts.rows_per_step))


def trainer_memory(
    facts: DataFacts,
    train: TrainConfig,
    num_replicas: int,
    num_stores: int,
    base_bytes: int = TRAINER_BASE_BYTES,
) -> TrainerMemory:
    """Return what one replica holds.

    Args:
        facts: sizes of the data.
        train: the job's training section.
        num_replicas: replicas that share a batch.
        num_stores: 0 when the tables lie in the one replica.
        base_bytes: measured where there is a history.
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
    """Return the bytes of one of several stores that share all tables by hash slots."""
    return STORE_BASE_BYTES + math.ceil(HEADROOM * tables_bytes(facts, train) / num_stores)


def stores_needed(facts: DataFacts, train: TrainConfig, store_memory: int) -> int | None:
    """Return the fewest stores that hold the tables, or None when not even many do.

    ceil(tables / (memory - base)), at least 1.
    """
    room = store_memory - STORE_BASE_BYTES
    if room <= 0:
        return None
    return max(1, math.ceil(HEADROOM * tables_bytes(facts, train) / room))


def worker_bytes(facts: DataFacts, segment_rows: float, workers_per_job: int) -> int:
    """Return the bytes of one pipeline worker: base, and some copies of its rows.

    A worker holds its shard of the segment, and never less than the part it writes or than
    the largest session, which lies in one part.
    """
    part = min(segment_rows, max(facts.part_rows or 0.0, facts.session_rows))
    rows = max(segment_rows / workers_per_job, part)
    return WORKER_BASE_BYTES + math.ceil(WORKER_COPIES * rows * facts.row_bytes)
