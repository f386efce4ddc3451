"""The processes of a Flink on this machine: started one by one, each ended by its own process id.

All ports are the system's choice and all listeners that can be told to are on the loopback
interface. (The channels between a task manager and its Python workers are not: Beam binds them to
all interfaces, there as on any Flink.)
"""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import HERE, PACKAGES

READY_SEC = 120.0
STOP_SEC = 20.0
CACHE_MILLIS = 10_000
"""How long a worker process waits for its job's next stage; without, each stage starts new ones."""

ENTRY_POINTS = {
    "job-manager": "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
    "task-manager": "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
}
HEAP_MB = {"job-manager": 512, "task-manager": 1664, "job-server": 512, "embedded": 1024}
TASK_MANAGER_MB = {
    "framework.heap.size": 128,
    "task.heap.size": 1536,
    "managed.size": 512,  # sorting and hashing
    "network.min": 256,  # Beam's many small stages need 512 buffers of 32 KiB each
    "network.max": 256,
    "framework.off-heap.size": 128,
    "task.off-heap.size": 1024,  # Beam sends 100 elements, of a partition each, before it waits
    "jvm-metaspace.size": 256,
    "jvm-overhead.min": 192,
    "jvm-overhead.max": 192,
}


DIRECT_MB = sum(
    TASK_MANAGER_MB[key] for key in ("network.max", "framework.off-heap.size", "task.off-heap.size")
)
RESTARTS = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 3,
    "restart-strategy.fixed-delay.delay": "8 s",
    "heartbeat.interval": 2000,  # ms; two lost ones end a task manager, before the next attempt
}
"""What lets a job continue without one of several task managers. Flink's default ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A Flink that takes jobs."""

    options: tuple[str, ...]
    """Beam options that send a job there."""
    rest: str | None
    """Address of Flink's REST API; none while Flink is embedded in the job server."""
    processes: dict[str, subprocess.Popen[str]]
    """By name, in the order of their start."""

    def dead(self) -> list[str]:
        """Return the names of processes that have ended, unless another task manager runs."""
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        managers = [name for name in self.processes if name.startswith("task-manager")]
        if set(managers) <= set(ended):
            return ended
        return [name for name in ended if name not in managers]


class Starter:
    """Starts processes whose output goes to one directory, and ends them together."""

    def __init__(self, flink_jar: Path, directory: Path) -> None:
        """Take the jar that names all others, and a directory for output."""
        self.flink_jar = flink_jar
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, command: list[str]) -> subprocess.Popen[str]:
        """Start a process; what it says on standard error is in `<name>.log`."""
        with self.log(name).open("w") as log:
            self.processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],  # ends with this process
                cwd=HERE.parents[1],
                env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self.processes[name]

    def java(self, name: str, main: str, arguments: list[str], heap_mb: int) -> None:
        """Start a Java program with Flink and Beam on its class path."""
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        options = [
            f"-Xmx{heap_mb}m",
            f"-XX:MaxDirectMemorySize={DIRECT_MB}m",
            f"-Djava.io.tmpdir={temporary}",
        ]
        options += [f"-Dlog4j.configurationFile={(HERE / 'log4j.properties').as_uri()}"]
        options += [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in PACKAGES]
        self.start(name, ["java", *options, "-cp", str(self.flink_jar), main, *arguments])

    def log(self, name: str) -> Path:
        """Return the file that holds a process's output."""
        return self.directory / f"{name}.log"

    def wait(self, name: str, probe: Callable[[], str | None]) -> str:
        """Ask until there is an answer.

        Raises:
            RuntimeError: the process has ended, or says nothing for too long.
        """
        deadline = time.monotonic() + READY_SEC
        while time.monotonic() < deadline:
            found = probe()
            if found is not None:
                return found
            if self.processes[name].poll() is not None:
                break
        text = self.log(name).read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{name} must start, got: {' | '.join(text[-3:]) or 'nothing'}")

    def address(self, name: str) -> str:
        """Return the address that a server prints when it is ready."""
        stdout = self.processes[name].stdout
        assert stdout is not None, "processes are started with a pipe"

        def probe() -> str | None:
            readable, _, _ = select.select([stdout], [], [], 0.5)
            return stdout.readline().strip() or None if readable else None

        return self.wait(name, probe)

    def logged(self, name: str, pattern: str) -> str:
        """Return what a pattern's group matches in the output of a process."""

        def probe() -> str | None:
            found = re.search(pattern, self.log(name).read_text(errors="replace"))
            time.sleep(0 if found else 0.1)
            return found[1] if found else None

        return self.wait(name, probe)

    def stop(self) -> None:
        """End what was started; by force what does not end."""
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_SEC)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running(
    kind: str, flink_jar: Path, directory: Path, slots: int, task_managers: int = 1
) -> Iterator[Running]:
    """Start a Flink, and end it with the body.

    Args:
        kind: `embedded` in the job server, or a `session` cluster with its own worker pool.
        flink_jar: the jar that names all others.
        directory: for logs and temporary files.
        slots: of each task manager, and parallelism of a job.
        task_managers: of a session; a job continues if one of several is lost.
    """
    with ExitStack() as stack:
        starter = Starter(flink_jar, directory)
        stack.callback(starter.stop)
        environment, rest, master = ["--environment_type=LOOPBACK"], None, "[local]"
        if kind == "session":
            starter.start("worker-pool", [sys.executable, "-u", str(HERE / "worker_pool.py")])
            master = _start_session(starter, slots, task_managers)
            rest = f"http://{master}"
            environment = ["--environment_type=EXTERNAL", f"--sdk_worker_parallelism={slots}"]
            environment += [f"--environment_config={starter.address('worker-pool')}"]
            environment += [f"--environment_cache_millis={CACHE_MILLIS}"]
        endpoint = _start_job_server(starter, master)
        if rest is not None:
            _wait_for_slots(starter, master, slots * task_managers)
        options = ["--runner=FlinkRunner", f"--job_endpoint={endpoint}", *environment]
        options.append(f"--parallelism={slots}")
        yield Running(options=tuple(options), rest=rest, processes=starter.processes)


