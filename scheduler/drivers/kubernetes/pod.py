"""One Pod: its state as the cluster reports it, and its life from creation to exit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from presage.scheduler.drivers.base import ExitStatus, ResourceRequest
from presage.scheduler.drivers.kubernetes.api_server import millicores, quantity

Pod = Mapping[str, Any]
SIGNALLED = 128
"""The exit code of a container that a signal ended is this plus the signal's number."""
OOM = "OOMKilled"
"""Reason of a container that exceeded its memory limit. An eviction from a node that is short of
memory is not the process's fault."""
_BY_CONDITION: Mapping[str, str] = MappingProxyType(
    {
        "PreemptionByScheduler": "Preempted",
        "DeletionByTaintManager": "Evicted",
        "EvictionByEvictionAPI": "Evicted",
        "DeletionByPodGC": "NodeLost",
        "TerminationByKubelet": "Evicted",
    }
)
"""Short names for the reasons of the condition DisruptionTarget."""
_INVALID = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"}
)
"""Wait reasons of a container that can never be created."""
_PULL_FAILED = frozenset({"ErrImagePull", "ImagePullBackOff"})
"""Wait reasons of a missing image or an unreachable registry; the message tells which."""
_IMAGE_MISSING = re.compile(
    r"not found|manifest unknown|does not exist|access denied|denied:|unauthorized|no match for",
    re.IGNORECASE,
)
"""Messages of registries that will never provide an image; an unresolved name ("no such host") is
temporary."""
_NORMAL = frozenset({"ContainerCreating", "PodInitializing"})
"""Wait reasons while volumes are mounted and images are pulled."""
STOP_SEC = 1
"""Grace period of a Pod that is killed; with 0 its object would go before its process ends."""
REPORT_SEC = 30.0
"""Time after which a normal wait is reported."""
_FOR_NODE, _FOR_START = "waits for a node", "waits for its start"


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a Pod does not start.

    Attributes:
        permanent: whether the Pod itself is invalid.
        normal: whether every Pod waits for it, for some seconds.
        unschedulable: whether no node has room.
    """

    reason: str
    message: str
    permanent: bool
    normal: bool = False
    unschedulable: bool = False

    @property
    def text(self) -> str:
        """Reason and message."""
        return _join(self.reason, self.message)


def has_ended(pod: Pod) -> bool:
    """Return whether the Pod's program has ended."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_running(pod: Pod) -> bool:
    """Return whether the Pod's program has started and not ended."""
    return "running" in _container_state(pod)


def exit_status_of(pod: Pod, *, deleted_by_us: bool) -> ExitStatus:
    """Return how the process of a Pod ended."""
    terminated = _container_state(pod).get("terminated")
    status = None if terminated is None else _status(int(terminated["exitCode"]))
    oom = (terminated or {}).get("reason") == OOM
    return ExitStatus(
        status=status, lost=_removed_by(pod, terminated or {}, deleted_by_us), oom=oom
    )


def preemption_notice(pod: Pod) -> float | None:
    """Return the seconds until the Pod is removed, None if it is not to be removed."""
    if has_ended(pod):
        return None
    metadata = pod["metadata"]
    if "deletionTimestamp" in metadata:
        return float(metadata.get("deletionGracePeriodSeconds") or 0)
    if _condition(pod, "DisruptionTarget", "True"):
        return float(pod["spec"].get("terminationGracePeriodSeconds") or 0)
    return None


def wait_of(pod: Pod) -> Wait | None:
    """Return why a Pod does not start, None if the cluster gives no reason."""
    scheduled = _condition(pod, "PodScheduled", "False")
    if scheduled and scheduled.get("reason") == "Unschedulable":
        message = scheduled.get("message", "")
        return Wait("Unschedulable", message, permanent=False, unschedulable=True)
    waiting = _container_state(pod).get("waiting", {})
    reason, message = waiting.get("reason"), waiting.get("message", "")
    if reason in _INVALID | _PULL_FAILED | _NORMAL:
        missing = reason in _PULL_FAILED and _IMAGE_MISSING.search(message) is not None
        permanent = missing or reason in _INVALID
        return Wait(reason, message, permanent=permanent, normal=reason in _NORMAL)
    return None


