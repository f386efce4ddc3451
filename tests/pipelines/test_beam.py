"""Transforms for users' pipelines, in Python and YAML, and the commit as their last step."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from apache_beam.pvalue import Row
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.utils.timestamp import Timestamp
from apache_beam.yaml import yaml_transform

from presage.pipelines.beam import io as committing
from presage.pipelines.beam.io import (
    BuildDataset,
    MakeSamples,
    ReadDataset,
    ReadSource,
    WriteDataset,
    select_columns,
)
from presage.pipelines.beam.yaml import rows_of_table, tables_of_rows
from presage.pipelines.build import build
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import SegmentManifest, find_root
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.pipelines.logs import (
    bytes_of,
    raw_rows,
    request,
    sample_tuples,
    samples_of,
    stored_samples,
    unnamed_places,
    vacuum_later,
    write_job,
    write_log,
)

ROWS = raw_rows(300, seed=0)


def write(directory: Path, tables: Sequence[pa.Table | pa.RecordBatch], name: str) -> Path:
    job = write_job(directory / "job")
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        rows = pipeline | beam.Create(tables)
        _ = rows | WriteDataset(job, directory / name, name="day-1", num_parts=3)
    return directory / name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of all rows in one table."""
    return write(tmp_path_factory.mktemp("whole"), [ROWS], "dataset")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log of which a file is damaged, its job, and the dataset of the command."""
    folder = tmp_path_factory.mktemp("built")
    write_log(folder / "log")
    (folder / "log" / "torn.parquet").write_bytes(b"PAR1")
    job = write_job(folder / "job", on_error="reject_files")
    build(request(job, folder / "log", folder / "dataset"))
    return folder


@pytest.mark.slow
def test_tables_of_a_pipeline_become_a_dataset_whatever_their_order_and_cuts(
    whole: Path, tmp_path: Path
) -> None:
    shuffled = ROWS.take(pa.array(np.random.default_rng(1).permutation(ROWS.num_rows)))
    batches = shuffled.combine_chunks().to_batches(max_chunksize=37)
    assert bytes_of(write(tmp_path, batches, "cut")) == bytes_of(whole)
    assert stored_samples(whole) == samples_of(ROWS)
    assert verify(whole)["problems"] == []
    assert unnamed_places(whole) == []


@pytest.mark.slow
def test_samples_of_a_dataset_come_back_as_tables(whole: Path) -> None:
    def check(tables: list[pa.Table]) -> None:
        assert sample_tuples(*tables) == samples_of(ROWS)

    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        assert_that(pipeline | ReadDataset(whole), check)


def test_rows_without_a_declared_column_are_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"^rows have no column 'user'"):
        select_columns(ROWS.drop_columns(["user"]), ROWS.column_names, "day-1")


def test_a_job_without_declared_columns_is_refused_when_the_pipeline_is_made(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job", columns="{}")
    with pytest.raises(SchemaError, match="job must have one source that declares its columns"):
        WriteDataset(job, tmp_path / "dataset", name="day-1")


def test_dataset_of_rows_may_lie_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    WriteDataset(write_job(tmp_path / "job"), "dataset", name="day-1")


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
@pytest.mark.parametrize("num_parts", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_samples_are_those_of_the_dataset_built_of_the_same_rows(
    tmp_path: Path, num_parts: int
) -> None:
    job = write_job(tmp_path / "job")
    bad = ROWS.slice(0, 1).set_column(0, "session", pa.array([None], pa.int64()))
    tables = [bad, *ROWS.slice(1).combine_chunks().to_batches(max_chunksize=70)]
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        rows = pipeline | beam.Create(tables)
        written: Any = rows | WriteDataset(job, tmp_path / "dataset", name="rows")
        stored: Any = rows | MakeSamples(job, num_parts=num_parts)
        both = (
            (stored["rejects"] | "made" >> beam.Map(str)) | "of samples" >> beam.combiners.ToList(),
            (written["rejects"] | "put" >> beam.Map(str)) | "of parts" >> beam.combiners.ToList(),
        ) | beam.Flatten()
        assert_that(both, same_rejects, "rejects")
        _ = stored["samples"] | beam.ParDo(Save(tmp_path / "samples"))
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        expected = [pq.read_table(p) for p in sorted((tmp_path / "samples").iterdir())]
        read = pipeline | ReadDataset(tmp_path / "dataset")
        assert_that(read, lambda found: rows_equal(found, expected))
    manifest = open_dataset(tmp_path / "dataset").segments[0].manifest
    assert manifest.num_rejects == len(bad["items"][0])
    assert manifest.num_samples == len(samples_of(ROWS.slice(1)))
    assert sum(t.num_rows for t in expected) == manifest.num_samples


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


def check_counters(pipeline: Any, manifest: SegmentManifest) -> None:
    """Check what the steps of a build have counted."""
    counters = pipeline.result.metrics().query()["counters"]
    found = {(c.key.metric.namespace, c.key.metric.name): c.committed for c in counters}
    rows, samples = manifest.num_rows, manifest.num_samples
    assert found["ReadRows", "out-rows"] == found["MapRows", "in-rows"] == rows
    assert found["MapRows", "out-rows"] == found["BuildParts", "in-rows"] == samples
    assert found["ReadRows", "out-bytes"] == found["MapRows", "in-bytes"] > 0
    assert found["BuildParts", "out-bytes"] == manifest.dataset_bytes
    assert all(found[step, "msec"] > 0 for step in ("ReadRows", "MapRows", "BuildParts"))


@pytest.mark.slow
def test_a_build_inside_a_pipeline_gives_the_bytes_of_the_command(
    built: Path, tmp_path: Path
) -> None:
    (expected,) = open_dataset(built / "dataset").segments
    for rejected in (["torn.parquet"], []):  # the second time it is there
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            transform = BuildDataset(
                built / "job" / "job.yaml", built / "log", tmp_path / "dataset"
            )
            outputs: Any = pipeline | transform
            files = outputs["rejects"] | beam.Map(lambda reject: reject.file)
            assert_that(files, equal_to(rejected), "rejects")
            assert_that(outputs["segment"], equal_to([expected.id]), "segment")
        assert bytes_of(tmp_path / "dataset") == bytes_of(built / "dataset")
        if rejected:
            check_counters(pipeline, expected.manifest)
    assert unnamed_places(tmp_path / "dataset") == []


FILES = Path(__file__).resolve().parents[2] / "deploy" / "beam_yaml"
DAY = {
    "type": "chain",
    "transforms": [
        {"type": "PresageReadDataset", "config": {"dataset": "{{ dataset }}"}},
        {"type": "Filter", "config": {"language": "python", "keep": "label == 1"}},
        {"type": "WriteToJson", "config": {"path": "{{ output }}"}},
    ],
}


def run(text: str, variables: Mapping[str, Path | str]) -> None:
    filled = yaml_transform.expand_jinja(text, {k: str(v) for k, v in variables.items()}, [])
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        yaml_transform.expand_pipeline(pipeline, filled, pipeline_path=str(FILES / "any.yaml"))


def json_lines(directory: Path, begin: str) -> list[dict[str, Any]]:
    paths = sorted(directory.glob(f"{begin}-*-of-*"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.nightly
def test_a_build_in_yaml_gives_the_bytes_of_the_command(built: Path, tmp_path: Path) -> None:
    variables = {
        "job": built / "job" / "job.yaml", "input": built / "log", "output": tmp_path / "dataset",
    }  # fmt: skip
    run((FILES / "build.yaml").read_text(), variables)
    assert bytes_of(tmp_path / "dataset") == bytes_of(built / "dataset")
    (reject,) = json_lines(tmp_path, "dataset.rejects.json")
    assert (reject["file"], reject.get("position")) == ("torn.parquet", None)


@pytest.mark.slow
def test_rows_of_yaml_become_a_dataset(tmp_path: Path) -> None:
    rows, job = write_log(tmp_path / "log"), write_job(tmp_path / "job")
    variables = {"job": job, "input": tmp_path / "log", "output": tmp_path / "dataset"}
    run((FILES / "filter.yaml").read_text().replace("user != 4", "user != 10"), variables)
    kept = rows.filter(pc.field("user") != 10)
    assert stored_samples(tmp_path / "dataset") == samples_of(kept)
    assert 0 < kept.num_rows < rows.num_rows


@pytest.mark.nightly
def test_samples_of_a_dataset_are_rows_of_yaml(built: Path, tmp_path: Path) -> None:
    spec = {"pipeline": DAY, "providers": [{"include": "providers.yaml"}]}
    run(yaml.safe_dump(spec), {"dataset": built / "dataset", "output": tmp_path / "day"})
    tables = read_samples(open_dataset(built / "dataset"))
    expected = [row for t in tables for row in t.to_pylist() if row["label"] == 1]
    names = ("session", "user", "history", "item", "label")
    assert sorted(str([r[n] for n in names]) for r in json_lines(tmp_path, "day")) == sorted(
        str([r[n] for n in names]) for r in expected
    )
    assert expected


def test_a_row_that_does_not_fit_comes_alone_and_the_others_typed() -> None:
    types = {"user": pa.int8(), "time": pa.timestamp("us"), "history": pa.large_list(pa.int64())}
    time = Timestamp(micros=1_767_225_600_000_001)
    rows = [Row(user=u, time=time, history=[], more=1) for u in (1, 2, 300, 4)]
    tables = list(tables_of_rows(rows, types))
    typed = [t for t in tables if t.schema == pa.schema(types)]
    assert [t["user"].to_pylist() for t in typed] == [[1, 2], [4]]
    (alone,) = (t for t in tables if t.schema != pa.schema(types))
    assert alone["user"].to_pylist() == ["300"]
    back = list(rows_of_table(typed[0]))
    assert back[0] == Row(user=1, time=time, history=[])
    texts = [Row(user=1, time="2026-01-01 00:00:00", history=[5])]
    assert [t.schema for t in tables_of_rows(texts, types)] == [pa.schema(types)]


Commit = Callable[[], str]


@pytest.fixture(scope="module")
def uncommitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Commit]:
    """A dataset's folder with the parts that a pipeline has written, and the commit of them."""
    folder = tmp_path_factory.mktemp("uncommitted")
    waiting: list[Any] = []

    def wait(*arguments: Any) -> str:
        waiting.append(arguments)
        return "later"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committing, "commit_pending", wait)
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            job = write_job(folder / "job")
            _ = pipeline | beam.Create([ROWS]) | WriteDataset(job, folder / "dataset", "day-1", 3)
    return folder / "dataset", lambda: committing.commit_pending(*waiting[0])