def _start_job_server(starter: Starter, master: str) -> str:
    artifacts = starter.directory / "artifacts"
    arguments = ["--job-port=0", "--artifact-port=0", "--expansion-port=-1"]
    arguments += [f"--artifacts-dir={artifacts}", f"--flink-master={master}"]
    heap = HEAP_MB["embedded" if master == "[local]" else "job-server"]
    starter.java("job-server", str(HERE / "JobServer.java"), arguments, heap)
    return starter.address("job-server")


def _start_session(starter: Starter, slots: int, task_managers: int) -> str:
    """Start a job manager and task managers; return the address of the REST API."""
    configuration = starter.directory / "conf"
    configuration.mkdir()
    (configuration / "config.yaml").write_text("")  # all settings are arguments

    def start(name: str, settings: dict[str, object]) -> None:
        arguments = ["--configDir", str(configuration)]
        for key, value in settings.items():
            arguments += ["-D", f"{key}={value}"]
        kind = name.rstrip("-0123456789")
        starter.java(name, ENTRY_POINTS[kind], arguments, HEAP_MB[kind])

    host = "127.0.0.1"
    start(
        "job-manager",
        {
            "jobmanager.rpc.address": host,
            "jobmanager.rpc.port": 0,
            "jobmanager.bind-host": host,
            "rest.address": host,
            "rest.bind-address": host,
            "rest.port": 0,
            "classloader.resolve-order": "parent-first",
            "cluster.evenly-spread-out-slots": "true",
            **(RESTARTS if task_managers > 1 else {}),
        },
    )
    port = starter.logged("job-manager", r"system started at \S+//flink@127\.0\.0\.1:(\d+)")
    settings = {
        "jobmanager.rpc.address": host,
        "jobmanager.rpc.port": port,
        "taskmanager.host": host,
        "taskmanager.bind-host": host,
        "taskmanager.rpc.port": 0,
        "taskmanager.numberOfTaskSlots": slots,
        "taskmanager.cpu.cores": slots,
        "cluster.uncaught-exception-handling": "FAIL",  # a full heap would leave the job waiting
        "classloader.resolve-order": "parent-first",
        **{f"taskmanager.memory.{key}": f"{mb}m" for key, mb in TASK_MANAGER_MB.items()},
    }
    for number in range(task_managers):
        start(f"task-manager-{number + 1}" if number else "task-manager", settings)
    return starter.logged("job-manager", r"Rest endpoint listening at (\S+:\d+)")


def _wait_for_slots(starter: Starter, rest: str, slots: int) -> None:
    def probe() -> str | None:
        time.sleep(0.2)
        return "ready" if ask(rest, "/overview").get("slots-total") == slots else None

    starter.wait("task-manager", probe)


def ask(address: str, path: str) -> dict[str, Any]:
    """Return an answer of Flink's REST API, empty while there is none."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
