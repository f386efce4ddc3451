"""SQL as DuckDB parses it: a statement and its tree of JSON objects, without binding."""

from __future__ import annotations

import json
import threading
from typing import Any

import duckdb

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
