"""A Kubernetes cluster as a platform, and the Pods of one job."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from scheduler.drivers.base import NOTHING, Ending, Needs
from scheduler.drivers.kubernetes.api import Usage
from scheduler.drivers.kubernetes.cluster import Cluster
from scheduler.drivers.kubernetes.manifest import ClusterConfig, Task
from scheduler.drivers.kubernetes.pod import STOP_SEC, last_message, resized

RESIZE_SEC = 30.0
"""A node that has not given more memory by then has none."""
LAST_BYTES = 4096
"""Bytes at the end of what a process said that are looked at."""


class Pods:
    """The processes of one job."""

    def __init__(self, cluster: Cluster, job: str, folder: Path) -> None:
        """Remember whose they are.

        Args:
            cluster: where they run.
            job: its name.
            folder: with `<name>.begun`, `.out` and `.err` of each; Pods see it, too.
        """
        self._cluster = cluster
        self._job = job
        self._folder = folder
        self._may_have_secret = True
        self.reach = cluster.reach(job)
        """How its processes reach each other."""

    def start(self, name: str, command: Sequence[str], needs: Needs = NOTHING) -> None:
        """Have a Pod, unless one was wanted by this name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._at(name, "begun").touch(exist_ok=False)
        except FileExistsError:
            return
        self._may_have_secret = True
        task = Task(job=self._job, name=name, command=command, needs=needs, folder=self._folder)
        self._cluster.want(task)

    def is_known(self, name: str) -> bool:
        """Tell whether a Pod was wanted by this name."""
        return self._at(name, "begun").exists()

    def newest(self, prefix: str) -> str | None:
        """Return the process that was begun last among those whose names begin so."""
        begun = list(self._folder.glob(f"{prefix}*.begun"))
        newest = max(begun, key=lambda path: path.stat().st_mtime_ns, default=None)
        return None if newest is None else newest.name.removesuffix(".begun")

    def lives(self, name: str) -> bool:
        """Tell whether a Pod has not ended; one that the API server was not told of yet lives."""
        tracked = self._cluster.tracked(self._job, name)
        return tracked is not None and tracked.lives

    def runs(self, name: str) -> bool:
        """Tell whether a container has begun, and not ended."""
        tracked = self._cluster.tracked(self._job, name)
        return tracked is not None and tracked.runs

    def ending(self, name: str) -> Ending:
        """Return how a Pod ended."""
        tracked = self._cluster.tracked(self._job, name)
        return Ending() if tracked is None else tracked.ending

    def ask(self, name: str) -> None:
        """Delete a Pod with its grace: its process is sent SIGTERM."""
        self._end(name, self._cluster.grace_sec)

    def end(self, name: str) -> None:
        """Delete a Pod with next to no grace."""
        self._end(name, STOP_SEC)

    def output(self, name: str) -> str:
        """Return what a process wrote on standard output."""
        with suppress(OSError):
            return self._at(name, "out").read_text(encoding="utf-8", errors="replace")
        return ""

    def last_words(self, name: str) -> str:
        """Return the last line on standard error, or of a container that could not write it."""
        with suppress(OSError):
            text = self._at(name, "err").read_text(encoding="utf-8", errors="replace")
            if lines := text[-LAST_BYTES:].strip().splitlines():
                return lines[-1].strip()
        tracked = self._cluster.tracked(self._job, name)
        return "" if tracked is None or tracked.seen is None else last_message(tracked.seen)

    def resident_bytes(self, name: str) -> int:
        """Return the memory of a Pod as the metrics server tells it, else 0."""
        found = self._usage(name)
        return 0 if found is None else found.memory_bytes

    def busy_cores(self, name: str) -> float | None:
        """Return the cores that a Pod kept busy as the metrics server tells it."""
        found = self._usage(name)
        return None if found is None else found.cores

    def notices(self) -> Mapping[str, float]:
        """Return the Pods that somebody else takes away."""
        found = {name: t.notice_sec for name, t in self._cluster.all_of(self._job).items()}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def resize(self, name: str, cpus: float, memory_bytes: int) -> bool | None:
        """Give a container other limits in place; None until its node has, or had the time."""
        tracked = self._cluster.tracked(self._job, name)
        if tracked is None or tracked.seen is None or not tracked.lives:
            return False
        needs = Needs(cpus=cpus, memory_bytes=memory_bytes)
        if tracked.given != needs:
            tracked.since["resizing"] = time.monotonic()
            return None if self._cluster.resize(tracked, needs) else False
        done = resized(tracked.seen, needs)
        late = time.monotonic() - tracked.since["resizing"] > RESIZE_SEC
        return False if done is None and late else done

    def tidy(self, names: Collection[str]) -> None:
        """Have the objects of Pods that have ended go, but for those of these names.

        A Pod that lives and has none of them came after it was taken for ended: the scheduler
        that asked for it died meanwhile. It is ended; only moves of slots live unnamed. With the
        last process goes what all had in common.
        """
        known = self._cluster.all_of(self._job)
        for name, tracked in known.items():
            if name in names:
                continue
            if not tracked.lives:
                self._cluster.forget(tracked)
            elif not name.startswith("move-"):
                self.end(name)
        if self._may_have_secret and not names and not any(t.lives for t in known.values()):
            self._may_have_secret = not self._cluster.drop_secret(self._job)

    def _usage(self, name: str) -> Usage | None:
        tracked = self._cluster.tracked(self._job, name)
        return None if tracked is None or not tracked.runs else self._cluster.usage(tracked)

    def _end(self, name: str, grace_sec: int) -> None:
        tracked = self._cluster.tracked(self._job, name)
        if tracked is not None and tracked.lives:
            tracked.end(grace_sec)
            self._cluster.settle(tracked)

    def _at(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"


class Kubernetes:
    """Has a Pod for each process."""

    resizes = True
    """A container's cores and memory may be changed while it runs."""

    def __init__(self, cluster: Cluster) -> None:
        """Remember whom to ask."""
        self._cluster = cluster
        self.where = cluster.where

    def of_job(self, job: str, folder: Path) -> Pods:
        """Return the Pods of a job."""
        return Pods(self._cluster, job, folder)

    def poll(self) -> None:
        """Take in what has happened."""
        self._cluster.poll()


@contextmanager
def kubernetes(
    config: ClusterConfig, output: Path, say: Callable[[str], None]
) -> Generator[Kubernetes]:
    """Follow the Pods of a scheduler; they go on after it.

    Args:
        config: of the cluster.
        output: folder of the scheduler.
        say: told what the cluster says.

    Raises:
        PlanError: the API server does not answer, or does not let us.
    """
    with Cluster(config, output, say) as cluster:
        yield Kubernetes(cluster)
