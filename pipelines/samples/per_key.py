"""`samples.per`: SQL over all rows of a key, run for many keys at once.

The statement is put under a lateral join with the distinct keys, with its tables restricted to the
key. DuckDB makes one plan of it for all keys, so that the cost depends on the number of rows, not
of keys. If it raises, the rows that `sql_rejects.py` marks are removed; if it still raises, the
keys are bisected. A statement that yields several samples of a row (unnest) is run key by key, as
the lateral plan does not keep their order within the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.samples.lookups import key_column, key_type
from presage.pipelines.samples.sql import Connection, name_errors, run
from presage.pipelines.samples.sql_rejects import (
    MAX_ATTEMPTS,
    ROW_ERRORS,
    SqlResult,
    bad_rows,
    bad_rows_error,
    bisect_rows,
    reject_reason,
    remove_marked,
)
from presage.pipelines.samples.statements import quoted_name
from presage.pipelines.sources.raw_rows import CHUNK_ROWS, ORIGIN
from presage.pipelines.sources.rejects import TooManyRunsError, isolate_bad

_ALL = "_all_"


@dataclass(frozen=True, slots=True)
class PerKey:
    """A statement over whole keys.

    `statement` is from `select_origin`; every source has the column `key`.
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


@dataclass(frozen=True, slots=True)
class _KeyedRows:
    """Rows of some keys by source, and the code of each row's key."""

    tables: Mapping[str, pa.Table]
    codes: Mapping[str, NDArray[np.int64]]

    def where(self, chosen: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> _KeyedRows:
        """Return the rows whose codes are chosen."""
        tables, codes = dict(self.tables), dict(self.codes)
        for name, of_table in self.codes.items():
            mask = chosen(of_table)
            if not mask.all():
                tables[name] = tables[name].filter(pa.array(mask))
                codes[name] = of_table[mask]
        return _KeyedRows(tables, codes)

    def of_key(self, key: int) -> _KeyedRows:
        return self.where(lambda codes: codes == key)


def run_keys(
    connection: Connection,
    per: PerKey,
    tables: Mapping[str, pa.Table],
    location: Callable[[int], str] | None = None,
) -> Iterator[SqlResult]:
    """Yield the samples of all keys that have rows in the statement's source.

    `tables` have all rows of some keys by source, in the order of their origins, keys not null; the
    database of `connection` does not have them. With `location`, which returns that of an origin,
    keys with a bad row are rejected.
    """
    tables = visible_rows(tables, per.source)
    rows = _KeyedRows(tables, _key_codes(tables, per))
    counts = np.bincount(rows.codes[per.source])
    for first, end in key_batches(counts, CHUNK_ROWS):
        batch = rows.where(lambda codes, low=first, high=end: (codes >= low) & (codes < high))
        with name_errors("data.samples.per.sql"):
            result = _run_batch(connection, per, batch)
        if location is not None and result.bad_rows.num_rows:
            result = _reject_keys(
                result, batch.tables[per.source], batch.codes[per.source], location
            )
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
        f"another row of the key is bad: {texts[i]}"
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


def _run_batch(connection: Connection, per: PerKey, batch: _KeyedRows) -> SqlResult:
    """Run the statement over the rows of some keys; rows that raise become bad rows."""
    source_rows, codes = batch.tables[per.source], batch.codes[per.source]
    if len(np.unique(codes)) == 1:
        return run_key(connection, per.statement, per.source, batch.tables)

    def run_alone(row: pa.Table) -> pa.Table:
        key = int(codes[np.searchsorted(origins, row[ORIGIN][0].as_py())])
        return run(connection, per.statement, {**batch.of_key(key).tables, per.source: row})

    origins = source_rows[ORIGIN].to_numpy()
    try:
        return _in_order(connection, per, _run(connection, per, batch.tables), batch)
    except ROW_ERRORS:
        attempt = partial(_attempt, connection, per, batch.tables)
        rows, bad = remove_marked(per.statement, attempt, run_alone, source_rows)
    kept = np.isin(origins, rows[ORIGIN].to_numpy())
    rest = _KeyedRows({**batch.tables, per.source: rows}, {**batch.codes, per.source: codes[kept]})
    return _concatenate([SqlResult(None, bad), *_bisect_keys(connection, per, rest)])


def _run(connection: Connection, per: PerKey, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Run the statement over the rows of several keys, without handling of errors."""
    renamed = {_ALL + name: table for name, table in tables.items()}
    return run(connection, per.batched(list(tables)), renamed)


def _attempt(
    connection: Connection, per: PerKey, tables: Mapping[str, pa.Table], text: str, rows: pa.Table
) -> pa.Table:
    """Run another statement over some rows of the source."""
    return _run(connection, replace(per, statement=text), {**tables, per.source: rows})


def _bisect_keys(connection: Connection, per: PerKey, batch: _KeyedRows) -> list[SqlResult]:
    """Bisect keys until those that raise are isolated, with at most `MAX_ATTEMPTS` runs."""
    codes = batch.codes[per.source]
    keys = np.unique(codes)

    def run_range(start: int, end: int) -> SqlResult:
        first, last = keys[start], keys[end - 1]
        some = batch.where(lambda codes: (codes >= first) & (codes <= last))
        if end - start == 1:
            return run_key(connection, per.statement, per.source, some.tables)
        return _in_order(connection, per, _run(connection, per, some.tables), some)

    try:  # no lateral plan may exist: then each key is run alone
        return [
            result for _, result in isolate_bad(len(keys), run_range, ROW_ERRORS, MAX_ATTEMPTS)[0]
        ]
    except TooManyRunsError as error:
        chosen = (codes >= keys[error.start]) & (codes <= keys[error.end - 1])
        rows = batch.tables[per.source].filter(pa.array(chosen))
        attempt = partial(_attempt, connection, per, batch.tables)
        raise bad_rows_error(per.statement, attempt, rows, error.cause) from error


def _in_order(
    connection: Connection, per: PerKey, samples: pa.Table, batch: _KeyedRows
) -> SqlResult:
    """Return samples in the order of their rows; run keys alone if a row has several samples."""
    if len(pc.unique(samples[ORIGIN])) == samples.num_rows:
        return SqlResult(samples)
    return _concatenate(
        [
            run_key(connection, per.statement, per.source, batch.of_key(key).tables)
            for key in np.unique(batch.codes[per.source]).tolist()
        ]
    )


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
    origins = table[ORIGIN].to_numpy()
    if (np.diff(origins) >= 0).all():
        return table
    return table.take(pa.array(np.argsort(origins, kind="stable")))


def run_key(
    connection: Connection,
    statement: str,
    source: str,
    tables: Mapping[str, pa.Table],
) -> SqlResult:
    """Run SQL over all rows of one key; rows of `source` that raise become bad rows.

    A row is bad if the statement raises on it alone; the statement is then run again over the
    others. If no row raises alone, all are bad.

    `tables` has all rows of the key by source; samples are made from the rows of `source`.
    """

    def attempt(text: str, some_rows: pa.Table) -> pa.Table:
        return run(connection, text, {**tables, source: some_rows})

    try:
        return SqlResult(attempt(statement, tables[source]))
    except ROW_ERRORS:
        run_alone = partial(attempt, statement)
        rows, bad = remove_marked(statement, attempt, run_alone, tables[source])
    while rows.num_rows:
        try:
            return SqlResult(attempt(statement, rows), bad)
        except ROW_ERRORS as error:
            more = bisect_rows(statement, attempt, rows).bad_rows
            more = more if more.num_rows else bad_rows(rows, reject_reason(error))
        bad = pa.concat_tables([bad, more])
        rows = rows.filter(pc.invert(pc.is_in(rows[ORIGIN], value_set=more["origin"])))
    return SqlResult(None, bad)
