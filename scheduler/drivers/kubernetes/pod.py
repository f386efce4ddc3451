"""What a Pod, as the API server shows it, means for its process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from scheduler.drivers.kubernetes.api import millicores, quantity
from scheduler.drivers.processes import Ending, Needs

Pod = Mapping[str, Any]
SIGNALLED = 128
"""A container that a signal ended has this exit code and the signal's number."""
OOM = "OOMKilled"
"""Reason of a container whose memory was above its limit. A node that is short of memory evicts:
that is no fault of the process."""
_BY_CONDITION: Mapping[str, str] = MappingProxyType(
    {
        "PreemptionByScheduler": "Preempted",
        "DeletionByTaintManager": "Evicted",
        "EvictionByEvictionAPI": "Evicted",
        "DeletionByPodGC": "NodeLost",
        "TerminationByKubelet": "Evicted",
    }
)
"""Words for the reasons of the condition DisruptionTarget."""
_NO_CONTAINER = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"}
)
"""Nobody will make a container of what was asked for."""
_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff"})
"""The image did not come: it is not there, or its registry is away, as the message says."""
_NOT_THERE = re.compile(
    r"not found|manifest unknown|does not exist|access denied|denied:|unauthorized|no match for",
    re.IGNORECASE,
)
"""What registries say of an image that they will not give, however often they are asked; a name
that is not resolved ("no such host") is none of it."""


_USUAL = frozenset({"ContainerCreating", "PodInitializing"})
"""While volumes are mounted and images are pulled."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a Pod does not begin.

    Attributes:
        word: for the reason.
        message: of the cluster.
        hopeless: whether what was asked for is wrong, not what is there.
        usual: whether every Pod waits for it, for some seconds.
        roomless: whether no node has room for it.
    """

    word: str
    message: str
    hopeless: bool
    usual: bool = False
    roomless: bool = False

    @property
    def in_words(self) -> str:
        """Return both."""
        return _with(self.word, self.message)


def is_over(pod: Pod) -> bool:
    """Tell whether its program has ended, for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_running(pod: Pod) -> bool:
    """Tell whether its program has begun, and not ended."""
    return "running" in _state(pod)


def ending_of(pod: Pod, *, asked: bool) -> Ending:
    """Return how the process of a Pod ended that is over or gone.

    Args:
        pod: as it was seen last.
        asked: whether we had it deleted.
    """
    ended = _state(pod).get("terminated")
    status = None if ended is None else _status(int(ended["exitCode"]))
    if status == 0:
        return Ending(status=0)
    oom = (ended or {}).get("reason") == OOM
    return Ending(status=status, lost=_taken_by(pod, ended or {}, asked), oom=oom)


def notice_of(pod: Pod) -> float | None:
    """Return the seconds until a Pod is taken away, None where nothing says that it is."""
    if is_over(pod):
        return None
    metadata = pod["metadata"]
    if "deletionTimestamp" in metadata:
        return float(metadata.get("deletionGracePeriodSeconds") or 0)
    if _condition(pod, "DisruptionTarget", "True"):
        return float(pod["spec"].get("terminationGracePeriodSeconds") or 0)
    return None


def waiting_of(pod: Pod) -> Waiting | None:
    """Return why a Pod does not begin, None where nothing says so."""
    scheduled = _condition(pod, "PodScheduled", "False")
    if scheduled and scheduled.get("reason") == "Unschedulable":
        message = scheduled.get("message", "")
        return Waiting("Unschedulable", message, hopeless=False, roomless=True)
    waiting = _state(pod).get("waiting", {})
    word, message = waiting.get("reason"), waiting.get("message", "")
    if word in _NO_CONTAINER | _PULLS | _USUAL:
        absent = word in _PULLS and _NOT_THERE.search(message) is not None
        hopeless = absent or word in _NO_CONTAINER
        return Waiting(word, message, hopeless=hopeless, usual=word in _USUAL)
    return None


def last_message(pod: Pod) -> str:
    """Return the last line of what a container left as it failed."""
    lines = str(_state(pod).get("terminated", {}).get("message") or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def resized(pod: Pod, needs: Needs) -> bool | None:
    """Tell whether a container has got these limits; None while it is open."""
    pending = _condition(pod, "PodResizePending", "True")
    if pending and pending.get("reason") == "Infeasible":
        return False
    statuses: Any = pod.get("status", {}).get("containerStatuses") or [{}]
    limits = (statuses[0].get("resources") or {}).get("limits") or {}
    has = limits.get("memory"), limits.get("cpu")
    if None in has:
        return None
    same = quantity(limits["memory"]) == needs.memory_bytes
    return True if same and millicores(limits["cpu"]) == round(1000 * needs.cpus) else None


def _taken_by(pod: Pod, ended: Mapping[str, Any], asked: bool) -> str:
    """Return what took a Pod away, in a word and what the cluster says; nothing where none did."""
    if ended.get("reason") == OOM:
        return OOM
    status = pod.get("status", {})
    if status.get("reason"):
        word = "Preempted" if status["reason"] == "Preempting" else str(status["reason"])
        return _with(word, status.get("message"))
    target = _condition(pod, "DisruptionTarget", "True")
    if target:
        return _with(_BY_CONDITION.get(target.get("reason", ""), "Evicted"), target.get("message"))
    if not ended or ("deletionTimestamp" in pod["metadata"] and not asked):
        return "deleted"
    return ""


def _with(word: str, message: str | None) -> str:
    return f"{word}: {message}" if message else word


def _status(code: int) -> int:
    return SIGNALLED - code if code > SIGNALLED else code


def _state(pod: Pod) -> Mapping[str, Any]:
    """Return the state of the only container."""
    statuses: Any = pod.get("status", {}).get("containerStatuses") or [{}]
    return statuses[0].get("state") or {}


def _condition(pod: Pod, kind: str, status: str) -> Mapping[str, Any]:
    """Return a condition that has this status, nothing where none has."""
    conditions: Any = pod.get("status", {}).get("conditions") or []
    found = (c for c in conditions if c.get("type") == kind and c.get("status") == status)
    return next(found, {})
