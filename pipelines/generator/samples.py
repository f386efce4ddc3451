"""Turn played samples into rows of the demo log."""

import numpy as np
import pyarrow as pa

from pipelines.generator.histories import Chunk
from pipelines.generator.items import item_brand, item_dense, item_ids
from pipelines.generator.random import CARDINALITIES
from pipelines.generator.sessions import VERSIONED
from pipelines.generator.users import user_dense, user_ids

HISTORIES = ("clicked_items", "clicked_brands", "viewed_items")
DENSE = (
    "user_age",
    "user_tenure_days",
    "user_sessions_7d",
    "user_clicks_7d",
    "user_ctr_7d",
    "item_price",
    "item_discount",
    "item_rating",
    "item_ctr_7d",
    "item_age_days",
    "position",
    "time_since_last_sec",
    "page_depth",
)

LOG_SCHEMA = pa.schema(
    [
        ("session_id", pa.int64()),
        ("request_id", pa.int64()),
        ("time", pa.timestamp("us")),
        ("clicked", pa.int8()),
        *((name, pa.int64()) for name in CARDINALITIES),
        *((name, pa.list_(pa.int64())) for name in HISTORIES),
        *((name, pa.float32()) for name in DENSE),
    ]
)
"""Columns of the log; `user_id` is a key and a feature. No value is null."""

_ID_MASK = (1 << 63) - 1
_SESSION_MULTIPLIER = 0x5851F42D4C957F2D  # odd: one-to-one modulo 2 ** 63
_REQUESTS_PER_SESSION = 1024


def to_record_batch(chunk: Chunk, rows: np.ndarray) -> pa.RecordBatch:
    """Return the samples at `rows` with all their columns.

    Args:
        chunk: samples and histories.
        rows: (n,) indices of samples, in the order wanted.
    """
    samples = {name: column[rows] for name, column in chunk.samples.items()}
    session = samples["session_ordinal"]
    request = session * _REQUESTS_PER_SESSION + samples["request_ordinal"]
    columns = {
        "session_id": _scramble(session),
        "request_id": _scramble(request),
        "time": samples["time"],
        "clicked": samples["clicked"],
        "page": samples["page"],
        "hour": samples["hour"],
        "slot": samples["slot"],
        "query": samples["query"],
        "position": samples["position"],
        "time_since_last_sec": samples["gap_sec"],
        "page_depth": samples["page_depth"],
    }
    columns |= user_ids(samples["user"], {name: samples[name] for name in VERSIONED})
    columns |= user_dense(samples["user"], samples["num_clicks"])
    columns |= item_ids(samples["item"]) | item_dense(samples["item"])
    arrays = {
        name: pa.array(values.astype(np.float32) if name in DENSE else values)
        for name, values in columns.items()
    }
    arrays |= _histories(chunk, samples)
    return pa.record_batch(
        [arrays[field.name].cast(field.type) for field in LOG_SCHEMA], schema=LOG_SCHEMA
    )


def _scramble(ordinal: np.ndarray) -> np.ndarray:
    """Give each ordinal a 63-bit id that says nothing about its time."""
    with np.errstate(over="ignore"):
        return ordinal * np.int64(_SESSION_MULTIPLIER) & np.int64(_ID_MASK)


def _histories(chunk: Chunk, samples: dict[str, np.ndarray]) -> dict[str, pa.Array]:
    """Copy the three histories of the samples out of the windows."""
    offsets, place = chunk.clicked.windows(samples["session"], samples["clicked_end"])
    brands = item_brand(chunk.clicked.values)
    arrays = {
        "clicked_items": _lists(offsets, chunk.clicked.values[place]),
        "clicked_brands": _lists(offsets, brands[place]),
    }
    offsets, place = chunk.viewed.windows(samples["session"], samples["viewed_end"])
    return arrays | {"viewed_items": _lists(offsets, chunk.viewed.values[place])}


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