@pytest.mark.slow
def test_write_that_fails_once_anywhere_loses_nothing_and_the_retry_completes(
    uncommitted: tuple[Path, Commit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, commit = uncommitted
    shutil.copytree(dataset, tmp_path / "before")
    written: list[Location] = []
    failing = -1  # first none does

    def fails_once(write: Callable[[Location, bytes], Any]) -> Callable[[Location, bytes], Any]:
        def wrapped(location: Location, data: bytes) -> Any:
            written.append(location)
            if len(written) == failing + 1:
                raise OSError(5, "Input/output error", str(location))
            return write(location, data)

        return wrapped

    for name in ("write_bytes", "create"):
        monkeypatch.setattr(Location, name, fails_once(getattr(Location, name)))
    wanted: dict[str, bytes] = {}
    num_written = 0
    while failing <= num_written:
        shutil.rmtree(dataset)
        shutil.copytree(tmp_path / "before", dataset)
        written.clear()
        with suppress(OSError):
            commit()
        num_written = len(written)
        written.append(Location.parse(dataset))  # the second commit does not fail
        commit()
        wanted = wanted or bytes_of(dataset)
        assert bytes_of(dataset) == wanted, f"write {failing} failed"
        failing += 1
    assert failing > 8
    vacuum_later(dataset)
    assert unnamed_places(dataset) == []
    assert open_dataset(dataset).segments[0].manifest.num_samples == len(samples_of(ROWS))
    assert verify(dataset)["problems"] == []


def test_commit_whose_parts_are_gone_is_refused_instead_of_committing_what_is_left(
    uncommitted: tuple[Path, Commit],
) -> None:
    dataset, commit = uncommitted
    shutil.rmtree(dataset)
    (dataset / "segments").mkdir(parents=True)
    with pytest.raises(SchemaError, match="file of a part was removed"):
        commit()
    assert find_root(dataset) is None
