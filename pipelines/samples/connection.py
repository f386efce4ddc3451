"""DuckDB connections for the job's SQL.

No files, no network, limits, errors with their position.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipelines.sources.rows import ORIGIN
from schemas.config.limits import SqlLimitsConfig
from schemas.config.parse import position_in_value
from schemas.errors import SchemaError

_OF_THREAD = threading.local()
"""A connection takes 20 ms to open, and one thread uses it at a time."""


def parse(statement: str) -> Any:
    """Return the tree of a text: `error`, and `statements`, each with its `node`.

    Source: `json_serialize_sql` of DuckDB, which serializes SELECT statements alone.
    """
    return json.loads(_ask("json_serialize_sql", statement))


def unparse(tree: Any) -> str:
    """Return the statement of a tree."""
    return _ask("json_deserialize_sql", json.dumps(tree))


def _ask(function: str, text: str) -> str:
    if not hasattr(_OF_THREAD, "connection"):
        _OF_THREAD.connection = duckdb.connect()
    row = _OF_THREAD.connection.execute(f"SELECT {function}(?)", [text]).fetchone()
    assert row is not None, f"{function} gives one row"
    return str(row[0])


_OF_ORIGIN = {
    f'column "{ORIGIN}" not found|not have a column named "{ORIGIN}"': (
        f"must carry {ORIGIN}, the place of each row, to its outermost SELECT, got a subquery or "
        f"WITH that leaves it out; add {ORIGIN} to the select list there"
    ),
    f'Ambiguous reference to column name "{ORIGIN}"': (
        f"must read {ORIGIN}, the place of each row, from one table, got two that have it; read "
        f"the other one as (SELECT * EXCLUDE ({ORIGIN}) FROM ...)"
    ),
}
"""What DuckDB says of the column that is added to the statement, and what is to be done."""
_CANDIDATES = re.compile(r"^(?:Did you mean|Candidate \w+:) (.+?)\??$", re.MULTILINE)
_NO_FIELD = re.compile(r'^Binder Error: Could not find key "(.*)" in struct$')
_MOST_CANDIDATES = 3


class SqlError(SchemaError):
    """Say that a statement of the job is wrong.

    Attributes:
        key: of the job file.
        position: bytes before the place in the statement, None when it is not known.
    """

    def __init__(self, message: str, key: str, position: int | None) -> None:
        """Keep where the error is."""
        super().__init__(message)
        self.key, self.position = key, position

    def in_file(self, job: Path) -> SchemaError:
        """Return the error with the line and the column in the job file."""
        place = None
        if self.position is not None:
            place = position_in_value(job.read_text(encoding="utf-8"), self.key, self.position)
        return SchemaError(self.message, file=str(job), place=place)


def located(key: str, text: str, tables: Mapping[str, pa.Table], error: duckdb.Error) -> SqlError:
    """Return an error of a statement that was rewritten as one of the statement itself.

    Args:
        key: of the job file.
        text: the statement as the user wrote it.
        tables: tables that it may read; no rows are needed.
        error: what the rewritten one raised.
    """
    message, position = str(error), None
    with duckdb.connect() as database:
        for name, table in tables.items():
            database.register(name, table.slice(0, 0))
        for setting in ("enable_external_access = false", "errors_as_json = true"):
            database.execute(f"SET {setting}")
        try:
            database.execute(text)
        except duckdb.Error as own:
            kind, _, details = str(own).partition(": ")
            try:
                fields = json.loads(details)
                message = f"{kind}: {fields['exception_message']}"
                position = int(fields["position"]) if "position" in fields else None
            except (ValueError, KeyError):  # some errors are no JSON
                message = str(own)
    first = message.splitlines()[0]
    for sign, remedy in _OF_ORIGIN.items():
        if re.search(sign, first):
            return SqlError(f"{key} {remedy}", key, 0 if position is None else position)
    missing = _NO_FIELD.match(first)  # of which DuckDB does not say where it stands
    if missing is not None and position is None:
        places = [*re.finditer(rf'\.\s*"?({re.escape(missing[1])})\b', text, re.IGNORECASE)]
        position = len(text[: places[0].start(1)].encode()) if len(places) == 1 else None
    return SqlError(f"{key} must run on its sources, got {first}; {_hint(message)}", key, position)


def _hint(message: str) -> str:
    """Return the names that DuckDB takes for the one that it misses."""
    found = _CANDIDATES.search(message)
    if found is None:
        return "correct it"
    return f"did you mean {' or '.join(found[1].split(', ')[:_MOST_CANDIDATES])}?"


_BATCH_ROWS = 1 << 16
_KEEP_GUARDS = "disabled_optimizers = 'unused_columns'"
"""With it DuckDB 2.0 moves a cast of a struct's field into the scan, where it also raises on rows
that a CASE around the cast leaves out. Off, 60 unused columns of texts cost 0.5 us a row."""


def quoted_name(name: str) -> str:
    """Return a name of a table or column as SQL has it, whatever its characters.

    Example:
        >>> quoted_name('a"b')
        '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def _without_offsets(table: pa.Table) -> pa.Table:
    """Return the table with slices of structs copied: DuckDB 2.0 refuses those within others."""
    for index, column in enumerate(table.columns):
        if _holds_struct(column.type) and any(chunk.offset for chunk in column.chunks):
            copied = column.take(pa.array(np.arange(len(column))))
            table = table.set_column(index, table.schema.field(index), copied)
    return table


