"""Does the job's SQL depend on how rows are batched? Run it on the same rows cut three ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from pipelines.samples.connection import Connection, connect
from pipelines.samples.sql import LIST_INDEX, map_rows, with_list_index
from pipelines.sources.read import ORIGIN
from schemas.columns import comparable_tuple
from schemas.errors import SchemaError
from schemas.jagged import hash_keys

CUTS = (1, 2, 7)
"""Into how many pieces the rows are cut; the last one leaves uneven pieces."""

MAX_ROWS = 1 << 16
"""Most raw rows that are compared."""


def check_map_sql(
    statement: str,
    source: str,
    chunks: Iterable[pa.Table],
    connection: Connection | None = None,
) -> int:
    """Compare the samples that row-local SQL makes of the same rows in one, two and seven pieces.

    Args:
        statement: from `carry_origin`.
        source: name of the table in it.
        chunks: raw rows with origins.
        connection: one that has the side tables, for a statement that reads them.

    Returns:
        The number of raw rows compared.

    Raises:
        SchemaError: naming the first raw row whose samples differ.
    """
    rows = _joined(first_rows(chunks))
    connection = connection or connect()
    whole = _samples(connection, statement, source, rows, CUTS[0])
    for cuts in CUTS[1:]:
        parts = _samples(connection, statement, source, rows, cuts)
        if whole.num_rows != parts.num_rows:
            raise _differs(f"{whole.num_rows} samples in one piece and {parts.num_rows} in {cuts}")
        names = whole.column_names
        left, right = (hash_keys(comparable_tuple(t, names)) for t in (whole, parts))
        different = (left != right).nonzero()[0]
        if len(different):
            row = whole[ORIGIN][int(different[0])].as_py()
            raise _differs(f"other samples for raw row {row & ((1 << 40) - 1)} in {cuts} pieces")
    return rows.num_rows


def first_rows(chunks: Iterable[pa.Table]) -> list[pa.Table]:
    """Return the first `MAX_ROWS` rows."""
    taken: list[pa.Table] = []
    for chunk in chunks:
        taken.append(chunk.slice(0, MAX_ROWS - sum(t.num_rows for t in taken)))
        if sum(t.num_rows for t in taken) >= MAX_ROWS:
            break
    return taken


def _joined(taken: list[pa.Table]) -> pa.Table:
    if not taken:
        raise SchemaError("check of SQL must have rows, got none; see what the build rejects")
    return pa.concat_tables(taken)


def _samples(
    connection: Connection, statement: str, source: str, rows: pa.Table, cuts: int
) -> pa.Table:
    size = -(-rows.num_rows // cuts)
    results = (
        map_rows(connection, statement, source, rows.slice(start, size)).samples
        for start in range(0, rows.num_rows, size)
    )
    made: Sequence[pa.Table] = [with_list_index(r) for r in results if r is not None]
    joined = pa.concat_tables(made)
    return joined.sort_by([(ORIGIN, "ascending"), (LIST_INDEX, "ascending")])


def _differs(what: str) -> SchemaError:
    return SchemaError(
        f"data.samples.map must be row-local, got {what}; remove window functions, aggregates and "
        "random values, or use samples.per"
    )
