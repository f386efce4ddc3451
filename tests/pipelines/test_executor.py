"""Builds in one process and with local workers: the same bytes, memory, number of workers."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from presage.pipelines.beam import runner
from presage.pipelines.beam.runner import local_workers
from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.exchange import keep_freed_memory
from presage.pipelines.samples import lookups
from presage.schemas.config.schedule import BudgetConfig
from tests import real_logs
from tests.pipelines import logs, test_joins, test_streams, transform_jobs
from tests.pipelines.logs import IN_PROCESS, ON_BEAM, PROCESSES, bytes_of, request
from tests.shared import error_of

BLOCKED = """
import json
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "apache_beam":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from presage.pipelines.cli import main

sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""


def shop(directory: Path) -> Path:
    """Sampled, with rejects of both kinds: keys that are null, values that SQL refuses."""
    rows = logs.raw_rows(300, seed=4)
    keys = [None if i % 50 == 7 else key for i, key in enumerate(rows["session"].to_pylist())]
    bad = rows.set_column(0, "session", [keys])
    (directory / "input").mkdir(parents=True)
    pq.write_table(bad, directory / "input" / "log.parquet", row_group_size=40)
    (directory / "input" / "torn.parquet").write_bytes(b"PAR1")
    job = logs.write_job(directory / "job", on_error="reject_files")
    text = job.read_text().replace(
        "  block_samples", "  sampling: {negatives: 0.5}\n  block_samples"
    )
    text = text.replace("clicked AS label", "(clicked / (user - 52))::INT + clicked AS label")
    job.write_text(text)
    schema = directory / "job" / "schema.pbtxt"
    weight = 'feature { name: "sample_weight" type: FLOAT annotation { tag: "weight" } }\n'
    schema.write_text(schema.read_text() + weight)
    return job


def fitted(directory: Path) -> Path:
    """Vocabularies, normalisation and quantiles."""
    transform_jobs.write_log(directory / "input", transform_jobs.raw_rows(400, seed=1))
    return transform_jobs.write_job(directory / "job")


def joined(directory: Path) -> Path:
    """Two side tables, one as of a time."""
    test_joins.write_input(directory / "input")
    return test_joins.write_job(directory / "job")


def joined_per(directory: Path) -> Path:
    """Look-ups after SQL per row over SQL per key."""
    test_joins.write_input(directory / "input")
    per = """per:
      key: session
      sql: SELECT *, row_number() OVER (ORDER BY time, _origin) AS n FROM log
    map: SELECT session, time, user, unnest(items) AS item, label FROM per"""
    before = "map: SELECT session, time, user, unnest(items) AS item, label FROM log"
    return test_joins.write_job(directory / "job", test_joins.JOB.replace(before, per))


def events(directory: Path) -> Path:
    """Labels as a log of their own."""
    test_streams.write(directory / "input", *test_streams.some_log())
    return test_streams.job_of(directory / "job")


