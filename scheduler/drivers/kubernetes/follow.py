"""Everything that happens to our Pods: a thread that lists them, then watches from there."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from scheduler.drivers.kubernetes.api import GONE, Api, RefusedError, UnreachableError

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
