"""One-line errors and their advice."""

import pickle
import re

import pytest

from presage.schemas.errors import (
    PlanError,
    SchemaError,
    check_at_least,
    suggest_name,
    suggest_name_or,
)

LINES = {
    "no location": (SchemaError("a must b, got c; do d"), "a must b, got c; do d"),
    "file": (SchemaError("a must b, got c; do d", file="f"), "a must b, got c in f; do d"),
    "location": (
        SchemaError("a must b, got c; do d", file="f", location="7"),
        "a must b, got c in f:7; do d",
    ),
    "no advice": (SchemaError("a must b, got c", file="f"), "a must b, got c in f"),
}


@pytest.mark.parametrize(("error", "line"), LINES.values(), ids=LINES.keys())
def test_schema_error_puts_the_location_before_the_advice(error: SchemaError, line: str) -> None:
    assert str(error) == line


def test_plan_error_carries_the_rows_that_work() -> None:
    assert PlanError("text", required_rows=5).required_rows == 5
    assert str(PlanError("text")) == "text"


def test_errors_survive_a_trip_between_processes() -> None:
    for error in (PlanError("text", required_rows=5), SchemaError("text", file="f", location="1")):
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_nearest_names_the_close_word_or_all() -> None:
    assert suggest_name("grops", ["groups", "tables"]) == "did you mean 'groups'?"
    assert suggest_name("x", ["tables", "groups"]) == "use one of groups, tables"


@pytest.mark.parametrize(
    ("name", "known", "close"),
    [
        ("items", ["item", "user"], "item"),
        ("ages", ["age"], "age"),
        ("prise", ["price"], "price"),
        ("label", ["price", "user", "shown_items", "table"], None),
        ("hour", ["house", "user"], None),
        ("x", [], None),
    ],
)
def test_similar_or_names_a_word_only_where_it_is_nearly_the_same(
    name: str, known: list[str], close: str | None
) -> None:
    wanted = "add it" if close is None else f"did you mean {close!r}? If not, add it"
    assert suggest_name_or(name, known, "add it") == wanted


def test_check_at_least_passes_one_and_none_and_names_the_rest() -> None:
    class Config:
        epochs, limit, rows = 1, None, 0

    check_at_least(Config, 1, "epochs", "limit")
    with pytest.raises(
        ValueError, match=f"^{re.escape('rows must be at least 1, got 0; raise it')}$"
    ):
        check_at_least(Config, 1, "epochs", "rows")
