"""The steps of a build in somebody else's pipeline: its rows, its samples, all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from pipelines.beam.io import (
    INCOMING,
    BuildDataset,
    MakeSamples,
    ReadDataset,
    ReadSource,
    WriteDataset,
)
from pipelines.build import build
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from tests.pipelines.logs import (
    bytes_of,
    raw_rows,
    request,
    samples_of,
    write_job,
    write_log,
)

ROWS = raw_rows(300, seed=0)


def sorted_rows(tables: list[pa.Table]) -> list[str]:
    return sorted(str(row) for table in tables for row in table.to_pylist())


def columns_and_rows(expected: list[pa.Table]):
    def check(tables: list[pa.Table]) -> None:
        assert {tuple(t.column_names) for t in tables} == {tuple(expected[0].column_names)}
        assert len({t.schema for t in tables}) == 1
        assert sorted_rows(tables) == sorted_rows(expected)

    return check


@pytest.mark.slow
def test_rows_of_a_source_are_those_of_its_files(tmp_path: Path) -> None:
    rows, job = write_log(tmp_path / "log"), write_job(tmp_path / "job")
    (tmp_path / "log" / "torn.parquet").write_bytes(b"PAR1")
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        read: Any = pipeline | ReadSource(job, tmp_path / "log")
        assert_that(read["rows"], columns_and_rows([rows]), "rows")
        files = read["rejects"] | beam.Map(lambda reject: (reject.file, reject.position))
        assert_that(files, equal_to([("torn.parquet", None)]), "rejects")
    assert ReadSource(job, tmp_path / "log").schema.names == rows.schema.names
    assert read["rows"].element_type is pa.Table


def test_a_source_that_the_job_lacks_is_refused_by_name(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    message = f"source must be one of the job's, got 'lock' in {job}; use one of log"
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        ReadSource(job, tmp_path / "log", source="lock")


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 3])
def test_samples_are_those_of_the_dataset_built_of_the_same_rows(
    tmp_path: Path, num_parts: int
) -> None:
    job = write_job(tmp_path / "job")
    bad = ROWS.slice(0, 1).set_column(0, "session", pa.array([None], pa.int64()))
    tables = [bad, *ROWS.slice(1).combine_chunks().to_batches(max_chunksize=70)]
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        rows = pipeline | beam.Create(tables)
        written: Any = rows | WriteDataset(job, tmp_path / "dataset", name="rows")
        made: Any = rows | MakeSamples(job, num_parts=num_parts)
        both = (
            (made["rejects"] | "made" >> beam.Map(str)) | "of samples" >> beam.combiners.ToList(),
            (written["rejects"] | "put" >> beam.Map(str)) | "of parts" >> beam.combiners.ToList(),
        ) | beam.Flatten()
        assert_that(both, same_rejects, "rejects")
        _ = made["samples"] | beam.ParDo(Save(tmp_path / "samples"))
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        expected = [pq.read_table(p) for p in sorted((tmp_path / "samples").iterdir())]
        read = pipeline | ReadDataset(tmp_path / "dataset")
        assert_that(read, lambda found: rows_equal(found, expected))
    assert sum(t.num_rows for t in expected) == len(samples_of(ROWS.slice(1)))


def same_rejects(found: list[list[str]]) -> None:
    assert sorted(found[0]) == sorted(found[1])
    assert len(found[0]) == len(ROWS["items"][0])


class Save(beam.DoFn):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir()

    def process(self, table: pa.Table) -> None:
        pq.write_table(table, self.path / f"{len(list(self.path.iterdir()))}.parquet")


def rows_equal(found: list[pa.Table], expected: list[pa.Table]) -> None:
    assert found[0].column_names == expected[0].column_names
    assert sorted_rows(found) == sorted_rows(expected)


@pytest.mark.slow
def test_a_build_inside_a_pipeline_gives_the_bytes_of_the_command(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job", on_error="reject_files")
    (tmp_path / "log" / "torn.parquet").write_bytes(b"PAR1")
    build(request(job, tmp_path / "log", tmp_path / "expected"))
    segments: list[str] = []
    for attempt in range(2):  # the second time it is there
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            built: Any = pipeline | BuildDataset(job, tmp_path / "log", tmp_path / "dataset")
            files = built["rejects"] | beam.Map(lambda reject: reject.file)
            assert_that(files, equal_to(["torn.parquet"] if attempt == 0 else []), "rejects")
            (segment,) = open_dataset(tmp_path / "expected").segments
            assert_that(built["segment"], equal_to([segment.manifest.id]), "segment")
        segments.append(segment.manifest.id)
        assert bytes_of(tmp_path / "dataset") == bytes_of(tmp_path / "expected")
    assert list((tmp_path / "dataset").glob(f"{INCOMING}*")) == []
