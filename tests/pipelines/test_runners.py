"""Beam's own local runners, and what a pipeline of a user must not change in its processes."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

from presage.pipelines.beam import runner
from presage.pipelines.beam.io import BuildDataset, ReadSource, WriteDataset
from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.external_tools import build_go_program
from tests.pipelines.logs import ON_BEAM, bytes_of, request, write_job, write_log

pytestmark = pytest.mark.nightly

PRISM, PRISM_VERSION = "github.com/apache/beam/sdks/v2/go/cmd/prism", f"v{beam.__version__}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_direct_runner_is_prism_and_gives_the_bytes_of_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 8_000)
    program, started = tmp_path / "prism.sh", tmp_path / "started"
    prism = build_go_program(PRISM, PRISM_VERSION)
    program.write_text(f'#!/bin/sh\ntouch {started}\nexec {prism} "$@"\n')
    write_log(tmp_path / "log", num_rows=600, num_files=4)
    words = ["build", str(write_job(tmp_path / "job")), "--input", str(tmp_path / "log")]
    assert main([*words, "--output", str(tmp_path / "here")]) == 0
    # Not the server that another test of this process may have started.
    experiment = "--experiments=disable_prism_server_singleton"
    options = ["--runner=DirectRunner", f"--prism_location={program}", experiment]
    assert main([*words, "--output", str(tmp_path / "prism"), *options]) == 0
    assert bytes_of(tmp_path / "prism") == bytes_of(tmp_path / "here")
    assert started.exists()


@pytest.fixture
def keeps_memory(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls that configure the allocator of a worker process."""
    calls: list[bool] = []
    for module in ("stage_transforms", "jobs"):
        monkeypatch.setattr(
            f"presage.pipelines.beam.{module}.keep_freed_memory", lambda: calls.append(True)
        )
    return calls


@pytest.mark.slow
def test_pipelines_of_users_run_with_the_allocator_and_the_beam_of_the_user(
    tmp_path: Path, keeps_memory: list[bool]
) -> None:
    rows, job = write_log(tmp_path / "log"), write_job(tmp_path / "job")
    interval = worker_handlers.DATA_BUFFER_TIME_LIMIT_MS
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | "source" >> ReadSource(job, tmp_path / "log")
        _ = pipeline | "build" >> BuildDataset(job, tmp_path / "log", tmp_path / "built")
        written = pipeline | beam.Create([rows])
        _ = written | "write" >> WriteDataset(job, tmp_path / "written", "day-1")
    assert keeps_memory == []
    assert worker_handlers.DATA_BUFFER_TIME_LIMIT_MS == interval == 1000


@pytest.mark.slow
def test_a_build_on_the_local_runner_restores_beam(
    tmp_path: Path, keeps_memory: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[int] = []
    handler = worker_handlers.GrpcServer.__init__

    def record(self: object, *arguments: object) -> None:
        intervals.append(worker_handlers.DATA_BUFFER_TIME_LIMIT_MS)
        handler(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_handlers.GrpcServer, "__init__", record)
    write_log(tmp_path / "log")
    options = [ON_BEAM, "--direct_num_workers=2", "--direct_running_mode=multi_threading"]
    job = write_job(tmp_path / "job")
    build(request(job, tmp_path / "log", tmp_path / "dataset", beam_args=options))
    assert keeps_memory
    assert set(intervals) == {0}
    assert worker_handlers.DATA_BUFFER_TIME_LIMIT_MS == 1000
    assert runner.LOCAL_RUNNERS == (None, "FnApiRunner")


def test_results_that_the_pipeline_did_not_write_are_not_unpickled(tmp_path: Path) -> None:
    file = Location.parse(tmp_path / "results" / "parts.pickle")
    runner._Save(file, b"key").process([1, 2])  # pyright: ignore[reportPrivateUsage]
    load = runner._load  # pyright: ignore[reportPrivateUsage]
    assert load(file, b"key") == [1, 2]
    content = file.read_bytes()
    for key, data in ((b"other", content), (b"key", content[:-1] + b"x"), (b"key", b"")):
        file.write_bytes(data)
        with pytest.raises(SchemaError, match="result was not written by this pipeline"):
            load(file, key)