def output_of(pod: Pod) -> tuple[str, str]:
    """Return the ends of standard output and of standard error of a container that has ended.

    Its node reports one of them: the file with its output, or its log if that file is empty and it
    has failed.
    """
    terminated = _container_state(pod).get("terminated", {})
    message = str(terminated.get("message") or "")
    return (message, "") if terminated.get("exitCode") == 0 else ("", message)


def resize_result(pod: Pod, request: ResourceRequest) -> bool | None:
    """Return whether the container has these limits; None while pending."""
    pending = _condition(pod, "PodResizePending", "True")
    if pending and pending.get("reason") == "Infeasible":
        return False
    statuses: Any = pod.get("status", {}).get("containerStatuses") or [{}]
    limits = (statuses[0].get("resources") or {}).get("limits") or {}
    if limits.get("memory") is None or limits.get("cpu") is None:
        return None
    same_memory = quantity(limits["memory"]) == request.memory_bytes
    same_cpus = millicores(limits["cpu"]) == round(1000 * request.cpus)
    return True if same_memory and same_cpus else None


def _removed_by(pod: Pod, terminated: Mapping[str, Any], deleted_by_us: bool) -> str:
    """Return why the cluster or another client removed a Pod; empty if neither did."""
    if terminated.get("reason") == OOM:
        return OOM
    status = pod.get("status", {})
    if status.get("reason"):
        reason = "Preempted" if status["reason"] == "Preempting" else str(status["reason"])
        return _join(reason, status.get("message"))
    target = _condition(pod, "DisruptionTarget", "True")
    if target:
        return _join(_BY_CONDITION.get(target.get("reason", ""), "Evicted"), target.get("message"))
    if not terminated or ("deletionTimestamp" in pod["metadata"] and not deleted_by_us):
        return "deleted"
    return ""


def _join(reason: str, message: str | None) -> str:
    return f"{reason}: {message}" if message else reason


def _status(code: int) -> int:
    return SIGNALLED - code if code > SIGNALLED else code


def _container_state(pod: Pod) -> Mapping[str, Any]:
    statuses: Any = pod.get("status", {}).get("containerStatuses") or [{}]
    return statuses[0].get("state") or {}


def _condition(pod: Pod, kind: str, status: str) -> Mapping[str, Any]:
    """Return the condition of this type if it has this status, else an empty mapping."""
    conditions: Any = pod.get("status", {}).get("conditions") or []
    matching = (c for c in conditions if c.get("type") == kind and c.get("status") == status)
    return next(matching, {})


