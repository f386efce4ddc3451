"""The SQL view gives the rows that `expand` gives, read by DuckDB with nothing of ours."""

import os
import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.clustering.reader import expand
from pipelines.table.content_hash import content_hash
from pipelines.table.view import VIEW, view_sql
from schemas.dataset import open_dataset
from tests import real_logs
from tests.pipelines.appending import DEFAULT, EXTRA, addition, changed
from tests.pipelines.logs import SCHEMA, built, bytes_of, request, write_log
from tests.pipelines.shifting import JOB, STORAGES, shifting_log


def by_view(dataset: Path, name: str) -> pa.Table:
    """Run the view from inside the dataset, as its first line says."""
    before = Path.cwd()
    os.chdir(dataset)
    try:
        connection = duckdb.connect()
        connection.execute((dataset / VIEW).read_text())
        return connection.sql(f"FROM {name}").to_arrow_table()
    finally:
        os.chdir(before)


def check(dataset: Path, scratch: Path) -> None:
    for name, model_inputs in (("samples", False), ("model_inputs", True)):
        expand(dataset, scratch / "x.parquet", model_inputs=model_inputs)
        expected, found = pq.read_table(scratch / "x.parquet"), by_view(dataset, name)
        assert found.column_names == expected.column_names
        assert content_hash([found]) == content_hash([expected])


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGES)
def test_view_covers_every_layout_of_a_group(name: str, tmp_path: Path) -> None:
    shifting_log(tmp_path / "log", 1000)
    (tmp_path / "job.yaml").write_text(JOB.replace("{storage}", STORAGES[name]))
    (tmp_path / "schema.pbtxt").write_text(SCHEMA)
    build(request(tmp_path / "job.yaml", tmp_path / "log", tmp_path / "dataset"))
    check(tmp_path / "dataset", tmp_path)
    found = by_view(tmp_path / "dataset", "samples")["history"]
    assert found.null_count > 0
    assert [] in found.to_pylist()


@pytest.mark.slow
def test_view_joins_parts_and_stays_true_when_the_dataset_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.prepare.PART_INPUT_BYTES", 2_000)
    dataset = built(tmp_path)
    assert len(list(dataset.glob("segments/*/samples/*"))) > 3
    check(Path(shutil.move(dataset, tmp_path / "else where")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("default", ["", DEFAULT])
def test_view_answers_for_columns_that_a_segment_lacks(default: str, tmp_path: Path) -> None:
    dataset = built(tmp_path)
    write_log(tmp_path / "log-1", num_rows=200, seed=1)
    job = changed(
        tmp_path / "newer",
        ("clicked AS label", "clicked AS label, 1.5::FLOAT AS price"),
        schema=SCHEMA + EXTRA + default,
    )
    build(addition(job, tmp_path / "log-1", dataset))
    check(dataset, tmp_path)
    assert len(open_dataset(dataset).segments) == 2


def test_view_quotes_names_that_sql_would_misread(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = changed(
        tmp_path / "job",
        ("clicked AS label", 'clicked AS label, 1 AS "it\'s ""new"" [*]", 2 AS "select"'),
        schema=SCHEMA
        + 'feature { name: "it\'s \\"new\\" [*]" type: INT annotation { tag: "kept" } }\n'
        + 'feature { name: "select" type: INT annotation { tag: "kept" } }\n',
    )
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    check(tmp_path / "dataset", tmp_path)


@pytest.mark.slow
def test_view_without_groups_reads_the_samples_alone(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = changed(
        tmp_path / "job",
        ("{user: [session, user, history]}", "{}"),
        ("transforms: {user:", "transforms: {samples:"),
    )
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    assert "JOIN" not in (tmp_path / "dataset" / VIEW).read_text()
    check(tmp_path / "dataset", tmp_path)


@pytest.mark.slow
def test_view_is_the_same_text_whenever_it_is_made(tmp_path: Path) -> None:
    dataset = built(tmp_path)
    assert view_sql(open_dataset(dataset)) == (dataset / VIEW).read_text()
    before = bytes_of(dataset)
    build(request(tmp_path / "job" / "job.yaml", tmp_path / "log", dataset))
    assert bytes_of(dataset) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mind", "ebnerd"])
def test_view_of_real_logs(name: str, shared_data: Path, tmp_path: Path) -> None:
    check(real_logs.built(name, shared_data)[0], tmp_path)
