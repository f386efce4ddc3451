"""Parsing of days, and folders of their files."""

import re
from datetime import date

import pytest

from presage.scheduler.retrain.records import check_folder, days_between, folder_of_day, parse_days
from presage.schemas.errors import PlanError
from presage.schemas.storage.location import Location

TODAY = date(2026, 3, 2)

NAMED = {
    "one day": ("2026-04-09", ["2026-04-09"]),
    "a range": ("2026-02-27..2026-03-01", ["2026-02-27", "2026-02-28", "2026-03-01"]),
    "a range of one": ("2026-04-09..2026-04-09", ["2026-04-09"]),
    "yesterday": ("yesterday", ["2026-03-01"]),
    "until yesterday": ("2026-02-28..yesterday", ["2026-02-28", "2026-03-01"]),
}


@pytest.mark.parametrize(("text", "days"), NAMED.values(), ids=NAMED.keys())
def test_days_of_text_are_all_days_in_order(text: str, days: list[str]) -> None:
    assert parse_days(text, TODAY) == days


WRONG = {
    "no date": ("today", "day must be a date, got 'today'; write 2026-04-09"),
    "a day that is not": ("2026-02-30", "day must be a date, got '2026-02-30'; write 2026-04-09"),
    "without dashes": ("20260409", "day must be a date, got '20260409'; write 2026-04-09"),
    "half a range": ("2026-04-09..", "day must be a date, got ''; write 2026-04-09"),
    "backwards": (
        "2026-04-09..2026-04-08",
        "days are in reverse order: 2026-04-09 to 2026-04-08; swap them",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG.keys())
def test_days_of_another_text_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_days(text, TODAY)


def test_days_between_spans_a_leap_day() -> None:
    assert days_between("2028-02-28", "2028-03-01", TODAY)[1] == "2028-02-29"


def test_folder_of_day_takes_the_day_for_its_place() -> None:
    assert folder_of_day("logs/{date}/x", "2026-04-09", 2) == "logs/2026-04-09/x"
    assert folder_of_day("logs", "2026-04-09", 1) == "logs"
    message = "input is the same folder for 2 days: 'logs/'; write logs/{date}"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        folder_of_day("logs/", "2026-04-09", 2)


def test_check_folder_of_one_that_is_not_there_is_refused(tmp_path: object) -> None:
    check_folder(str(tmp_path), "2026-04-09")
    url = "memory://days/logs"
    with pytest.raises(PlanError, match=f"^input of 2026-04-09 is no folder: {url}; wait for"):
        check_folder(url, "2026-04-09")
    (Location.parse(url) / "part.parquet").write_bytes(b"")
    check_folder(url, "2026-04-09")
    message = (
        f"input of 2026-04-09 is no folder: {tmp_path}/none; wait for the logs, or set --input"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        check_folder(f"{tmp_path}/none", "2026-04-09")
