"""Which days somebody asks for, and where their files lie."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

from schemas.errors import PlanError

PLACE = "{date}"
"""Stands for the day in the name of a folder."""
RANGE = ".."


def days_between(first: str, last: str, today: date) -> list[str]:
    """Return all days from the first to the last, in order.

    Args:
        first: as ISO 8601, or `yesterday`.
        last: likewise.
        today: the date now.

    Raises:
        ValueError: one is no date, or they are in the wrong order.

    Example:
        >>> days_between("2026-02-27", "yesterday", date(2026, 3, 2))
        ['2026-02-27', '2026-02-28', '2026-03-01']
    """
    start, end = day_of(first, today), day_of(last, today)
    if end < start:
        raise ValueError(f"days must be in order, got {first} to {last}; turn them around")
    return [(start + timedelta(days=i)).isoformat() for i in range((end - start).days + 1)]


def days_of(text: str, today: date) -> list[str]:
    """Return the days that a text such as `2026-04-01` or `2026-04-01..2026-04-03` names.

    Raises:
        ValueError: it names none.
    """
    first, dots, last = text.partition(RANGE)
    return days_between(first, last if dots else first, today)


def day_of(text: str, today: date) -> date:
    """Return the day that a text names.

    Raises:
        ValueError: it is no date.
    """
    if text == "yesterday":
        return today - timedelta(days=1)
    try:
        found = date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"day must be a date, got {text!r}; write 2026-04-09") from error
    if found.isoformat() != text:
        raise ValueError(f"day must be a date, got {text!r}; write 2026-04-09")
    return found


def folder_of_day(template: str, day: str, num_days: int) -> str:
    """Return the folder of the raw files of one day.

    Args:
        template: a folder in whose name `{date}` stands for the day.
        day: the day.
        num_days: how many days are asked for.

    Raises:
        PlanError: there are several days and one folder.
    """
    if PLACE not in template and num_days > 1:
        raise PlanError(
            f"input must name a folder for each day, got {template!r} for {num_days} days; "
            f"write {template.rstrip('/')}/{PLACE}"
        )
    return template.replace(PLACE, day)


def check_folder(folder: str, day: str) -> None:
    """Refuse a folder of this machine that is not there; URLs are left to the pipelines.

    Raises:
        PlanError: it is not there.
    """
    if "://" not in folder and not Path(folder).is_dir():
        raise PlanError(
            f"input of {day} must be a folder, got none at {folder}; wait for the logs, or say "
            "--input"
        )
