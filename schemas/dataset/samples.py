"""The samples of a dataset as rows: the star schema joined, one row group at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.schemas.arrays import check_inverse, numpy_of, offsets_of, one_chunk
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.defaults import (
    constant_column,
    missing_column_defaults,
    type_from_name,
)
from presage.schemas.dataset.group_files import OpenFile, read_group
from presage.schemas.dataset.opened import OpenDataset, Segment
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.layout import internal_columns, inverse_column, part_path

_THREADS = 8
"""Files of a row group that are read at once; a dataset has at most as many groups."""


@cache
def _read_pool(process_id: int) -> ThreadPoolExecutor:
    """Return the threads that read groups; threads do not survive a fork, hence one pool each."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix=f"read-{process_id}")


def row_groups(segment: Segment, split: str | None = None) -> list[tuple[int, int]]:
    """Return the distinct (file, row group) pairs of a segment or split, in training order.

    A row group has samples of one split.
    """
    positions = slice(None) if split is None else segment.positions(split)
    files, groups = (segment.column(name)[positions].tolist() for name in ("file", "row_group"))
    return list(dict.fromkeys(zip(files, groups, strict=True)))


def blocks_of_row_group(segment: Segment, file_index: int, row_group: int) -> NDArray[np.bool_]:
    """Return which blocks of a segment are in a row group, (num_blocks,)."""
    return (segment.column("file") == file_index) & (segment.column("row_group") == row_group)


def tuples_of_samples(
    segment: Segment, group: str, blocks: NDArray[np.bool_], samples: pa.Table
) -> NDArray[np.int64]:
    """Return the row of each sample's tuple among the unique tuples of a row group.

    `blocks` is from `blocks_of_row_group`; the samples have the inverse indices of the group.
    """
    starts = offsets_of(segment.num_unique(group)[blocks])[:-1]
    starts_of_samples = np.repeat(starts, segment.column("num_samples")[blocks])
    return numpy_of(samples[inverse_column(group)]) + starts_of_samples


def read_joined_row_group(
    segment: Segment,
    file_index: int,
    row_group: int,
    data: DataConfig,
    defaults: Mapping[str, pa.Scalar] | None = None,
    columns: Sequence[str] | None = None,
    open_file: OpenFile | None = None,
) -> pa.Table:
    """Return the samples of one row group with the columns of their groups.

    Args:
        segment: an open segment.
        file_index: number of the part.
        row_group: row group in each file of the part.
        data: groups of the dataset.
        defaults: values of columns that the segment does not store.
        columns: columns of the result, in order; others are not read. All of them, stored ones and
            those of `defaults`, if None.
        open_file: opens a file of the segment; `segment.file` if None.

    Raises:
        SchemaError: a byte has changed, or an inverse index is out of range.
    """
    open_file, defaults = open_file or segment.file, defaults or {}
    own, members = _columns_of_files(data, columns, defaults)
    inverse = {group: inverse_column(group) for group in members}
    blocks = blocks_of_row_group(segment, file_index, row_group)
    pool = _read_pool(os.getpid())  # a store answers several requests at once
    tables = {
        group: pool.submit(read_group, open_file, group, file_index, row_group, names)
        for group, names in members.items()
    }
    selected = None if own is None else [*own, *inverse.values()]
    samples = open_file(part_path(file_index, "samples")).read_row_group(row_group, selected)
    joined = {name: samples[name] for name in samples.column_names}
    for group, table in tables.items():
        tuples = tuples_of_samples(segment, group, blocks, samples)
        joined.update(_take(table.result(), tuples))
    num_samples = int(segment.column("num_samples")[blocks].sum())
    joined.update({name: constant_column(v, num_samples) for name, v in defaults.items()})
    if columns is None:
        hidden = internal_columns(members, data.histories)
        columns = [name for name in joined if name not in hidden]
    return pa.table({name: joined[name] for name in columns})


def _columns_of_files(
    data: DataConfig, columns: Sequence[str] | None, defaults: Mapping[str, pa.Scalar]
) -> tuple[list[str] | None, dict[str, list[str] | None]]:
    """Return the columns to read of the samples, and of each group; None is all of a file."""
    if columns is None:
        return None, dict.fromkeys(data.groups)
    own: list[str] = []
    members: dict[str, list[str]] = {}
    for name in columns:
        if name not in defaults:
            group = data.group_of_column.get(name)
            (own if group is None else members.setdefault(group, [])).append(name)
    return own, {**members}


