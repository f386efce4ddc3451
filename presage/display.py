"""Tables of text, as datasets and batches print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import pyarrow as pa

T = TypeVar("T")

WIDTH = 100
"""Longest line."""
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


class Listing(tuple[T, ...]):
    """A tuple of dataclasses that prints as a table."""

    def values(self, name: str) -> list[Any]:
        """Return an attribute of each item."""
        return [getattr(item, name) for item in self]

    def __repr__(self) -> str:
        """Return a line for each item, below the names of the attributes."""
        if not self:
            return "(none)"
        names = [f.name for f in fields(self[0])]  # type: ignore[arg-type]
        return align([names, *([_text(getattr(item, n)) for n in names] for item in self)])


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def align(rows: Sequence[Sequence[str]], indent: int = 0) -> str:
    """Return rows of cells as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((" " * indent + line).rstrip() for line in lines)


def columns_text(table: pa.Table) -> str:
    """Return a line for each column: name, type and values, cut at `WIDTH`."""
    rows = [(f.name, _type_text(f.type), _values_text(table[f.name])) for f in table.schema]
    return "\n".join(line[:WIDTH] for line in align(rows, 2).splitlines())


def _values_text(column: pa.ChunkedArray) -> str:
    return "  ".join(_value_text(value) for value in column.to_pylist())


def _value_text(value: object) -> str:
    if isinstance(value, list) and len(value) > 3:
        return f"[{', '.join(map(str, value[:2]))}, ... {len(value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _type_text(kind: pa.DataType) -> str:
    return str(kind).replace("large_list<item: ", "list<")


def format_bytes(num_bytes: int) -> str:
    """Return a size in decimal units.

    Example:
        >>> format_bytes(999), format_bytes(3_397_790)
        ('999 bytes', '3.4 MB')
    """
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} bytes"
