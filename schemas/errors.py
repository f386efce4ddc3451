"""Errors that cross package borders, with typed fields."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SIMILAR = 0.8
"""Share of two words' letters in common from which on one may be meant for the other."""


class SchemaError(Exception):
    """Say that data or a declaration breaks its format.

    Attributes:
        message: one line, what must hold and what was found.
        file: the file it was found in, as the user would name it, or None.
        place: line, key, row group or position inside `file`, or None.
    """

    def __init__(self, message: str, *, file: str | None = None, place: str | None = None) -> None:
        """Build the one-line text `message in file:place`."""
        self.message = message
        self.file = file
        self.place = place
        super().__init__(message)  # the rest travels as attributes, so that it can be pickled

    def __str__(self) -> str:
        """Return the whole line; the advice after `;` stays last."""
        if self.file is None:
            return self.message
        where = self.file if self.place is None else f"{self.file}:{self.place}"
        what, separator, advice = self.message.partition("; ")
        return f"{what} in {where}{separator}{advice}"


class PlanError(Exception):
    """Say that no plan fits the given limits.

    Attributes:
        required_rows: the smallest cache that works, in rows; None when size is not the cause.
    """

    def __init__(self, message: str, *, required_rows: int | None = None) -> None:
        """Keep the smallest working size beside the text."""
        self.required_rows = required_rows
        super().__init__(message)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return advice that names the known word closest to `name`.

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
    """Return advice for a name that need not be one of the known ones, after one that is similar.

    Example:
        >>> suggest_name_or("prices", ["price", "user"], "add it")
        "did you mean 'price'? If not, add it"
        >>> suggest_name_or("label", ["price", "user"], "add it")
        'add it'
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    return f"did you mean {close[0]!r}? If not, {advice}" if close else advice


def pluralize(number: int, noun: str) -> str:
    """Return a number and what it counts.

    Example:
        >>> counted(1, "segment"), counted(2, "segment")
        ('1 segment', '2 segments')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_at_least_one(config: object, *names: str) -> None:
    """Refuse counts below one; None means that there is no limit, and passes.

    Args:
        config: the object whose attributes are checked.
        names: the attributes.

    Raises:
        ValueError: naming the first attribute that is below one.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; raise it")
