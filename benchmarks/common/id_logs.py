"""Drawn logs of ids and numbers, with a table for each column of ids, and their jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.common.logs import write_yaml

_FEATURE = 'feature {{ name: "{}" type: {} annotation {{ tag: "{}" }} {} }}\n'
_ALWAYS = "presence { min_fraction: 1 }"
_TIME = _ALWAYS + " time_domain { integer_format: UNIX_MICROSECONDS }"


def write_id_log(
    folder: Path,
    columns: Mapping[str, NDArray[Any]],
    num_samples: int,
    per_session: int = 1,
    first: int = 0,
) -> Path:
    """Write samples one second apart, of which half have the label 1; return the folder.

    Args:
        folder: to create.
        columns: (num_samples,) each.
        num_samples: of the log.
        per_session: samples of a session.
        first: number of the first sample.
    """
    folder.mkdir(parents=True)
    number = np.arange(first, first + num_samples)
    rows = {
        "session": number // per_session,
        "time": number.astype("datetime64[s]").astype("datetime64[us]"),
        "label": np.random.default_rng([1, first]).integers(0, 2, num_samples),
    }
    pq.write_table(pa.table({**rows, **columns}), folder / "log.parquet", row_group_size=1 << 16)
    return folder


def write_id_job(
    folder: Path,
    columns: Mapping[str, int],
    data: Mapping[str, Any],
    train: Mapping[str, Any],
) -> Path:
    """Write the job that builds such a log and trains on it, with its schema; return its path.

    Args:
        folder: created if it does not exist.
        columns: name -> rows of its table, 0 of a column of numbers.
        data: further keys of `data`.
        train: further keys of `train`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "name": "ids",
        "data": {
            "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
            "samples": {"map": "SELECT * FROM log"},
            "session": {"key": "session", "time": "time"},
            "tables": {
                f"table_{name}": {"features": [name], "rows": "identity", "num_rows": num_rows}
                for name, num_rows in columns.items()
                if num_rows
            },
            **data,
        },
        "train": {
            "model": {"name": "dlrm", "bottom_layers": [16], "top_layers": [16]},
            "embedding_dim": 16,
            **train,
        },
    }
    features = [("session", "INT", "kept", _ALWAYS), ("time", "INT", "kept", _TIME)]
    features.append(("label", "INT", "label", _ALWAYS))
    features += [
        (name, "INT", "sparse", _ALWAYS) if num_rows else (name, "FLOAT", "dense", "")
        for name, num_rows in columns.items()
    ]
    text = "".join(_FEATURE.format(*feature) for feature in features)
    (folder / "schema.pbtxt").write_text(text, encoding="utf-8")
    return write_yaml(folder / "job.yaml", job)
