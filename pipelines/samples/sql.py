"""Run the job's SQL over rows in DuckDB: connections with limits and no I/O, types of results.

`samples.map` is run here, row by row; `per_key.py` runs `samples.per`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.samples.sql_rejects import (
    ROW_ERRORS,
    BadRowsError,
    SqlResult,
    bisect_rows,
    remove_marked,
)
from presage.pipelines.samples.statements import quoted_name
from presage.pipelines.sources.raw_rows import CHUNK_ROWS, ORIGIN, POSITION_MASK
from presage.schemas.arrays import comparable_tuple, hash_keys, one_chunk
from presage.schemas.config.sources import SqlLimitsConfig
from presage.schemas.errors import SchemaError

PREVIEW_TIME = timedelta(seconds=10)
"""Time limit of a statement in `preview`, unless that of the job is shorter."""
LIST_INDEX = "_list_index"
"""Column added to every sample: its index among the samples of one raw row."""


# Connections.

_BATCH_ROWS = 1 << 16
_KEEP_GUARDS = "disabled_optimizers = 'unused_columns'"
"""This optimizer of DuckDB 2.0 moves a cast of a struct's field into the scan, where it also raises
on rows that a CASE around it excludes. Without the optimizer 60 unused text columns cost 0.5 us a
row."""


def _without_offsets(table: pa.Table) -> pa.Table:
    """Return the table with sliced struct columns copied: DuckDB 2.0 refuses nested ones."""
    for index, column in enumerate(table.columns):
        if _holds_struct(column.type) and any(chunk.offset for chunk in column.chunks):
            copied = column.take(pa.array(np.arange(len(column))))
            table = table.set_column(index, table.schema.field(index), copied)
    return table


def _holds_struct(kind: pa.DataType) -> bool:
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return pa.types.is_struct(kind) or any(map(_holds_struct, inner))


class LimitError(Exception):
    """Raised when a statement exceeds the job's limit of time or memory."""


class Connection:
    """An in-memory database of registered tables.

    Statements run in one thread; one that exceeds the limits raises `LimitError`.
    """

    def __init__(self, limits: SqlLimitsConfig | None = None) -> None:
        """Open the database; `limits` defaults to those of a job that declares none."""
        self.limits = limits or SqlLimitsConfig()
        self._tables: dict[str, pa.Table] = {}
        self._has_structs = False
        self._database = self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        database = duckdb.connect()
        for setting in (
            "threads = 1",
            "preserve_insertion_order = true",
            "arrow_large_buffer_size = true",
            "temp_directory = ''",
            "enable_external_access = false",
            "TimeZone = 'UTC'",
            "python_enable_replacements = false",
            f"memory_limit = '{self.limits.memory}B'",
            *([_KEEP_GUARDS] if self._has_structs else []),
            "lock_configuration = true",
        ):
            database.execute(f"SET {setting}")
        for name, table in self._tables.items():
            database.register(name, table)
        return database

    def register(self, name: str, table: pa.Table) -> None:
        """Make a table readable by name."""
        self._tables[name] = table = _without_offsets(table)
        if not self._has_structs and any(map(_holds_struct, table.schema.types)):
            self._has_structs = True
            self._database = self._open()
        else:
            self._database.register(name, table)

    def unregister(self, name: str) -> None:
        """Remove a table."""
        del self._tables[name]
        self._database.unregister(name)

    def query(self, statement: str) -> pa.Table:
        """Return the result of a statement.

        Raises:
            duckdb.Error: the statement fails.
            LimitError: it exceeds a limit.
        """
        seconds = self.limits.time.total_seconds()
        watchdog = threading.Timer(seconds, self._database.interrupt)
        watchdog.daemon = True
        watchdog.start()
        try:
            return self._read(statement)
        except duckdb.InterruptException as error:
            raise LimitError(f"did not end within {seconds:g} s") from error
        except (duckdb.OutOfMemoryException, MemoryError) as error:
            size = f"{self.limits.memory / (1 << 20):g} MiB"
            raise LimitError(f"needs more than {size} of memory") from error
        finally:
            watchdog.cancel()
            watchdog.join()  # a thread that lives at the end of the process can abort it

    def _read(self, statement: str) -> pa.Table:
        reader = self._database.sql(statement).to_arrow_reader(_BATCH_ROWS)
        batches, num_bytes = list[pa.RecordBatch](), 0
        try:
            for batch in reader:
                batches.append(batch)
                num_bytes += batch.nbytes
                if num_bytes > self.limits.memory:
                    raise MemoryError
        except OSError as error:  # Arrow's reader keeps only the text of an error of DuckDB
            raise _duckdb_error(str(error)) from error
        finally:
            reader.close()
        return pa.Table.from_batches(batches, reader.schema)


