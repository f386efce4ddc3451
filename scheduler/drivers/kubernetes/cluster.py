"""All Pods of one scheduler in one namespace: a watch, and requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from scheduler.drivers.base import Ending, Needs, Reach, instance_of
from scheduler.drivers.kubernetes.api import (
    CONFLICT,
    GONE,
    INVALID,
    Api,
    RefusedError,
    UnreachableError,
    Usage,
    connect,
)
from scheduler.drivers.kubernetes.manifest import (
    INSTANCE,
    PROCESS,
    ClusterConfig,
    Task,
    pod_name,
    pod_of,
    reach_of,
    resize_patch,
    secret_name,
    secret_of,
)
from scheduler.drivers.kubernetes.pod import STOP_SEC, Tracked, is_over
from schemas.errors import PlanError

FIRST_WAIT_SEC, MAX_WAIT_SEC = 0.5, 10.0
"""After the first failure it is tried again so much later, and twice as late each time."""


@dataclass(frozen=True, slots=True)
class Listed:
    """All Pods that are there.

    Attributes:
        pods: as they are.
    """

    pods: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """One Pod is new, has changed, or is gone.

    Attributes:
        pod: as it is, or was last.
        gone: whether it is no more.
    """

    pod: dict[str, Any]
    gone: bool


@dataclass(frozen=True, slots=True)
class Away:
    """The API server does not answer, or answers again.

    Attributes:
        why: in its words; empty when it answers.
    """

    why: str


News = Listed | Changed | Away


class Follower:
    """A list and its watch, continued from version to version."""

    def __init__(self, api: Api, selector: str) -> None:
        """Remember what to follow.

        Args:
            api: of its own: it waits there.
            selector: labels of our Pods.
        """
        self._api = api
        self._selector = selector
        self._news: SimpleQueue[News] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
        self._version: str | None = None
        self._wait_sec = 0.0

    def start(self) -> tuple[dict[str, Any], ...]:
        """List once, and follow from there.

        Raises:
            RefusedError: we may not.
            UnreachableError: there is no answer.
        """
        pods, self._version = self._api.list(self._selector)
        self._thread.start()
        return tuple(pods)

    def stop(self) -> None:
        """End it; its thread goes with its connection."""
        self._stopping.set()
        self._api.interrupt()

    def take(self) -> list[News]:
        """Return what has happened since the last time."""
        return [self._news.get() for _ in range(self._news.qsize())]

    def _run(self) -> None:
        while not self._stopping.wait(self._wait_sec):
            try:
                self._follow()
            except UnreachableError as error:
                self._failed(str(error))
            except RefusedError as error:
                if error.status == GONE:  # older than what the server remembers
                    self._version = None
                else:
                    self._failed(error.message)
            except Exception as error:  # an end of this thread would look like nothing happening
                self._version = None
                self._failed(repr(error))

    def _follow(self) -> None:
        """List where it is not known what there is; then watch until the server ends it."""
        if self._version is None:
            pods, self._version = self._api.list(self._selector)
            self._answered()
            self._news.put(Listed(tuple(pods)))
        events = self._api.watch(self._selector, self._version)
        self._answered()
        for kind, pod in events:
            if kind != "BOOKMARK":
                self._news.put(Changed(pod, gone=kind == "DELETED"))
            self._version = pod["metadata"]["resourceVersion"]

    def _answered(self) -> None:
        if self._wait_sec:
            self._wait_sec = 0.0
            self._news.put(Away(""))

    def _failed(self, why: str) -> None:
        if not self._stopping.is_set():
            self._wait_sec = min(MAX_WAIT_SEC, 2.0 * self._wait_sec or FIRST_WAIT_SEC)
            self._news.put(Away(why))


# The Pods of one scheduler in one namespace: what is seen of them, and what is asked.
#
# Nothing here raises while jobs run: what the API server does not take now is asked again, and so
# is a delete that it refuses. A Pod that it refuses is how its process ended.

AGAIN_SEC = 2.0
"""Time after a call that was not answered, or a delete that was refused, and between two looks at
Pods that the watch misses."""
USAGE_SEC = 10.0
"""Age of a reading of memory and cores that is read again: a metrics server has a new one every
15 s."""


class Cluster:
    """The Pods of one scheduler; a context."""

    def __init__(self, config: ClusterConfig, output: Path, say: Callable[[str], None]) -> None:
        """Remember where Pods run.

        Args:
            config: of the cluster.
            output: folder of the scheduler.
            say: told what the cluster says, once.
        """
        self._config = config
        self._output = output
        self._say = say
        self._said = set[str]()
        self._away = set[Literal["calls", "watch"]]()
        self._pods: dict[str, Tracked] = {}
        self._doubtful = set[str]()
        self._quiet_until = self._doubts_at = 0.0
        self._usage_at = -USAGE_SEC
        self._usage: dict[str, Usage] = {}
        self._usage_answers = True

    def __enter__(self) -> Cluster:
        """Learn what there is, and follow it from there.

        Raises:
            PlanError: the API server does not answer, or does not let us.
        """
        self._instance = instance_of(self._output)
        self._selector = f"{INSTANCE}={self._instance}"
        self._api, other = connect(self._config), connect(self._config)
        self._follower = Follower(other, self._selector)
        try:
            found = self._follower.start()
        except (RefusedError, UnreachableError) as error:
            raise PlanError(
                f"cluster must list Pods of namespace {self._config.namespace!r}, got {error}; "
                "check the kubeconfig, and the rights in deploy/kubernetes/base/rbac.yaml"
            ) from error
        self._take(Listed(found))
        return self

    def __exit__(self, *error: object) -> None:
        """End the watch; Pods go on."""
        self._follower.stop()
        self._api.close()

    @property
    def where(self) -> str:
        """Return which Pods these are among those of all clusters, in a line."""
        return f"kubernetes {self._api.host} {self._config.namespace}"

    @property
    def grace_sec(self) -> int:
        """Seconds that a process which is asked to end may take."""
        return int(self._config.grace.total_seconds())

    def poll(self) -> None:
        """Take in what has happened, and ask again for what was not answered."""
        for news in self._follower.take():
            self._take(news)
        now = time.monotonic()
        for tracked in self._pods.values():
            self._look(tracked, now)
        if now >= self._quiet_until and now >= self._doubts_at:
            self._doubts_at = now + AGAIN_SEC
            self._settle_doubts()
        for tracked in list(self._pods.values()):
            self.settle(tracked)

    def _look(self, tracked: Tracked, now: float) -> None:
        """See whether it waits for too long; while nothing new is seen, no time counts."""
        if "watch" in self._away:
            tracked.look_anew()
            return
        config = self._config
        unschedulable_sec = config.unschedulable_after.total_seconds()
        waiting = tracked.look(now, unschedulable_sec, config.lost_after.total_seconds())
        if waiting is not None:
            self.say(f"a Pod waits: {waiting.in_words}")

    def tracked(self, job: str, process: str) -> Tracked | None:
        """Return the Pod of a process, None where there was none."""
        return self._pods.get(pod_name(self._instance, job, process))

    def reach(self, job: str) -> Reach | None:
        """Return how processes of a job reach each other, None where all share one loopback."""
        return reach_of(self._config, self._instance, job)

    def want(self, task: Task) -> None:
        """Have a Pod for a process."""
        pod = pod_of(self._config, self._instance, task)
        name = pod["metadata"]["name"]
        needs = task.job if task.is_reached else None
        self._pods.setdefault(name, Tracked(name, wanted=pod, needs_secret_of=needs))
        self.settle(self._pods[name])

    def drop_secret(self, job: str) -> bool:
        """Take off what the processes of a job had in common; False where it is to be tried again.

        Nothing of it must live: the next process that needs it has a new one made.
        """
        if self._config.shared_loopback:
            return True
        if time.monotonic() < self._quiet_until:
            return False
        try:
            self._api.drop_secret(secret_name(self._instance, job))
        except UnreachableError as error:
            self._unanswered(error)
            return False
        except RefusedError as error:
            self.say(f"Secret of job {job} cannot be deleted: {error.message}")
        self._answers("calls")
        return True

    def settle(self, tracked: Tracked) -> None:
        """Tell the API server what is to be done for a Pod, if it answers."""
        now = time.monotonic()
        if now < self._quiet_until or now < tracked.since.get("refused", -AGAIN_SEC) + AGAIN_SEC:
            return
        if tracked.wanted is None and not tracked.must_be_deleted:
            return
        try:
            if tracked.wanted is not None:
                self._apply(tracked, tracked.wanted)
            if tracked.must_be_deleted:
                assert tracked.grace_sec is not None, "it must be deleted"
                self._api.delete(tracked.name, tracked.uid, tracked.grace_sec)
                tracked.deleted = tracked.grace_sec
        except UnreachableError as error:
            self._unanswered(error)
            return
        except RefusedError as error:
            what = "deleted" if tracked.wanted is None else "asked for"
            self.say(f"Pod {tracked.name} cannot be {what}: {error.message}")
            tracked.since["refused"] = time.monotonic()
        self._answers("calls")

    def resize(self, tracked: Tracked, needs: Needs) -> bool:
        """Tell the API server of other limits, if it answers; False where it refuses."""
        if time.monotonic() < self._quiet_until:
            return True  # it is asked again
        try:
            tracked.seen = self._api.resize(tracked.name, resize_patch(needs))
            tracked.given = needs
        except UnreachableError as error:
            self._unanswered(error)
            return True
        except RefusedError as error:
            self.say(f"Pod {tracked.name} cannot be resized: {error.message}")
            return False
        self._answers("calls")
        return True

    def usage(self, tracked: Tracked) -> Usage | None:
        """Return what a Pod has in use, None where no metrics server tells it."""
        now = time.monotonic()
        if self._usage_answers and now - self._usage_at >= USAGE_SEC and now > self._quiet_until:
            try:
                self._usage = self._api.usage(self._selector)
                self._answers("calls")
            except RefusedError as error:
                self._usage_answers = False
                self.say(f"no memory is read: metrics.k8s.io says {error.message.strip()}")
            except UnreachableError as error:
                self.say(f"no memory is read: metrics.k8s.io says {error}")
            self._usage_at = time.monotonic()  # an answer may take longer than it holds
        return self._usage.get(tracked.name)

    def forget(self, tracked: Tracked) -> None:
        """Have the object of a Pod that has ended go, then think of it no more."""
        if tracked.is_gone or tracked.seen is None:
            self._pods.pop(tracked.name, None)
        else:
            tracked.end(0 if is_over(tracked.seen) else STOP_SEC)
            self.settle(tracked)

    def all_of(self, job: str) -> dict[str, Tracked]:
        """Return the Pods of a job by the names of its processes."""
        found: dict[str, Tracked] = {}
        for tracked in self._pods.values():
            pod = tracked.seen or tracked.wanted
            names = {} if pod is None else pod["metadata"].get("annotations", {})
            process = names.get(PROCESS)
            if process and tracked.name == pod_name(self._instance, job, process):
                found[process] = tracked
        return found

    def say(self, line: str) -> None:
        """Say a line, once."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _apply(self, tracked: Tracked, pod: Any) -> None:
        try:
            self._have_secret(tracked.needs_secret_of)
            tracked.seen = self._api.apply(pod)
        except RefusedError as error:
            if error.is_quota:
                quota = error.message.partition("exceeded quota: ")[2].partition(",")[0]
                self.say(f"the namespace has no room in quota {quota}")
                tracked.verdict = Ending(lost="quota exceeded")
            elif error.status in (CONFLICT, INVALID) and self._is_ours(tracked):
                pass  # somebody has changed it since: it runs all the same
            else:
                tracked.verdict = Ending(refused=f"Pod {tracked.name}: {error.message}")
        tracked.wanted = None

    def _have_secret(self, job: str | None) -> None:
        """Have what a Pod is to see; asked before each, for somebody may have taken it off."""
        reach = None if job is None else self.reach(job)
        if job is not None and reach is not None:
            self._api.have_secret(secret_of(self._config, self._instance, job, reach))

    def _is_ours(self, tracked: Tracked) -> bool:
        found = self._api.get(tracked.name)
        if found is None or found["metadata"].get("labels", {}).get(INSTANCE) != self._instance:
            return False
        tracked.seen = found
        return True

    def _take(self, news: News) -> None:
        if isinstance(news, Away):
            self._answers("watch", news.why)
        elif isinstance(news, Changed):
            self._see(news.pod)
            if news.gone:
                self._went(news.pod)
        else:
            there = {pod["metadata"]["name"] for pod in news.pods}
            for pod in news.pods:
                self._see(pod)
            # A list may be older than a Pod that was made meanwhile.
            known = {name for name, t in self._pods.items() if t.seen is not None}
            self._doubtful |= {name for name in known - there if not self._pods[name].is_gone}

    def _see(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        tracked = self._pods.setdefault(name, Tracked(name))
        if tracked.uid in ("", pod["metadata"]["uid"]):
            tracked.seen, tracked.wanted = pod, None
        else:  # ours was deleted meanwhile
            tracked.is_gone = True

    def _went(self, pod: dict[str, Any]) -> None:
        tracked = self._pods[pod["metadata"]["name"]]
        if tracked.uid != pod["metadata"]["uid"]:
            return
        if "deletionTimestamp" in pod["metadata"] or not tracked.lives:
            tracked.is_gone = True
        else:  # it may only have lost its labels
            self._doubtful.add(tracked.name)

    def _settle_doubts(self) -> None:
        """Ask for the Pods that the watch does not show; what is there without our labels ends."""
        try:
            for name in sorted(self._doubtful):
                tracked = self._pods.get(name)
                found = None if tracked is None else self._api.get(name)
                if tracked is None or found is None or found["metadata"]["uid"] != tracked.uid:
                    self._doubtful.discard(name)
                    if tracked is not None:
                        tracked.is_gone = True
                    continue
                self._answers("calls")
                tracked.seen = found
                if found["metadata"].get("labels", {}).get(INSTANCE) == self._instance:
                    self._doubtful.discard(name)
                else:
                    self.say(f"Pod {name} has lost its labels, and is ended")
                    tracked.end(self.grace_sec)
        except UnreachableError as error:
            self._unanswered(error)
        except RefusedError as error:
            self.say(f"Pods cannot be asked for: {error.message}")

    def _unanswered(self, error: UnreachableError) -> None:
        self._quiet_until = time.monotonic() + AGAIN_SEC
        self._answers("calls", str(error) or repr(error))

    def _answers(self, whom: Literal["calls", "watch"], why: str = "") -> None:
        """Say when the API server ceases to answer, and when it answers all of us again."""
        was_away = bool(self._away)
        if why:
            self._away.add(whom)
        else:
            self._away.discard(whom)
        if bool(self._away) != was_away:
            what = f"does not answer: {why}" if why else "answers again"
            self._say(f"the API server {what}")
        if whom == "watch" and not why:
            self._quiet_until = 0.0
