"""Read a dataset as one row per sample, and the lengths of its sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.partition import microseconds
from schemas.arrays import check_inverse, numpy_of, offsets_of, one_chunk
from schemas.config.job import DataConfig
from schemas.dataset import Dataset, Segment, constant_column, missing_column_defaults, open_dataset
from schemas.errors import SchemaError
from schemas.group_files import read_group
from schemas.layout import BLOCK, inverse_column, samples_path


def row_groups(segment: Segment) -> list[tuple[int, int]]:
    """Return the distinct (file, row group) pairs of a segment, in training order."""
    pairs = zip(segment.column("file").tolist(), segment.column("row_group").tolist(), strict=True)
    return list(dict.fromkeys(pairs))


def read_joined_row_group(
    segment: Segment,
    file_index: int,
    row_group: int,
    data: DataConfig,
    defaults: Mapping[str, pa.Scalar] | None = None,
) -> pa.Table:
    """Return the samples of one row group with the columns of their groups.

    Args:
        segment: an open segment.
        file_index: number of the part.
        row_group: row group in each file of the part.
        data: groups of the dataset.
        defaults: values of columns that the segment does not store.

    Raises:
        SchemaError: a byte has changed, or an inverse index is out of range.
    """
    samples = segment.file(samples_path(file_index)).read_row_group(row_group)
    chosen = (segment.column("file") == file_index) & (segment.column("row_group") == row_group)
    per_block = segment.column("num_samples")[chosen]
    block_of_sample = np.repeat(np.arange(len(per_block)), per_block)
    columns = {c: samples[c] for c in samples.column_names}
    for group in data.groups:
        table = read_group(segment.file, group, file_index, row_group)
        starts = offsets_of(segment.num_unique(group)[chosen])[:-1]
        tuples = numpy_of(samples[inverse_column(group)]) + starts[block_of_sample]
        check_inverse(tuples, table.num_rows)
        taken = table.take(pa.array(tuples))
        columns.update({c: taken[c] for c in table.column_names[2:]})
        del columns[inverse_column(group)]
    del columns[BLOCK]
    for name, value in (defaults or {}).items():
        columns[name] = constant_column(value, samples.num_rows)
    return pa.table(columns)


def read_live_row_group(
    segment: Segment,
    file_index: int,
    row_group: int,
    data: DataConfig,
    defaults: Mapping[str, pa.Scalar] | None = None,
) -> pa.Table:
    """Return what `read_joined_row_group` does, without deleted samples."""
    joined = read_joined_row_group(segment, file_index, row_group, data, defaults)
    deleted = segment.deleted_rows(file_index, row_group)
    if not len(deleted):
        return joined
    return joined.take(pa.array(np.setdiff1d(np.arange(joined.num_rows), deleted)))


def column_names(dataset: Dataset, model_inputs: bool) -> list[str]:
    """Return the names of the columns in the order of the schema."""
    derived = dataset.job.data.derived_columns
    return [n for n in dataset.features.names if model_inputs or n not in derived]


def read_samples(dataset: Dataset, model_inputs: bool = False) -> Iterator[pa.Table]:
    """Yield the samples of each row group of all segments and splits, without deleted samples."""
    columns = column_names(dataset, model_inputs)
    for segment in dataset.segments:
        defaults = missing_column_defaults(dataset, segment)
        for file_index, row_group in row_groups(segment):
            rows = read_live_row_group(segment, file_index, row_group, dataset.job.data, defaults)
            yield rows.select(columns)


def expand(dataset_path: Path, output: Path, model_inputs: bool = False) -> int:
    """Write all samples of a dataset to one Parquet file; return their number.

    Args:
        dataset_path: the dataset.
        output: the file to write.
        model_inputs: whether to include the columns that transforms and sampling added.

    Raises:
        SchemaError: the output is a directory, or the dataset does not match its manifests.
    """
    if output.is_dir():
        raise SchemaError(f"output is a directory: {output}; name a file in it")
    writer: pq.ParquetWriter | None = None
    partial = output.with_name(f".{output.name}.partial")
    count = 0
    for table in read_samples(open_dataset(dataset_path), model_inputs):
        if writer is None:
            writer = pq.ParquetWriter(partial, table.schema, compression="zstd")
        writer.write_table(table)
        count += table.num_rows
    assert writer is not None, "a committed segment has samples"
    writer.close()
    partial.replace(output)
    return count


def read_sample_column(
    segment: Segment, file_index: int, row_group: int, data: DataConfig, name: str
) -> pa.Array:
    """Return one column of the samples of a row group."""
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
    """Return the number of samples of each session, (num_sessions,), in no particular order.

    A session that the split or a window divides counts once, as in the manifest.
    """
    return np.concatenate([segment_session_lengths(s, dataset.job.data) for s in dataset.segments])


def segment_session_lengths(segment: Segment, data: DataConfig) -> NDArray[np.int64]:
    """Return the number of samples of each session of one segment."""
    session, groups = data.session, row_groups(segment)
    parts = {
        name: pa.chunked_array([read_sample_column(segment, f, g, data, name) for f, g in groups])
        for name in (session.key, session.time)
    }
    codes = pc.rank(one_chunk(parts[session.key]), tiebreaker="dense").to_numpy().astype(np.int64)
    time = pc.cast(one_chunk(parts[session.time]), pa.int64()).to_numpy()
    order = np.lexsort((time, codes))
    starts = np.diff(codes[order], prepend=-1) != 0
    if session.gap is not None:
        starts[1:] |= np.diff(time[order]) > microseconds(session.gap)
    return np.diff(np.append(np.flatnonzero(starts), len(order)))
