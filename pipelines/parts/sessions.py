"""How long sessions are, read back from a dataset."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.parts.cluster import microseconds
from pipelines.parts.expand import row_groups
from schemas.columns import one_chunk
from schemas.dataset import Dataset, Segment
from schemas.jagged import offsets_of
from schemas.job import DataConfig
from schemas.layout import inverse_column, samples_path
from schemas.stored import read_group


def sample_column(
    segment: Segment, file_index: int, row_group: int, data: DataConfig, name: str
) -> pa.Array:
    """Return one column of the samples of a row group, read from its group if it is in one."""
    samples = segment.file(samples_path(file_index))
    group = data.group_of_column.get(name)
    if group is None:
        return one_chunk(samples.read_row_group(row_group, [name])[name])
    chosen = (segment.column("file") == file_index) & (segment.column("row_group") == row_group)
    inverse = inverse_column(group)
    local = samples.read_row_group(row_group, [inverse])[inverse].to_numpy()
    starts = offsets_of(segment.num_unique(group)[chosen])[:-1]
    tuples = local + np.repeat(starts, segment.column("num_samples")[chosen])
    unique = read_group(segment.file, group, file_index, row_group, [name])[name]
    return one_chunk(unique).take(pa.array(tuples))


def session_lengths(dataset: Dataset) -> NDArray[np.int64]:
    """Return the samples of each session, (num_sessions,), in no order that means anything.

    A session that the split or a window cuts counts once, as in the manifest.
    """
    return np.concatenate([segment_session_lengths(s, dataset.job.data) for s in dataset.segments])


def segment_session_lengths(segment: Segment, data: DataConfig) -> NDArray[np.int64]:
    """Return the samples of each session of one segment."""
    session, places = data.session, row_groups(segment)
    parts = {
        name: pa.chunked_array([sample_column(segment, f, g, data, name) for f, g in places])
        for name in (session.key, session.time)
    }
    codes = pc.rank(one_chunk(parts[session.key]), tiebreaker="dense").to_numpy().astype(np.int64)
    time = pc.cast(one_chunk(parts[session.time]), pa.int64()).to_numpy()
    order = np.lexsort((time, codes))
    starts = np.diff(codes[order], prepend=-1) != 0
    if session.gap is not None:
        starts[1:] |= np.diff(time[order]) > microseconds(session.gap)
    return np.diff(np.append(np.flatnonzero(starts), len(order)))
