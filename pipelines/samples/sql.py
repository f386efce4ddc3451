"""The job's SQL in DuckDB: syntax, error positions, connections with limits and no I/O, results."""

from __future__ import annotations

import atexit
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipelines.sources.raw_rows import ORIGIN
from schemas.arrays import one_chunk
from schemas.config.job import DataConfig
from schemas.config.parse import position_in_value
from schemas.config.sources import SqlLimitsConfig
from schemas.errors import SchemaError
from schemas.storage.location import Location


class ThreadConnections(threading.local):
    """Databases of a thread, which end with it: to open one takes 20 ms."""

    @cached_property
    def syntax(self) -> duckdb.DuckDBPyConnection:
        """Database for the syntax of statements."""
        return duckdb.connect()

    @cached_property
    def transforms(self) -> Connection:
        """Database of transforms."""
        return Connection()


thread_connections = ThreadConnections()
atexit.register(lambda: vars(thread_connections).clear())  # those of the main thread


def parse(statement: str) -> Any:
    """Return the syntax tree of a text: `error`, and `statements`, each with its `node`.

    Source: `json_serialize_sql` of DuckDB, which serializes SELECT statements only.
    """
    return json.loads(_call("json_serialize_sql", statement))


def unparse(tree: Any) -> str:
    """Return the statement of a syntax tree."""
    return _call("json_deserialize_sql", json.dumps(tree))


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a syntax tree, outer ones first."""
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from nodes(part)


@cache
def function_names(condition: str) -> frozenset[str]:
    """Return the names of DuckDB's functions with a condition on `duckdb_functions()`."""
    with duckdb.connect() as database:
        query = f"SELECT DISTINCT function_name FROM duckdb_functions() WHERE {condition}"
        return frozenset(name for (name,) in database.execute(query).fetchall())


def _call(function: str, text: str) -> str:
    row = thread_connections.syntax.execute(f"SELECT {function}(?)", [text]).fetchone()
    assert row is not None, f"{function} gives one row"
    return str(row[0])


# Errors of statements, with their position in the job file.

_ORIGIN_ERRORS = {
    f'column "{ORIGIN}" not found|not have a column named "{ORIGIN}"': (
        f"loses {ORIGIN}, the origin of each row, in a subquery or WITH; add {ORIGIN} to the "
        "select list there"
    ),
    f'Ambiguous reference to column name "{ORIGIN}"': (
        f"reads {ORIGIN}, the origin of each row, from two tables; read one of them as (SELECT * "
        f"EXCLUDE ({ORIGIN}) FROM ...)"
    ),
}
"""DuckDB's errors about the column that is added to the statement, with their remedies."""
_CANDIDATES = re.compile(r"^(?:Did you mean|Candidate \w+:) (.+?)\??$", re.MULTILINE)
_MISSING_FIELD = re.compile(r'^Binder Error: Could not find key "(.*)" in struct$')
_MAX_CANDIDATES = 3
PREVIEW_TIME = timedelta(seconds=10)
"""Time limit of a statement in `preview`, unless that of the job is shorter."""


class SqlError(SchemaError):
    """Raised when a statement of the job is wrong.

    Attributes:
        key: of the job file.
        position: byte offset of the error in the statement, None if unknown.
    """

    def __init__(self, message: str, key: str, position: int | None) -> None:
        super().__init__(message)
        self.key, self.position = key, position

    def in_file(self, job: Path | Location) -> SchemaError:
        """Return the error with the line and the column in the job file."""
        location = None
        if self.position is not None:
            location = position_in_value(job.read_bytes().decode(), self.key, self.position)
        return SchemaError(self.message, file=str(job), location=location)


