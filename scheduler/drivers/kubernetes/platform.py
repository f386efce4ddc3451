"""A Kubernetes cluster as a platform, and the Pods of one job."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from scheduler.drivers.base import (
    NO_RESOURCES,
    ExitStatus,
    ResourceRequest,
    last_line,
    newest_name,
    read_output,
)
from scheduler.drivers.kubernetes.api import Usage
from scheduler.drivers.kubernetes.cluster import Cluster
from scheduler.drivers.kubernetes.manifest import ClusterConfig, Task
from scheduler.drivers.kubernetes.pod import STOP_SEC, TrackedPod, last_message, resize_result

RESIZE_SEC = 30.0
"""Time limit of a change of limits."""


class Pods:
    """The processes of one job."""

    def __init__(self, cluster: Cluster, job: str, folder: Path) -> None:
        """Create the table of Pods; nothing is started.

        Args:
            cluster: all Pods of the scheduler.
            job: name of the job.
            folder: holds `<name>.begun`, `.out` and `.err` of each process; Pods mount it, too.
        """
        self._cluster = cluster
        self._job = job
        self._folder = folder
        self._may_have_secret = True
        self.endpoint = cluster.endpoint(job)
        """How its processes connect."""

    def start(
        self, name: str, command: Sequence[str], request: ResourceRequest = NO_RESOURCES
    ) -> None:
        """Create a Pod, unless the name was used before."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._path(name, "begun").touch(exist_ok=False)
        except FileExistsError:
            return
        self._may_have_secret = True
        self._cluster.create(
            Task(job=self._job, name=name, command=command, request=request, folder=self._folder)
        )

    def was_started(self, name: str) -> bool:
        """Return whether a Pod of this name was ever requested."""
        return self._path(name, "begun").exists()

    def newest_started(self, prefix: str) -> str | None:
        """Return the name with this prefix that was started last."""
        return newest_name(self._folder, prefix, ".begun")

    def is_alive(self, name: str) -> bool:
        """Return whether a Pod has not ended; one that was not created yet is alive."""
        pod = self._find(name)
        return pod is not None and pod.is_alive

    def is_running(self, name: str) -> bool:
        """Return whether a container has started and not ended."""
        pod = self._find(name)
        return pod is not None and pod.is_running

    def exit_status(self, name: str) -> ExitStatus:
        """Return how a Pod ended."""
        pod = self._find(name)
        return ExitStatus() if pod is None else pod.exit_status

    def request_stop(self, name: str) -> None:
        """Delete a Pod with its grace period: its process receives SIGTERM."""
        self._delete(name, self._cluster.grace_sec)

    def kill(self, name: str) -> None:
        """Delete a Pod with a minimal grace period."""
        self._delete(name, STOP_SEC)

    def output(self, name: str) -> str:
        """Return the standard output of a process so far."""
        return read_output(self._path(name, "out"))

    def last_stderr_line(self, name: str) -> str:
        """Return the last line on standard error, else of the container's termination message."""
        if line := last_line(read_output(self._path(name, "err"))):
            return line
        pod = self._find(name)
        return "" if pod is None or pod.observed is None else last_message(pod.observed)

    def resident_bytes(self, name: str) -> int:
        """Return the memory of a Pod from the metrics server, 0 if unknown."""
        usage = self._usage(name)
        return 0 if usage is None else usage.memory_bytes

    def busy_cores(self, name: str) -> float | None:
        """Return the busy cores of a Pod from the metrics server."""
        usage = self._usage(name)
        return None if usage is None else usage.cores

    def preemption_notices(self) -> Mapping[str, float]:
        """Return the Pods that another client or the cluster removes."""
        notices = {name: pod.notice_sec for name, pod in self._cluster.pods_of(self._job).items()}
        return {name: seconds for name, seconds in notices.items() if seconds is not None}

    def resize(self, name: str, cpus: float, memory_bytes: int) -> bool | None:
        """Change a container's limits in place; None until the node has done so, or timed out."""
        pod = self._find(name)
        if pod is None or pod.observed is None or not pod.is_alive:
            return False
        request = ResourceRequest(cpus=cpus, memory_bytes=memory_bytes)
        if pod.resize_request != request:
            pod.since["resizing"] = time.monotonic()
            return None if self._cluster.resize(pod, request) else False
        result = resize_result(pod.observed, request)
        late = time.monotonic() - pod.since["resizing"] > RESIZE_SEC
        return False if result is None and late else result

    def remove_ended(self, names: Collection[str]) -> None:
        """Delete the objects of ended Pods, except these names.

        A live Pod with another name appeared after it was declared ended: the scheduler that
        requested it died. It is killed; only slot moves live without being named. The job's Secret
        is deleted with its last process.
        """
        pods = self._cluster.pods_of(self._job)
        for name, pod in pods.items():
            if name in names:
                continue
            if not pod.is_alive:
                self._cluster.remove(pod)
            elif not name.startswith("move-"):
                self.kill(name)
        if self._may_have_secret and not names and not any(p.is_alive for p in pods.values()):
            self._may_have_secret = not self._cluster.delete_secret(self._job)

    def _find(self, name: str) -> TrackedPod | None:
        return self._cluster.find(self._job, name)

    def _usage(self, name: str) -> Usage | None:
        pod = self._find(name)
        return None if pod is None or not pod.is_running else self._cluster.usage(pod)

    def _delete(self, name: str, grace_sec: int) -> None:
        pod = self._find(name)
        if pod is not None and pod.is_alive:
            pod.delete(grace_sec)
            self._cluster.sync(pod)

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}.{suffix}"


class Kubernetes:
    """Runs each process as a bare Pod."""

    resizes = True
    """Limits of a container can be changed while it runs."""

    def __init__(self, cluster: Cluster) -> None:
        """Wrap the Pods of a scheduler."""
        self._cluster = cluster
        self.identity = cluster.identity

    def of_job(self, job: str, folder: Path) -> Pods:
        """Return the Pods of a job."""
        return Pods(self._cluster, job, folder)

    def poll(self) -> None:
        """Process events since the last call."""
        self._cluster.poll()


@contextmanager
def kubernetes(
    config: ClusterConfig, output: Path, progress: Callable[[str], None]
) -> Generator[Kubernetes]:
    """Watch the Pods of a scheduler; they keep running afterwards.

    Args:
        config: of the cluster.
        output: folder of the scheduler.
        progress: called with messages of the cluster.

    Raises:
        PlanError: the API server does not answer or denies access.
    """
    with Cluster(config, output, progress) as cluster:
        yield Kubernetes(cluster)
