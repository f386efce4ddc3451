"""`samples.per`: SQL that sees all rows of one key, run for many keys at once.

The statement is put under a lateral join with the distinct keys, its tables
restricted to the key. DuckDB turns that into one plan over all keys: a
million keys cost what their rows cost, not a million queries. When the batch
raises, the rows that `pipelines/samples/sql_rejects.py` finds are taken out; what still raises is
halved down to single keys.

A statement that makes several samples of one row (unnest) is run key by key:
the lateral plan gives the same samples, but not their order within the row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.samples.connection import Connection, name_errors, quoted_name
from pipelines.samples.lookups import key_column, key_type
from pipelines.samples.sql import run, run_key
from pipelines.samples.sql_rejects import (
    MAX_ATTEMPTS,
    ROW_ERRORS,
    SqlResult,
    bad_rows,
    bad_rows_error,
    reject_reason,
    remove_marked,
)
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN

_ALL = "_all_"


@dataclass(frozen=True, slots=True)
class PerKey:
    """A statement over whole keys.

    Attributes:
        statement: from `sql.carry_origin`.
        source: the source whose rows become samples.
        key: column that every source has.
    """

    statement: str
    source: str
    key: str

    def batched(self, sources: list[str]) -> str:
        """Return one statement over many keys; its tables are `_all_<source>`."""
        key = quoted_name(self.key)
        tables = ", ".join(
            f"{quoted_name(name)} AS (SELECT * FROM {quoted_name(_ALL + name)} AS _rows "
            f"WHERE _rows.{key} = _keys._key)"
            for name in sources
        )
        keys = f"SELECT DISTINCT {key} AS _key FROM {quoted_name(_ALL + self.source)}"
        body = self.statement.rstrip().rstrip(";")
        return (
            f"SELECT _made.* FROM ({keys} ORDER BY _key) AS _keys, "
            f"LATERAL (WITH {tables} SELECT * FROM ({body})) AS _made"
        )


def run_keys(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    place_text: Callable[[int], str] | None = None,
) -> Iterator[SqlResult]:
    """Yield the samples of all keys that have rows in the statement's source.

    Args:
        connection: from `sql.connect`.
        per: the statement.
        tables: all rows of some keys by source, in the order of their origins, keys not null.
        place_text: names the place of an origin; a key with a bad row is then dropped as a whole.
    """
    tables = visible_rows(tables, per.source)
    coded = _coded(tables, per)
    counts = np.bincount(coded[per.source])
    for first, end in batches_of(counts, CHUNK_ROWS):
        rows = {
            name: table.filter(pa.array((coded[name] >= first) & (coded[name] < end)))
            for name, table in tables.items()
        }
        codes = {n: c[(c >= first) & (c < end)] for n, c in coded.items()}
        with name_errors("data.samples.per.sql"):
            result = _run(connection, per, rows, codes)
        if place_text is not None and result.bad_rows.num_rows:
            result = _without_keys(result, rows[per.source], codes[per.source], place_text)
        yield result


def _without_keys(
    result: SqlResult, rows: pa.Table, codes: NDArray[np.int64], place_text: Callable[[int], str]
) -> SqlResult:
    """Return a result without the keys that have a bad row; their other rows are bad, too."""
    bad = result.bad_rows.take(pc.sort_indices(result.bad_rows["origin"]))
    is_bad = pc.is_in(rows[ORIGIN], value_set=bad["origin"]).to_numpy()
    places = pc.index_in(bad["origin"], value_set=rows[ORIGIN]).to_numpy()
    keys, first = np.unique(codes[places], return_index=True)
    others = np.isin(codes, keys) & ~is_bad
    starts = bad.take(pa.array(first)).to_pylist()
    texts = [f"{place_text(row['origin'])}: {row['reason']}" for row in starts]
    reasons = [
        f"row must stand under a key without bad rows, got {texts[i]}"
        for i in np.searchsorted(keys, codes[others]).tolist()
    ]
    dropped = bad_rows(rows.filter(pa.array(others)), pa.array(reasons, pa.string()))
    samples = result.samples
    if samples is not None:
        samples = samples.filter(pc.invert(pc.is_in(samples[ORIGIN], value_set=dropped["origin"])))
    return SqlResult(samples, pa.concat_tables([bad, dropped]))


def _coded(tables: Mapping[str, pa.Table], per: PerKey) -> dict[str, NDArray[np.int64]]:
    """Return for each row the rank of its key among those of the source, -1 for other keys."""
    kind = key_type(tables, per.key)
    known = pc.unique(key_column(tables[per.source], per.key, kind))
    known = known.take(pc.sort_indices(known))
    return {
        name: pc.fill_null(pc.index_in(key_column(table, per.key, kind), value_set=known), -1)
        .to_numpy()
        .astype(np.int64)
        for name, table in tables.items()
    }


def batches_of(counts: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of keys with at most `limit` rows together, one key at least.

    Example:
        >>> list(batches_of(np.array([3, 1, 9, 2, 2]), 5))
        [(0, 2), (2, 3), (3, 5)]
    """
    first, rows = 0, 0
    for index, count in enumerate(counts.tolist()):
        if rows and rows + count > limit:
            yield first, index
            first, rows = index, 0
        rows += count
    if len(counts):
        yield first, len(counts)


