"""How input is split into segments, and which arguments of `run` are rejected."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler.__main__ import main
from scheduler.drivers.job_files import segment_folder
from scheduler.drivers.submit import split_input, submit
from schemas.config.job import load_job
from schemas.errors import SchemaError
from tests.scheduler.made import write_job


def write_log(folder: Path, names: list[str], rows: int = 10) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"a": list(range(rows))}), folder / name)
    return folder


def test_split_input_makes_a_segment_of_each_file_in_order(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    source = write_log(tmp_path / "log", ["b.parquet", "a.parquet", "deep/c.parquet"])
    (source / "notes.txt").write_text("no log")
    cut = split_input(job, source, tmp_path / "job")
    assert [[path.name for path in part] for part in cut] == [["a.parquet"], ["b.parquet"]]
    linked = segment_folder(tmp_path / "job", 1) / "b.parquet"
    assert linked.read_bytes() == (source / "b.parquet").read_bytes()
    assert split_input(job, source, tmp_path / "job") == cut


def test_split_input_of_files_that_changed_is_refused(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    source = write_log(tmp_path / "log", ["a.parquet"])
    split_input(job, source, tmp_path / "job")
    write_log(source, ["b.parquet"])
    with pytest.raises(SchemaError, match="input files differ from those listed in "):
        split_input(job, source, tmp_path / "job")
    with pytest.raises(SchemaError, match="input has no files of the job"):
        split_input(job, tmp_path / "empty", tmp_path / "other")


def test_submit_counts_the_rows_of_the_input(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    log = write_log(tmp_path / "log", ["a.parquet", "b.parquet"], rows=30)
    told, paths = submit(job, {"small": log}, tmp_path / "out", 5.0)
    assert told.facts.num_samples == 60
    assert told.num_segments == paths.num_segments == 2
    assert told.document == job.read_text()
    assert paths.dataset == (tmp_path / "out" / "small" / "dataset").resolve()


CLUSTER = "namespace: a\nimage: b\nvolumes: [{{path: {}, claim: c}}]\n"
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
        "output is in no volume that Pods can write: /elsewhere in cluster.yaml; use an "
        "--output below {}",
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
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, message = REFUSED[name]
    write_job(tmp_path)
    write_log(tmp_path / "log", ["a.parquet"])
    (tmp_path / "budget.yaml").write_text("cpu: 2\n")
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "job.yaml", *words, "--dry-run"]) == 1
    message = message.replace("{}", str(tmp_path))
    assert re.fullmatch(f"error: {re.escape(message)}\n", capsys.readouterr().err)


def test_run_dry_says_what_would_be_decided_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    write_log(tmp_path / "log", ["a.parquet", "b.parquet"])
    (tmp_path / "budget.yaml").write_text("cpus: 4\nmemory: 16GiB\n")
    monkeypatch.chdir(tmp_path)
    words = ["--input", "log", "--budget", "budget.yaml", "--dry-run"]
    assert main(["run", "job.yaml", *words]) == 0
    admit, start = capsys.readouterr().out.splitlines()
    assert admit.startswith("small: admit : ")
    assert admit.endswith(" s predicted, within 4 cores and 17,179,869,184 bytes")
    assert start == "small: start segment-0.1: segment 0 of 2 is to be built"
    assert not (tmp_path / "scheduled" / "scheduler.jsonl").exists()
    assert not (tmp_path / "scheduled" / "small" / "processes").exists()
