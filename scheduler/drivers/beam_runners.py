"""Segment jobs on Beam runners: Flink session clusters, Dataflow, or this machine."""

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
from typing import Any, Literal, Protocol
from urllib.parse import quote, urlsplit

from scheduler.controller.events import Event, RunnerName, RunnerSet, SlotsRead, SlotsUnread
from scheduler.controller.state import ENDED_PHASES, SLOTS_VALID_SEC, State
from scheduler.drivers.base import instance_of
from schemas.config.parse import read_yaml
from schemas.errors import SchemaError


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one scheduler's jobs, which no other scheduler gives.

    Attributes:
        prefix: with which all of them begin.
    """

    prefix: str

    @staticmethod
    def of_scheduler(output: Path) -> Names:
        """Return the names of a scheduler; the same when it is started again, on any machine."""
        return Names(f"presage-{instance_of(output)}-")

    def of(self, job: str, process: str) -> str:
        """Return the name of a segment job: letters, digits and dashes, as Dataflow wants it.

        Example:
            >>> Names("presage-0123abcd-").of("Demo job", "segment-3.1")
            'presage-0123abcd-demo-job-segment-3-1-2c2c8613'
        """
        words = re.sub("[^a-z0-9]+", "-", f"{job}-{process}".lower())
        return f"{self.prefix}{words}-{_digest(f'{job}/{process}')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


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


TIMEOUT_SEC = 5.0
"""A scheduler that waits longer for an answer looks at nothing else meanwhile."""
FLINK_ENDED = ("FINISHED", "CANCELED", "FAILED", "CANCELLING")
"""States of jobs that are not to be cancelled."""
GONE = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT)
"""Answers about one that is not there any more, or that ended before it could be cancelled."""


class SilentError(Exception):
    """The API does not answer, or what answers is none."""


@dataclass(frozen=True, slots=True)
class Load:
    """Slots of a cluster.

    Attributes:
        free: that no job holds.
        own: that jobs of the asked names hold.
        total: all.
        running: ids of jobs of these names that have not ended, by id their names.
    """

    free: int
    own: int
    total: int
    running: Mapping[str, str]


class FlinkRest:
    """The REST API of one cluster."""

    def __init__(self, address: str, timeout_sec: float = TIMEOUT_SEC) -> None:
        """Remember where it is.

        Args:
            address: URL.
            timeout_sec: longest time for one answer.
        """
        self._address = address.rstrip("/")
        self._timeout_sec = timeout_sec
        # A cluster lies where its scheduler reaches it, not behind a proxy for the web.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def load(self, prefix: str) -> Load:
        """Return how busy the cluster is now.

        Free slots are read first: a job of ours that takes some meanwhile is counted twice then,
        never not at all.

        Args:
            prefix: of the names of own jobs.

        Raises:
            SilentError: there is no answer.
        """
        try:
            managers = self._ask("GET", "/taskmanagers")["taskmanagers"]
            jobs = {job["jid"]: job for job in self._ask("GET", "/jobs/overview")["jobs"]}
            names = {i: job["name"] for i, job in jobs.items() if job["name"].startswith(prefix)}
            busy = [m["id"] for m in managers if names and m["freeSlots"] < m["slotsNumber"]]
            return Load(
                free=sum(manager["freeSlots"] for manager in managers),
                own=sum(self._held(manager, names) for manager in busy),
                total=sum(manager["slotsNumber"] for manager in managers),
                running={i: n for i, n in names.items() if jobs[i]["state"] not in FLINK_ENDED},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SilentError(f"an answer that is none of Flink's ({error!r})") from error

    def cancel(self, job_id: str) -> None:
        """Ask the cluster to end a job; one that is gone has ended.

        Raises:
            SilentError: there is no answer.
        """
        self._ask("PATCH", f"/jobs/{quote(job_id)}?mode=cancel")

    def _held(self, manager: str, names: Mapping[str, str]) -> int:
        """Return the slots of a task manager that own jobs hold; none where it is gone."""
        answer = self._ask("GET", f"/taskmanagers/{quote(manager, safe=':')}")
        return sum(slot["jobId"] in names for slot in answer.get("allocatedSlots", []))

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self._address + path, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_sec) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in GONE and path.count("/") > 1:
                return {}  # one that was listed a moment ago
            raise SilentError(f"HTTP {error.code} of {path}") from error
        except urllib.error.URLError as error:
            raise SilentError(str(error.reason)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SilentError(f"{type(error).__name__}: {error}") from error


READ_SEC = 5.0
"""Time between two questions."""
MAX_READ_SEC = 60.0
"""While the cluster is silent they become rarer, up to so long."""

Say = Callable[[str], None]


class Flink:
    """A session cluster, as it was last seen."""

    def __init__(self, config: FlinkConfig, names: Names, file: str) -> None:
        """Remember where it is; nothing is asked yet.

        Args:
            config: of the file.
            names: of the jobs.
            file: that says so, for errors.
        """
        self._config = config
        self._names = names
        self._file = file
        self._rest = FlinkRest(config.address)
        self._told: tuple[int, int, int] | None = None
        self._said_silent = False
        self._next_sec = 0.0
        self._pause_sec = READ_SEC

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know before it decides anything.

        Raises:
            SchemaError: the cluster never answered, or has fewer slots than one job may have and
                had never enough.
        """
        largest, address = self._config.largest_parallelism, self._config.address
        known = state.runner
        same = (known.name, known.largest, known.address) == ("flink", largest, address)
        self._next_sec = now_sec + READ_SEC
        try:
            load = self._rest.load(self._names.prefix)
        except SilentError as error:
            if same and known.slots is not None:
                self._next_sec = now_sec
                return []
            raise SchemaError(
                f"flink.address must be that of a cluster that answers, got {error} from "
                f"{self._config.address}; start the cluster, or correct the address",
                file=self._file,
            ) from error
        if same:  # a task manager that is lost meanwhile may come back
            return [self._seen(load, now_sec)]
        if largest is not None and largest > load.total:
            raise SchemaError(
                "flink.largest_parallelism must be at most the slots of the cluster, got "
                f"largest_parallelism={largest}, {load.total} slots; lower it, or start more "
                "task managers",
                file=self._file,
            )
        self._told = (load.free, load.own, load.total)
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

    def poll(self, state: State, now_sec: float, say: Say) -> list[Event]:
        """Ask when it is time, and return what is new.

        Jobs that outlived their segment job, which was ended or killed, are cancelled.
        """
        builds = any(
            job.remaining_segments for job in state.jobs.values() if job.phase not in ENDED_PHASES
        )
        if now_sec < self._next_sec or not builds:
            return []
        try:
            load = self._rest.load(self._names.prefix)
            self._cancel(load, state, say)
        except SilentError as error:
            return self._silent(state, now_sec, error, say)
        self._pause_sec, self._said_silent = READ_SEC, False
        self._next_sec = now_sec + READ_SEC
        news = self._told != (load.free, load.own, load.total)
        again = state.runner.silent_sec is not None
        return [self._seen(load, now_sec)] if news or again else []

    def end(self, state: State, say: Say) -> None:
        """Cancel what is left of segment jobs that were ended."""
        try:
            self._cancel(self._rest.load(self._names.prefix), state, say)
        except SilentError as error:
            say(f"runner: {self._config.address} does not answer ({error}); jobs may go on there")

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return Beam's options of a segment job."""
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

    def _seen(self, load: Load, now_sec: float) -> SlotsRead:
        self._told = (load.free, load.own, load.total)
        return SlotsRead(time_sec=now_sec, free=load.free, own=load.own, total=load.total)

    def _silent(self, state: State, now_sec: float, error: SilentError, say: Say) -> list[Event]:
        self._pause_sec = min(MAX_READ_SEC, 2.0 * self._pause_sec)
        self._next_sec = now_sec + self._pause_sec
        if not self._said_silent:
            self._said_silent = True
            say(
                f"runner: {self._config.address} does not answer ({error}); what it said last "
                f"counts for {SLOTS_VALID_SEC:g} s, then there is one worker at a time"
            )
        if state.runner.silent_sec is not None:
            return []
        return [SlotsUnread(time_sec=now_sec, detail=str(error))]

    def _cancel(self, load: Load, state: State, say: Say) -> None:
        live = {
            self._names.of(job.name, process.name)
            for job in state.jobs.values()
            for process in job.of_pool("segment")
        }
        for job_id, name in load.running.items():
            if name not in live:
                say(f"runner: {name} is cancelled: its segment job has ended")
                self._rest.cancel(job_id)


