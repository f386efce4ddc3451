"""How input is split into segments, and which arguments of `run` are rejected."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.scheduler.__main__ import main
from presage.scheduler.drivers.job_files import copy_job_file
from presage.scheduler.drivers.submit import split_input, submit
from presage.schemas.config.job import load_job
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.scheduler.small_job import write_job
from tests.shared import output_of, refusal_of


def write_log(folder: Path, names: list[str], rows: int = 10) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"a": list(range(rows))}), folder / name)
    return folder


def test_split_input_makes_a_segment_of_each_file_in_order(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    source = write_log(tmp_path / "log", ["b.parquet", "a.parquet", "deep/c.parquet"])
    (source / "notes.txt").write_text("no log")
    cut = split_input(job, Location.parse(source), tmp_path / "job")
    assert [[entry.path for entry in part] for part in cut] == [["a.parquet"], ["b.parquet"]]
    assert split_input(job, Location.parse(source), tmp_path / "job") == cut
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["segments.json"]


def test_split_input_of_files_that_changed_is_refused(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    source = write_log(tmp_path / "log", ["a.parquet"])
    location = Location.parse(source)
    split_input(job, location, tmp_path / "job")
    write_log(source, ["b.parquet"])
    with pytest.raises(SchemaError, match="input files differ from those listed in "):
        split_input(job, location, tmp_path / "job")
    with pytest.raises(SchemaError, match="input has no files of the job"):
        split_input(job, Location.parse(tmp_path / "empty"), tmp_path / "other")


@pytest.mark.parametrize(
    ("names", "refusal"),
    [
        (["a.parquet", "_delta_log/0.json"], "belongs to a table format"),
        (["_temporary/a.parquet", "b.parquet"], "belong to unfinished jobs"),
    ],
)
def test_split_input_refuses_what_a_build_of_the_folder_refuses(
    tmp_path: Path, names: list[str], refusal: str
) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace('"*.parquet"', '"**/*.parquet"'))
    job = load_job(path)
    source = write_log(tmp_path / "log", [*names, ".hidden.parquet"])
    with pytest.raises(SchemaError, match=refusal):
        split_input(job, Location.parse(source), tmp_path / "job")


def test_submit_counts_the_rows_of_the_input(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    log = write_log(tmp_path / "log", ["a.parquet", "b.parquet"], rows=30)
    event, paths = submit(job, {"small": Location.parse(log)}, tmp_path / "out", 5.0)
    assert event.facts.num_samples == 60
    assert event.num_segments == paths.num_segments == 2
    assert paths.segments == (("a.parquet",), ("b.parquet",))
    assert event.document == job.read_text()
    assert paths.dataset.local == (tmp_path / "out" / "small" / "dataset").resolve()


def test_submit_of_a_job_at_a_url_leaves_records_alone_in_the_folder(tmp_path: Path) -> None:
    job, log = write_job(tmp_path), write_log(tmp_path / "local", ["a.parquet", "b.parquet"], 30)
    source = Location.parse(f"memory://{tmp_path.name}/log")
    for entry in Location.parse(log).entries():
        (source / entry.path).upload(log / entry.path)
    storage = Location.parse(f"memory://{tmp_path.name}/jobs")
    event, paths = submit(job, {"small": source}, tmp_path / "out", 5.0, storage=storage)
    assert event.facts.num_samples == 60
    assert paths.input == source
    copy_job_file(paths, event.document)
    assert [entry.path for entry in storage.entries()] == ["small/job.yaml", "small/schema.pbtxt"]
    assert paths.job_file.read_bytes() == job.read_bytes()
    below = (tmp_path / "out").rglob("*")
    assert [path.name for path in below if path.is_file()] == ["segments.json"]


def test_schema_outside_the_jobs_folder_is_copied_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    job = write_job(tmp_path / "jobs")
    (tmp_path / "jobs" / "schema.pbtxt").rename(tmp_path / "other.pbtxt")
    text = job.read_text().replace("data:\n", "data:\n  schema: ../other.pbtxt\n")
    job.write_text(text)
    log = Location.parse(write_log(tmp_path / "log", ["a.parquet"]))
    event, paths = submit(job, {"small": log}, tmp_path / "out", 5.0, allow_outside=True)
    copy_job_file(paths, event.document)
    copied, submitted = load_job(paths.job_file), load_job(job)
    assert replace(copied, data=replace(copied.data, schema="../other.pbtxt")) == submitted
    copy = paths.storage / copied.data.schema
    assert copy.read_bytes() == (tmp_path / "other.pbtxt").read_bytes()


CLUSTER = """\
namespace: a
image: b
pod_template:
  spec: {{containers: [{{name: main, volumeMounts: [{{name: c, mountPath: {}}}]}}]}}
"""
REFUSED = {
    "a driver of a cluster without one": (
        ["--driver", "kubernetes"],
        "driver kubernetes needs a cluster; add a --cluster file",
    ),
    "a cluster for this machine": (
        ["--cluster", "cluster.yaml"],
        "driver process takes no cluster: cluster.yaml; use --driver kubernetes",
    ),
    "an output that Pods do not see": (
        ["--driver", "kubernetes", "--cluster", "cluster.yaml", "--output", "/elsewhere"],
        "Pods cannot write to /elsewhere, which none of their volumes has in cluster.yaml; give "
        "--storage a URL or a path below {}",
    ),
    "an input of no job": (
        ["--input", "large=log"],
        "--input names no job of this run: 'large'; use 'small'",
    ),
    "one job twice": (
        ["job.yaml", "--input", "small=log"],
        "two jobs have the same name: 'small' in job.yaml; rename one",
    ),
    "a budget file that is none": (
        ["--budget", "budget.yaml"],
        "unknown key: cpu in budget.yaml:1; did you mean 'cpus'?",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_run_of_what_cannot_be_run_says_why(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = REFUSED[name]
    write_job(tmp_path)
    write_log(tmp_path / "log", ["a.parquet"])
    (tmp_path / "budget.yaml").write_text("cpu: 2\n")
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    message = message.replace("{}", str(tmp_path))
    assert refusal_of(main, ["run", "job.yaml", *words, "--dry-run"]) == message


def test_run_with_its_log_at_a_url_is_told_of_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(write_job(tmp_path)), "--output", "s3://bucket/jobs"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        "argument --output: must be a local folder, got 's3://bucket/jobs'; give --storage "
        "s3://bucket/jobs for the jobs' files; see "
    ) in line


def test_run_dry_says_what_would_be_decided_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path)
    write_log(tmp_path / "log", ["a.parquet", "b.parquet"])
    (tmp_path / "budget.yaml").write_text("cpus: 4\nmemory: 16GiB\n")
    monkeypatch.chdir(tmp_path)
    words = ["--input", "log", "--budget", "budget.yaml", "--dry-run"]
    admit, start = output_of(main, ["run", "job.yaml", *words]).splitlines()
    assert admit.startswith("small: admit : ")
    assert admit.endswith(" s predicted, within 4 cores and 17,179,869,184 bytes")
    assert start == "small: start segment-0.1: segment 0 of 2 is to be built"
    assert not (tmp_path / "scheduled" / "scheduler.jsonl").exists()
    assert not (tmp_path / "scheduled" / "small" / "processes").exists()
