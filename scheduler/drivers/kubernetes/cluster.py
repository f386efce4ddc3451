"""A cluster as a platform: all Pods of one scheduler in one namespace, and the Pods of one job.

Nothing here raises while jobs run: requests that the API server does not answer are repeated, and
so are rejected deletions. A rejected Pod is an ended process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from presage.scheduler.drivers.base import (
    NO_RESOURCES,
    Endpoint,
    ExitStatus,
    ResourceRequest,
    instance_of,
    newest_name,
)
from presage.scheduler.drivers.kubernetes.api_server import (
    CONFLICT,
    INVALID,
    ApiRefusedError,
    PodChange,
    PodUsage,
    Unreachable,
    UnreachableError,
    Watch,
    connect,
)
from presage.scheduler.drivers.kubernetes.pod import (
    STOP_SEC,
    TrackedPod,
    has_ended,
    output_of,
    resize_result,
)
from presage.scheduler.drivers.kubernetes.pod_manifest import (
    INSTANCE,
    JOB,
    PROCESS,
    ClusterConfig,
    Task,
    endpoint_of,
    pod_name,
    pod_of,
    resize_patch,
    secret_name,
    secret_of,
)
from presage.scheduler.drivers.observations import last_line, read_output
from presage.schemas.errors import PlanError

RETRY_SEC = 2.0
"""Delay after an unanswered request or a rejected deletion, and between two checks of Pods that the
watch does not show."""
USAGE_SEC = 10.0
"""Age at which usage is read again; a metrics server has new values every 15 s."""
RESIZE_SEC = 30.0
"""Time limit of a change of limits."""


class Cluster:
    """A cluster as a platform: the Pods of one scheduler; a context, which they outlive."""

    resizes = True
    """Limits of a container can be changed while it runs."""

    def __init__(
        self, config: ClusterConfig, output: Path, progress: Callable[[str], None]
    ) -> None:
        self._config = config
        self._output = output
        self._progress = progress
        self._reported = set[str]()
        self._unreachable = set[Literal["calls", "watch"]]()
        self._pods: dict[str, TrackedPod] = {}
        self._pods_of: dict[str, dict[str, TrackedPod]] = {}
        """Tracked Pods by job and process."""
        self._unconfirmed = set[str]()
        self._quiet_until = self._confirm_at = 0.0
        self._usage_at = -USAGE_SEC
        self._usage: dict[str, PodUsage] = {}

    def __enter__(self) -> Cluster:
        """List the Pods and start the watch.

        Raises:
            PlanError: the API server does not answer or denies access.
        """
        self._instance = instance_of(self._output)
        self._selector = f"{INSTANCE}={self._instance}"
        self._api = connect(self._config)
        self._watch = Watch(connect(self._config), self._selector)
        try:
            pods = self._watch.start()
        except (ApiRefusedError, UnreachableError) as error:
            raise PlanError(
                f"Pods of namespace {self._config.namespace!r} cannot be listed: {error}; check "
                "the kubeconfig, and the rights in deploy/kubernetes/base/rbac.yaml"
            ) from error
        self._on_listed(pods)
        return self

    def __exit__(self, *error: object) -> None:
        """End the watch; Pods keep running."""
        self._watch.stop()
        self._api.close()

    @property
    def identity(self) -> str:
        """API server and namespace, in one line."""
        return f"kubernetes {self._api.host} {self._config.namespace}"

    @property
    def grace_sec(self) -> int:
        """Termination grace period."""
        return int(self._config.grace.total_seconds())

    def of_job(self, job: str, folder: Path) -> Pods:
        """Return the processes of a job, with records in a folder."""
        return Pods(self, job, folder)

    @property
    def work(self) -> str:
        """Folder that each Pod has for itself."""
        return self._config.work

    def endpoint(self, job: str) -> Endpoint:
        """Return how processes of a job connect."""
        return endpoint_of(self._config, self._instance, job)

    def poll(self) -> None:
        """Process events of the watch, check timeouts, and repeat unanswered requests."""
        for event in self._watch.take():
            if isinstance(event, Unreachable):
                self._set_reachable("watch", event.reason)
            elif isinstance(event, PodChange):
                self._on_changed(event)
            else:
                self._on_listed(event.pods)
        now = time.monotonic()
        for pod in self._pods.values():
            self._check_timeouts(pod, now)
        if self._unconfirmed and now >= self._confirm_at:
            self._confirm_at = now + RETRY_SEC
            self._send("Pods cannot be read", self._confirm_pods)
        for pod in list(self._pods.values()):
            self.sync(pod)

    def find(self, job: str, process: str) -> TrackedPod | None:
        """Return the Pod of a process, None if there was none."""
        return self._pods.get(pod_name(self._instance, job, process))

    def pods_of(self, job: str) -> dict[str, TrackedPod]:
        """Return the Pods of a job by process name, those that were requested or observed."""
        pods = self._pods_of.get(job, {})
        return {process: pod for process, pod in pods.items() if pod.observed or pod.manifest}

    def _track(self, body: Mapping[str, Any]) -> TrackedPod:
        """Return the tracked Pod of a manifest or an object, a new one under its job's name."""
        name = body["metadata"]["name"]
        pod = self._pods.setdefault(name, TrackedPod(name))
        names = body["metadata"].get("annotations", {})
        job, process = names.get(JOB), names.get(PROCESS)
        if job and process and name == pod_name(self._instance, job, process):
            self._pods_of.setdefault(job, {})[process] = pod
        return pod

    def create(self, task: Task) -> None:
        """Create a Pod for a process."""
        manifest = pod_of(self._config, self._instance, task)
        is_new = manifest["metadata"]["name"] not in self._pods
        pod = self._track(manifest)
        if is_new:
            pod.manifest, pod.secret_job = manifest, task.job if task.needs_secret else None
        self.sync(pod)

    def remove(self, job: str, process: str) -> None:
        """Delete the object of an ended Pod, then stop tracking it."""
        pod = self._pods_of[job][process]
        if pod.is_gone or pod.observed is None:
            del self._pods_of[job][process]
            self._pods.pop(pod.name, None)
        else:
            pod.delete(0 if has_ended(pod.observed) else STOP_SEC)
            self.sync(pod)

    def sync(self, pod: TrackedPod) -> None:
        """Send pending requests for a Pod, if the API server answers."""
        if time.monotonic() < pod.since.get("refused", -RETRY_SEC) + RETRY_SEC:
            return
        sent: bool | None = True
        if pod.manifest is not None:
            sent = self._send(f"Pod {pod.name} cannot be created", lambda: self._apply(pod))
        if sent and pod.must_be_deleted:
            sent = self._send(f"Pod {pod.name} cannot be deleted", lambda: self._delete(pod))
        if sent is False:
            pod.since["refused"] = time.monotonic()

    def _send(self, problem: str, request: Callable[[], object]) -> bool | None:
        """Send a request if the API server answers, and report a problem if it is rejected.

        Returns:
            Whether it was accepted; None if it is to be repeated.
        """
        if time.monotonic() < self._quiet_until:
            return None
        accepted = True
        try:
            request()
        except UnreachableError as error:
            self._quiet_until = time.monotonic() + RETRY_SEC
            self._set_reachable("calls", str(error) or repr(error))
            return None
        except ApiRefusedError as error:
            self._report(f"{problem}: {error.message}")
            accepted = False
        self._set_reachable("calls")
        return accepted

    def resize(self, pod: TrackedPod, request: ResourceRequest) -> bool:
        """Request other limits; False if the API server rejects them."""

        def request_limits() -> None:
            pod.observed = self._api.resize(pod.name, resize_patch(request))
            pod.resize_request = request

        return self._send(f"Pod {pod.name} cannot be resized", request_limits) is not False

    def usage(self, pod: TrackedPod) -> PodUsage | None:
        """Return the resources that a Pod uses, None while no metrics server answers."""
        now = time.monotonic()
        if now - self._usage_at >= USAGE_SEC and now > self._quiet_until:
            try:
                self._usage = self._api.usage(self._selector)
                self._set_reachable("calls")
            except (ApiRefusedError, UnreachableError) as error:
                self._usage = {}
                self._report(f"memory cannot be read from metrics.k8s.io: {str(error).strip()}")
            self._usage_at = time.monotonic()  # the answer may take longer than `USAGE_SEC`
        return self._usage.get(pod.name)

    def delete_secret(self, job: str) -> bool:
        """Delete a job's Secret, without live processes; False if it is to be repeated.

        The next process that needs one gets a new Secret.
        """
        name, problem = secret_name(self._instance, job), f"Secret of job {job} cannot be deleted"
        return self._send(problem, lambda: self._api.delete_secret(name)) is not None

    def _delete(self, pod: TrackedPod) -> None:
        assert pod.grace_sec is not None, "it must be deleted"
        self._api.delete(pod.name, pod.uid, pod.grace_sec)
        pod.deleted_grace_sec = pod.grace_sec

    def _apply(self, pod: TrackedPod) -> None:
        job = pod.secret_job
        try:
            if job is not None:  # each time, as another client may have deleted it
                endpoint = self.endpoint(job)
                self._api.ensure_secret(secret_of(self._config, self._instance, job, endpoint))
            pod.observed = self._api.apply(pod.manifest or {})
        except ApiRefusedError as error:
            if error.is_quota:
                quota = error.message.partition("exceeded quota: ")[2].partition(",")[0]
                self._report(f"the namespace's quota {quota} is exceeded")
                pod.forced_status = ExitStatus(lost="quota exceeded")
            elif error.status in (CONFLICT, INVALID) and self._is_ours(pod):
                pass  # another client has changed it since; it runs all the same
            else:
                pod.forced_status = ExitStatus(refused=f"Pod {pod.name}: {error.message}")
        pod.manifest = None

    def _is_ours(self, pod: TrackedPod) -> bool:
        body = self._api.get(pod.name)
        if body is None or body["metadata"].get("labels", {}).get(INSTANCE) != self._instance:
            return False
        pod.observed = body
        return True

    def _check_timeouts(self, pod: TrackedPod, now: float) -> None:
        if "watch" in self._unreachable:
            pod.reset_timers()
            return
        config = self._config
        start_sec = config.unschedulable_after.total_seconds()
        wait = pod.check_timeouts(now, start_sec, config.lost_after.total_seconds())
        if wait is not None:
            self._report(f"a Pod waits: {wait.text}")

    def _on_listed(self, bodies: tuple[dict[str, Any], ...]) -> None:
        for body in bodies:
            self._on_observed(body)
        # A list may be older than a Pod that was created meanwhile.
        listed = {body["metadata"]["name"] for body in bodies}
        self._unconfirmed |= {
            name
            for name, pod in self._pods.items()
            if pod.observed is not None and not pod.is_gone and name not in listed
        }

    def _on_changed(self, event: PodChange) -> None:
        self._on_observed(event.pod)
        metadata = event.pod["metadata"]
        pod = self._pods[metadata["name"]]
        if not event.gone or pod.uid != metadata["uid"]:
            return
        if "deletionTimestamp" in metadata or not pod.is_alive:
            pod.is_gone = True
        else:  # it may only have lost its labels
            self._unconfirmed.add(pod.name)

    def _on_observed(self, body: dict[str, Any]) -> None:
        pod = self._track(body)
        if pod.uid in ("", body["metadata"]["uid"]):
            pod.observed, pod.manifest = body, None
        else:  # ours was deleted meanwhile
            pod.is_gone = True

    def _confirm_pods(self) -> None:
        """Look up Pods that the watch does not show; those without our labels are deleted."""
        for name in sorted(self._unconfirmed):
            pod = self._pods.get(name)
            body = None if pod is None else self._api.get(name)
            if pod is None or body is None or body["metadata"]["uid"] != pod.uid:
                self._unconfirmed.discard(name)
                if pod is not None:
                    pod.is_gone = True
                continue
            pod.observed = body
            if body["metadata"].get("labels", {}).get(INSTANCE) == self._instance:
                self._unconfirmed.discard(name)
            else:
                self._report(f"Pod {name} has lost its labels and is deleted")
                pod.delete(self.grace_sec)

    def _set_reachable(self, channel: Literal["calls", "watch"], reason: str = "") -> None:
        """Record whether the API server answers (no reason) or not, and report the change."""
        was_unreachable = bool(self._unreachable)
        if reason:
            self._unreachable.add(channel)
        else:
            self._unreachable.discard(channel)
        if bool(self._unreachable) != was_unreachable:
            state = f"does not answer: {reason}" if reason else "answers again"
            self._progress(f"the API server {state}")
        if channel == "watch" and not reason:
            self._quiet_until = 0.0

    def _report(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._progress(line)


class Pods:
    """The processes of one job."""

    def __init__(self, cluster: Cluster, job: str, folder: Path) -> None:
        self._cluster = cluster
        self._job = job
        self._folder = folder
        self._may_have_secret = True
        self.endpoint: Endpoint | None = cluster.endpoint(job)
        """How its processes connect."""
        self.work = Path(cluster.work)
        """Folder that each of its processes has for itself."""

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
        self._cluster.create(Task(job=self._job, name=name, command=command, request=request))

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
        """Return the standard output of a process that has ended."""
        return self._output(name)[0]

    def last_stderr_line(self, name: str) -> str:
        """Return the last line that a process that has failed wrote to standard error."""
        return last_line(self._output(name)[1])

    def _output(self, name: str) -> tuple[str, str]:
        pod = self._find(name)
        if pod is not None and pod.observed is not None:
            return output_of(pod.observed)
        return read_output(self._path(name, "out")), read_output(self._path(name, "err"))

    def _record_output(self, name: str) -> None:
        """Write what an ended process printed to the folder, before its Pod is deleted."""
        for suffix, text in zip(("out", "err"), self._output(name), strict=True):
            path = self._path(name, suffix)
            if text and not path.exists():
                path.write_text(text, encoding="utf-8")

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
        requested it died. It is killed; only processes of slot moves run without being in the
        state. The job's Secret is deleted with its last process.
        """
        pods = self._cluster.pods_of(self._job)
        for name, pod in pods.items():
            if name in names:
                continue
            if not pod.is_alive:
                self._record_output(name)
                self._cluster.remove(self._job, name)
            elif not name.startswith("move-"):
                self.kill(name)
        if self._may_have_secret and not names and not any(p.is_alive for p in pods.values()):
            self._may_have_secret = not self._cluster.delete_secret(self._job)

    def _find(self, name: str) -> TrackedPod | None:
        return self._cluster.find(self._job, name)

    def _usage(self, name: str) -> PodUsage | None:
        pod = self._find(name)
        return None if pod is None or not pod.is_running else self._cluster.usage(pod)

    def _delete(self, name: str, grace_sec: int) -> None:
        pod = self._find(name)
        if pod is not None and pod.is_alive:
            pod.delete(grace_sec)
            self._cluster.sync(pod)

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}.{suffix}"
