# ruff: noqa: E501 - a table of faults, one a line
"""What would give other samples in the next build, or none, is refused before any work."""

import re
from pathlib import Path

import pytest

from pipelines.beam.runner import pipeline_options
from pipelines.build import build
from pipelines.context import BuildRequest
from pipelines.prepare import prepare
from pipelines.table.rows import expand
from schemas.config.job import load_job
from schemas.errors import SchemaError
from schemas.features import load_features
from tests.pipelines.logs import request, write_job, write_log

# What is wrong, to a text of the job, what stands there instead, and the message.
REFUSED = {
    "chance": ("clicked AS label", "(random() < clicked)::INT AS label", "data.samples.map must yield the same in each build, got random"),
    "the clock": ("FROM log", "FROM log WHERE time < current_timestamp", "got current_timestamp"),
    "chance below": ("FROM log", "FROM (SELECT * FROM log WHERE RANDOM() < 0.5)", "got random"),
    "chance in a transform": ("ln(1 + len(history))", "random()", "transforms.user.num_history must yield the same in each build, got random"),
    "a limit": ("FROM log", "FROM log LIMIT 5", "data.samples.map must treat each row alone, got LIMIT"),
    "distinct rows": ("SELECT session", "SELECT DISTINCT session", "got DISTINCT"),
    "a sample": ("FROM log", "FROM log USING SAMPLE 10", "got SAMPLE"),
    "a sample of the table": ("FROM log", "FROM log TABLESAMPLE 10%", "got SAMPLE"),
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
    ],
)
def test_what_treats_each_row_alone_passes(before: str, after: str, tmp_path: Path) -> None:
    asked = shop(tmp_path, before, after)
    job = load_job(asked.job_path)
    prepare(asked, job, load_features(asked.job_path.parent / job.data.schema))


def test_workers_below_none_are_refused() -> None:
    with pytest.raises(SchemaError, match="direct_num_workers must not be negative, got -1;"):
        pipeline_options(["--direct_num_workers=-1"])


def test_samples_are_not_written_over_a_directory(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="output is a directory"):
        expand(tmp_path / "dataset", tmp_path)
