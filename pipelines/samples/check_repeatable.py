"""Before any work: refuse SQL that gives other samples each time, or as rows happen to be cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from pipelines.samples.syntax import parse
from schemas.errors import SchemaError
from schemas.job import DataConfig

CHANGING = frozenset({
    "random", "uuid", "uuidv4", "uuidv7", "gen_random_uuid", "nextval", "currval", "now", "today",
    "get_current_time", "get_current_timestamp", "current_date", "current_time",
    "current_timestamp", "localtime", "localtimestamp", "transaction_timestamp",
})  # fmt: skip
"""Functions of DuckDB whose value is another one in the next run."""
LIKE_COLUMNS = frozenset({
    "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp",
})  # fmt: skip
"""Those that are written without parentheses."""


def check_repeatable(data: DataConfig, sources: Mapping[str, pa.Table]) -> None:
    """Refuse a job whose statements would not give the same samples again.

    Args:
        data: the job's data section, whose statements are SQL.
        sources: by table that they may read, its columns.

    Raises:
        SchemaError: a statement calls a function of chance or of the clock, or picks some rows
            of those that are read together.
    """
    known = {name for table in sources.values() for name in table.column_names}
    per, text = data.samples.per, data.samples.map
    if per is not None:
        _check_functions(per.sql, "data.samples.per.sql", known)
    if text is not None:
        _check_functions(text, "data.samples.map", known)
        _check_every_row(text, "data.samples.map")
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str):
                place = f"transforms.{group}.{name}"
                _check_functions(f"SELECT ({transform}) FROM tuples", place, known)


def _check_functions(statement: str, place: str, known: Collection[str]) -> None:
    waiting: list[Any] = [parse(statement)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            name = _called(node)
            if name in CHANGING and name not in known:
                raise SchemaError(
                    f"{place} must give the same in each build, got {name}; "
                    "hash columns instead of drawing, and write times down"
                )
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _called(node: Mapping[str, Any]) -> str:
    """Return the function that a node calls; some are written like columns."""
    if node.get("class") == "FUNCTION":
        return str(node["function_name"]).lower()
    path = node.get("column_names") if node.get("class") == "COLUMN_REF" else None
    name = str(path[0]).lower() if path and len(path) == 1 else ""
    return name if name in LIKE_COLUMNS else ""


def _check_every_row(statement: str, place: str) -> None:
    """Refuse what would choose among the rows of one chunk."""
    for node in (s["node"] for s in parse(statement).get("statements", ())):
        found = {m["type"].split("_")[0] for m in node.get("modifiers", ())}
        sampled = node.get("sample") or (node.get("from_table") or {}).get("sample")
        chosen = sorted(found & {"LIMIT", "DISTINCT"}) + (["SAMPLE"] if sampled else [])
        if chosen:
            raise SchemaError(
                f"{place} must treat each row alone, got {chosen[0]}; "
                "choose rows by WHERE, or all rows of a key in data.samples.per"
            )