def _master(address: str) -> str:
    """Return an address as Beam wants it: without the scheme where that is `http`.

    Example:
        >>> _master("http://127.0.0.1:8081/"), _master("https://flink:8443")
        ('127.0.0.1:8081', 'https://flink:8443')
    """
    place = urlsplit(address)
    return place.netloc if place.scheme == "http" else address.rstrip("/")


class Dataflow:
    """Jobs of Dataflow; nothing is asked of it."""

    def __init__(self, config: DataflowConfig, names: Names) -> None:
        """Remember where jobs go.

        Args:
            config: of the file.
            names: of the jobs.
        """
        self._config = config
        self._names = names

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know of it."""
        largest = self._config.max_workers
        if (state.runner.name, state.runner.largest) == ("dataflow", largest):
            return []
        return [RunnerSet(time_sec=now_sec, name="dataflow", largest=largest)]

    def poll(self, state: State, now_sec: float, say: Callable[[str], None]) -> list[Event]:
        """Return nothing: Dataflow has as many workers as are asked for."""
        return []

    def end(self, state: State, say: Callable[[str], None]) -> None:
        """Do nothing."""

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return the options of a segment job."""
        return dataflow_options(self._config, self._names.of(job, process), workers)


def dataflow_options(config: DataflowConfig, name: str, workers: int) -> list[str]:
    """Return Beam's options of one job.

    Args:
        config: of the file.
        name: of the job.
        workers: machines that it begins with, and keeps unless Dataflow may add some.
    """
    staging = config.staging_location
    most = config.max_workers if config.autoscaling else workers
    return [
        "--runner=DataflowRunner",
        f"--project={config.project}",
        f"--region={config.region}",
        f"--temp_location={config.temp_location}",
        *([] if staging is None else [f"--staging_location={staging}"]),
        f"--sdk_container_image={config.image}",
        "--sdk_location=container",
        f"--worker_machine_type={config.machine_type}",
        f"--job_name={name}",
        f"--num_workers={workers}",
        f"--max_num_workers={most}",
        f"--autoscaling_algorithm={'THROUGHPUT_BASED' if config.autoscaling else 'NONE'}",
        *config.options,
    ]


