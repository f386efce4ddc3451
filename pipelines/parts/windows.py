"""Which groups are stored beyond blocks: shared tuples and windows, by measured bytes.

A pure function of the tables of one part, and of the job. It is asked once, and
all parts of a segment are stored alike; each segment is asked anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.encodings import smallest_bytes
from pipelines.parts.star import Star
from pipelines.parts.stored import (
    GroupLayout,
    can_be_windows,
    list_windows,
    numbers,
    shared,
    windowed,
)
from schemas.job_storage import StorageConfig, named
from schemas.layout import BLOCK, BUFFER_INDEX, TUPLE_INDEX, UNIQUE_INDEX, window_columns

SAMPLE_ROWS = 1 << 15
"""Unique tuples of a group that are looked at."""
SAMPLE_BYTES = 4 << 20
"""Uncompressed bytes of one column that are looked at."""
WORTHWHILE = 0.98
"""Share of the bytes at which a layout is taken; what saves less is not worth another file."""
HOPELESS = 0.9
"""Share of tuples or values that are left at which bytes are not even measured."""
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

Layouts = Mapping[str, GroupLayout]
"""Group to its layout."""


def choose_windows(star: Star, storage: StorageConfig) -> dict[str, GroupLayout]:
    """Choose the layout of every group.

    Args:
        star: some sessions of one part.
        storage: what the job says.
    """
    found: dict[str, GroupLayout] = {}
    for group, table in star.groups.items():
        rows = min(table.num_rows, SAMPLE_ROWS)
        largest = max((table[c].nbytes for c in table.column_names), default=0)
        rows = min(rows, max(1, SAMPLE_BYTES * table.num_rows // max(1, largest)))
        sample = table.slice(0, rows).combine_chunks()
        found[group] = choose_layout(sample, star.tuples[group][:rows], group, storage)
    return found


def choose_layout(
    table: pa.Table, tuples: NDArray[np.int64], group: str, storage: StorageConfig
) -> GroupLayout:
    """Choose the layout of one group.

    Args:
        table: some rows of the group, as one row group.
        tuples: (num_rows,) equal where two rows are.
        group: its name in the job.
        storage: what the job says.
    """
    wanted = named(storage.shared_tuples, group)
    index, kept, _ = shared(table, tuples, [table.num_rows])
    if wanted is None and kept.num_rows > HOPELESS * table.num_rows:
        wanted = False
    plain = table.drop_columns([BLOCK, UNIQUE_INDEX])
    if wanted is not None:
        return GroupLayout(wanted, _windows(kept if wanted else plain, group, storage)[0])
    by_block, plain_bytes = _windows(plain, group, storage)
    by_row_group, shared_bytes = _windows(kept, group, storage)
    shared_bytes += _index_bytes(index) + _index_bytes(np.arange(kept.num_rows))
    if shared_bytes <= WORTHWHILE * plain_bytes:
        return GroupLayout(True, by_row_group)
    return GroupLayout(False, by_block)


def _windows(table: pa.Table, group: str, storage: StorageConfig) -> tuple[tuple[str, ...], int]:
    """Return the list features that are windows, and the bytes of all files together."""
    wanted = named(storage.windows, group)
    total, chosen = smallest_bytes(table), []
    for field in table.schema:
        if wanted is False or not can_be_windows(field.type) or not _PATH.fullmatch(field.name):
            continue
        column = table[field.name]
        found, values = list_windows(column.combine_chunks())
        if wanted is None and len(found.source) > HOPELESS * len(values):
            continue
        columns, buffers = windowed(column, [table.num_rows], 0)
        names = window_columns(field.name)
        before = smallest_bytes(table.select([field.name]))
        after = smallest_bytes(pa.table(dict(zip(names, columns, strict=True))))
        index = pa.array(numbers(0, np.arange(len(buffers[0]))))
        after += smallest_bytes(pa.table({BUFFER_INDEX: index, field.name: buffers[0]}))
        if wanted or after <= WORTHWHILE * before:
            chosen.append(field.name)
            total += after - before
    return tuple(chosen), total


def _index_bytes(index: NDArray[np.int64]) -> int:
    return smallest_bytes(pa.table({TUPLE_INDEX: pa.array(numbers(0, index))}))
