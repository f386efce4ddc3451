"""`samples.per`: SQL over all rows of a key, run for many keys at once.

The statement is put under a lateral join with the distinct keys, with its tables restricted to the
key. DuckDB makes one plan of it for all keys, so that the cost depends on the number of rows, not
of keys. If it raises, the rows that `sql_rejects.py` marks are removed; if it still raises, the
keys are bisected.

A statement that yields several samples of a row (unnest) is run key by key, as the lateral plan
does not keep their order within the row.
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
        statement: from `sql.select_origin`.
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
            f"SELECT _samples.* FROM ({keys} ORDER BY _key) AS _keys, "
            f"LATERAL (WITH {tables} SELECT * FROM ({body})) AS _samples"
        )


def run_keys(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    location: Callable[[int], str] | None = None,
) -> Iterator[SqlResult]:
    """Yield the samples of all keys that have rows in the statement's source.

    Args:
        connection: to a database without the tables.
        per: the statement.
        tables: all rows of some keys by source, in the order of their origins, keys not null.
        location: returns the location of an origin; if given, keys with a bad row are rejected.
    """
    tables = visible_rows(tables, per.source)
    all_codes = _key_codes(tables, per)
    counts = np.bincount(all_codes[per.source])
    for first, end in key_batches(counts, CHUNK_ROWS):
        in_batch = {name: (codes >= first) & (codes < end) for name, codes in all_codes.items()}
        rows = {name: table.filter(pa.array(in_batch[name])) for name, table in tables.items()}
        codes = {name: codes[in_batch[name]] for name, codes in all_codes.items()}
        with name_errors("data.samples.per.sql"):
            result = _run_batch(connection, per, rows, codes)
        if location is not None and result.bad_rows.num_rows:
            result = _reject_keys(result, rows[per.source], codes[per.source], location)
        yield result


def _reject_keys(
    result: SqlResult, rows: pa.Table, codes: NDArray[np.int64], location: Callable[[int], str]
) -> SqlResult:
    """Return the result without the keys that have a bad row; their other rows become bad rows."""
    bad = result.bad_rows.take(pc.sort_indices(result.bad_rows["origin"]))
    is_bad = pc.is_in(rows[ORIGIN], value_set=bad["origin"]).to_numpy()
    positions = pc.index_in(bad["origin"], value_set=rows[ORIGIN]).to_numpy()
    keys, first = np.unique(codes[positions], return_index=True)
    others = np.isin(codes, keys) & ~is_bad
    first_bad = bad.take(pa.array(first)).to_pylist()
    texts = [f"{location(row['origin'])}: {row['reason']}" for row in first_bad]
    reasons = [
        f"another row of the key is bad, got {texts[i]}"
        for i in np.searchsorted(keys, codes[others]).tolist()
    ]
    dropped = bad_rows(rows.filter(pa.array(others)), pa.array(reasons, pa.string()))
    samples = result.samples
    if samples is not None:
        samples = samples.filter(pc.invert(pc.is_in(samples[ORIGIN], value_set=dropped["origin"])))
    return SqlResult(samples, pa.concat_tables([bad, dropped]))


def _key_codes(tables: Mapping[str, pa.Table], per: PerKey) -> dict[str, NDArray[np.int64]]:
    """Return the rank of each row's key among those of the statement's source, -1 for others."""
    kind = key_type(tables, per.key)
    keys = pc.unique(key_column(tables[per.source], per.key, kind))
    keys = keys.take(pc.sort_indices(keys))
    return {
        name: pc.fill_null(pc.index_in(key_column(table, per.key, kind), value_set=keys), -1)
        .to_numpy()
        .astype(np.int64)
        for name, table in tables.items()
    }


def key_batches(counts: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of keys with at most `limit` rows in total, or of one key.

    Example:
        >>> list(key_batches(np.array([3, 1, 9, 2, 2]), 5))
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


def _run_batch(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    codes: Mapping[str, NDArray[np.int64]],
) -> SqlResult:
    """Run the statement over the rows of some keys; rows that raise become bad rows."""
    if len(np.unique(codes[per.source])) == 1:
        return run_key(connection, per.statement, per.source, tables)

    def attempt(text: str, rows: pa.Table) -> pa.Table:
        return _attempt(connection, replace(per, statement=text), {**tables, per.source: rows})

    def run_alone(row: pa.Table) -> pa.Table:
        code = codes[per.source][np.searchsorted(origins, row[ORIGIN][0].as_py())]
        of_key = _rows_of_key(tables, codes, int(code))
        return run(connection, per.statement, {**of_key, per.source: row})

    origins = tables[per.source][ORIGIN].to_numpy()
    try:
        return _in_order(connection, per, _attempt(connection, per, tables), tables, codes)
    except ROW_ERRORS:
        rows, bad = remove_marked(per.statement, attempt, run_alone, tables[per.source])
    kept = np.isin(origins, rows[ORIGIN].to_numpy())
    codes = {**codes, per.source: codes[per.source][kept]}
    results = _bisect_keys(connection, per, {**tables, per.source: rows}, codes)
    return _concatenate([SqlResult(None, bad), *results])


def _attempt(connection: Connection, per: PerKey, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Run the statement over the rows of several keys, without handling of errors."""
    renamed = {_ALL + name: table for name, table in tables.items()}
    return run(connection, per.batched(list(tables)), renamed)


