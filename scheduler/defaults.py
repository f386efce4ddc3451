"""What the model assumes before anything has been measured, each with where it is from.

A plan that rests on these is marked as not confident.
"""

from __future__ import annotations

from scheduler.memory import dense_multiplications
from scheduler.model import PreprocessingModel, TrainingModel
from scheduler.snapshot import DataFacts
from schemas.job_train import TrainConfig

FLOP_PER_CORE_SEC = 5e9
"""Assumed, not measured: small matrix products reach a fraction of a core's peak."""
SEC_PER_LOOKUP = 1e-7
"""Assumed: one row read and updated costs about one cache miss to memory."""
PARALLEL_SHARE = 0.9
"""Assumed: share of a step that threads of one replica divide."""
FIXED_SHARE = 0.32
"""b / a, measured by others: 78 configurations of the retrieval model `dssm` over parameter
servers and workers (DL2, Peng et al. 2021) give a : k : b = 0.397 : 0.0072 : 0.128 with a mean
error of 4.9 %, for 1 to 23 workers."""
SYNC_SHARE = 0.018
"""k / a, from the same fit."""
STORE_BYTES_PER_SEC = 2e8
"""Assumed: gathered rows that one store sends over Arrow Flight."""
ROWS_PER_WORKER_SEC = 1.8e4
"""Measured: 18,586 rows/s of `pipelines build schemas/demo/job.yaml` on 100,000 samples with the
local runner on one of two busy cores (2026-11-21); other jobs have other columns and SQL."""
STARTUP_SEC = 4.0
"""Measured: 3.7 and 4.7 s in two builds of that day."""
SERIAL_SHARE = 0.05
"""Assumed: listing, manifest and commit of a segment."""


def default_training(facts: DataFacts, train: TrainConfig) -> TrainingModel:
    """Return the model of a job that was never run.

    a = n0 (6 m / FLOP_PER_CORE_SEC + l SEC_PER_LOOKUP), with m multiplications of the
    dense layers per sample (two operations each, three passes) and l lookups per sample.
    """
    flop = 6.0 * dense_multiplications(facts, train)
    per_sample = flop / FLOP_PER_CORE_SEC + facts.lookups_per_sample * SEC_PER_LOOKUP
    compute = train.batch_samples * per_sample
    width = 8 if train.dtype == "float64" else 4
    moved = 2.0 * facts.rows_per_step * train.embedding_dim * width  # read and written back
    return TrainingModel(
        batch_samples=train.batch_samples,
        compute_sec=compute,
        sync_sec=SYNC_SHARE * compute,
        lookup_sec=moved / STORE_BYTES_PER_SEC,
        fixed_sec=FIXED_SHARE * compute,
        parallel_share=PARALLEL_SHARE,
    )


def default_preprocessing() -> PreprocessingModel:
    """Return the model of a job whose data was never built."""
    return PreprocessingModel(
        rows_per_worker_sec=ROWS_PER_WORKER_SEC,
        startup_sec=STARTUP_SEC,
        serial_share=SERIAL_SHARE,
    )
