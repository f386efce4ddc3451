"""What the model assumes before anything has been measured, each with where it is from.

A plan that rests on these is marked as not confident.
"""

from __future__ import annotations

from scheduler.memory import dense_multiplications, value_bytes
from scheduler.snapshot import DataFacts
from schemas.job_train import TrainConfig

FLOP_PER_CORE_SEC = 5e9
"""Assumed, not measured: small matrix products reach a fraction of a core's peak."""
SEC_PER_LOOKUP = 1e-7
"""Assumed: one row read or updated costs about one cache miss to memory."""
PARALLEL_SHARE = 0.9
"""Assumed: share of a replica's computation that its threads divide."""
EXCHANGE_SHARE, TREE_SHARE = 0.011, 0.077
"""k1 and k2 over a1 + a2, measured by others: 78 configurations of the retrieval model `dssm` over
parameter servers and workers (DL2, Peng et al. 2021), fitted by `benchmarks.model`: 0.541, 0.006
and 0.042 s for 1 to 23 workers."""
FIXED_SHARE = 0.05
"""b over a1 + a2, assumed: that testbed shows none, yet no step is free."""
STORE_BYTES_PER_SEC = 2e8
"""Assumed: gathered rows that one store sends over Arrow Flight."""
MEETING_SHARE = 0.1
"""Assumed: what a further replica costs at a store, as a share of a transfer."""
ROWS_PER_WORKER_SEC = 1.8e4
"""Measured: 18,586 rows/s of `pipelines build schemas/demo/job.yaml` on 100,000 samples with the
local runner on one of two busy cores (2026-11-21); other jobs have other columns and SQL."""
STARTUP_SEC = 4.0
"""Measured: 3.7 and 4.7 s in two builds of that day."""
SERIAL_SHARE = 0.05
"""Assumed: listing, manifest and commit of a segment."""
SHARING_SHARE = 0.01
"""Assumed: what a segment job costs another one at once, as a share of a worker's time."""


def fetched_rows(facts: DataFacts) -> float:
    """Return the rows that a step fetches; all that it touches where no index tells."""
    known = facts.fetched_rows_per_step
    return facts.rows_per_step if known is None else known


def moved_bytes(facts: DataFacts, train: TrainConfig) -> float:
    """Return the bytes that a step moves to and from the stores: rows read and written back."""
    return 2.0 * fetched_rows(facts) * train.embedding_dim * value_bytes(train)


def default_training(facts: DataFacts, train: TrainConfig) -> tuple[float, ...]:
    """Return the coefficients of the steps of a job that was never run.

    A sample takes 6 m / FLOP_PER_CORE_SEC + l SEC_PER_LOOKUP, with m multiplications of
    the dense layers (two operations each, three passes) and l lookups.
    """
    flop = 6.0 * dense_multiplications(facts, train)
    per_sample = flop / FLOP_PER_CORE_SEC + facts.lookups_per_sample * SEC_PER_LOOKUP
    step = train.batch_samples * per_sample
    per_byte = 1.0 / STORE_BYTES_PER_SEC
    return (
        PARALLEL_SHARE * per_sample,
        (1.0 - PARALLEL_SHARE) * per_sample,
        SEC_PER_LOOKUP,
        EXCHANGE_SHARE * step,
        TREE_SHARE * step,
        SEC_PER_LOOKUP,
        per_byte,
        MEETING_SHARE * per_byte,
        FIXED_SHARE * step,
    )


def default_segments() -> tuple[float, ...]:
    """Return the coefficients of segment jobs of a job that was never built."""
    per_row = 1.0 / ROWS_PER_WORKER_SEC
    return (
        STARTUP_SEC,
        SERIAL_SHARE * per_row,
        (1.0 - SERIAL_SHARE) * per_row,
        SHARING_SHARE * per_row,
    )
