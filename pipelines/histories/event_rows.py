"""Raw rows to events of histories, by SQL."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.samples.lookups import with_one_zero
from presage.pipelines.samples.sql import Connection, map_rows, name_errors, run
from presage.pipelines.samples.sql_rejects import BAD_ROWS_SCHEMA, SqlResult, bad_rows
from presage.pipelines.samples.statements import original_error, quoted_name, select_origin
from presage.pipelines.sources.raw_rows import CHUNK_ROWS, ORIGIN
from presage.schemas.arrays import one_chunk
from presage.schemas.config.histories import HistoryConfig
from presage.schemas.config.job import DataConfig
from presage.schemas.errors import SchemaError

KEY, AVAILABLE, ORDER = "_key", "_available", "_order"
"""Columns of events beside those of the job; the last two are int64, the first of them in
microseconds."""


class EventSql:
    """The SQL of a job's histories, over chunks of raw rows."""

    def __init__(self, connection: Connection, data: DataConfig) -> None:
        """Parse the statements.

        Raises:
            SchemaError: one is not valid.
        """
        self._connection = connection
        self._statements: dict[str, dict[str, str]] = {}  # by source and history
        for name, history in data.histories.items():
            source = history.source or data.sample_source
            statement = select_origin(_statement(history, source, data), _key_of(name))
            self._statements.setdefault(source, {})[name] = statement

    def check(self, source: str, empty: pa.Table, key_type: pa.DataType) -> None:
        """Run the statements on an empty table.

        Raises:
            SchemaError: one does not fit the columns of the source.
        """
        for name, statement in self._statements.get(source, {}).items():
            try:
                with name_errors(_key_of(name)):
                    events = run(self._connection, statement, {source: empty})
            except duckdb.Error as error:
                raise original_error(_key_of(name), statement, {source: empty}, error) from error
            _typed(name, events, key_type)

    def results(
        self, source: str, rows: pa.Table, key_type: pa.DataType
    ) -> Iterator[tuple[str, SqlResult]]:
        """Yield (history, its events and bad rows) of raw rows, chunk by chunk.

        Raises:
            SchemaError: a column has a wrong type, or keys are not of the type of the samples'.
        """
        for name, statement in self._statements.get(source, {}).items():
            for start in range(0, rows.num_rows, CHUNK_ROWS):
                with name_errors(_key_of(name)):
                    chunk = rows.slice(start, CHUNK_ROWS)
                    result = map_rows(self._connection, statement, source, chunk)
                yield name, _checked(name, result, key_type)


def _key_of(name: str) -> str:
    return f"data.histories.{name}"


def _statement(history: HistoryConfig, source: str, data: DataConfig) -> str:
    selected = {
        KEY: quoted_name(data.session.key),
        AVAILABLE: history.available or quoted_name(data.session.time),
        **({} if history.order is None else {ORDER: quoted_name(history.order)}),
        **history.columns,
    }
    columns = ", ".join(f"({text}) AS {quoted_name(name)}" for name, text in selected.items())
    where = "" if history.where is None else f" WHERE {history.where}"
    return f"SELECT {columns} FROM {quoted_name(source)}{where}"


def _checked(name: str, result: SqlResult, key_type: pa.DataType) -> SqlResult:
    """Return events with typed columns; those with a null become bad rows."""
    events, bad = result.samples, [BAD_ROWS_SCHEMA.empty_table(), result.bad_rows]
    if events is None:
        return result
    for column in events.column_names:
        if events[column].null_count:
            valid = events[column].is_valid()
            shown = {KEY: "key", AVAILABLE: "available", ORDER: "order"}.get(column, column)
            reason = f"history {name!r}: {shown} must not be null"
            bad.append(bad_rows(events.filter(pc.invert(valid)), reason))
            events = events.filter(valid)
    return SqlResult(_typed(name, events, key_type), pa.concat_tables(bad))


def _typed(name: str, events: pa.Table, key_type: pa.DataType) -> pa.Table:
    """Return events with key, time and order in their types.

    Raises:
        SchemaError: a column has a wrong type.
    """
    key, kinds = _key_of(name), {c: events.schema.field(c).type for c in events.column_names}
    if not pa.types.is_timestamp(kinds[AVAILABLE]):
        raise SchemaError(
            f"{key}.available must be a timestamp, got {kinds[AVAILABLE]}; cast it in SQL"
        )
    if not pa.types.is_integer(kinds.get(ORDER, pa.int64())):
        raise SchemaError(f"{key}.order must be a column of whole numbers, got {kinds[ORDER]}")
    for column, kind in kinds.items():
        if pa.types.is_nested(kind):
            raise SchemaError(f"{key}.columns.{column} must be one number or text, got {kind}")
    try:
        keys = one_chunk(events[KEY]).cast(key_type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"{key}: key must be {key_type}, as that of the samples, got {kinds[KEY]}; cast it in "
            "data.sources"
        ) from error
    order = one_chunk(events[ORDER if ORDER in kinds else ORIGIN]).cast(pa.int64())
    columns = {
        KEY: with_one_zero(keys),
        AVAILABLE: one_chunk(events[AVAILABLE]).cast(pa.int64()),
        ORDER: order,
        ORIGIN: one_chunk(events[ORIGIN]),
    }
    return pa.table(columns | {c: one_chunk(events[c]) for c in kinds if c not in columns})
