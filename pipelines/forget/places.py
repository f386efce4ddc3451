"""Where the samples of some ids lie: tombstones of a dataset, made without touching its data."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa

from pipelines.forget.ids import holding
from pipelines.parts.expand import row_groups
from pipelines.parts.sessions import sample_column
from schemas.dataset import Dataset, Segment
from schemas.jagged import offsets_of
from schemas.job import DataConfig
from schemas.tombstones import joined_tombstones, tombstones_schema


def tombstones_of(dataset: Dataset, column: str, ids: pa.Array, at: datetime) -> pa.Table:
    """Return a tombstone for each sample that holds one of some ids.

    Args:
        dataset: an open dataset.
        column: what the ids are values of.
        ids: of the type of its values.
        at: when they are forgotten, UTC.
    """
    found = [
        _of_row_group(segment, file_index, row_group, dataset.job.data, column, ids, at)
        for segment in dataset.segments
        if column in segment.manifest.columns
        for file_index, row_group in row_groups(segment)
    ]
    return joined_tombstones(found)


def _of_row_group(
    segment: Segment,
    file_index: int,
    row_group: int,
    data: DataConfig,
    column: str,
    ids: pa.Array,
    at: datetime,
) -> pa.Table:
    values = sample_column(segment, file_index, row_group, data, column)
    rows = np.flatnonzero(holding(values, ids))
    in_file = segment.column("file") == file_index
    group = segment.column("row_group")
    chosen = in_file & (group == row_group)
    samples = segment.column("num_samples")
    first = int(samples[in_file & (group < row_group)].sum())
    starts = offsets_of(samples[chosen])[:-1]
    place = np.searchsorted(starts, rows, side="right") - 1
    columns = {
        "segment": np.full(len(rows), segment.manifest.id),
        "block": segment.block_names[chosen][place],
        "sample_index": rows - starts[place],
        "file_row": rows + first,
        "reason": np.full(len(rows), column),
    }
    arrays = {name: pa.array(values) for name, values in columns.items()}
    times = pa.array([at.replace(tzinfo=None)] * len(rows), pa.timestamp("us"))
    return pa.table({**arrays, "forgotten_at": times}).cast(tombstones_schema())