def _duckdb_error(text: str) -> duckdb.Error:
    if text.startswith("INTERRUPT"):
        return duckdb.InterruptException(text)
    if text.startswith("Out of Memory"):
        return duckdb.OutOfMemoryException(text)
    return duckdb.Error(text)


@contextmanager
def name_errors(key: str) -> Iterator[None]:
    """Raise `LimitError` and `BadRowsError` of the body as SchemaError that names a job key."""
    try:
        yield
    except BadRowsError as error:
        raise SchemaError(f"{key} {error}") from error
    except LimitError as error:
        raise SchemaError(
            f"{key} {error} for one chunk of rows; look for a join without a condition or for "
            "large values of functions such as repeat and range, or raise data.samples.limits; "
            f"`preview` waits {PREVIEW_TIME.seconds} s at most"
        ) from error


# Results.


def run(connection: Connection, statement: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Run a statement over named tables; its result has the types of `to_stored_types`.

    Raises:
        duckdb.Error: the statement fails.
        LimitError: it exceeds a limit.
    """
    for name, table in tables.items():
        connection.register(name, table)
    try:
        return to_stored_types(connection.query(statement))
    finally:
        for name in tables:
            connection.unregister(name)


def to_stored_types(table: pa.Table) -> pa.Table:
    """Return the table with the types of format 1: `large_list`, `timestamp[us]`, plain strings.

    Raises:
        SchemaError: a column has a type that format 1 does not support.
        pa.ArrowInvalid: a value does not fit the type, such as a time finer than a microsecond.
    """
    columns: dict[str, pa.Array] = {}
    for name, chunks in zip(table.column_names, table.itercolumns(), strict=True):
        if name not in columns:
            column = one_chunk(chunks)
            try:
                columns[name] = column.cast(_stored_type(name, column.type))
            except pa.ArrowInvalid as error:
                shown = name if name.isidentifier() else quoted_name(name)
                is_time = pa.types.is_timestamp(column.type)
                advice = f"; CAST({shown} AS TIMESTAMP) truncates it" if is_time else ""
                raise pa.ArrowInvalid(f"{error} in column {shown}{advice}") from error
    return pa.table(columns)


def _stored_type(name: str, kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        value = _stored_type(name, kind.value_type)
        if t.is_integer(value):
            return pa.large_list(pa.int64())
        if t.is_floating(value):
            return pa.large_list(pa.float32())
        if t.is_string(value):
            return pa.large_list(value)
        raise SchemaError(
            f"lists must hold numbers or texts, got {kind} for {name!r}; cast them in the job's SQL"
        )
    if t.is_timestamp(kind) or t.is_date(kind):
        return pa.timestamp("us")
    if t.is_string(kind) or t.is_large_string(kind):
        return pa.string()
    if t.is_integer(kind) or t.is_float32(kind) or t.is_float64(kind) or t.is_boolean(kind):
        return kind
    raise SchemaError(
        f"column must be a number, text, time or list, got {kind} for {name!r}; "
        "cast it in the job's SQL"
    )


def with_list_index(samples: pa.Table) -> pa.Table:
    """Add each sample's index among the samples of its raw row, in the order of the result."""
    origins = samples[ORIGIN].to_numpy()
    order = np.argsort(origins, kind="stable")
    ordered = origins[order]
    is_first = np.ones(len(origins), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    ranks = np.arange(len(origins)) - np.repeat(starts, np.diff(np.append(starts, len(origins))))
    index = np.empty(len(origins), np.int32)
    index[order] = ranks
    return samples.append_column(LIST_INDEX, pa.array(index))


# `samples.map`, row by row.

_CHECKED_SHARE = 128
"""One of this many rows of a chunk is mapped again, in the middle of the chunk."""
_UNCHECKED_ROWS = 1 << 13
"""Rows of small chunks after which the next chunk is checked: a statement takes some 2 ms."""


class MapSql:
    """`samples.map` of a job over chunks of rows.

    Some rows are mapped once more, alone, as a sample must not depend on the rows of its chunk: its
    samples must be the same, in the same order.
    """

    def __init__(self, connection: Connection, statement: str | None, check_all: bool) -> None:
        """`statement` is from `select_origin`; `check_all` maps all rows twice."""
        self._connection = connection
        self._statement = statement
        self._check_all = check_all
        self._unchecked = _UNCHECKED_ROWS

    def results(self, source: str, result: SqlResult) -> Iterator[SqlResult]:
        """Yield the samples of rows, which the statement reads as `source`, chunk by chunk.

        Without a statement the rows are the samples.

        Raises:
            SchemaError: samples of a row depend on other rows.
        """
        if self._statement is None or result.samples is None:
            yield result
            return
        if result.bad_rows.num_rows:
            yield SqlResult(None, result.bad_rows)
        for start in range(0, result.samples.num_rows, CHUNK_ROWS):
            chunk = result.samples.slice(start, CHUNK_ROWS)
            mapped = self._map(source, chunk)
            for cut in self._cuts(chunk.num_rows):
                origins = one_chunk(chunk[ORIGIN][cut])
                alone = self._map(source, _of_origins(chunk, origins))
                _check_equal(
                    _of_origins(mapped.samples, origins), _of_origins(alone.samples, origins)
                )
            yield mapped

    def _map(self, source: str, rows: pa.Table) -> SqlResult:
        assert self._statement is not None, "called with a statement only"
        with name_errors("data.samples.map"):
            return map_rows(self._connection, self._statement, source, rows)

    def _cuts(self, num_rows: int) -> list[slice]:
        """Return the ranges of a chunk's rows to map once more."""
        if self._check_all:
            return [slice(0, num_rows // 3), slice(num_rows // 3, num_rows)]
        self._unchecked += num_rows
        if self._unchecked < _UNCHECKED_ROWS or num_rows < 2:
            return []
        self._unchecked = 0
        start = num_rows // 2 | 1
        return [slice(start, start + -(-num_rows // _CHECKED_SHARE))]


def _of_origins(rows: pa.Table | None, origins: pa.Array) -> pa.Table:
    """Return the rows that have one of some origins, by origin and in their order."""
    if rows is None:
        return pa.table({ORIGIN: origins.slice(0, 0)})
    chosen = rows.filter(pc.is_in(rows[ORIGIN], value_set=origins))
    return chosen.take(pa.array(np.argsort(chosen[ORIGIN].to_numpy(), kind="stable")))


def _check_equal(expected: pa.Table, samples: pa.Table) -> None:
    """Raise SchemaError if samples of rows alone differ from those among other rows."""
    difference = ""
    if expected.num_rows != samples.num_rows:
        difference = (
            f"{expected.num_rows} samples of some rows and {samples.num_rows} of them alone"
        )
    elif expected.num_rows:
        names = expected.column_names
        left, right = (hash_keys(comparable_tuple(t, names)) for t in (expected, samples))
        different = (left != right).nonzero()[0]
        if len(different):
            row = expected[ORIGIN][int(different[0])].as_py() & POSITION_MASK
            difference = f"other samples of raw row {row} alone than among other rows"
    if difference:
        raise SchemaError(
            f"data.samples.map is not row-local: {difference}; remove window functions, "
            "aggregates and random values, or use samples.per"
        )


def map_rows(connection: Connection, statement: str, source: str, rows: pa.Table) -> SqlResult:
    """Run row-local SQL over raw rows; rows that raise become bad rows.

    The statement is from `select_origin` and reads the rows as `source`.

    Raises:
        BadRowsError: the rows that raise cannot be isolated.
    """

    def attempt(text: str, some_rows: pa.Table) -> pa.Table:
        return run(connection, text, {source: some_rows})

    try:
        return SqlResult(attempt(statement, rows))
    except ROW_ERRORS:
        unmarked, bad = remove_marked(statement, attempt, partial(attempt, statement), rows)
    rest = bisect_rows(statement, attempt, unmarked)
    return SqlResult(rest.samples, pa.concat_tables([bad, rest.bad_rows]))
