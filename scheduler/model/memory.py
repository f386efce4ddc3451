"""Memory of each kind of process, predicted from its contents, and forecast from its growth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from scheduler.model.plan_inputs import DataFacts
from scheduler.model.throughput import LEVEL, Floats
from schemas.config.train import TrainConfig

_MIB = 1 << 20
TRAINER_BASE_BYTES = 930 * _MIB
"""Measured: `trainer train schemas/demo/job.yaml` on 20,000 samples peaked at 1,016 MiB, of which
the terms below explain 91; the imports alone take 693 (torch 2.13, 2 threads, 2026-11-21)."""
STORE_BASE_BYTES = 70 * _MIB
"""Measured: 64 MiB resident after `import pyarrow.flight`, the same day."""
WORKER_BASE_BYTES, WORKER_COPIES = 350 * _MIB, 1.2
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
    """Return the rows of the plan's caches: the limit, or the need according to the oracle.

    Without an index this is a bound: the rows of all steps of the lookahead. Belady's plan without
    a limit keeps every row that is used again.
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


# Forecasts. Resident bytes y at step x are modelled as
#
#     y = b + a x + e h(x)
#
# with a leak or a fill of a >= 0 bytes per step, and e >= 0 bytes per unit of a load h that is
# known ahead: the rows touched so far, from the oracle. A table that fills grows ever more slowly,
# so a line alone would give false alarms. Early on the load is nearly a line itself; then the load
# decides how much is needed, but the line can still raise the alarm, or a leak would be noticed
# late. The highest readings of up to 64 stretches are fitted, because peaks count; their errors are
# correlated, which widens the interval.

STRETCHES = 64
"""Stretches of steps whose peaks are fitted."""
MIN_STRETCHES = 8
"""Fewest peaks for a trend."""
SKIPPED = 0.1
"""Share of the earliest readings that is skipped, while the process starts."""
MAX_POINTS = 4096
"""Most future steps at which a forecast is evaluated."""
BETTER = 0.95
"""Squared error of a fit over that of a simpler one, below which it is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Resident memory up to the end of a process."""

    confident: bool
    """Whether there are enough readings for a trend; if not, the steps below are None."""
    expected_step: int | None
    """First step at which the limit is expected to be reached; None if not before the end."""
    earliest_step: int | None
    """First step at which the upper end of the interval reaches it, or that of a line that fits
    about as well as the load."""
    end_bytes: int
    """Expected bytes at the last step, at least the largest reading."""
    needed_bytes: int
    """Upper end of the interval there, which suffices for the process."""


def forecast(
    steps: ArrayLike,
    resident_bytes: ArrayLike,
    *,
    end_step: int,
    limit_bytes: int,
    load: ArrayLike | None = None,
) -> Forecast:
    """Predict when a process reaches its memory limit.

    Args:
        steps: (n,) ascending steps (or rows, or seconds) of the readings.
        resident_bytes: (n,) readings.
        end_step: its last step.
        limit_bytes: its limit.
        load: (end_step + 1,) load of every step, known ahead; None for a straight line.

    Raises:
        ValueError: there is no reading, or the end is before the last one.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(resident_bytes, np.float64)
    if not len(x) or end_step < x[-1]:
        raise ValueError(
            "forecast needs a reading and a later end, got "
            f"{len(x)} readings and end_step={end_step}; read memory first"
        )
    loads = np.zeros(end_step + 1) if load is None else np.asarray(load, np.float64)
    top = float(y.max())
    late = x >= x[0] + SKIPPED * (x[-1] - x[0])
    x, y = peaks(x[late], y[late])
    if len(x) < MIN_STRETCHES:
        needed = int(top)
        return Forecast(
            confident=False,
            expected_step=None,
            earliest_step=None,
            end_bytes=needed,
            needed_bytes=needed,
        )
    future = np.linspace(x[-1], end_step, MAX_POINTS).astype(np.int64)
    future = future[np.diff(future, prepend=future[0] - 1) > 0]
    fits, right = _fits(_columns(x, loads), y, _columns(future, loads))
    middle, high = (np.maximum(end, y.max()) for end in _extrapolate(fits[0], y, right))
    alarms = [np.maximum(_extrapolate(fit, y, right)[1], y.max()) for fit in fits[1:]]
    return Forecast(
        confident=True,
        expected_step=_first(future, middle >= limit_bytes),
        earliest_step=_first(future, np.max([high, *alarms], axis=0) >= limit_bytes),
        end_bytes=int(np.ceil(max(middle[-1], top))),
        needed_bytes=int(np.ceil(max(high.max(), top))),
    )


def peaks(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the steps and values of the highest value of each stretch.

    Example:
        >>> peaks(np.arange(4.0), np.array([1.0, 3.0, 2.0, 5.0]))[1].tolist()
        [1.0, 3.0, 2.0, 5.0]
    """
    parts = np.array_split(np.arange(len(steps)), min(STRETCHES, len(steps)))
    indices = [part[values[part].argmax()] for part in parts]
    return steps[indices], values[indices]