def original_error(
    key: str, text: str, tables: Mapping[str, pa.Table], error: duckdb.Error
) -> SqlError:
    """Return the error of the user's statement for an error of a rewritten one.

    `text` is the statement as the user wrote it, `error` of a rewritten one; rows of `tables` are
    not needed.
    """
    message, position = str(error), None
    with duckdb.connect() as database:
        for name, table in tables.items():
            database.register(name, table.slice(0, 0))
        for setting in ("enable_external_access = false", "errors_as_json = true"):
            database.execute(f"SET {setting}")
        try:
            database.execute(text)
        except duckdb.Error as user_error:
            kind, _, details = str(user_error).partition(": ")
            try:
                fields = json.loads(details)
                message = f"{kind}: {fields['exception_message']}"
                position = int(fields["position"]) if "position" in fields else None
            except (ValueError, KeyError):  # some errors are not JSON
                message = str(user_error)
    first = message.splitlines()[0]
    for pattern, remedy in _ORIGIN_ERRORS.items():
        if re.search(pattern, first):
            return SqlError(f"{key} {remedy}", key, 0 if position is None else position)
    missing = _MISSING_FIELD.match(first)  # DuckDB gives no position for it
    if missing is not None and position is None:
        uses = [*re.finditer(rf'\.\s*"?({re.escape(missing[1])})\b', text, re.IGNORECASE)]
        position = len(text[: uses[0].start(1)].encode()) if len(uses) == 1 else None
    return SqlError(f"{key} cannot run on its sources: {first}; {_hint(message)}", key, position)


def _hint(message: str) -> str:
    """Return DuckDB's candidates for an unknown name."""
    candidates = _CANDIDATES.search(message)
    if candidates is None:
        return "correct it"
    return f"did you mean {' or '.join(candidates[1].split(', ')[:_MAX_CANDIDATES])}?"


# Connections.

_BATCH_ROWS = 1 << 16
_KEEP_GUARDS = "disabled_optimizers = 'unused_columns'"
"""This optimizer of DuckDB 2.0 moves a cast of a struct's field into the scan, where it also raises
on rows that a CASE around it excludes. Without the optimizer 60 unused text columns cost 0.5 us a
row."""


def quoted_name(name: str) -> str:
    """Return a name of a table or column quoted for SQL.

    Example:
        >>> quoted_name('a"b')
        '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


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


class BadRowsError(Exception):
    """Raised when a statement fails on rows that cannot be isolated."""


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


# Statements of the job, and their results.

LIST_INDEX = "_list_index"
"""Column added to every sample: its index among the samples of one raw row."""


def table_names(statement: str) -> frozenset[str]:
    """Return the names of the tables in a statement, without binding it.

    Example:
        >>> sorted(table_names("SELECT * FROM a WHERE x IN (SELECT y FROM b JOIN c USING (y))"))
        ['a', 'b', 'c']
    """
    tables = (n for n in nodes(parse(statement)) if n.get("type") == "BASE_TABLE")
    return frozenset(node["table_name"] for node in tables)


def select_origin(statement: str, key: str) -> str:
    """Return the statement with `_origin` in its select list.

    Raises:
        SchemaError: it is not a single SELECT, it aggregates, or it selects the origin.
    """
    tree = parse(statement)
    if tree["error"]:
        message = str(tree["error_message"]).splitlines()[0]
        position = int(tree["position"]) if "position" in tree else None
        raise SqlError(f"{key} is not valid SQL: {message}; correct it", key, position)
    nodes = [s["node"] for s in tree["statements"]]
    if len(nodes) != 1 or nodes[0]["type"] != "SELECT_NODE":
        raise SchemaError(f"{key} must be one SELECT; wrap a UNION in SELECT * FROM (...)")
    node = nodes[0]
    if node["group_expressions"] or node["aggregate_handling"] != "STANDARD_HANDLING":
        raise SchemaError(f"{key} must not aggregate at its top level; move it into a subquery")
    for expression in node["select_list"]:
        name = expression["alias"] or expression.get("column_names", [""])[-1]
        if name.lower() == ORIGIN:
            raise SqlError(
                f"{key} must not select {ORIGIN}, which is added to every sample; leave it out",
                key,
                expression["query_location"],
            )
    if not any(e["class"] == "STAR" for e in node["select_list"]):
        node["select_list"].append(
            {
                "class": "COLUMN_REF",
                "type": "COLUMN_REF",
                "alias": "",
                "query_location": 0,
                "column_names": [ORIGIN],
            }
        )
    return unparse(tree)


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


def tables_in_sql(data: DataConfig) -> frozenset[str]:
    """Return the names of the tables in the job's SQL."""
    texts = [data.samples.map, data.samples.per.sql if data.samples.per else None]
    return frozenset(name for text in texts if text for name in table_names(text))
