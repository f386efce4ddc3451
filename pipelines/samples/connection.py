"""A DuckDB connection for the job's SQL: no files, no network, limits of time and memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb
import numpy as np
import pyarrow as pa

from schemas.errors import SchemaError
from schemas.job_limits import SqlLimitsConfig

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
