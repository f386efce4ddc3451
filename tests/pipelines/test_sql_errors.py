"""Errors of the job's SQL name line and column in the job file."""

import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from pipelines.build import build
from pipelines.samples.sql import Connection, original_error, run, select_origin
from pipelines.sources.rows import ORIGIN
from schemas.config.parse import position_in_value
from schemas.errors import SchemaError
from tests.pipelines.logs import request, write_job, write_log

SQL = "SELECT session, time, user, history, unnest(items) AS item, clicked AS label FROM log"

WRONG: dict[str, tuple[str, str, str]] = {
    "a column that the log has not": (
        "usr, history", "", 'cannot run on its sources: Binder Error: Referenced column "usr" '
        "not found in FROM clause!"),
    "a function that there is not": (
        "unest(items)", "", "cannot run on its sources: Catalog Error: Scalar Function with name "
        "unest does not exist!"),
    "no SQL": (
        "clicked AS label FRM log", "FRM", 'is not valid SQL: syntax error at or near "FRM"'),
    "the origin": (
        "label, log._origin FROM", "log._origin",
        "must not select _origin, which is added to every sample"),
}  # fmt: skip

OLD = {
    "usr, history": "user, history",
    "unest(items)": "unnest(items)",
    "clicked AS label FRM log": "clicked AS label FROM log",
    "label, log._origin FROM": "label FROM",
}


@pytest.mark.parametrize("name", WRONG)
def test_error_names_line_and_column_of_the_job_file(name: str, tmp_path: Path) -> None:
    wrong, place, message = WRONG[name]
    write_log(tmp_path / "log", 60)
    job = write_job(tmp_path / "job")
    broken = SQL.replace(OLD[wrong], wrong).replace(", ", ",\n             ")
    text = job.read_text().replace(SQL, broken)
    job.write_text(text)
    wrong = wrong.replace(", ", ",\n             ")
    offset = text.index(wrong) + (wrong.index(place) if place else 0)
    line, column = text[:offset].count("\n") + 1, offset - text[:offset].rfind("\n")
    expected = f"data.samples.map {message} in {job}:{line}:{column}; "
    with pytest.raises(SchemaError, match=f"^{re.escape(expected)}[^\n]*$"):
        build(request(job, tmp_path / "log", tmp_path / "dataset"))


def test_error_offers_the_names_that_are_like_the_one_that_is_missing() -> None:
    log = pa.table({"user": [{"id": 1}], "event": [2], ORIGIN: [0]})

    def error_of(statement: str) -> tuple[str, int | None]:
        result = original_error(
            "data.samples.map", statement, {"log": log}, duckdb.Error("rewritten")
        )
        return result.message.partition("; ")[2], result.position

    assert error_of("SELECT evnt FROM log") == ('did you mean "event"?', 7)
    assert error_of("SELECT user.idd FROM log") == ('did you mean "id"?', 12)
    assert error_of("SELECT '\N{SNOWMAN}', user.idd FROM log") == ('did you mean "id"?', 19)
    assert error_of("SELECT user.idd, log.user.idd FROM log") == ('did you mean "id"?', None)
    assert error_of("SELECT event FROM lg") == ('did you mean "log"?', 18)
    assert error_of("SELECT event + FROM log")[0] == "correct it"


ORIGIN_LOST = {
    "SELECT x FROM (SELECT x FROM log)": "add _origin to the select list there",
    "WITH a AS (SELECT x FROM log) SELECT a.x FROM a": "add _origin to the select list there",
    "SELECT x, row_number() OVER (ORDER BY t._origin) AS n FROM (SELECT x FROM log) t": (
        "add _origin to the select list there"),
    "SELECT a.x FROM log a JOIN log b USING (x)": "(SELECT * EXCLUDE (_origin) FROM ...)",
}  # fmt: skip


@pytest.mark.parametrize("statement", ORIGIN_LOST)
def test_a_statement_that_loses_the_origin_is_told_how_to_keep_it(statement: str) -> None:
    log = pa.table({"x": [1], ORIGIN: [0]})
    with pytest.raises(duckdb.Error) as error:
        run(Connection(), select_origin(statement, "data.samples.map"), {"log": log})
    result = original_error("data.samples.map", statement, {"log": log}, error.value)
    assert result.message.startswith("data.samples.map must ")
    assert result.message.endswith(ORIGIN_LOST[statement])
    assert result.position is not None


PLACES: dict[str, tuple[str, int, str | None]] = {
    "a block": ("a:\n  b: |\n    one\n    two\n", 5, "4:6"),
    "a block with a blank line": ("a:\n  b: |\n\n    one\n    two\n", 6, "5:6"),
    "a block with wide characters": ("a:\n  b: |\n    é one\n", 3, "3:7"),
    "a plain value": ("a: {b: one two}\n", 4, "1:12"),
    "a quoted value": ("a: {b: 'one two'}\n", 4, "1:13"),
    "a folded block": ("a:\n  b: >\n    one\n    two\n", 5, "2"),
    "no such key": ("a: {c: 1}\n", 0, None),
}


@pytest.mark.parametrize(("text", "offset", "place"), PLACES.values(), ids=PLACES)
def test_place_in_value_is_a_line_and_a_column_of_the_document(
    text: str, offset: int, place: str | None
) -> None:
    assert position_in_value(text, "a.b", offset) == place
