"""Errors in the job's SQL, with the position in the statement as the user wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import duckdb
import pyarrow as pa

from pipelines.sources.rows import ORIGIN
from schemas.declare import place_in_value
from schemas.errors import SchemaError

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
            place = place_in_value(job.read_text(encoding="utf-8"), self.key, self.position)
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
