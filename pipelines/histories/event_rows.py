"""Raw rows to events of histories, by SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import duckdb
import pyarrow as pa

from presage.pipelines.samples.lookups import with_one_zero
from presage.pipelines.samples.sql import Connection, map_rows, name_errors, run
from presage.pipelines.samples.sql_rejects import SqlResult
from presage.pipelines.samples.statements import original_error, quoted_name, select_origin
from presage.pipelines.samples.tuples import (
    Check,
    Tuples,
    is_missing,
    limit_checks,
    not_finite,
    outside_calendar,
    usable_samples,
)
from presage.pipelines.sources.raw_rows import CHUNK_ROWS, ORIGIN
from presage.schemas.arrays import is_text, one_chunk
from presage.schemas.config.histories import HistoryConfig
from presage.schemas.config.job import DataConfig
from presage.schemas.errors import SchemaError

KEY, AVAILABLE, ORDER = "_key", "_available", "_order"
"""Columns of events beside those of the job; the last two are int64, the first of them in
microseconds."""


class EventSql:
    """The SQL of a job's histories, over chunks of raw rows."""

    def __init__(self, connection: Connection, data: DataConfig, key_type: pa.DataType) -> None:
        """Parse the statements.

        Args:
            connection: runs them.
            data: with the histories.
            key_type: of the samples' session keys, to which those of events are cast.

        Raises:
            SchemaError: a statement is not valid.
        """
        self._connection, self._data = connection, data
        self._statements: dict[str, dict[str, str]] = {}  # by source and history
        for name, history in data.histories.items():
            source = history.source or data.sample_source
            statement = select_origin(_statement(history, source, data, key_type), _key_of(name))
            self._statements.setdefault(source, {})[name] = statement

    def check(self, source: str, empty: pa.Table, text_tables: Mapping[str, bool]) -> None:
        """Run the statements on an empty table.

        `text_tables` says of each table whose ids have a type whether they are texts.

        Raises:
            SchemaError: one does not fit the columns of the source, or a column its use.
        """
        for name, statement in self._statements.get(source, {}).items():
            try:
                with name_errors(_key_of(name)):
                    events = run(self._connection, statement, {source: empty})
            except duckdb.Error as error:
                raise original_error(_key_of(name), statement, {source: empty}, error) from error
            _check_types(name, self._data.histories[name], events.schema, text_tables)

    def results(self, source: str, rows: pa.Table) -> Iterator[tuple[str, SqlResult]]:
        """Yield (history, its events and bad rows) of raw rows, chunk by chunk."""
        for name, statement in self._statements.get(source, {}).items():
            checks = [*_checks(name, self._data)]
            for start in range(0, rows.num_rows, CHUNK_ROWS):
                with name_errors(_key_of(name)):
                    chunk = rows.slice(start, CHUNK_ROWS)
                    result = map_rows(self._connection, statement, source, chunk)
                yield name, _usable(result, checks)


def _key_of(name: str) -> str:
    return f"data.histories.{name}"


def _statement(history: HistoryConfig, source: str, data: DataConfig, key_type: pa.DataType) -> str:
    kind = duckdb.from_arrow(pa.schema([("key", key_type)]).empty_table()).types[0]
    selected = {
        KEY: f"CAST({quoted_name(data.session.key)} AS {kind})",
        AVAILABLE: history.available or quoted_name(data.session.time),
        **({} if history.order is None else {ORDER: quoted_name(history.order)}),
        **history.columns,
    }
    columns = ", ".join(f"({text}) AS {quoted_name(name)}" for name, text in selected.items())
    where = "" if history.where is None else f" WHERE {history.where}"
    return f"SELECT {columns} FROM {quoted_name(source)}{where}"


def _check_types(
    name: str, history: HistoryConfig, events: pa.Schema, text_tables: Mapping[str, bool]
) -> None:
    """Raise SchemaError if a column does not have the type that its use needs."""
    key, kinds = _key_of(name), {field.name: field.type for field in events}
    if not pa.types.is_timestamp(kinds[AVAILABLE]):
        raise SchemaError(
            f"{key}.available must be a timestamp, got {kinds[AVAILABLE]}; cast it in SQL"
        )
    if not pa.types.is_integer(kinds.get(ORDER, pa.int64())):
        raise SchemaError(
            f"{key}.order must be a column of whole numbers, got {kinds[ORDER]}; name another"
        )
    for column in history.columns:
        kind = kinds[column]
        is_id = pa.types.is_integer(kind) or is_text(kind)
        if pa.types.is_nested(kind) or (column in history.tables and not is_id):
            wanted = "an id" if column in history.tables else "one number or text"
            raise SchemaError(
                f"{key}.columns.{column} must be {wanted}, got {kind}; cast it in SQL"
            )
        if is_text(kind) and column not in history.tables:
            raise SchemaError(
                f"{key}.columns.{column} is text without a table; name its table in {key}.tables, "
                "or number it in SQL"
            )
        table = history.tables.get(column, "")
        if text_tables.get(table, is_text(kind)) != is_text(kind):
            wanted = "text" if text_tables[table] else "a number"
            raise SchemaError(
                f"{key}.columns.{column} must be {wanted}, as the ids of table {table!r}, got "
                f"{kind}; cast it in SQL, or name another table"
            )


def _checks(name: str, data: DataConfig) -> Iterator[Check]:
    """Yield the checks of events, those of samples for what training reads."""
    history, subject = data.histories[name], f"history {name!r}"
    own = {KEY: "key", AVAILABLE: "available"} | ({ORDER: "order"} if history.order else {})
    for column in (*own, *history.columns):
        yield (column,), is_missing, f"{subject}: {own.get(column, column)} must not be null"
    reason = f"{subject}: available must be in the years 1 to 9999"
    yield (AVAILABLE,), outside_calendar, reason
    for column in history.columns:
        yield (column,), not_finite, f"{subject}: {column} must be finite in float32"
        table = data.tables.get(history.tables.get(column, ""))
        if table is not None and table.rows == "identity":
            yield from limit_checks(column, f"{subject}: {column}", 0, table.num_rows - 1)


def _usable(result: SqlResult, checks: Sequence[Check]) -> SqlResult:
    """Return the events that pass all checks, with times and order as int64; others as bad rows."""
    if result.samples is None:
        return result
    names = [name for name in result.samples.column_names if name != ORIGIN]
    usable, bad = usable_samples(Tuples(result.samples, {}, {}), names, checks)
    events = {name: one_chunk(usable.samples[name]) for name in (*names, ORIGIN)}
    events[KEY] = with_one_zero(events[KEY])
    events[AVAILABLE] = events[AVAILABLE].cast(pa.int64())
    events[ORDER] = events.get(ORDER, events[ORIGIN]).cast(pa.int64())
    return SqlResult(pa.table(events), pa.concat_tables([result.bad_rows, bad]))
