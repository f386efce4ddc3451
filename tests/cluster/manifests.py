"""Pods that run Python, and what became of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import watch

from tests.cluster.waiting import until

SLEEPS = "import time; time.sleep(600)"
SMALL = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def pod(name: str, code: str, *arguments: object, **spec: Any) -> dict[str, Any]:
    """A Pod of one container that runs Python code; `resources` are the container's."""
    container = {
        "name": "main",
        "image": "none",
        "command": [sys.executable, "-c", code],
        "args": [str(argument) for argument in arguments],
        "resources": spec.pop("resources", SMALL),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"metadata": {"name": name}, "spec": spec}


def terminated(api: Any, namespace: str, name: str = "one") -> Any:
    """Wait for a Pod's container to end, and return how it did."""

    def look() -> Any:
        statuses = api.read_namespaced_pod(name, namespace).status.container_statuses
        return statuses and statuses[0].state.terminated

    return until(f"the end of {name}", look)


def wait_until_running(api: Any, namespace: str, name: str = "one") -> None:
    until(
        f"{name} to run",
        lambda: api.read_namespaced_pod(name, namespace).status.phase == "Running",
    )


def is_gone(api: Any, namespace: str, name: str = "one") -> bool:
    found = api.list_namespaced_pod(namespace, field_selector=f"metadata.name={name}")
    return not found.items


def events_since(
    api: Any, namespace: str, seen: str, is_last: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Watch the Pods from a version that was seen before, to an event that must come."""
    watcher: Any = watch.Watch()
    for event in watcher.stream(
        api.list_namespaced_pod, namespace, resource_version=seen, timeout_seconds=60
    ):
        yield event
        if is_last(event):
            return
    pytest.fail(f"the last event must come, got the end of the watch from version {seen}")


def pid_in(file: Path) -> int:
    """Wait for a process to write its pid to a file."""
    return int(until(f"a pid in {file}", lambda: file.exists() and file.read_text()) or 0)


WRITES_PID = f"import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); {SLEEPS}"
