"""Run segment jobs on Beam runners: a Flink session cluster, Dataflow, or this machine.

Each gets its workers at its submission. A Flink cluster without free slots queues it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlsplit

import urllib3

from presage.scheduler.controller.state import State
from presage.scheduler.drivers.base import instance_of
from presage.scheduler.drivers.job_files import Progress, SegmentRunner
from presage.schemas.config.parse import read_yaml
from presage.schemas.errors import SchemaError, check_at_least


@dataclass(frozen=True, slots=True)
class JobNames:
    """Names of one scheduler's jobs on a cluster, different from all other schedulers' names."""

    prefix: str

    @staticmethod
    def of_scheduler(output: Path) -> JobNames:
        """Return the names of the scheduler of a folder; they stay the same across restarts."""
        return JobNames(f"presage-{instance_of(output)}-")

    def of(self, job: str, process: str) -> str:
        """Return the name of a segment job: letters, digits and dashes, as Dataflow requires.

        Example:
            >>> JobNames("presage-0123abcd-").of("Demo job", "segment-3.1")
            'presage-0123abcd-demo-job-segment-3-1-2c2c8613'
        """
        words = re.sub("[^a-z0-9]+", "-", f"{job}-{process}".lower())
        digest = hashlib.sha256(f"{job}/{process}".encode()).hexdigest()[:8]
        return f"{self.prefix}{words}-{digest}"


_FLINK_OPTIONS = (
    *("runner", "job_name", "flink_master", "job_endpoint", "flink_job_server_jar"),
    *("parallelism", "environment_type", "environment_config"),
)
_DATAFLOW_OPTIONS = (
    *("runner", "job_name", "project", "region", "temp_location", "staging_location"),
    *("num_workers", "max_num_workers", "autoscaling_algorithm", "worker_machine_type"),
    *("sdk_container_image", "sdk_location"),
)
"""Beam options that the scheduler or other keys of the file set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlinkConfig:
    """A Flink session cluster, and the Beam job server that submits pipelines to it."""

    address: str
    """URL of its REST API, such as `http://127.0.0.1:8081`."""
    largest_parallelism: int
    """Maximum workers of one segment job, at most the number of slots."""
    job_endpoint: str | None = None
    """`HOST:PORT` of a running Beam job server; either this or `job_server_jar`."""
    job_server_jar: str | None = None
    """Jar from which each segment job starts its own job server."""
    environment_type: Literal["EXTERNAL", "PROCESS", "DOCKER", "LOOPBACK"] = "EXTERNAL"
    """How Python workers start; `EXTERNAL`: by a worker pool beside each task manager."""
    environment_config: str | None = None
    """Address of the pool, program or image; null with `LOOPBACK`."""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        url = urlsplit(self.address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"address must be a URL of Flink's REST API, got {self.address!r}; "
                "write http://HOST:8081"
            )
        check_at_least(self, 1, "largest_parallelism")
        if (self.job_endpoint is None) == (self.job_server_jar is None):
            both = "both" if self.job_endpoint else "neither"
            raise ValueError(
                f"job_endpoint or job_server_jar must be given, got {both}; give one of them"
            )
        if (self.environment_config is None) != (self.environment_type == "LOOPBACK"):
            raise ValueError(
                f"environment_config must be given unless environment_type is LOOPBACK, got "
                f"{self.environment_config!r} with {self.environment_type}; correct one of them"
            )
        _check_options(self.options, _FLINK_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowConfig:
    """Jobs of Google Cloud Dataflow."""

    project: str
    region: str
    temp_location: str
    """`gs://` folder for files of the jobs."""
    staging_location: str | None = None
    """`gs://` folder for staged files; null: below `temp_location`."""
    image: str
    """Container image of the workers (`deploy/dataflow/README.md`)."""
    machine_type: str = "n2-standard-4"
    max_workers: int = 16
    """Maximum workers of one segment job."""
    autoscaling: bool = False
    """Whether Dataflow may add workers up to `max_workers`; else the number is fixed."""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temp_location", "staging_location"):
            value = getattr(self, name)
            if value is not None and not value.startswith("gs://"):
                raise ValueError(
                    f"{name} must be a folder of Cloud Storage, got {value!r}; "
                    "write gs://BUCKET/FOLDER"
                )
        check_at_least(self, 1, "max_workers")
        _check_options(self.options, _DATAFLOW_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Where segment jobs run."""

    runner: Literal["local", "flink", "dataflow"] = "local"
    """`local`: processes on this machine; `flink`, `dataflow`: as configured in that section."""
    flink: FlinkConfig | None = None
    dataflow: DataflowConfig | None = None

    def __post_init__(self) -> None:
        if self.runner != "local" and getattr(self, self.runner) is None:
            raise ValueError(
                f"runner {self.runner} has no section of that name; add the section {self.runner}"
            )


def _check_options(options: Sequence[str], reserved: Sequence[str]) -> None:
    for option in options:
        name = option.partition("=")[0].removeprefix("--")
        if option.startswith("--") and name in reserved:
            raise ValueError(
                f"options must not set what the scheduler or another key sets, got {option!r}; "
                "remove it"
            )


TIMEOUT_SEC = 5.0
"""Time limit of one request; the scheduler's loop waits for it."""
READ_SEC = 5.0
"""Time between two requests."""
FLINK_ENDED = ("FINISHED", "CANCELED", "FAILED", "CANCELLING")
"""Job states that need no cancellation."""


class FlinkRunner(SegmentRunner):
    """A Flink session cluster. Its jobs outlive their segment jobs, and are cancelled here."""

    def __init__(self, config: FlinkConfig, names: JobNames, file: str) -> None:
        self._config = config
        self._names = names
        self._file = file
        self._is_silent = False
        self._next_sec = 0.0
        self.largest_job = config.largest_parallelism

    def check(self) -> None:
        """Raise SchemaError if the cluster does not answer."""
        try:
            self._running_jobs()
        except OSError as error:
            raise SchemaError(
                f"flink.address does not answer: {self._config.address}: {error}; start the "
                "cluster, or correct the address",
                file=self._file,
            ) from error

    def cancel_ended(self, state: State, now_sec: float, progress: Progress) -> None:
        """Cancel Flink jobs whose segment job was stopped or killed, every `READ_SEC`."""
        if now_sec < self._next_sec:
            return
        self._next_sec = now_sec + READ_SEC
        live = {
            self._names.of(job.name, process.name)
            for job in state.jobs.values()
            for process in job.of_pool("segment")
        }
        try:
            for job_id, name in self._running_jobs().items():
                if name not in live:
                    progress(f"runner: {name} is cancelled: its segment job has ended")
                    self._request("PATCH", f"/jobs/{quote(job_id)}?mode=cancel")
            self._is_silent = False
        except OSError as error:
            if not self._is_silent:
                progress(
                    f"runner: {self._config.address} does not answer: {error}; jobs may run on"
                )
            self._is_silent = True

    def _running_jobs(self) -> dict[str, str]:
        """Return the names of this scheduler's unfinished jobs by id.

        Raises:
            OSError: no valid answer.
        """
        try:
            return {
                job["jid"]: job["name"]
                for job in json.loads(self._request("GET", "/jobs/overview"))["jobs"]
                if job["name"].startswith(self._names.prefix) and job["state"] not in FLINK_ENDED
            }
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"invalid answer ({error!r})") from error

    def _request(self, method: str, path: str) -> bytes:
        url = self._config.address.rstrip("/") + path
        try:  # without the environment's web proxies
            answer = urllib3.request(method, url, timeout=TIMEOUT_SEC, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise OSError(str(error).rpartition(": ")[2]) from error
        if answer.status >= 400 and method != "PATCH":  # a job may end before it is cancelled
            raise OSError(f"HTTP {answer.status} of {path}")
        return answer.data

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return the Beam options of a segment job."""
        config = self._config
        server = f"--job_endpoint={config.job_endpoint}"
        if config.job_server_jar is not None:
            server = f"--flink_job_server_jar={config.job_server_jar}"
        environment = [f"--environment_type={config.environment_type}"]
        if config.environment_config is not None:
            environment.append(f"--environment_config={config.environment_config}")
        return [
            "--runner=FlinkRunner",
            f"--flink_master={_master(config.address)}",
            server,
            *environment,
            f"--job_name={self._names.of(job, process)}",
            f"--parallelism={workers}",
            *config.options,
        ]


def _master(address: str) -> str:
    """Return an address as Beam expects it: without the scheme `http`.

    Example:
        >>> _master("http://127.0.0.1:8081/"), _master("https://flink:8443")
        ('127.0.0.1:8081', 'https://flink:8443')
    """
    url = urlsplit(address)
    return url.netloc if url.scheme == "http" else address.rstrip("/")


class DataflowRunner(SegmentRunner):
    """Google Cloud Dataflow, which provides the workers that a job requests."""

    def __init__(self, config: DataflowConfig, names: JobNames) -> None:
        self._config = config
        self._names = names
        self.largest_job = config.max_workers

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return the Beam options of a segment job."""
        config = self._config
        staging = config.staging_location
        max_workers = config.max_workers if config.autoscaling else workers
        return [
            "--runner=DataflowRunner",
            f"--project={config.project}",
            f"--region={config.region}",
            f"--temp_location={config.temp_location}",
            *([] if staging is None else [f"--staging_location={staging}"]),
            f"--sdk_container_image={config.image}",
            "--sdk_location=container",
            f"--worker_machine_type={config.machine_type}",
            f"--job_name={self._names.of(job, process)}",
            f"--num_workers={workers}",
            f"--max_num_workers={max_workers}",
            f"--autoscaling_algorithm={'THROUGHPUT_BASED' if config.autoscaling else 'NONE'}",
            *config.options,
        ]


def segment_runner(file: Path | None, output: Path) -> SegmentRunner:
    """Return the runner that a configuration file selects.

    Raises:
        SchemaError: the file is invalid.
    """
    config = RunnerConfig() if file is None else read_yaml(file, RunnerConfig)
    if config.runner == "flink" and config.flink is not None:
        return FlinkRunner(config.flink, JobNames.of_scheduler(output), str(file))
    if config.runner == "dataflow" and config.dataflow is not None:
        return DataflowRunner(config.dataflow, JobNames.of_scheduler(output))
    return SegmentRunner()
