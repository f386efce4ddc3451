"""Segment jobs on a Flink session cluster: its slots become events, workers become parallelism."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from scheduler.drivers.runners.names import Names
from scheduler.drivers.runners.options import FlinkConfig
from scheduler.drivers.runners.rest import FlinkRest, Load, SilentError
from scheduler.machine.events import Event, RunnerSet, SlotsRead, SlotsUnread
from scheduler.machine.runner import BELIEVED_SEC
from scheduler.machine.state import ENDED, State
from schemas.errors import SchemaError

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
        builds = any(job.left_segments for job in state.jobs.values() if job.phase not in ENDED)
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
                f"counts for {BELIEVED_SEC:g} s, then there is one worker at a time"
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
