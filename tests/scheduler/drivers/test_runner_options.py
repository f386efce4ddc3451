"""The runner's configuration file, and Beam options that `pipelines` and Beam accept."""

import re
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    GoogleCloudOptions,
    PortableOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner

from presage.pipelines.beam.runner import pipeline_options
from presage.pipelines.cli import build_parser as pipelines_parser
from presage.scheduler.__main__ import main
from presage.scheduler.drivers.base import instance_of
from presage.scheduler.drivers.beam_runners import FlinkRunner, RunnerConfig, segment_runner
from presage.scheduler.drivers.job_files import SegmentRunner, segment_command
from presage.schemas.config.parse import read_yaml
from presage.schemas.errors import SchemaError
from tests.scheduler.small_job import paths_of, write_job
from tests.shared import error_of, output_of

FLINK = """\
runner: flink
flink:
  address: http://127.0.0.1:8081
  largest_parallelism: 4
  job_endpoint: localhost:8099
  environment_config: localhost:50000
  options: [--sdk_worker_parallelism=4, --environment_cache_millis=10000]
"""
DATAFLOW = """\
runner: dataflow
dataflow:
  project: shop-project
  region: europe-west4
  temp_location: gs://shop-presage/tmp
  image: europe-west4-docker.pkg.dev/shop-project/presage/pipelines:1
  max_workers: 8
  options: [--disk_size_gb=50]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "runner.yaml"
    path.write_text(text)
    return path


def runner_in(folder: Path, text: str) -> SegmentRunner:
    return segment_runner(written(folder, text), folder)


def words_of(folder: Path, text: str, workers: int) -> list[str]:
    """Return the Beam options of a segment job, after `pipelines` took the rest."""
    options = runner_in(folder, text).options("small", "segment-1.1", workers)
    paths = paths_of(folder / "small", num_segments=3)
    command = segment_command(paths, 1, workers, options)
    parsed, beam = pipelines_parser().parse_known_args(command[3:])
    assert (parsed.command, parsed.position) == ("append", 1)
    assert beam == options
    return beam


def job_with_log(folder: Path) -> tuple[Path, Path]:
    """Return a job, and a folder with one file of raw rows."""
    (folder / "log").mkdir()
    pq.write_table(pa.table({"time": [1, 2]}), folder / "log" / "one.parquet")
    return write_job(folder), folder / "log"


def test_options_of_flink_are_what_beam_takes(tmp_path: Path) -> None:
    options = pipeline_options(words_of(tmp_path, FLINK, 3))
    assert options.view_as(StandardOptions).runner == "FlinkRunner"
    flink = options.view_as(FlinkRunnerOptions)
    assert (flink.flink_master, flink.parallelism) == ("127.0.0.1:8081", 3)
    portable = options.view_as(PortableOptions)
    assert portable.job_endpoint == "localhost:8099"
    assert (portable.environment_type, portable.environment_config) == (
        "EXTERNAL",
        "localhost:50000",
    )
    assert portable.sdk_worker_parallelism == "4"


def test_options_of_flink_with_a_jar_start_a_job_server(tmp_path: Path) -> None:
    text = FLINK.replace("job_endpoint: localhost:8099", "job_server_jar: flink.jar")
    options = pipeline_options(words_of(tmp_path, text, 2))
    assert options.view_as(FlinkRunnerOptions).flink_job_server_jar == "flink.jar"
    assert options.view_as(PortableOptions).job_endpoint is None


@pytest.mark.parametrize(("autoscaling", "most"), [("false", 3), ("true", 8)])
def test_options_of_dataflow_are_valid_and_of_the_size_that_is_asked_for(
    autoscaling: str, most: int, tmp_path: Path
) -> None:
    text = f"{DATAFLOW}  autoscaling: {autoscaling}\n"
    options = pipeline_options(words_of(tmp_path, text, 3))
    assert PipelineOptionsValidator(options, DataflowRunner()).validate() == []
    workers = options.view_as(WorkerOptions)
    assert (workers.num_workers, workers.max_num_workers) == (3, most)
    algorithm = "THROUGHPUT_BASED" if autoscaling == "true" else "NONE"
    assert workers.autoscaling_algorithm == algorithm
    assert (workers.machine_type, workers.disk_size_gb) == ("n2-standard-4", 50)
    name = options.view_as(GoogleCloudOptions).job_name
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)


def test_files_that_the_document_shows_are_read_and_beam_takes_their_options(
    repository: Path, tmp_path: Path
) -> None:
    text = (repository / "docs" / "scheduling.md").read_text()
    files = re.findall(r"```yaml\n(runner: .*?)```", text, re.DOTALL)
    found = [pipeline_options(words_of(tmp_path, file, 2)) for file in files]
    runners = [options.view_as(StandardOptions).runner for options in found]
    assert runners == ["FlinkRunner", "DataflowRunner"]


def test_place_of_no_file_is_the_local_runner(tmp_path: Path) -> None:
    local = segment_runner(None, tmp_path)
    assert type(local) is SegmentRunner
    assert local.options("small", "segment-0.1", 2) == []
    assert local.largest_job is None


def test_files_limit_the_workers_of_one_segment_job(tmp_path: Path) -> None:
    found = [runner_in(tmp_path, text).largest_job for text in (FLINK, DATAFLOW)]
    assert found == [4, 8]


def test_names_are_those_of_one_scheduler_and_stay_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(folder: str, process: str = "segment-0.1") -> str:
        runner = segment_runner(written(tmp_path, FLINK), tmp_path / folder)
        assert isinstance(runner, FlinkRunner)
        return next(o for o in runner.options("a", process, 1) if o.startswith("--job_name="))

    same = name("one")
    with monkeypatch.context() as patch:  # a scheduler in a Pod gets another host's name each time
        patch.setattr(socket, "gethostname", lambda: "another")
        assert name("one") == same
    (tmp_path / "one").rename(tmp_path / "moved")
    assert name("moved") == same
    assert len({same, name("two"), name("moved", "segment-0.2")}) == 3


def test_instance_of_stays_as_long_as_the_folder(tmp_path: Path) -> None:
    first = instance_of(tmp_path / "a")
    assert instance_of(tmp_path / "a") == first != instance_of(tmp_path / "b")
    assert first in (tmp_path / "a" / "instance").read_text()


REFUSED = {
    "an unknown runner": (
        FLINK.replace("runner: flink", "runner: fink"),
        "runner must be one of local, flink, dataflow, got 'fink' in FILE:1; did you mean 'flink'?",
    ),
    "no section": (
        "runner: dataflow\n",
        "runner dataflow has no section of that name in FILE:1; add the section dataflow",
    ),
    "an address that is none": (
        FLINK.replace("http://127.0.0.1:8081", "127.0.0.1:8081"),
        "flink.address must be a URL of Flink's REST API, got '127.0.0.1:8081' in FILE:3; "
        "write http://HOST:8081",
    ),
    "no parallelism": (
        FLINK.replace("parallelism: 4", "parallelism: 0", 1),
        "flink.largest_parallelism must be at least 1, got 0 in FILE:3; raise it",
    ),
    "two job servers": (
        f"{FLINK}  job_server_jar: flink.jar\n",
        "flink.job_endpoint or job_server_jar must be given, got both in FILE:3; give one of them",
    ),
    "workers of nobody": (
        FLINK.replace("  environment_config: localhost:50000\n", ""),
        "flink.environment_config must be given unless environment_type is LOOPBACK, got None "
        "with EXTERNAL in FILE:3; correct one of them",
    ),
    "an option that is the scheduler's": (
        FLINK.replace("--sdk_worker_parallelism=4", "--parallelism=9"),
        "flink.options must not set what the scheduler or another key sets, got "
        "'--parallelism=9' in FILE:3; remove it",
    ),
    "a folder that Dataflow cannot reach": (
        DATAFLOW.replace("gs://shop-presage", "/mnt"),
        "dataflow.temp_location must be a folder of Cloud Storage, got '/mnt/tmp' in FILE:3; "
        "write gs://BUCKET/FOLDER",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_yaml_refuses(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    path = written(tmp_path, text)
    with pytest.raises(SchemaError) as error:
        read_yaml(path, RunnerConfig)
    assert str(error.value) == message.replace("FILE", str(path))


def test_main_run_dry_prints_the_command_that_dataflow_would_get(tmp_path: Path) -> None:
    job, log = job_with_log(tmp_path)
    words = ["run", str(job), "--input", str(log), "--output", str(tmp_path / "out"), "--dry-run"]
    lines = output_of(main, [*words, "--runner", str(written(tmp_path, DATAFLOW))]).splitlines()
    prefix = "small: command segment-0.1: "
    (command,) = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    parsed, beam = pipelines_parser().parse_known_args(command.split()[3:])
    assert (parsed.command, parsed.job) == ("build", tmp_path / "out" / "small" / "job.yaml")
    assert PipelineOptionsValidator(pipeline_options(beam), DataflowRunner()).validate() == []
    assert not (tmp_path / "out" / "scheduler.jsonl").exists()


def test_main_run_refuses_a_cluster_that_does_not_answer_in_one_line(tmp_path: Path) -> None:
    job, log = job_with_log(tmp_path)
    file = written(tmp_path, FLINK.replace(":8081", ":1"))
    words = ["run", str(job), "--input", str(log), "--output", str(tmp_path / "out")]
    assert error_of(main, [*words, "--status", "off", "--runner", str(file)]) == (
        "error: flink.address does not answer: http://127.0.0.1:1: [Errno 111] Connection refused "
        f"in {file}; start the cluster, or correct the address\n"
    )
