"""Limits of the readers of all formats, so that a small file cannot take all memory or time.

They bound what is in memory at a time, and what is read without yielding a row; they do not bound
how well a file is compressed, since columns of equal values shrink a thousandfold and more.
"""

from __future__ import annotations

from typing import Any

MAX_ROW_BYTES = 16 << 20
"""Maximum bytes of a row of text with its line end; longer ones are rejected as malformed."""
MAX_BARREN_BYTES = 256 << 20
"""Maximum bytes of text, decompressed, in which no row ends; the rest of the file is not read."""
MAX_BLOCK_BYTES = 64 << 20
"""Maximum bytes of a decompressed block of Avro."""
MAX_EMPTY_ROWS = 1 << 16
"""Maximum rows of a block of Avro beyond one a byte."""
MAX_SCHEMA_BYTES = 16 << 20
"""Maximum bytes of the schema in a file."""
MAX_COLUMNS = 10_000
"""Maximum columns of a source, nested fields included."""
MAX_DEPTH = 64
"""Maximum depth of nested types."""


def check_num_columns(count: int) -> None:
    """Raise ValueError if a source has too many columns."""
    if count > MAX_COLUMNS:
        raise ValueError(
            f"source must have at most {MAX_COLUMNS:,} columns, nested fields included, got "
            f"{count:,}; leave out those that no sample needs"
        )


def check_schema(schema: Any) -> None:
    """Raise ValueError if a schema in JSON is nested too deeply or has too many fields."""
    count, depth, level = 0, 0, [schema]
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                fields = value.get("fields")
                count += len(fields) if isinstance(fields, list) else 0
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        depth, level = depth + 1, inner
        if depth > 4 * MAX_DEPTH:  # a field takes up to four levels: list, field, type, record
            raise ValueError(f"types must be nested at most {MAX_DEPTH} deep; flatten them")
    check_num_columns(count)
