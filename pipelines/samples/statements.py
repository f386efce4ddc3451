"""The SQL statements of a job as texts: their syntax, and the positions of errors."""

from __future__ import annotations

import atexit
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from presage.pipelines.sources.raw_rows import ORIGIN
from presage.schemas.config.job import DataConfig
from presage.schemas.config.parse import position_in_value
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location

PER = "per"
"""Table that `samples.map` reads if the job also has `samples.per`."""


class _Syntax(threading.local):
    """A database for the syntax of statements in each thread: to open one takes 20 ms."""

    @cached_property
    def database(self) -> duckdb.DuckDBPyConnection:
        return duckdb.connect()


_syntax = _Syntax()
atexit.register(lambda: vars(_syntax).clear())  # that of the main thread


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
    row = _syntax.database.execute(f"SELECT {function}(?)", [text]).fetchone()
    assert row is not None, f"{function} gives one row"
    return str(row[0])


def quoted_name(name: str) -> str:
    """Return a name of a table or column quoted for SQL.

    Example:
        >>> quoted_name('a"b')
        '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


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


# Statements of a job.


@dataclass(frozen=True, slots=True)
class Steps:
    """The statements that are run on raw rows, in this order; None for those that a job lacks.

    `per` is over all rows of a key, `map` row by row, over `per` or the sample source.
    """

    per: str | None
    map: str | None


def job_steps(data: DataConfig) -> Steps:
    """Return the statements of a job, which select the origin.

    Raises:
        SchemaError: a statement is not a single SELECT, or it aggregates.
    """
    per, text = data.samples.per, data.samples.map
    return Steps(
        select_origin(per.sql, "data.samples.per.sql") if per else None,
        select_origin(text, "data.samples.map") if text else None,
    )


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


def tables_in_sql(data: DataConfig) -> frozenset[str]:
    """Return the names of the tables in the job's SQL."""
    texts = [data.samples.map, data.samples.per.sql if data.samples.per else None]
    return frozenset(name for text in texts if text for name in table_names(text))