def _holds_struct(kind: pa.DataType) -> bool:
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return pa.types.is_struct(kind) or any(_holds_struct(each) for each in inner)


class LimitError(Exception):
    """Say that a statement took more time or memory than a job's statement may take."""


class BadRowsError(Exception):
    """Say that a statement raises on rows that cannot be told from the good ones."""


class Connection:
    """A database in memory that sees only registered tables.

    Its statements run in one thread; each ends within the limits or raises `LimitError`.
    """

    def __init__(self, limits: SqlLimitsConfig) -> None:
        """Open the database."""
        self.limits = limits
        self._tables: dict[str, pa.Table] = {}
        self._has_structs = False
        self._database = self._opened()

    def _opened(self) -> duckdb.DuckDBPyConnection:
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
        """Let statements read a table by a name."""
        self._tables[name] = table = _without_offsets(table)
        if not self._has_structs and any(map(_holds_struct, table.schema.types)):
            self._has_structs = True
            self._database = self._opened()
        else:
            self._database.register(name, table)

    def unregister(self, name: str) -> None:
        """Take a table away."""
        del self._tables[name]
        self._database.unregister(name)

    def query(self, statement: str) -> pa.Table:
        """Return what a statement gives.

        Raises:
            duckdb.Error: whatever DuckDB says.
            LimitError: a limit is reached.
        """
        seconds = self.limits.time.total_seconds()
        watchdog = threading.Timer(seconds, self._database.interrupt)
        watchdog.daemon = True
        watchdog.start()
        try:
            return self._read(statement)
        except duckdb.InterruptException as error:
            raise LimitError(f"must end within {seconds:g} s") from error
        except (duckdb.OutOfMemoryException, MemoryError) as error:
            size = f"{self.limits.memory / (1 << 20):g} MiB"
            raise LimitError(f"must do with {size} of memory") from error
        finally:
            watchdog.cancel()

    def _read(self, statement: str) -> pa.Table:
        reader = self._database.sql(statement).to_arrow_reader(_BATCH_ROWS)
        batches, num_bytes = list[pa.RecordBatch](), 0
        try:
            for batch in reader:
                batches.append(batch)
                num_bytes += batch.nbytes
                if num_bytes > self.limits.memory:
                    raise MemoryError
        except OSError as error:  # what DuckDB raises while rows are read comes as text
            raise _typed(str(error)) from error
        finally:
            reader.close()
        return pa.Table.from_batches(batches, reader.schema)


def _typed(text: str) -> duckdb.Error:
    """Return an error by the words that DuckDB begins its text with."""
    if text.startswith("INTERRUPT"):
        return duckdb.InterruptException(text)
    if text.startswith("Out of Memory"):
        return duckdb.OutOfMemoryException(text)
    return duckdb.Error(text)


def connect(limits: SqlLimitsConfig | None = None) -> Connection:
    """Return a connection that sees only registered tables."""
    return Connection(limits or SqlLimitsConfig())


@contextmanager
def named(key: str) -> Iterator[None]:
    """Say which statement of the job it was that reached a limit, or cannot be used.

    Args:
        key: of the job file.

    Raises:
        SchemaError: the body raised `LimitError` or `BadRowsError`.
    """
    try:
        yield
    except BadRowsError as error:
        raise SchemaError(f"{key} {error}") from error
    except LimitError as error:
        raise SchemaError(
            f"{key} {error} for one chunk of rows; look for a join without a condition, or raise "
            "data.samples.limits"
        ) from error
