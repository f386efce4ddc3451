# ruff: noqa: E501 - tables of faults, one a line
"""The job's SQL: errors, limits, repeatability, statements over keys, columns that bypass it."""

import re
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from presage.pipelines.beam.runner import pipeline_options
from presage.pipelines.build import build
from presage.pipelines.prepare import BuildRequest, prepare
from presage.pipelines.samples.per_key import PerKey, run_key, run_keys
from presage.pipelines.samples.sql import Connection, LimitError, name_errors, run
from presage.pipelines.samples.statements import original_error, select_origin
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.table.expand import expand
from presage.pipelines.table.target import load_job_files
from presage.schemas.config.parse import position_in_value
from presage.schemas.config.sources import SqlLimitsConfig
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.pipelines.logs import request, write_job, write_log

# Errors have line and column in the job file.

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
    assert result.message.startswith("data.samples.map ")
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


# Limits of time and memory.

CROSS_JOIN = "SELECT {} FROM range(1000000) AS a(i), range(1000000) AS b(i)"
SHORT = SqlLimitsConfig(time=timedelta(seconds=0.3))
SMALL = SqlLimitsConfig(memory=64 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "limits", "message"),
    [
        ("sum(a.i * b.i)", SHORT, "did not end within 0.3 s"),
        ("a.i, b.i", SMALL, "needs more than 64 MiB of memory"),
        ("DISTINCT a.i * b.i", SMALL, "needs more than 64 MiB of memory"),
    ],
    ids=["no end", "a result without end", "a hash table without end"],
)
def test_statement_ends_at_its_limit_and_the_next_one_runs(
    columns: str, limits: SqlLimitsConfig, message: str
) -> None:
    connection = Connection(limits)
    with pytest.raises(LimitError, match=f"^{re.escape(message)}$"):
        connection.query(CROSS_JOIN.format(columns))
    assert connection.query("SELECT 1 AS x").to_pylist() == [{"x": 1}]


def test_limit_says_which_key_of_the_job_and_the_way_out() -> None:
    text = (
        "^data.samples.map did not end within 0.3 s for one chunk of rows; .* data.samples.limits; "
    )
    with pytest.raises(SchemaError, match=text), name_errors("data.samples.map"):
        Connection(SHORT).query(CROSS_JOIN.format("sum(a.i * b.i)"))


def test_error_of_a_row_far_from_the_first_has_the_same_text() -> None:
    statement = "SELECT CAST(CASE WHEN i = {0} THEN 'x' ELSE '1' END AS INT) AS y FROM {1}"
    texts: list[str] = []
    for row in (0, 200_000):
        with pytest.raises(duckdb.Error) as raised:
            Connection().query(statement.format(row, f"range({row} + 1) AS t(i)"))
        texts.append(str(raised.value).splitlines()[0])
    assert texts[0] == texts[1]
    assert texts[0].startswith("Conversion Error: Could not convert string 'x' to INT32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "joined",
    [
        f"({CROSS_JOIN.format('max(a.i * b.i) AS m')})",
        "(SELECT count(*) AS m FROM range(1000000 * log.user) a(i), range(100 * a.i) b(i))",
    ],
    ids=["before the first row", "on a worker"],
)
def test_job_with_a_cross_join_ends_with_one_line_that_names_file_and_statement(
    joined: str, tmp_path: Path
) -> None:
    write_log(tmp_path / "log", 60)
    job = write_job(tmp_path / "job")
    text = job.read_text().replace("FROM log", f"FROM log, {joined} WHERE m > 0")
    job.write_text(text.replace("    map: |", "    limits: {time: 1s}\n    map: |"))
    message = f"data.samples.map did not end within 1 s for one chunk of rows in {job}; "
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}[^\n]*$"):
        build(request(job, tmp_path / "log", tmp_path / "dataset"))


# Statements that yield other samples in the next build are refused.