def _columns(steps: ArrayLike, load: Floats) -> Floats:
    x = np.asarray(steps, np.float64)
    return np.stack([np.ones_like(x), x, load[x.astype(np.int64)]], axis=1)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least squares over some of the columns.

    Attributes:
        support: indices of the columns.
        columns: (n, len(support)) values.
    """

    support: tuple[int, ...]
    columns: Floats
    coefficients: Floats
    error: float


def _fits(columns: Floats, values: Floats, future: Floats) -> tuple[list[_Fit], Floats]:
    """Return the best fit, and the line if it is about as good, with the scaled future columns.

    Least squares with the second and third coefficient at least 0. A fit must be clearly better
    than one that was tried before it, with fewer columns, or with the load instead of the line.
    """
    # Columns of similar magnitude, so that no support is singular because of units.
    scale = np.maximum(np.abs(future).max(axis=0), 1.0)
    scaled = columns / scale
    order = ((0,), (0, 2), (0, 1), (0, 1, 2)) if columns[:, 2].any() else ((0,), (0, 1))
    allowed = [fit for fit in (_fit(scaled, values, one) for one in order) if _grows(fit)]
    best = allowed[0]
    for fit in allowed[1:]:
        best = fit if fit.error < BETTER * best.error else best
    lines = [fit for fit in allowed if fit.support == (0, 1) and best.support == (0, 2)]
    return [best, *(fit for fit in lines if BETTER * fit.error <= best.error)], future / scale


def _fit(scaled: Floats, values: Floats, support: tuple[int, ...]) -> _Fit:
    columns = scaled[:, support]
    coefficients = np.asarray(np.linalg.lstsq(columns, values, rcond=None)[0], np.float64)
    error = float(np.sum((columns @ coefficients - values) ** 2))
    return _Fit(support, columns, coefficients, error)


def _grows(fit: _Fit) -> bool:
    return bool((fit.coefficients[1:] >= 0).all())


def _extrapolate(fit: _Fit, values: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Return the values of a fit at future columns, and the upper end of its interval."""
    freedom = len(values) - len(fit.support)
    variance = fit.error / freedom * _inflation(values - fit.columns @ fit.coefficients)
    inverse = np.linalg.pinv(fit.columns.T @ fit.columns)
    later = right[:, fit.support]
    spread = np.einsum("ij,jk,ik->i", later, inverse, later)
    # One-sided, because only the upper end matters.
    half = stdtrit(freedom, LEVEL) * np.sqrt(variance * (1.0 + spread))
    middle = later @ fit.coefficients
    return middle, middle + half


def _inflation(residuals: Floats) -> float:
    """Return the factor on the variance for the autocorrelation of the residuals."""
    total = float(residuals @ residuals)
    if total == 0.0:
        return 1.0
    autocorrelation = float(np.clip(residuals[1:] @ residuals[:-1] / total, 0.0, 0.9))
    return (1.0 + autocorrelation) / (1.0 - autocorrelation)


def _first(steps: np.ndarray, met: np.ndarray) -> int | None:
    return int(steps[met.argmax()]) if met.any() else None