JOBS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "sampled, with rejects": (shop, 1 << 30),
    "fitted": (fitted, 1 << 30),
    "joined, every worker has the side tables": (joined, 1 << 30),
    "joined by key, after per and map": (joined_per, 1000),
    "events": (events, 1 << 30),
}
IN_FILES = ("fitted", "joined by key, after per and map")
"""Built by two processes, too, in each run of the tests; the others nightly."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_files"),
    [
        *((name, name in IN_FILES) for name in JOBS),
        *(pytest.param(n, True, marks=pytest.mark.nightly) for n in JOBS if n not in IN_FILES),
    ],
)
def test_builds_in_memory_and_in_files_have_the_bytes_of_beam(
    name: str, in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, broadcast = JOBS[name]
    job = write(tmp_path)
    size = sum(file.stat().st_size for file in (tmp_path / "input").iterdir())
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", size // 3)  # three parts
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", broadcast)
    by_beam = request(job, tmp_path / "input", tmp_path / "beam", beam_args=[ON_BEAM])
    result = without_times(build(by_beam))
    for number, beam_args in enumerate(([IN_PROCESS], PROCESSES)[: 1 + in_files]):
        dataset = tmp_path / str(number)
        asked = request(job, tmp_path / "input", dataset, beam_args=beam_args)
        assert without_times(build(asked)) == result
        assert bytes_of(dataset) == bytes_of(tmp_path / "beam")


def without_times(printed: dict[str, Any]) -> dict[str, Any]:
    """Return what a build prints, but for how long it took and where the rejects lie."""
    if "rejects" in printed:
        printed["rejects"].pop("path")
    return {k: v for k, v in printed.items() if k not in ("wall_sec", "rows_per_sec")}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mind", "ebnerd"])
def test_a_real_log_built_in_process_has_the_bytes_of_the_local_runner(
    name: str, shared_data: Path, repository: Path, tmp_path: Path
) -> None:
    job = repository / "schemas" / name / "job.yaml"
    log = shared_data / real_logs.LOGS[name]
    build(request(job, log, tmp_path / "beam", beam_args=[ON_BEAM]))
    assert bytes_of(real_logs.built(name, shared_data)[0]) == bytes_of(tmp_path / "beam")


@pytest.mark.slow
def test_commands_on_a_small_log_import_no_beam(tmp_path: Path, repository: Path) -> None:
    job = fitted(tmp_path)
    transform_jobs.write_log(tmp_path / "more", transform_jobs.raw_rows(90, seed=2))
    dataset, here = str(tmp_path / "dataset"), ("--direct_num_workers=1", "--json")
    commands = [
        ["build", str(job), "--input", str(tmp_path / "input"), "--output", dataset, *here],
        ["append", str(job), "--input", str(tmp_path / "more"), "--dataset", dataset, "--json"],
        ["oracle", dataset, "--reindex", "--batch-samples", "64", *here],
        ["verify", dataset, "--json"],
        ["preview", str(job), "--input", str(tmp_path / "input"), "--json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=repository,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line).get("built") for line in done.stdout.splitlines()][:2] == [True, True]


def test_a_build_in_process_fails_in_the_words_of_any_other(tmp_path: Path) -> None:
    job = joined(tmp_path)
    with (tmp_path / "input" / "items.jsonl").open("a") as file:
        file.write('\n{"item": 4, "price": 1, "tags": []}')
    words = ["build", str(job), "--input", str(tmp_path / "input"), "--runner=InProcess"]
    assert "side 'items' must have one row for each item, got 4" in error_of(
        main, [*words, "--output", str(tmp_path / "a")]
    )
    option = "--direct_num_workers=2"
    assert f"runner InProcess takes no Beam options: {option}" in error_of(
        main, [*words, "--output", str(tmp_path / "b"), option]
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_the_c_library_takes_the_settings() -> None:
    assert keep_freed_memory()


def test_workers_follow_work_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = BudgetConfig(cpus=8, memory=1 << 40)
    monkeypatch.setattr(runner, "machine_budget", lambda: machine)
    threads = "--direct_running_mode=multi_threading"
    monkeypatch.setattr(runner, "WORKER_BYTES", 1)
    processes = "--direct_running_mode=multi_processing"
    assert local_workers([], 100) == ["--direct_num_workers=8", processes]
    assert local_workers([], 23) == ["--direct_num_workers=8", threads]
    assert local_workers([], 3) == ["--direct_num_workers=3", threads]
    assert local_workers([], 1) == []
    monkeypatch.setattr(runner, "WORKER_BYTES", 1 << 62)
    assert local_workers([], 100) == []


def test_what_the_user_says_about_workers_wins() -> None:
    assert local_workers(["--direct_num_workers", "1"], 100) == []


PROGRAM = """
import resource, sys, time
import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from presage.pipelines.beam.runner import run_pipeline
from presage.schemas.storage.location import Location

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
worker_handlers.DATA_BUFFER_TIME_LIMIT_MS = 100  # instead of 1 s

class Slow:
    def __init__(self, number):
        self.number = number
    def __reduce__(self):
        time.sleep(0.12)  # longer than Beam waits before it sends what it has
        return Slow, (self.number,)

def make(pipeline):
    numbers = pipeline | beam.Create(range(2)) | beam.Reshuffle()
    return {"slow": numbers | beam.Map(Slow)}

if __name__ == "__main__":
    threads = ["--direct_num_workers=2", "--direct_running_mode=multi_threading"]
    found = run_pipeline(make, threads, Location.parse(sys.argv[1]))["slow"]
    print(sorted(s.number for s in found))
"""


@pytest.mark.slow
def test_an_element_is_not_sent_before_it_is_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split("\n")[-2:] == ["[0, 1]", ""], done.stderr[-2000:]