# What is wrong, to a text of the job, what stands there instead, and the message.
REFUSED = {
    "chance": ("clicked AS label", "(random() < clicked)::INT AS label", "data.samples.map calls random, which gives other values in each build"),
    "the clock": ("FROM log", "FROM log WHERE time < current_timestamp", "calls current_timestamp, which"),
    "chance below": ("FROM log", "FROM (SELECT * FROM log WHERE RANDOM() < 0.5)", "calls random, which"),
    "chance in a transform": ("ln(1 + len(history))", "random()", "transforms.user.num_history calls random, which gives other values in each build"),
    "a limit": ("FROM log", "FROM log LIMIT 5", "data.samples.map does not treat each row alone: LIMIT"),
    "distinct rows": ("SELECT session", "SELECT DISTINCT session", ": DISTINCT in "),
    "a sample": ("FROM log", "FROM log USING SAMPLE 10", ": SAMPLE in "),
    "a sample of the table": ("FROM log", "FROM log TABLESAMPLE 10%", ": SAMPLE in "),
    "a function beside a column of its name": ("FROM log", "FROM (SELECT *, 1 AS uuid FROM log) WHERE uuid() IS NOT NULL", "calls uuid, which"),
    "the age from today": ("FROM log", "FROM log WHERE age(time) > INTERVAL 1 DAY", "calls age, which"),
    "a clock that DuckDB does not call one": ("FROM log", "FROM log WHERE time < current_localtimestamp()", "calls current_localtimestamp, which"),
    "a rank": ("FROM log", "FROM (SELECT * FROM log QUALIFY row_number() OVER (ORDER BY time) < 9)", ": the window function row_number in "),
    "a rank of a CTE": ("SELECT session", "WITH a AS (SELECT * FROM log), b AS (FROM a QUALIFY rank() OVER (ORDER BY time) < 9) SELECT b.session", ": the window function rank in "),
    "a limit below": ("FROM log", "FROM (SELECT * FROM log LIMIT 5)", ": LIMIT in "),
    "a sample below": ("FROM log", "FROM (SELECT * FROM log USING SAMPLE 10%)", ": SAMPLE in "),
    "a mean of all rows": ("FROM log", "FROM log WHERE clicked > (SELECT avg(clicked) FROM log)", "alone: a subquery over all rows"),
    "groups of rows": ("FROM log", "FROM (SELECT max(time) AS time, session, user, history, items, clicked FROM log GROUP BY ALL)", ": the aggregate max in "),
    "rows of rows": ("FROM log", "FROM log JOIN (SELECT session AS other FROM log) ON session = other", ": a join of the rows with themselves in "),
    "a union of values": ("FROM log", "FROM (SELECT * FROM log UNION SELECT * FROM log)", ": UNION without ALL in "),
    "a limit of a union": ("FROM log", "FROM (SELECT * FROM log UNION ALL SELECT * FROM log LIMIT 5)", ": LIMIT in "),
    "a list as session": ("key: session,", "key: history,", "session.key must be one value, got a list for 'history'"),
}  # fmt: skip


def shop(tmp_path: Path, before: str, after: str) -> BuildRequest:
    write_log(tmp_path / "log", 60)
    job = write_job(tmp_path / "job")
    assert before in job.read_text()
    job.write_text(job.read_text().replace(before, after))
    return request(job, tmp_path / "log", tmp_path / "dataset")


