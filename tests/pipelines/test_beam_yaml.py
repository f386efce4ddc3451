"""Our transforms in Beam YAML, by the files of `deploy/beam_yaml`, on the local runner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
import yaml
from apache_beam.pvalue import Row
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.utils.timestamp import Timestamp
from apache_beam.yaml import yaml_transform

from pipelines.beam.io import ReadSource, WriteDataset
from pipelines.beam.yaml import rows_of_table, tables_of_rows
from pipelines.build import build
from pipelines.clustering.reader import read_samples
from schemas.dataset import open_dataset
from tests.pipelines.logs import bytes_of, request, samples_of, write_job, write_log

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


@pytest.mark.slow
def test_a_build_in_yaml_gives_the_bytes_of_the_command(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    (tmp_path / "log" / "torn.parquet").write_bytes(b"PAR1")
    job = write_job(tmp_path / "job", on_error="reject_files")
    build(request(job, tmp_path / "log", tmp_path / "expected"))
    variables = {"job": job, "input": tmp_path / "log", "output": tmp_path / "dataset"}
    run((FILES / "build.yaml").read_text(), variables)
    assert bytes_of(tmp_path / "dataset") == bytes_of(tmp_path / "expected")
    (reject,) = json_lines(tmp_path, "dataset.rejects.json")
    assert (reject["file"], reject.get("position")) == ("torn.parquet", None)


@pytest.mark.slow
def test_rows_of_yaml_become_the_dataset_that_their_tables_become(tmp_path: Path) -> None:
    rows, job = write_log(tmp_path / "log"), write_job(tmp_path / "job")
    text = (FILES / "filter.yaml").read_text().replace("user != 4", "True")
    variables = {"job": job, "input": tmp_path / "log", "output": tmp_path / "dataset"}
    run(text, variables)
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        read: Any = pipeline | ReadSource(job, tmp_path / "log")
        _ = read["rows"] | WriteDataset(job, tmp_path / "expected", name="without-user-4")
    assert bytes_of(tmp_path / "dataset") == bytes_of(tmp_path / "expected")
    (manifest,) = (s.manifest for s in open_dataset(tmp_path / "dataset").segments)
    assert manifest.num_samples == len(samples_of(rows))


@pytest.mark.slow
def test_samples_of_a_dataset_are_rows_of_yaml(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job")
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    spec = {"pipeline": DAY, "providers": [{"include": "providers.yaml"}]}
    variables = {"dataset": tmp_path / "dataset", "output": tmp_path / "day"}
    run(yaml.safe_dump(spec), variables)
    tables = read_samples(open_dataset(tmp_path / "dataset"))
    expected = [row for t in tables for row in t.to_pylist() if row["label"] == 1]
    found = json_lines(tmp_path, "day")
    names = ("session", "user", "history", "item", "label")
    assert sorted(str([r[n] for n in names]) for r in found) == sorted(
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
