"""The file that says where segment jobs run: `python -m scheduler run JOB --runner FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from scheduler.machine.events import RunnerName

_FLINK = (
    *("runner", "job_name", "flink_master", "job_endpoint", "flink_job_server_jar"),
    *("parallelism", "environment_type", "environment_config"),
)
_DATAFLOW = (
    *("runner", "job_name", "project", "region", "temp_location", "staging_location"),
    *("num_workers", "max_num_workers", "autoscaling_algorithm", "worker_machine_type"),
    *("sdk_container_image", "sdk_location"),
)
"""Options that come from keys of the file, or from the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlinkConfig:
    """A Flink session cluster, and the job server that hands it Beam's pipelines."""

    address: str
    """Its REST API, such as `http://127.0.0.1:8081`."""
    largest_parallelism: int | None = None
    """Workers of one segment job at most; as many as there are slots when null."""
    job_endpoint: str | None = None
    """`HOST:PORT` of a job server of Beam that runs; this or `job_server_jar`."""
    job_server_jar: str | None = None
    """Jar from which each segment job starts a job server of its own."""
    environment_type: Literal["EXTERNAL", "PROCESS", "DOCKER", "LOOPBACK"] = "EXTERNAL"
    """How Python workers are started; `EXTERNAL` by a pool that runs beside each task manager."""
    environment_config: str | None = None
    """Address of that pool, program or image; none with `LOOPBACK`."""
    options: tuple[str, ...] = ()
    """More options of Beam, passed on as they are."""

    def __post_init__(self) -> None:
        """Refuse what no segment job could be sent with."""
        place = urlsplit(self.address)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise ValueError(
                f"address must be a URL of Flink's REST API, got {self.address!r}; "
                "write http://HOST:8081"
            )
        _at_least_one("largest_parallelism", self.largest_parallelism)
        if (self.job_endpoint is None) == (self.job_server_jar is None):
            both = "both" if self.job_endpoint else "neither"
            raise ValueError(
                f"job_endpoint or job_server_jar must be given, got {both}; write one of them"
            )
        if (self.environment_config is None) != (self.environment_type == "LOOPBACK"):
            raise ValueError(
                f"environment_config must be given unless environment_type is LOOPBACK, got "
                f"{self.environment_config!r} with {self.environment_type}; correct one of them"
            )
        _not_taken(self.options, _FLINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowConfig:
    """Jobs of Google Cloud Dataflow."""

    project: str
    """Project that pays."""
    region: str
    """Region of the workers."""
    temp_location: str
    """Folder below `gs://` for files of the jobs."""
    staging_location: str | None = None
    """Folder below `gs://` for what is sent along; below `temp_location` when null."""
    image: str
    """Container image of the workers (`deploy/dataflow/README.md`)."""
    machine_type: str = "n2-standard-4"
    """Of each worker."""
    max_workers: int = 16
    """Workers of one segment job at most."""
    autoscaling: bool = False
    """Whether Dataflow may add workers up to `max_workers`; else a job keeps those of its start."""
    options: tuple[str, ...] = ()
    """More options of Beam, passed on as they are."""

    def __post_init__(self) -> None:
        """Refuse what Dataflow would."""
        for name in ("temp_location", "staging_location"):
            value = getattr(self, name)
            if value is not None and not value.startswith("gs://"):
                raise ValueError(
                    f"{name} must be a folder of Cloud Storage, got {value!r}; "
                    "write gs://BUCKET/FOLDER"
                )
        _at_least_one("max_workers", self.max_workers)
        _not_taken(self.options, _DATAFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Where segment jobs run."""

    runner: RunnerName = "local"
    """`local`: as processes here; `flink`, `dataflow`: as the section of that name says."""
    flink: FlinkConfig | None = None
    """For `runner: flink`."""
    dataflow: DataflowConfig | None = None
    """For `runner: dataflow`."""

    def __post_init__(self) -> None:
        """Refuse a runner of which nothing is said."""
        if self.runner != "local" and getattr(self, self.runner) is None:
            raise ValueError(
                f"{self.runner} must be given with runner {self.runner}, got none; add the section"
            )


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}; raise it")


def _not_taken(options: Sequence[str], taken: Sequence[str]) -> None:
    for option in options:
        name = option.partition("=")[0].removeprefix("--")
        if option.startswith("--") and name in taken:
            raise ValueError(
                f"options must not say what the scheduler or another key does, got {option!r}; "
                "leave it out"
            )
