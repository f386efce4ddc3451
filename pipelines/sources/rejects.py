"""Rows that could not be used: what the build keeps of them instead of losing them.

Stages hand them on as tables of `FOUND_SCHEMA`; `reject_files.py` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.layout import REJECTS_SCHEMA

FOUND_SCHEMA = REJECTS_SCHEMA.append(pa.field("rows_unknown", pa.bool_()))
"""Rejects on their way: the columns of the files, and whether a reject stands for unread rows."""

MAX_TEXT = 1000
"""Characters kept of a rejected row."""


@dataclass(frozen=True, slots=True)
class Reject:
    """One unusable row, or one unusable file.

    Attributes:
        file: relative to the input directory.
        position: row in the file from 0, or None when the file as a whole is unusable.
        reason: one line, what must hold and what was found.
        value: the row as text.
        rows_unknown: whether it stands for an unknown number of rows: those of a file, or of the
            rest of a file, that could not be read.
    """

    file: str
    position: int | None
    reason: str
    value: str = ""
    rows_unknown: bool = False

    def __str__(self) -> str:
        """Return the reject as one line of an error."""
        place = self.file if self.position is None else f"{self.file}:{self.position}"
        return f"{self.reason} in {place}"


def file_reject(file: str, reason: str) -> Reject:
    """Return the reject of a file, or of a part of one, of which no row can be read."""
    return Reject(file, None, reason, rows_unknown=True)


def unread(file: str, row: int, problem: str) -> Reject:
    """Return the reject of what stands in a file from some row on."""
    reason = f"file must be readable to its end, got none from row {row} on: {problem}"
    return file_reject(file, reason)


def sort_key(reject: Reject) -> tuple[str, int, str, str]:
    """Order rejects by place, whatever worker found them."""
    position = -1 if reject.position is None else reject.position
    return reject.file, position, reject.reason, reject.value


def as_table(rejects: Iterable[Reject]) -> pa.Table:
    """Return rejects as a table, in their order."""
    rows = [{**asdict(reject), "value": reject.value[:MAX_TEXT]} for reject in rejects]
    return pa.Table.from_pylist(rows, schema=FOUND_SCHEMA)


def from_table(table: pa.Table) -> Iterator[Reject]:
    """Undo `as_table`."""
    for row in table.to_pylist():
        yield Reject(**row)


def sorted_rejects(tables: Iterable[pa.Table]) -> pa.Table:
    """Return rejects sorted by place, without repetition."""
    table = pa.concat_tables([FOUND_SCHEMA.empty_table(), *tables]).combine_chunks()
    keys = [(name, "ascending", "at_start") for name in table.column_names]
    table = table.take(pc.sort_indices(table, sort_keys=keys))
    if table.num_rows < 2:
        return table
    new = np.zeros(table.num_rows - 1, bool)
    for name in table.column_names:
        column = table[name].combine_chunks()
        column = column.fill_null(-1) if name == "position" else column
        new |= pc.not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    return table.filter(pa.array(np.concatenate([[True], new])))


def row_texts(rows: pa.Table) -> pa.Array:
    """Return each row as text, at most `MAX_TEXT` characters of it."""
    return pa.array([str(row)[:MAX_TEXT] for row in python_rows(rows)], pa.string())


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as Python values, times that Python cannot hold as their numbers.

    Example:
        >>> python_rows(pa.table({"time": pa.array([2**62], pa.timestamp("us"))}))
        [{'time': 4611686018427387904}]
    """
    for index, name in enumerate(table.column_names):
        kind = table[name].type
        if pa.types.is_timestamp(kind) and kind.unit == "ns":  # else another with pandas installed
            try:
                times = table[name].cast(pa.timestamp("us", kind.tz))
            except pa.ArrowInvalid:
                times = table[name].cast(pa.int64())
            table = table.set_column(index, name, times)
    try:
        return table.to_pylist()
    except (OverflowError, ValueError):  # before year 1, after 9999, or parts of a microsecond
        for index, name in enumerate(table.column_names):
            if pa.types.is_timestamp(table[name].type):
                table = table.set_column(index, name, table[name].cast(pa.int64()))
        return table.to_pylist()
