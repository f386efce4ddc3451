"""Exceptions shared by the packages, and helpers for their messages."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

_SIMILAR = 0.8
"""Smallest `difflib` ratio at which a name is suggested."""


class SchemaError(Exception):
    """Data or a declaration does not match its format.

    Attributes:
        message: one line, `what is wrong; what to do`.
        file: path of the file, or None.
        location: line, key, row group or position inside `file`, or None.
    """

    def __init__(
        self, message: str, *, file: str | None = None, location: str | None = None
    ) -> None:
        self.message = message
        self.file = file
        self.location = location
        super().__init__(message)  # the other fields are pickled as attributes

    def __str__(self) -> str:
        """Return `what is wrong in file:location; what to do`."""
        if self.file is None:
            return self.message
        where = self.file if self.location is None else f"{self.file}:{self.location}"
        problem, separator, advice = self.message.partition("; ")
        return f"{problem} in {where}{separator}{advice}"


class StorageError(SchemaError):
    """A store cannot be reached, or refuses a request."""


class PlanError(Exception):
    """No plan fits the given limits.

    Attributes:
        required_rows: smallest cache that works, in rows; None if size is not the cause.
    """

    def __init__(self, message: str, *, required_rows: int | None = None) -> None:
        self.required_rows = required_rows
        super().__init__(message)


def printable(text: str) -> str:
    r"""Return text that a terminal shows as it is: control and formatting characters are escaped.

    Line ends are kept.

    Example:
        >>> printable(chr(27) + "[2J" + chr(0x202E))
        '\\x1b[2J\\u202e'
    """
    return "".join(
        c.encode("unicode_escape").decode()
        if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"
        else c
        for c in text
    )


MAX_SHOWN = 200
"""Longest text of a value in an error."""


def shown(value: object) -> str:
    """Return a value as an error shows it, cut if it is long.

    Example:
        >>> shown("a"), len(shown("a" * 1000))
        ("'a'", 203)
    """
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return advice that names the word of `known` closest to `name`.

    Example:
        >>> suggest_name("grops", ["groups", "tables"])
        "did you mean 'groups'?"
        >>> suggest_name("x", ["groups", "tables"])
        'use one of groups, tables'
    """
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(words)}"


def suggest_name_or(name: str, names: Iterable[str], advice: str) -> str:
    """Return `advice`, after the name of `names` that is similar to `name`, if any.

    Example:
        >>> suggest_name_or("prices", ["price", "user"], "add it")
        "did you mean 'price'? If not, add it"
        >>> suggest_name_or("label", ["price", "user"], "add it")
        'add it'
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    return f"did you mean {close[0]!r}? If not, {advice}" if close else advice


def pluralize(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless it is 1.

    Example:
        >>> pluralize(1, "segment"), pluralize(2, "segment")
        ('1 segment', '2 segments')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_at_least(config: object, lowest: int, *names: str) -> None:
    """Raise ValueError if one of the named attributes is below a limit; None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {value}; raise it")


def check_at_most(config: object, highest: int, *names: str) -> None:
    """Raise ValueError if a named attribute, or a number in it, exceeds a limit."""
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number > highest:
                raise ValueError(f"{name} must be at most {highest}, got {number}; lower it")


def check_positive(config: object, *names: str) -> None:
    """Raise ValueError if one of the named durations is not above 0; None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= timedelta():
            raise ValueError(f"{name} must be longer than 0s; write a duration such as 30s or 1d")


def first_difference(old: Any, new: Any, name: str) -> tuple[str, Any, Any] | None:
    """Return the name of the first value that differs in nested mappings, and both values.

    Example:
        >>> first_difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"d": 2}}, "x")
        ('x.b.c', 2, None)
    """
    if old == new:
        return None
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return name, old, new
    for key in [*old, *new]:
        difference = first_difference(old.get(key), new.get(key), f"{name}.{key}")
        if difference is not None:
            return difference
    return None
