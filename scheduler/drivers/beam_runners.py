"""Run segment jobs on Beam runners: a Flink session cluster, Dataflow, or this machine.

Nothing is decided here: what a cluster reports goes into the log as events, and the controller
limits the next segment job by it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from scheduler.controller.events import Event, RunnerName, RunnerSet, SlotsRead, SlotsUnread
from scheduler.controller.state import ENDED_PHASES, SLOTS_VALID_SEC, State
from scheduler.drivers.base import instance_of
from schemas.config.parse import read_yaml
from schemas.errors import SchemaError, check_at_least

Progress = Callable[[str], None]
"""Called with one line for each message."""


class SegmentRunner:
    """Where segment jobs run. This one is Beam's local runner, in their own processes."""

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return the events that precede all decisions: that this runner is selected.

        Raises:
            SchemaError: no segment job can run there.
        """
        return [] if state.runner.name == "local" else [RunnerSet(time_sec=now_sec, name="local")]

    def poll(self, state: State, now_sec: float, progress: Progress) -> list[Event]:
        """Return new events; called about twice a second. Only a cluster has some."""
        return []

    def end(self, state: State, progress: Progress) -> None:
        """Cancel what remains of ended segment jobs; called once, at the end."""

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return the Beam options of a segment job; those of the local runner are added later."""
        return []


@dataclass(frozen=True, slots=True)
class JobNames:
    """Names of one scheduler's jobs on a cluster, different from all other schedulers' names.

    Attributes:
        prefix: of all names.
    """

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
    largest_parallelism: int | None = None
    """Maximum workers of one segment job; null: the number of slots."""
    job_endpoint: str | None = None
    """`HOST:PORT` of a running Beam job server; either this or `job_server_jar`."""
    job_server_jar: str | None = None
    """Jar from which each segment job starts its own job server."""
    environment_type: Literal["EXTERNAL", "PROCESS", "DOCKER", "LOOPBACK"] = "EXTERNAL"
    """How Python workers start; `EXTERNAL`: by a worker pool beside each task manager."""
    environment_config: str | None = None
    """Address of the pool, program or image; null with `LOOPBACK`."""
    options: tuple[str, ...] = ()
    """Additional Beam options."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid combination."""
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
    """Project that is billed."""
    region: str
    """Region of the workers."""
    temp_location: str
    """`gs://` folder for files of the jobs."""
    staging_location: str | None = None
    """`gs://` folder for staged files; null: below `temp_location`."""
    image: str
    """Container image of the workers (`deploy/dataflow/README.md`)."""
    machine_type: str = "n2-standard-4"
    """Machine type of each worker."""
    max_workers: int = 16
    """Maximum workers of one segment job."""
    autoscaling: bool = False
    """Whether Dataflow may add workers up to `max_workers`; else the number is fixed."""
    options: tuple[str, ...] = ()
    """Additional Beam options."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that Dataflow would reject."""
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

    runner: RunnerName = "local"
    """`local`: processes on this machine; `flink`, `dataflow`: as configured in that section."""
    flink: FlinkConfig | None = None
    """For `runner: flink`."""
    dataflow: DataflowConfig | None = None
    """For `runner: dataflow`."""

    def __post_init__(self) -> None:
        """Raise ValueError if the runner's section is missing."""
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
FLINK_ENDED = ("FINISHED", "CANCELED", "FAILED", "CANCELLING")
"""Job states that need no cancellation."""
GONE = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT)
"""Status codes for a job or task manager that is gone, or ended before it was cancelled."""


class UnreachableError(Exception):
    """The API does not answer, or not as Flink does."""


@dataclass(frozen=True, slots=True)
class Load:
    """Slots of a cluster.

    Attributes:
        free: slots that no job holds.
        own: slots that jobs with the given prefix hold.
        total: all slots.
        running: names of unfinished jobs with that prefix, by id.
    """

    free: int
    own: int
    total: int
    running: Mapping[str, str]