def _take(unique: pa.Table, tuples: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
    check_inverse(tuples, unique.num_rows)
    taken = unique.take(pa.array(tuples))
    return {name: taken[name] for name in taken.column_names}


def read_live_row_group(
    segment: Segment,
    file_index: int,
    row_group: int,
    data: DataConfig,
    defaults: Mapping[str, pa.Scalar] | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return what `read_joined_row_group` does, without deleted samples."""
    open_file = partial(segment.file, by_column=columns is not None)
    part = (segment, file_index, row_group)
    joined = read_joined_row_group(*part, data, defaults, columns, open_file)
    return _keep(joined, live_rows(*part))


def live_rows(segment: Segment, file_index: int, row_group: int) -> NDArray[np.bool_]:
    """Return which samples of a row group are not deleted."""
    blocks = blocks_of_row_group(segment, file_index, row_group)
    rows = np.ones(int(segment.column("num_samples")[blocks].sum()), np.bool_)
    rows[segment.deleted_rows(file_index, row_group)] = False
    return rows


def num_live_samples(segment: Segment, split: str | None = None) -> int:
    """Return the number of samples of a split, or of all, that are not deleted."""
    if split is None:  # without reading its blocks
        return segment.manifest.num_samples - segment.deleted_samples.num_rows
    live = segment.column("num_samples") - segment.num_deleted_per_block
    return int(live[segment.positions(split)].sum())


def _keep(table: pa.Table, rows: NDArray[np.bool_]) -> pa.Table:
    return table if rows.all() else table.take(pa.array(np.flatnonzero(rows)))


def column_names(dataset: OpenDataset, model_inputs: bool) -> list[str]:
    """Return the names of the columns in the order of the schema."""
    derived = dataset.job.data.derived_columns
    return [n for n in dataset.features.names if model_inputs or n not in derived]


def samples_schema(dataset: OpenDataset, columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of some columns.

    Raises:
        SchemaError: the dataset has no column of a name, or no or one column is named twice.
    """
    types = dataset.column_types
    if not columns or len(set(columns)) < len(columns):
        raise SchemaError(f"columns must be distinct names, got {list(columns)}; name each once")
    for name in columns:
        if name not in types:
            raise SchemaError(
                f"dataset has no column {name!r}; {suggest_name(name, types)}",
                file=str(dataset.directory),
            )
    return pa.schema([pa.field(name, type_from_name(types[name])) for name in columns])


def read_samples(dataset: OpenDataset, model_inputs: bool = False) -> Iterator[pa.Table]:
    """Yield the samples of each row group of all segments and splits, without deleted samples."""
    return _read_row_groups(dataset, column_names(dataset, model_inputs), None, by_column=False)


def read_columns(
    dataset: OpenDataset, columns: Sequence[str], split: str | None = None
) -> Iterator[pa.Table]:
    """Yield some columns of what `read_samples` does; the bytes of others are not read.

    Raises:
        SchemaError: the dataset has no column of a name, or a page has changed.
    """
    return _read_row_groups(dataset, columns, split, by_column=True)


def _read_row_groups(
    dataset: OpenDataset, columns: Sequence[str], split: str | None, *, by_column: bool
) -> Iterator[pa.Table]:
    """Yield columns of the samples; `by_column` is whether pages are verified, or row groups."""
    schema = samples_schema(dataset, columns)
    for segment in dataset.segments:
        defaults = missing_column_defaults(dataset, segment)
        last_file, open_file = -1, segment.file
        for file_index, row_group in row_groups(segment, split):
            if file_index != last_file:  # each file of a part is opened once, and closed with it
                last_file = file_index
                open_file = cache(partial(segment.file, by_column=by_column))
            part = (segment, file_index, row_group)
            rows = read_joined_row_group(*part, dataset.job.data, defaults, columns, open_file)
            yield _keep(rows, live_rows(*part)).cast(schema)


def read_sample_column(
    segment: Segment, file_index: int, row_group: int, data: DataConfig, name: str
) -> pa.Array:
    """Return one column of the samples of a row group."""
    rows = read_joined_row_group(segment, file_index, row_group, data, columns=[name])
    return one_chunk(rows[name])