def _run(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    codes: Mapping[str, NDArray[np.int64]],
) -> SqlResult:
    """Run the statement over the rows of some keys; what raises is set apart."""
    if len(np.unique(codes[per.source])) == 1:
        return run_key(connection, per.statement, per.source, tables)
    names = list(tables)

    def attempt(text: str, part: pa.Table) -> pa.Table:
        named = {_ALL + n: part if n == per.source else t for n, t in tables.items()}
        return run(connection, replace(per, statement=text).batched(names), named)

    def alone(row: pa.Table) -> pa.Table:
        code = codes[per.source][np.searchsorted(origins, row[ORIGIN][0].as_py())]
        own = _rows_of(tables, codes, int(code))
        return run(connection, per.statement, {**own, per.source: row})

    origins = tables[per.source][ORIGIN].to_numpy()
    try:
        return _in_order(connection, per, attempt(per.statement, tables[per.source]), tables, codes)
    except ROW_ERRORS:
        rows, bad = remove_marked(per.statement, attempt, alone, tables[per.source])
    kept = np.isin(origins, rows[ORIGIN].to_numpy())
    codes = {**codes, per.source: codes[per.source][kept]}
    halves = _halved(connection, per, {**tables, per.source: rows}, codes)
    return _joined([SqlResult(None, bad), *halves])


def _halved(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    codes: Mapping[str, NDArray[np.int64]],
) -> Iterator[SqlResult]:
    """Halve keys until those that raise are alone, at most `MAX_ATTEMPTS` times."""
    waiting, attempts, reason = deque([(tables, codes)]), 0, ""

    def attempt(text: str, part: pa.Table) -> pa.Table:
        named = {_ALL + n: part if n == per.source else t for n, t in tables.items()}
        return run(connection, replace(per, statement=text).batched(list(tables)), named)

    while waiting:
        tables, codes = waiting.popleft()
        keys = np.unique(codes[per.source])
        if len(keys) == 1 and attempts <= MAX_ATTEMPTS:
            yield run_key(connection, per.statement, per.source, tables)
            attempts += 1
        elif attempts > MAX_ATTEMPTS:
            raise bad_rows_error(per.statement, attempt, tables[per.source], reason)
        elif len(keys):
            attempts += 1
            try:
                made = attempt(per.statement, tables[per.source])
            except ROW_ERRORS as error:  # a key raises, or no lateral plan exists
                reason = reject_reason(error)
                middle = int(keys[len(keys) // 2])
                waiting.extend(_side(tables, codes, middle, lower) for lower in (True, False))
                continue
            yield _in_order(connection, per, made, tables, codes)


def _in_order(
    connection: Connection,
    per: PerKey,
    samples: pa.Table,
    tables: Mapping[str, pa.Table],
    codes: Mapping[str, NDArray[np.int64]],
) -> SqlResult:
    """Return samples in the order of their rows; the lateral plan loses it where a row has several.

    Each key has its own run then.
    """
    if len(pc.unique(samples[ORIGIN])) == samples.num_rows:
        return SqlResult(samples)
    return _joined(
        [
            run_key(connection, per.statement, per.source, _rows_of(tables, codes, key))
            for key in np.unique(codes[per.source]).tolist()
        ]
    )


def _side(
    tables: Mapping[str, pa.Table], codes: Mapping[str, NDArray[np.int64]], middle: int, lower: bool
) -> tuple[dict[str, pa.Table], dict[str, NDArray[np.int64]]]:
    """Return the rows of the keys below `middle`, or of the others."""
    chosen = {name: (code < middle) == lower for name, code in codes.items()}
    rows = {name: table.filter(pa.array(chosen[name])) for name, table in tables.items()}
    return rows, {name: code[chosen[name]] for name, code in codes.items()}


def _rows_of(
    tables: Mapping[str, pa.Table], codes: Mapping[str, NDArray[np.int64]], key: int
) -> dict[str, pa.Table]:
    return {n: t.take(pa.array(np.flatnonzero(codes[n] == key))) for n, t in tables.items()}


def _joined(results: Sequence[SqlResult]) -> SqlResult:
    good = [r.samples for r in results if r.samples is not None]
    bad = pa.concat_tables([r.bad_rows for r in results])
    return SqlResult(pa.concat_tables(good) if good else None, bad)


def visible_rows(tables: Mapping[str, pa.Table], source: str) -> dict[str, pa.Table]:
    """Return the tables that a statement sees: only the sample source has origins."""
    return {
        name: table if name == source else table.drop_columns([ORIGIN])
        for name, table in tables.items()
    }


def in_origin_order(table: pa.Table) -> pa.Table:
    """Return raw rows in the order of their origins."""
    return table.take(pa.array(np.argsort(table[ORIGIN].to_numpy(), kind="stable")))
