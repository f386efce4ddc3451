"""Our transforms in somebody else's pipeline: tables in, a dataset out, and back again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from pipelines.beam.io import INCOMING, ReadDataset, WriteDataset
from pipelines.clustering.reader import read_samples
from pipelines.table.verify import verify
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from tests.pipelines.logs import bytes_of, raw_rows, samples_of, write_job

ROWS = raw_rows(300, seed=0)


def write(directory: Path, tables: Sequence[pa.Table | pa.RecordBatch], name: str) -> Path:
    job = write_job(directory / "job")
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        rows = pipeline | beam.Create(tables)
        _ = rows | WriteDataset(job, directory / name, name="day-1", num_parts=3)
    return directory / name


def as_tuples(table: pa.Table) -> list[tuple[object, ...]]:
    return [
        (r["session"], r["time"], r["user"], tuple(r["history"]), r["item"], r["label"])
        for r in table.to_pylist()
    ]


@pytest.mark.slow
def test_tables_of_a_pipeline_become_a_dataset_whatever_their_order_and_cuts(
    tmp_path: Path,
) -> None:
    whole = write(tmp_path, [ROWS], "whole")
    shuffled = ROWS.take(pa.array(np.random.default_rng(1).permutation(ROWS.num_rows)))
    batches = shuffled.combine_chunks().to_batches(max_chunksize=37)
    assert bytes_of(write(tmp_path, batches, "cut")) == bytes_of(whole)
    found = [row for t in read_samples(open_dataset(whole)) for row in as_tuples(t)]
    assert sorted(found) == samples_of(ROWS)
    assert verify(whole)["problems"] == []
    assert list(whole.glob(f"{INCOMING}*")) == []


@pytest.mark.slow
def test_samples_of_a_dataset_come_back_as_tables(tmp_path: Path) -> None:
    dataset = write(tmp_path, [ROWS], "dataset")

    def check(tables: list[pa.Table]) -> None:
        assert sorted(row for t in tables for row in as_tuples(t)) == samples_of(ROWS)

    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        assert_that(pipeline | ReadDataset(dataset), check)


@pytest.mark.slow
def test_rows_that_cannot_be_used_are_rejects_and_the_others_are_there(tmp_path: Path) -> None:
    bad = ROWS.slice(0, 1).set_column(0, "session", pa.array([None], pa.int64()))
    dataset = write(tmp_path, [bad, ROWS.slice(1)], "dataset")
    manifest = open_dataset(dataset).segments[0].manifest
    assert manifest.num_rejects == len(bad["items"][0])
    assert manifest.num_samples == len(samples_of(ROWS.slice(1)))


@pytest.mark.slow
def test_rows_without_a_declared_column_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=re.escape("rows must have column 'user', got none")):
        write(tmp_path, [ROWS.drop_columns(["user"])], "dataset")


def test_a_job_without_declared_columns_is_refused_when_the_pipeline_is_made(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job", columns="{}")
    with pytest.raises(SchemaError, match="job must have one source that declares its columns"):
        WriteDataset(job, tmp_path / "dataset", name="day-1")
