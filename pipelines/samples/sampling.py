"""Downsample negatives by a hash of their content, and weigh those that are kept.

A draw depends only on the seed and on the session key (unit `session`) or on all columns of the
sample (unit `sample`), not on the runner, the order of files, or the segment. Positives and
evaluation samples are always kept with weight 1 (times the job's own weight), so that metrics mean
the same with and without sampling.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.partition import hash_session_keys, microseconds
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import HASH_PREFIX, Tuples
from pipelines.sources.rows import ORIGIN
from schemas.arrays import combine_hashes, hash_tuples, numpy_of
from schemas.config.job import DataConfig
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.hashing import salt_of, splitmix64
from schemas.layout import SAMPLE_WEIGHT

Unit = Literal["session", "sample"]


def check_sampling(samples: pa.Schema, features: FeatureSet, data: DataConfig) -> None:
    """Check that a job's negatives can be recognized and weighed.

    Raises:
        SchemaError: the label is not binary, or there is no column for the weight.
    """
    if data.sampling is None:
        return
    label = features[features.label]
    if label.type != "INT" or (label.minimum, label.maximum) != (0, 1):
        raise SchemaError(
            f"data.sampling must have a binary label, got {label.name!r} of type {label.type} from "
            f"{label.minimum} to {label.maximum}; declare it INT with int_domain 0 to 1"
        )
    if SAMPLE_WEIGHT in samples.names:
        raise SchemaError(
            f"samples must not have column {SAMPLE_WEIGHT!r}, which data.sampling adds; "
            "rename it in the job's SQL"
        )
    declared = next((f for f in features.features if f.name == SAMPLE_WEIGHT), None)
    if declared is None or (declared.role, declared.type) != ("weight", "FLOAT"):
        actual = "none" if declared is None else f"{declared.type} tagged {declared.role}"
        raise SchemaError(
            f"data.sampling must have feature {SAMPLE_WEIGHT!r} declared, got {actual}; "
            "add it to the schema as FLOAT with the tag weight"
        )
    if len(_sql_weights(features)) > 1:
        raise SchemaError(
            f"data.sampling must find at most one weight, got {list(_sql_weights(features))}; "
            "multiply them in the job's SQL"
        )


def _sql_weights(features: FeatureSet) -> tuple[str, ...]:
    """Return the weight columns of the SQL's result."""
    return tuple(n for n in features.with_role("weight") if n != SAMPLE_WEIGHT)


def sample_negatives(samples: Tuples, features: FeatureSet, data: DataConfig) -> Tuples:
    """Drop negatives by their draws, and add the weights of the samples that are kept.

    Without `data.sampling` the samples are returned as they are.
    """
    config = data.sampling
    if config is None:
        return samples
    # Positives and samples of the evaluation range are always kept.
    positive = numpy_of(samples.column(features.label)) == 1
    kept = positive | in_evaluation(samples, data)
    drawn = draws(samples, config.unit, config.seed, data.session.key) < config.negatives
    weights = np.where(kept, 1.0, 1.0 / config.negatives)
    for name in _sql_weights(features):
        weights = weights * numpy_of(samples.column(name)).astype(np.float64)
    rows = np.flatnonzero(kept | drawn)
    chosen = samples.take(rows)
    column = pa.array(weights[rows].astype(np.float32))
    table = chosen.samples.append_column(SAMPLE_WEIGHT, column)
    return Tuples(table, chosen.references, chosen.uniques)


def in_evaluation(samples: Tuples, data: DataConfig) -> NDArray[np.bool_]:
    """Return which samples are in the evaluation range."""
    if data.split.evaluation_from is None:
        return np.zeros(samples.num_samples, bool)
    time = samples.column(data.session.time).cast(pa.int64()).to_numpy()
    return time >= microseconds(data.split.evaluation_from)


def draws(samples: Tuples, unit: Unit, seed: int, session_key: str) -> NDArray[np.float64]:
    """Return a draw in [0, 1) for each sample.

    Args:
        samples: of one chunk.
        unit: `session` if the samples of a session key share a draw.
        seed: different seeds give independent draws.
        session_key: the column of session keys.
    """
    if unit == "session":
        hashes = hash_session_keys(samples.column(session_key))
    else:
        hashes = hash_samples(samples)
    salt = splitmix64(np.array([seed])) ^ salt_of(f"sampling {unit}")
    return (splitmix64(hashes ^ salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hash_samples(samples: Tuples) -> NDArray[np.uint64]:
    """Return a hash of all columns of each sample, the same for equal samples of any chunk."""
    columns = [c for c in samples.samples.column_names if c not in (ORIGIN, LIST_INDEX)]
    parts = [hash_tuples(samples.samples, columns)] if columns else []
    for group, table in sorted(samples.uniques.items()):
        columns = [c for c in table.column_names if not c.startswith(HASH_PREFIX)]
        parts.append(hash_tuples(table, columns)[samples.references[group]])
    return combine_hashes(parts)