def _bisect_keys(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    codes: Mapping[str, NDArray[np.int64]],
) -> Iterator[SqlResult]:
    """Bisect keys until those that raise are isolated, with at most `MAX_ATTEMPTS` runs."""
    queue, attempts, reason = deque([(tables, codes)]), 0, ""

    def attempt(text: str, rows: pa.Table) -> pa.Table:
        return _attempt(connection, replace(per, statement=text), {**tables, per.source: rows})

    while queue:
        tables, codes = queue.popleft()
        keys = np.unique(codes[per.source])
        if len(keys) == 1 and attempts <= MAX_ATTEMPTS:
            yield run_key(connection, per.statement, per.source, tables)
            attempts += 1
        elif attempts > MAX_ATTEMPTS:
            raise bad_rows_error(per.statement, attempt, tables[per.source], reason)
        elif len(keys):
            attempts += 1
            try:
                samples = _attempt(connection, per, tables)
            except ROW_ERRORS as error:  # a key raises, or no lateral plan exists
                reason = reject_reason(error)
                middle = int(keys[len(keys) // 2])
                queue.extend(_half(tables, codes, middle, lower) for lower in (True, False))
                continue
            yield _in_order(connection, per, samples, tables, codes)


def _in_order(
    connection: Connection,
    per: PerKey,
    samples: pa.Table,
    tables: Mapping[str, pa.Table],
    codes: Mapping[str, NDArray[np.int64]],
) -> SqlResult:
    """Return samples in the order of their rows; run keys alone if a row has several samples."""
    if len(pc.unique(samples[ORIGIN])) == samples.num_rows:
        return SqlResult(samples)
    return _concatenate(
        [
            run_key(connection, per.statement, per.source, _rows_of_key(tables, codes, key))
            for key in np.unique(codes[per.source]).tolist()
        ]
    )


def _half(
    tables: Mapping[str, pa.Table], codes: Mapping[str, NDArray[np.int64]], middle: int, lower: bool
) -> tuple[dict[str, pa.Table], dict[str, NDArray[np.int64]]]:
    """Return the rows of the keys below `middle`, or of the others."""
    chosen = {name: (code < middle) == lower for name, code in codes.items()}
    rows = {name: table.filter(pa.array(chosen[name])) for name, table in tables.items()}
    return rows, {name: code[chosen[name]] for name, code in codes.items()}


def _rows_of_key(
    tables: Mapping[str, pa.Table], codes: Mapping[str, NDArray[np.int64]], key: int
) -> dict[str, pa.Table]:
    return {n: t.take(pa.array(np.flatnonzero(codes[n] == key))) for n, t in tables.items()}


def _concatenate(results: Sequence[SqlResult]) -> SqlResult:
    good = [r.samples for r in results if r.samples is not None]
    bad = pa.concat_tables([r.bad_rows for r in results])
    return SqlResult(pa.concat_tables(good) if good else None, bad)


def visible_rows(tables: Mapping[str, pa.Table], source: str) -> dict[str, pa.Table]:
    """Return the tables that a statement can read: only the sample source has origins."""
    return {
        name: table if name == source else table.drop_columns([ORIGIN])
        for name, table in tables.items()
    }


def in_origin_order(table: pa.Table) -> pa.Table:
    """Return raw rows in the order of their origins."""
    return table.take(pa.array(np.argsort(table[ORIGIN].to_numpy(), kind="stable")))
