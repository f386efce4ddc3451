"""An in-process API server that records requests and fails as configured."""

import threading
from collections.abc import Generator, Mapping
from queue import SimpleQueue
from typing import Any

from presage.scheduler.drivers.kubernetes.api_server import (
    ApiRefusedError,
    PodUsage,
    UnreachableError,
)

SILENT = UnreachableError("timed out")


class Server:
    """Speaks as `Api` does; what changes is told to the watch when a test says so."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, Mapping[str, Any]] = {}
        self.fails: dict[str, Exception] = {}
        """What is raised by the name of a call."""
        self.loses_answers = False
        """Whether Pods are made, and nobody hears of it."""
        self.calls: list[str] = []
        self._events: SimpleQueue[tuple[str, dict[str, Any]] | Exception | None] = SimpleQueue()
        self._counted = threading.Lock()

    def list(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        self._called("list")
        return list(self.pods.values()), "1"

    def get(self, name: str) -> dict[str, Any] | None:
        self._called("get")
        return self.pods.get(name)

    def apply(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        self._called("apply")
        name = pod["metadata"]["name"]
        metadata = {**pod["metadata"], "uid": f"uid-{name}", "resourceVersion": "2"}
        self.pods[name] = {**pod, "metadata": metadata, "status": {"phase": "Pending"}}
        if self.loses_answers:
            raise SILENT
        return self.pods[name]

    def delete(self, name: str, uid: str, grace_sec: int) -> None:
        self._called("delete")
        gone = self.pods.pop(name)
        metadata = {**gone["metadata"], "deletionTimestamp": "2026-11-22T10:00:00Z"}
        self._events.put(("DELETED", {**gone, "metadata": metadata}))

    def resize(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        self._called("resize")
        return self.pods[name]

    def ensure_secret(self, secret: Mapping[str, Any]) -> None:
        self._called("ensure_secret")
        self.secrets.setdefault(secret["metadata"]["name"], secret)

    def delete_secret(self, name: str) -> None:
        self._called("delete_secret")
        self.secrets.pop(name, None)

    def usage(self, selector: str) -> dict[str, PodUsage]:
        self._called("usage")
        return {}

    def watch(self, selector: str, version: str) -> Generator[tuple[str, dict[str, Any]]]:
        self._called("watch")
        return self._watched()

    def _watched(self) -> Generator[tuple[str, dict[str, Any]]]:
        while (event := self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def interrupt(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        pass

    def send(self, name: str, kind: str = "ADDED") -> None:
        """Have the watch show a Pod as it is."""
        self._events.put((kind, self.pods[name]))

    def cut(self) -> None:
        """End the connection of the watch."""
        self._events.put(SILENT)

    def _called(self, call: str) -> None:
        with self._counted:
            self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]


FORBIDDEN = ApiRefusedError(403, "no right")
