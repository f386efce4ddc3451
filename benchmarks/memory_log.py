"""A log whose rows do not fit in memory: 26 tables shaped like Criteo's large ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.oracle_tables import NUM_TABLES, skewed

TABLE_ROWS = 2_000_000
HOT_SHARE = 0.5
"""Share of accesses of the hottest 1 % of rows: the others make a table be touched as a whole."""
NUM_DENSE = 13
DIM, BATCH = 256, 1024
EPOCHS = 2
_EVALUATED = 16_384
_FEATURE = 'feature {{ name: "{name}" type: {type} annotation {{ tag: "{tag}" }} {more} }}\n'
_ALWAYS = "presence { min_fraction: 1 }"


def write_log(directory: Path, num_samples: int) -> None:
    """Write samples one second apart, each a session of its own; half of the labels are 1.

    Args:
        directory: that is made.
        num_samples: to train on; some more are for evaluation.
    """
    directory.mkdir(parents=True)
    count = num_samples + _EVALUATED
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "session": np.arange(count),
        "time": np.arange(count).astype("datetime64[s]").astype("datetime64[us]"),
        "label": rng.integers(0, 2, count),
    }
    for number in range(NUM_DENSE):
        columns[f"dense_{number}"] = rng.random(count, np.float32)
    for number in range(NUM_TABLES):
        columns[_id(number)] = skewed(TABLE_ROWS, count, number, HOT_SHARE).astype(np.int64)
    pq.write_table(pa.table(columns), directory / "log.parquet", row_group_size=1 << 16)


def write_job(directory: Path, num_samples: int, train: dict[str, Any]) -> Path:
    """Write the job that builds such a log and trains on it, with its schema; return its path.

    Args:
        directory: that is made.
        num_samples: as `write_log` was given.
        train: keys of the `train` section beside those of the workload.
    """
    directory.mkdir(parents=True)
    tables = {
        _table(k): {"features": [_id(k)], "rows": "identity", "num_rows": TABLE_ROWS}
        for k in range(NUM_TABLES)
    }
    first_evaluated = np.datetime64(num_samples, "s")
    job = {
        "name": "memory",
        "data": {
            "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
            "samples": {"map": "SELECT * FROM log"},
            "session": {"key": "session", "time": "time"},
            "split": {"evaluation_from": str(first_evaluated)},
            "tables": tables,
            "oracle": {"batch_samples": BATCH, "epochs": EPOCHS},
        },
        "train": {
            "model": {"name": "dlrm", "bottom_layers": [256], "top_layers": [512, 256]},
            "embedding_dim": DIM,
            "batch_samples": BATCH,
            "epochs": EPOCHS,
            **train,
        },
    }
    features = [("session", "INT", "kept", _ALWAYS), ("time", "INT", "kept", _TIME)]
    features.append(("label", "INT", "label", _ALWAYS))
    features += [(f"dense_{k}", "FLOAT", "dense", "") for k in range(NUM_DENSE)]
    features += [(_id(k), "INT", "sparse", _ALWAYS) for k in range(NUM_TABLES)]
    text = [_FEATURE.format(name=n, type=t, tag=g, more=more) for n, t, g, more in features]
    (directory / "schema.pbtxt").write_text("".join(text), encoding="utf-8")
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


_TIME = _ALWAYS + " time_domain { integer_format: UNIX_MICROSECONDS }"


def _id(number: int) -> str:
    return f"id_{number:02d}"


def _table(number: int) -> str:
    return f"table_{number:02d}"