class FlinkRest:
    """The REST API of one cluster."""

    def __init__(self, address: str, timeout_sec: float = TIMEOUT_SEC) -> None:
        """Create a client; nothing is sent.

        Args:
            address: URL.
            timeout_sec: time limit of one request.
        """
        self._address = address.rstrip("/")
        self._timeout_sec = timeout_sec
        # Without the environment's web proxies.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def load(self, prefix: str) -> Load:
        """Return the current use of slots.

        Free slots are read first, so that slots which an own job takes meanwhile are counted twice
        rather than not at all.

        Args:
            prefix: of the names of own jobs.

        Raises:
            UnreachableError: no valid answer.
        """
        try:
            managers = self._request("GET", "/taskmanagers")["taskmanagers"]
            jobs = {job["jid"]: job for job in self._request("GET", "/jobs/overview")["jobs"]}
            names = {i: job["name"] for i, job in jobs.items() if job["name"].startswith(prefix)}
            busy = [m["id"] for m in managers if names and m["freeSlots"] < m["slotsNumber"]]
            return Load(
                free=sum(manager["freeSlots"] for manager in managers),
                own=sum(self._held(manager, names) for manager in busy),
                total=sum(manager["slotsNumber"] for manager in managers),
                running={i: n for i, n in names.items() if jobs[i]["state"] not in FLINK_ENDED},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreachableError(f"invalid answer ({error!r})") from error

    def cancel(self, job_id: str) -> None:
        """Cancel a job, unless it has ended.

        Raises:
            UnreachableError: no valid answer.
        """
        self._request("PATCH", f"/jobs/{quote(job_id)}?mode=cancel")

    def _held(self, manager: str, names: Mapping[str, str]) -> int:
        """Return the number of slots of a task manager that own jobs hold, 0 if it is gone."""
        answer = self._request("GET", f"/taskmanagers/{quote(manager, safe=':')}")
        return sum(slot["jobId"] in names for slot in answer.get("allocatedSlots", []))

    def _request(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self._address + path, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_sec) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in GONE and path.count("/") > 1:
                return {}  # it was listed a moment ago
            raise UnreachableError(f"HTTP {error.code} of {path}") from error
        except urllib.error.URLError as error:
            raise UnreachableError(str(error.reason)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableError(f"{type(error).__name__}: {error}") from error


READ_SEC = 5.0
"""Time between two requests."""
MAX_READ_SEC = 60.0
"""Upper limit of that time; it doubles while the cluster does not answer."""


class FlinkRunner(SegmentRunner):
    """A Flink session cluster, polled for its free slots."""

    def __init__(self, config: FlinkConfig, names: JobNames, file: str) -> None:
        """Create a runner; nothing is sent.

        Args:
            config: of the cluster.
            names: of the jobs.
            file: path of the configuration, for errors.
        """
        self._config = config
        self._names = names
        self._file = file
        self._rest = FlinkRest(config.address)
        self._last_load: tuple[int, int, int] | None = None
        self._reported_silence = False
        self._next_sec = 0.0
        self._pause_sec = READ_SEC

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return the events that precede all decisions.

        Raises:
            SchemaError: the cluster has never answered, or has never had enough slots for
                `largest_parallelism`.
        """
        largest, address = self._config.largest_parallelism, self._config.address
        last = state.runner
        same = (last.name, last.largest, last.address) == ("flink", largest, address)
        self._next_sec = now_sec + READ_SEC
        try:
            load = self._rest.load(self._names.prefix)
        except UnreachableError as error:
            if same and last.slots is not None:
                self._next_sec = now_sec
                return []
            raise SchemaError(
                f"flink.address does not answer: {self._config.address}: {error}; start the "
                "cluster, or correct the address",
                file=self._file,
            ) from error
        if same:  # lost task managers may return
            return [self._slots_read(load, now_sec)]
        if largest is not None and largest > load.total:
            raise SchemaError(
                f"flink.largest_parallelism exceeds the {load.total} slots of the cluster: "
                f"{largest}; lower it, or start more task managers",
                file=self._file,
            )
        self._last_load = (load.free, load.own, load.total)
        return [
            RunnerSet(
                time_sec=now_sec,
                name="flink",
                largest=largest,
                address=address,
                free=load.free,
                own=load.own,
                total=load.total,
            )
        ]

    def poll(self, state: State, now_sec: float, progress: Progress) -> list[Event]:
        """Return new events, at most one request in `READ_SEC`.

        Flink jobs whose segment job was stopped or killed are cancelled.
        """
        builds = any(
            job.remaining_segments for job in state.jobs.values() if job.phase not in ENDED_PHASES
        )
        if now_sec < self._next_sec or not builds:
            return []
        try:
            load = self._rest.load(self._names.prefix)
            self._cancel(load, state, progress)
        except UnreachableError as error:
            return self._on_silence(state, now_sec, error, progress)
        self._pause_sec, self._reported_silence = READ_SEC, False
        self._next_sec = now_sec + READ_SEC
        changed = self._last_load != (load.free, load.own, load.total)
        was_silent = state.runner.silent_sec is not None
        return [self._slots_read(load, now_sec)] if changed or was_silent else []

    def end(self, state: State, progress: Progress) -> None:
        """Cancel the Flink jobs of segment jobs that have ended."""
        try:
            self._cancel(self._rest.load(self._names.prefix), state, progress)
        except UnreachableError as error:
            progress(f"runner: {self._config.address} does not answer: {error}; jobs may run on")

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

    def _slots_read(self, load: Load, now_sec: float) -> SlotsRead:
        self._last_load = (load.free, load.own, load.total)
        return SlotsRead(time_sec=now_sec, free=load.free, own=load.own, total=load.total)

    def _on_silence(
        self, state: State, now_sec: float, error: UnreachableError, progress: Progress
    ) -> list[Event]:
        self._pause_sec = min(MAX_READ_SEC, 2.0 * self._pause_sec)
        self._next_sec = now_sec + self._pause_sec
        if not self._reported_silence:
            self._reported_silence = True
            progress(
                f"runner: {self._config.address} does not answer ({error}); its last known slots "
                f"are used for {SLOTS_VALID_SEC:g} s, then one worker at a time"
            )
        if state.runner.silent_sec is not None:
            return []
        return [SlotsUnread(time_sec=now_sec, detail=str(error))]

    def _cancel(self, load: Load, state: State, progress: Progress) -> None:
        live = {
            self._names.of(job.name, process.name)
            for job in state.jobs.values()
            for process in job.of_pool("segment")
        }
        for job_id, name in load.running.items():
            if name not in live:
                progress(f"runner: {name} is cancelled: its segment job has ended")
                self._rest.cancel(job_id)


def _master(address: str) -> str:
    """Return an address as Beam expects it: without the scheme `http`.

    Example:
        >>> _master("http://127.0.0.1:8081/"), _master("https://flink:8443")
        ('127.0.0.1:8081', 'https://flink:8443')
    """
    url = urlsplit(address)
    return url.netloc if url.scheme == "http" else address.rstrip("/")


class DataflowRunner(SegmentRunner):
    """Google Cloud Dataflow, which provides the workers that a job requests: nothing is polled."""

    def __init__(self, config: DataflowConfig, names: JobNames) -> None:
        """Create a runner.

        Args:
            config: of the jobs.
            names: of the jobs.
        """
        self._config = config
        self._names = names

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return the event that selects this runner, if another one was selected."""
        largest = self._config.max_workers
        if (state.runner.name, state.runner.largest) == ("dataflow", largest):
            return []
        return [RunnerSet(time_sec=now_sec, name="dataflow", largest=largest)]

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

    Args:
        file: None for the local runner.
        output: folder of the scheduler.

    Raises:
        SchemaError: the file is invalid.
    """
    config = RunnerConfig() if file is None else read_yaml(file, RunnerConfig)
    if config.runner == "flink" and config.flink is not None:
        return FlinkRunner(config.flink, JobNames.of_scheduler(output), str(file))
    if config.runner == "dataflow" and config.dataflow is not None:
        return DataflowRunner(config.dataflow, JobNames.of_scheduler(output))
    return SegmentRunner()
