"""What a statement of the job may take: time and memory, for one chunk of rows."""

import re
from datetime import timedelta
from pathlib import Path

import duckdb
import pytest

from pipelines.build import build
from pipelines.samples.sql import Connection, LimitError, name_errors
from schemas.config.sources import SqlLimitsConfig
from schemas.errors import SchemaError
from tests.pipelines.logs import request, write_job, write_log

CROSS_JOIN = "SELECT {} FROM range(1000000) AS a(i), range(1000000) AS b(i)"
SHORT = SqlLimitsConfig(time=timedelta(seconds=0.3))
SMALL = SqlLimitsConfig(memory=64 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "limits", "message"),
    [
        ("sum(a.i * b.i)", SHORT, "must end within 0.3 s"),
        ("a.i, b.i", SMALL, "must fit into 64 MiB of memory"),
        ("DISTINCT a.i * b.i", SMALL, "must fit into 64 MiB of memory"),
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
    text = "^data.samples.map must end within 0.3 s for one chunk of rows; .* data.samples.limits$"
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
    message = f"data.samples.map must end within 1 s for one chunk of rows in {job}; "
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}[^\n]*$"):
        build(request(job, tmp_path / "log", tmp_path / "dataset"))