@pytest.mark.parametrize(("before", "after", "message"), REFUSED.values(), ids=REFUSED)
def test_statement_is_refused_before_any_work(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(shop(tmp_path, before, after))
    assert not list(tmp_path.glob("dataset/**/*.parquet"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("FROM log", "FROM (SELECT *, 1 AS today FROM log) WHERE today = 1"),
        ("FROM log", "FROM log ORDER BY time"),
        ("FROM log", "FROM (SELECT * FROM log UNION ALL SELECT * FROM log)"),
        ("FROM log", "FROM log WHERE (SELECT max(i) FROM unnest(items) AS of_row(i)) > 3"),
        (
            "FROM log",
            "FROM (SELECT *, 1 AS age FROM log) WHERE age(time, time) IS NOT NULL OR age = 1",
        ),
    ],
)
def test_what_treats_each_row_alone_passes(before: str, after: str, tmp_path: Path) -> None:
    asked = shop(tmp_path, before, after)
    prepare(asked, load_job_files(asked.input.job_path))


def test_workers_below_none_are_refused() -> None:
    with pytest.raises(SchemaError, match="direct_num_workers must not be negative, got -1;"):
        pipeline_options(["--direct_num_workers=-1"])


def test_samples_are_not_written_over_a_directory(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="output is a directory"):
        expand(Location.parse(tmp_path / "dataset"), Location.parse(tmp_path))


# One statement over many keys yields what it yields for each key alone.

PLAYS = pa.table(
    {
        "user": [3, 1, 3, 2, 1, 3, 2, 9],
        "song": [30, 10, 31, 20, 11, 32, 21, 90],
        "sec": [5, 1, 7, 2, 3, 6, 9, 1],
        ORIGIN: list(range(8)),
    }
)
PROFILES = pa.table({"user": pa.array([1, 2, 3, 4], pa.int32()), "age": [11, 22, 33, 44]})
TABLES = {"plays": PLAYS, "profiles": PROFILES.append_column(ORIGIN, pa.array([0, 1, 2, 3]))}

PER_KEY = {
    "a history by a window function": (
        "SELECT list(song) OVER (ORDER BY sec ROWS BETWEEN 50 PRECEDING AND 1 PRECEDING) AS h "
        "FROM plays"
    ),
    "a join with another source": "SELECT song, age FROM plays LEFT JOIN profiles USING (user)",
    "a count of the key's rows": "SELECT song, (SELECT count(*) FROM plays) AS n FROM plays",
    "a rank without a partition": "SELECT song, row_number() OVER (ORDER BY sec) AS n FROM plays",
    "several samples of a row": "SELECT song, unnest([song, sec, 7]) AS item FROM plays",
}


def rows_of(table: pa.Table) -> list[dict[str, object]]:
    """Return rows sorted by origin, rows of one origin in their order."""
    order = np.argsort(table[ORIGIN].to_numpy(), kind="stable")
    return table.take(pa.array(order)).to_pylist()


@pytest.mark.parametrize("statement", PER_KEY.values(), ids=PER_KEY.keys())
def test_many_keys_at_once_give_what_each_key_alone_gives(statement: str) -> None:
    per = PerKey(select_origin(statement, "key"), "plays", "user")
    together = [r.samples for r in run_keys(Connection(), per, TABLES)]
    alone = []
    for user in (1, 2, 3, 9):
        tables = {
            "plays": PLAYS.filter(pa.array(PLAYS["user"].to_numpy() == user)),
            "profiles": PROFILES.filter(pa.array(PROFILES["user"].to_numpy() == user)),
        }
        alone.append(run_key(Connection(), per.statement, "plays", tables).samples)
    assert rows_of(pa.concat_tables(together)) == rows_of(pa.concat_tables(alone))


def test_row_that_raises_costs_its_key_nothing_else() -> None:
    statement = select_origin("SELECT 100 // (song - 31) AS x FROM plays", "key")
    per = PerKey(statement, "plays", "user")
    results = list(run_keys(Connection(), per, TABLES))
    assert sorted(r["_origin"] for t in results if t.samples for r in t.samples.to_pylist()) == [
        0, 1, 3, 4, 5, 6, 7]  # fmt: skip
    assert [o for t in results for o in t.bad_rows["origin"].to_pylist()] == [2]


def test_keys_without_rows_in_the_other_source_are_kept() -> None:
    per = PerKey(select_origin(PER_KEY["a join with another source"], "key"), "plays", "user")
    empty = {**TABLES, "profiles": TABLES["profiles"].slice(0, 0)}
    (result,) = run_keys(Connection(), per, empty)
    assert result.samples is not None
    assert result.samples["age"].to_pylist() == [None] * 8


WINDOW = "list(song) OVER (ORDER BY sec ROWS BETWEEN 50 PRECEDING AND 1 PRECEDING) AS h"


def one_key(songs: list[int]) -> dict[str, pa.Table]:
    """Return rows of one key in time order."""
    count = len(songs)
    columns = {"user": [1] * count, "song": songs, "sec": range(count), ORIGIN: range(count)}
    return {"plays": pa.table({name: pa.array(v, pa.int64()) for name, v in columns.items()})}


def test_good_rows_of_a_key_with_a_bad_one_keep_their_whole_history() -> None:
    statement = select_origin(f"SELECT 100 // (song - 9) AS x, {WINDOW} FROM plays", "key")
    result = run_key(Connection(), statement, "plays", one_key(list(range(16))))
    assert result.bad_rows["origin"].to_pylist() == [9]
    assert result.samples is not None
    expected = [song for song in range(16) if song != 9]
    histories = {r[ORIGIN]: r["h"] or [] for r in rows_of(result.samples)}
    assert histories == {song: expected[: expected.index(song)] for song in expected}


def test_rows_that_fail_only_together_are_all_rejected() -> None:
    text = "SELECT song, 1 // (3 - (SELECT count(*) FROM plays)) AS x FROM plays"
    result = run_key(Connection(), select_origin(text, "key"), "plays", one_key([5, 6, 7]))
    assert result.samples is None
    assert result.bad_rows["origin"].to_pylist() == [0, 1, 2]


def test_key_with_a_bad_row_is_dropped_as_a_whole_when_asked_for() -> None:
    statement = select_origin(f"SELECT 100 // (song - 31) AS x, {WINDOW} FROM plays", "key")
    (result,) = run_keys(Connection(), PerKey(statement, "plays", "user"), TABLES, "log:{}".format)
    assert result.samples is not None
    assert sorted(result.samples[ORIGIN].to_pylist()) == [1, 3, 4, 6, 7]
    bad = {row["origin"]: row["reason"] for row in result.bad_rows.to_pylist()}
    own = "row fails in the job's SQL: "
    assert bad.keys() == {0, 2, 5}
    assert bad[2].startswith(own)
    assert bad[0] == bad[5] == f"another row of the key is bad: log:2: {bad[2]}"
