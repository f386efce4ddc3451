"""One Pod, from its creation to how it ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from scheduler.drivers.base import Ending, Needs
from scheduler.drivers.kubernetes.api import millicores, quantity

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


STOP_SEC = 1
"""Time of a process that is ended; 0 would take its object away before its node has ended it."""
USUAL_SEC = 30.0
"""What every Pod waits for is worth a word after so long."""
_FOR_NODE, _FOR_START = "waits for a node", "waits for its start"


@dataclass(slots=True)
class Tracked:
    """What is known of a Pod, and what is still to be done."""

    name: str
    """Of the Pod."""
    wanted: Mapping[str, Any] | None = None
    """To be applied; None once the server has it."""
    seen: Mapping[str, Any] | None = None
    """As it was seen last."""
    is_gone: bool = False
    """Whether there is no such Pod any more."""
    grace_sec: int | None = None
    """It is to be deleted, with so much time; None while it is to stay."""
    deleted: int | None = None
    """Time with which the server was told so."""
    is_taken: bool = False
    """Whether somebody else had it deleted before we did."""
    verdict: Ending | None = None
    """How it ended, where we decide that it did."""
    given_up: Ending | None = None
    """How it ends that waited for too long, once it is gone."""
    final: str = ""
    """Why it will never begin, once its node has said so; between two tries it says less."""
    since: dict[str, float] = field(default_factory=dict[str, float])
    """When something was first seen that must not last, by its word."""
    needs_secret_of: str | None = None
    """Job whose Secret it is to see; None where it sees none, or is there already."""
    given: Needs | None = None
    """Limits that the server was told last, since it began."""

    @property
    def uid(self) -> str:
        """Return what makes this Pod another than the next one of its name."""
        return "" if self.seen is None else str(self.seen["metadata"]["uid"])

    @property
    def lives(self) -> bool:
        """Whether it may run, now or later."""
        if self.verdict is not None or self.is_gone:
            return False
        return self.seen is None or not is_over(self.seen)

    @property
    def runs(self) -> bool:
        """Whether its program has begun, and not ended."""
        return self.lives and self.seen is not None and is_running(self.seen)

    @property
    def ending(self) -> Ending:
        """How it ended."""
        if self.verdict is not None:
            return self.verdict
        if self.seen is None:
            return Ending()
        found = ending_of(self.seen, asked=self.deleted is not None and not self.is_taken)
        return found if self.given_up is None or found.status == 0 else self.given_up

    @property
    def notice_sec(self) -> float | None:
        """Seconds until somebody else takes it away; None where nobody does."""
        if not self.lives or self.grace_sec is not None or self.seen is None:
            return None
        return notice_of(self.seen)

    @property
    def must_be_deleted(self) -> bool:
        """Whether the server is to be told that it is to go, or to go sooner."""
        if self.is_gone or self.seen is None or self.grace_sec is None:
            return False
        return self.deleted is None or self.grace_sec < self.deleted

    def end(self, grace_sec: int) -> None:
        """Have it deleted; one that the server has not shown ends at once.

        It stays known: should the server have made it, it is deleted when it is shown.
        """
        if self.seen is None:
            self.verdict = self.verdict or Ending(lost="deleted")
            self.wanted = None
        if self.grace_sec is None or grace_sec < self.grace_sec:
            self.grace_sec = grace_sec

    def look(self, now: float, unschedulable_sec: float, lost_sec: float) -> Waiting | None:
        """Give it up when it waits, or is about to go, for too long.

        One that waits is deleted, and has ended when it is gone: it may begin meanwhile. For one
        that its node does not end there is nothing to wait for.

        Args:
            now: seconds of any clock that only goes forward.
            unschedulable_sec: how long it may wait.
            lost_sec: how long it may outlive its grace.

        Returns:
            What it waits for, when that is worth a word.
        """
        if not self.lives or self.seen is None:
            return None
        self._look_at_deletion(now, self.seen["metadata"], lost_sec)
        waiting = waiting_of(self.seen)
        waited_sec = self._waited_sec(now, waiting)
        if waiting is not None and waiting.hopeless:
            self.final = waiting.in_words
        if waiting is not None and waited_sec > unschedulable_sec and self.given_up is None:
            lost = Ending(lost=waiting.in_words)
            self.given_up = Ending(refused=self.final) if self.final else lost
            self.end(STOP_SEC)
        return None if waiting is None or (waiting.usual and waited_sec < USUAL_SEC) else waiting

    def look_anew(self) -> None:
        """Forget for how long something was seen: it may have changed since, unseen."""
        for word in [word for word in self.since if word.startswith(("waits", "going"))]:
            del self.since[word]

    def _waited_sec(self, now: float, waiting: Waiting | None) -> float:
        """Return for how long it has waited for a node, or since then for its start."""
        word = None if waiting is None else _FOR_NODE if waiting.roomless else _FOR_START
        for other in {_FOR_NODE, _FOR_START} - {word}:
            self.since.pop(other, None)
        return 0.0 if word is None else now - self.since.setdefault(word, now)

    def _look_at_deletion(self, now: float, metadata: Mapping[str, Any], lost_sec: float) -> None:
        if "deletionTimestamp" in metadata:
            self.is_taken |= self.deleted is None
            grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
            over = now - self.since.setdefault(f"going {grace:g}", now) - grace
            if over > lost_sec:
                why = f"its node has not ended it {over:.0f} s after its time"
                self.verdict = Ending(lost=f"NodeLost: {why}")
                self.grace_sec = 0
