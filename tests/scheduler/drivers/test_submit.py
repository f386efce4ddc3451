"""Submission of a job: rows of its input, and sizes for this machine."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.prepare import PART_INPUT_BYTES
from presage.scheduler.drivers import run_jobs as command
from presage.scheduler.drivers import submit as module
from presage.scheduler.drivers.driver import DriverOptions
from presage.scheduler.drivers.run_jobs import RunRequest, plan_jobs
from presage.scheduler.drivers.submit import submit
from presage.schemas.config.schedule import BudgetConfig
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.scheduler.small_job import write_job

GIB = 1 << 30
LINES = "".join(f"{i},a longer text {i}\n" for i in range(100_000))


def job_of(folder: Path, kind: str, files: str) -> Path:
    job = write_job(folder)
    columns = ", columns: {a: int64, b: string}" if kind != "parquet" else ""
    text = job.read_text().replace(
        '{files: "*.parquet", format: parquet}', f'{{files: "{files}", format: {kind}{columns}}}'
    )
    job.write_text(text)
    return job


def rows_of(folder: Path, kind: str, files: str) -> int:
    job = job_of(folder, kind, files)
    submitted, _ = submit(job, {"small": Location.parse(folder / "log")}, folder / "out", 0.0)
    return submitted.facts.num_samples


def test_rows_of_text_are_estimated_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_text(LINES)
    (tmp_path / "log" / "b.csv").write_text(LINES[: len(LINES) // 2])
    (tmp_path / "log" / "other.txt").write_text(LINES)
    assert rows_of(tmp_path, "csv", "*.csv") == pytest.approx(150_000, rel=0.05)


def test_rows_of_compressed_text_are_estimated(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    assert rows_of(tmp_path, "jsonl", "*.gz") == pytest.approx(100_000, rel=0.3)


def test_rows_of_parquet_are_counted_and_damage_is_left_to_the_build(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    pq.write_table(pa.table({"a": range(321)}), tmp_path / "log" / "a.parquet")
    assert rows_of(tmp_path, "parquet", "*.parquet") == 321
    (tmp_path / "two" / "log").mkdir(parents=True)
    (tmp_path / "two" / "log" / "a.parquet").write_bytes(b"no parquet")
    assert rows_of(tmp_path / "two", "parquet", "*.parquet") == 100_000, "what generate says"


def test_parts_of_a_segment_follow_from_the_bytes_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").mkdir()
    for name, rows in (("a", 1000), ("b", 3000)):
        pq.write_table(pa.table({"a": range(rows)}), tmp_path / "log" / f"{name}.parquet")
    sizes = [(tmp_path / "log" / f"{name}.parquet").stat().st_size for name in "ab"]
    monkeypatch.setattr(module, "PART_BYTES", sizes[0])
    job = job_of(tmp_path, "parquet", "*.parquet")
    submitted, _ = submit(job, {"small": Location.parse(tmp_path / "log")}, tmp_path / "out", 0.0)
    assert submitted.facts.part_rows == 4000 / (1 + -(-sizes[1] // sizes[0]))


def test_part_bytes_are_those_of_the_build() -> None:
    assert module.PART_BYTES == PART_INPUT_BYTES


def test_name_of_a_job_cannot_lead_out_of_the_output(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    job = write_job(tmp_path / "in")
    job.write_text(job.read_text().replace("name: small", "name: ../../escaped"))
    with pytest.raises(SchemaError, match="name must consist of letters"):
        submit(job, {}, tmp_path / "a" / "b" / "out", 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("cpus", [1.0, 2.0])
def test_jobs_are_admitted_on_small_machines_by_default(
    cpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = BudgetConfig(cpus=cpus, memory=4 * GIB)
    monkeypatch.setattr(command, "machine_budget", lambda: machine)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_text(LINES)
    messages: list[str] = []
    request = RunRequest(
        job_files=[job_of(tmp_path, "csv", "*.csv")],
        inputs={"small": Location.parse(tmp_path / "log")},
        output=tmp_path / "out",
        storage=Location.parse(tmp_path / "out"),
        budget=None,
        driver=DriverOptions(output=tmp_path / "out", progress=messages.append),
    )
    verbs = [action.verb for action, _ in plan_jobs(request)]
    assert verbs == ["admit", "start"]
    assert [line.split(" instead")[0] for line in messages] == (
        []
        if cpus == 2.0
        else ["small: preprocessing.worker has 0.5", "small: training.replica has 0.5"]
    )