class Place(Protocol):
    """Where segment jobs run."""

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know before it decides anything.

        Raises:
            SchemaError: no segment job can run there.
        """
        ...

    def poll(self, state: State, now_sec: float, say: Callable[[str], None]) -> list[Event]:
        """Return what is new; asked again and again, twice a second or so."""
        ...

    def end(self, state: State, say: Callable[[str], None]) -> None:
        """Leave nothing behind of segment jobs that have ended; asked once, at the end."""
        ...

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return Beam's options of a segment job; none where the local runner's suit."""
        ...


class Local:
    """Beam's local runner: a segment job runs in its own processes."""

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know, where it knew another place."""
        if state.runner.name == "local":
            return []
        return [RunnerSet(time_sec=now_sec, name="local")]

    def poll(self, state: State, now_sec: float, say: Callable[[str], None]) -> list[Event]:
        """Return nothing: the budget bounds all."""
        return []

    def end(self, state: State, say: Callable[[str], None]) -> None:
        """Do nothing."""

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return nothing: the local runner has options of its own."""
        return []


def place_of(file: Path | None, output: Path) -> Place:
    """Return where a file says that segment jobs run.

    Args:
        file: none for the local runner.
        output: folder of the scheduler.

    Raises:
        SchemaError: the file is none.
    """
    config = RunnerConfig() if file is None else read_yaml(file, RunnerConfig)
    if config.runner == "flink" and config.flink is not None:
        return Flink(config.flink, Names.of_scheduler(output), str(file))
    if config.runner == "dataflow" and config.dataflow is not None:
        return Dataflow(config.dataflow, Names.of_scheduler(output))
    return Local()