@dataclass(slots=True)
class TrackedPod:
    """The observed state of a Pod, and pending requests for it."""

    name: str
    manifest: Mapping[str, Any] | None = None
    """Manifest to apply; None once the server has it."""
    observed: Mapping[str, Any] | None = None
    is_gone: bool = False
    """Whether the object no longer exists."""
    grace_sec: int | None = None
    """Grace period with which to delete it; None to keep it."""
    deleted_grace_sec: int | None = None
    """Grace period with which the server was asked to delete it."""
    deleted_by_other: bool = False
    """Whether another client deleted it before we did."""
    forced_status: ExitStatus | None = None
    """Exit status that we decided, whatever the cluster reports."""
    timeout_status: ExitStatus | None = None
    """Exit status of a Pod that waited too long; it applies once the Pod is gone."""
    permanent_wait: str = ""
    """Why it can never start, as reported once; later reports may lack the reason."""
    since: dict[str, float] = field(default_factory=dict[str, float])
    """When a temporary state was first observed, by its name."""
    secret_job: str | None = None
    """Job whose Secret must exist before it; None if it mounts none."""
    resize_request: ResourceRequest | None = None
    """Limits last requested after its creation."""

    @property
    def uid(self) -> str:
        """Uid of the Pod, empty until it is observed."""
        return "" if self.observed is None else str(self.observed["metadata"]["uid"])

    @property
    def is_alive(self) -> bool:
        """Whether it may run, now or later."""
        if self.forced_status is not None or self.is_gone:
            return False
        return self.observed is None or not has_ended(self.observed)

    @property
    def is_running(self) -> bool:
        """Whether its program has started and not ended."""
        return self.is_alive and self.observed is not None and is_running(self.observed)

    @property
    def exit_status(self) -> ExitStatus:
        """How it ended."""
        if self.forced_status is not None:
            return self.forced_status
        if self.observed is None:
            return ExitStatus()
        deleted_by_us = self.deleted_grace_sec is not None and not self.deleted_by_other
        reported = exit_status_of(self.observed, deleted_by_us=deleted_by_us)
        if self.timeout_status is None or reported.status == 0:
            return reported
        return self.timeout_status

    @property
    def notice_sec(self) -> float | None:
        """Seconds until another client or the cluster removes it; None if none does."""
        if not self.is_alive or self.grace_sec is not None or self.observed is None:
            return None
        return preemption_notice(self.observed)

    @property
    def must_be_deleted(self) -> bool:
        """Whether a delete request, or one with a shorter grace period, is pending."""
        if self.is_gone or self.observed is None or self.grace_sec is None:
            return False
        return self.deleted_grace_sec is None or self.grace_sec < self.deleted_grace_sec

    def delete(self, grace_sec: int) -> None:
        """Request its deletion; a Pod that was not observed yet ends at once.

        It stays tracked: if the server did create it, it is deleted when it is observed.
        """
        if self.observed is None:
            self.forced_status = self.forced_status or ExitStatus(lost="deleted")
            self.manifest = None
        if self.grace_sec is None or grace_sec < self.grace_sec:
            self.grace_sec = grace_sec

    def check_timeouts(self, now: float, start_sec: float, lost_sec: float) -> Wait | None:
        """Delete the Pod if its start or its termination takes too long.

        A Pod that waits has ended only when it is gone, since it may start meanwhile. One that its
        node does not terminate is declared lost.

        Args:
            now: seconds of any monotonic clock.
            start_sec: time limit of each wait.
            lost_sec: time limit of its termination after the grace period.

        Returns:
            What it waits for, if that is to be reported.
        """
        if not self.is_alive or self.observed is None:
            return None
        self._check_deletion(now, self.observed["metadata"], lost_sec)
        wait = wait_of(self.observed)
        waited_sec = self._waited_sec(now, wait)
        if wait is None:
            return None
        if wait.permanent:
            self.permanent_wait = wait.text
        if waited_sec > start_sec and self.timeout_status is None:
            if self.permanent_wait:
                self.timeout_status = ExitStatus(refused=self.permanent_wait)
            else:
                self.timeout_status = ExitStatus(lost=wait.text)
            self.delete(STOP_SEC)
        return None if wait.normal and waited_sec < REPORT_SEC else wait

    def reset_timers(self) -> None:
        """Restart all time limits: states may have changed unobserved."""
        for name in [name for name in self.since if name.startswith(("waits", "going"))]:
            del self.since[name]

    def _waited_sec(self, now: float, wait: Wait | None) -> float:
        """Return how long it has waited for a node or, once it has one, for its start."""
        name = None if wait is None else _FOR_NODE if wait.unschedulable else _FOR_START
        for other in {_FOR_NODE, _FOR_START} - {name}:
            self.since.pop(other, None)
        return 0.0 if name is None else now - self.since.setdefault(name, now)

    def _check_deletion(self, now: float, metadata: Mapping[str, Any], lost_sec: float) -> None:
        if "deletionTimestamp" in metadata:
            self.deleted_by_other |= self.deleted_grace_sec is None
            grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
            late_sec = now - self.since.setdefault(f"going {grace:g}", now) - grace
            if late_sec > lost_sec:
                detail = f"not terminated {late_sec:.0f} s after its grace period"
                self.forced_status = ExitStatus(lost=f"NodeLost: {detail}")
                self.grace_sec = 0
