"""What a node reads from a Pod, and what it reports of it: plain functions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes.utils.quantity import parse_quantity

Pod = Any
"""A V1Pod of the official client, whose attributes have no types."""
ADDRESS = "127.0.0.1"
"""Of every node: all are processes of this machine."""
FIELDS: dict[str, Callable[[Pod], str]] = {
    "metadata.name": lambda pod: pod.metadata.name,
    "metadata.namespace": lambda pod: pod.metadata.namespace,
    "metadata.uid": lambda pod: pod.metadata.uid,
    "spec.nodeName": lambda pod: pod.spec.node_name,
    "spec.serviceAccountName": lambda pod: pod.spec.service_account_name,
    "status.podIP": lambda pod: address(pod),
    "status.hostIP": lambda _: ADDRESS,
}
"""Of a Pod, that a variable may have as its value."""
REFERENCE = re.compile(r"\$\$|\$\((\w+)\)")
MESSAGE = "termination-message"
"""Name of the file that a container sees at its `terminationMessagePath`, in its node's folder."""
MAX_MESSAGE_BYTES = 4096
MAX_LOG_BYTES, MAX_LOG_LINES = 2048, 80
"""Of the log, where it stands for the message."""


def address(pod: Pod) -> str:
    """Return a Pod's own address on this machine's loopback, the same each time, never 127.0.0.x.

    Two of a cluster have the same once in 16 million.
    """
    second, third, fourth = hashlib.sha256(pod.metadata.uid.encode()).digest()[:3]
    return f"127.{1 + second % 254}.{third}.{1 + fourth % 254}"


def secrets(pod: Pod) -> dict[str, tuple[str, int]]:
    """Return the Secrets that a container sees: by folder, the name and the mode of its files."""
    named = {
        volume.name: (volume.secret.secret_name, volume.secret.default_mode or 0o644)
        for volume in pod.spec.volumes or []
        if volume.secret is not None
    }
    mounts = pod.spec.containers[0].volume_mounts or []
    return {mount.mount_path: named[mount.name] for mount in mounts if mount.name in named}


def waiting(pod: Pod, reason: str, message: str) -> dict[str, Any]:
    """Return the status of a Pod whose container cannot be made yet."""
    state = {"waiting": {"reason": reason, "message": message}}
    return _status(pod, "Pending", _container(pod, state, is_ready=False), is_ready=False)


def unsupported(pod: Pod) -> str | None:
    """Say why a node of processes cannot run a Pod, None where it can."""
    if len(pod.spec.containers) != 1 or pod.spec.init_containers:
        return "a node of processes runs Pods of one container; leave out the others"
    if pod.spec.restart_policy != "Never":
        return f"restartPolicy must be Never, got {pod.spec.restart_policy}"
    if not pod.spec.containers[0].command:
        return "a node of processes has no images; give the container a command"
    for variable in pod.spec.containers[0].env or []:
        if variable.value_from is not None and _field(variable) not in FIELDS:
            return f"variable {variable.name} must be a value or one of {', '.join(FIELDS)}"
    return None


def sources(pod: Pod) -> list[tuple[str, str]]:
    """Return kind and name of the Secrets and ConfigMaps whose keys are a container's variables."""
    found: list[tuple[str, str]] = []
    for source in pod.spec.containers[0].env_from or []:
        kind = "Secret" if source.secret_ref is not None else "ConfigMap"
        found.append((kind, (source.secret_ref or source.config_map_ref).name))
    return found


def mounts(pod: Pod, folder: Path) -> dict[str, str]:
    """Return the paths at which a container sees files of its own: by path, the node's path.

    Containers share the file system here, so nothing is mounted: `command` replaces the paths.

    Args:
        pod: what is run.
        folder: of the node, for this Pod alone.
    """
    container = pod.spec.containers[0]
    own = {volume.name for volume in pod.spec.volumes or [] if volume.empty_dir is not None}
    found = {
        mount.mount_path: str(folder / mount.name)
        for mount in container.volume_mounts or []
        if mount.name in own
    }
    return {**found, container.termination_message_path: str(folder / MESSAGE)}


def environment(pod: Pod, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return a container's environment: what the node has stands for what an image would have."""
    found = dict(inherited)
    for variable in pod.spec.containers[0].env or []:
        found[variable.name] = expand(_value(variable, pod), found)
    return found


def command(
    pod: Pod, variables: Mapping[str, str], mounted: Mapping[str, str] | None = None
) -> list[str]:
    """Return the program and its arguments, with `$(NAME)` replaced as Kubernetes does it.

    Args:
        pod: what is run.
        variables: the container's environment.
        mounted: paths of the container that are others on the node; words that begin with one are
            replaced.
    """
    container = pod.spec.containers[0]
    words = [expand(word, variables) for word in [*container.command, *(container.args or [])]]
    for inside, outside in (mounted or {}).items():
        words = [
            outside + word.removeprefix(inside)
            if word == inside or word.startswith(f"{inside}/")
            else word
            for word in words
        ]
    return words


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where NAME is known; `$$` stands for `$`.

    Example:
        >>> expand("$(A) $(B) $$(A)", {"A": "1"})
        '1 $(B) $(A)'
    """
    return REFERENCE.sub(
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text
    )


def _value(variable: Any, pod: Pod) -> str:
    """Return a variable's value, which may be a field of the Pod."""
    if variable.value_from is None:
        return variable.value or ""
    return FIELDS[_field(variable)](pod)


def _field(variable: Any) -> str:
    return variable.value_from.field_ref.field_path if variable.value_from.field_ref else ""


def resources(pod: Pod) -> dict[str, dict[str, str]]:
    """Return requests and limits of the container, without what is empty."""
    wanted = pod.spec.containers[0].resources
    named = {"requests": wanted and wanted.requests, "limits": wanted and wanted.limits}
    return {name: dict(amounts) for name, amounts in named.items() if amounts}


def amount(resources: Mapping[str, Mapping[str, str]], kind: str, name: str) -> float:
    """Return one of a container's resources, in cores or bytes; 0 where it is not given.

    Example:
        >>> amount({"limits": {"memory": "2Ki"}}, "limits", "memory")
        2048.0
    """
    return float(parse_quantity(resources.get(kind, {}).get(name, "0")))


def message(pod: Pod, written: Path, log: Path, code: int) -> str:
    """Return the termination message: the end of what the container wrote for it, or of its log.

    Args:
        pod: what was run.
        written: the node's file at `terminationMessagePath`.
        log: of the container.
        code: with which it ended.
    """
    container = pod.spec.containers[0]
    if text := written.read_bytes()[-MAX_MESSAGE_BYTES:]:
        return text.decode(errors="replace")
    if container.termination_message_policy == "FallbackToLogsOnError" and code != 0:
        last = log.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
        return "".join(last.splitlines(keepends=True)[-MAX_LOG_LINES:])
    return ""


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def condition(name: str, *, holds: bool, reason: str = "", text: str = "") -> dict[str, object]:
    """Return one condition of a Pod."""
    return {
        "type": name,
        "status": str(holds),
        "reason": reason,
        "message": text,
        "lastTransitionTime": now(),
    }


def running(pod: Pod, started_at: str, applied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a Pod whose container runs, with the resources that it has."""
    container = _container(pod, {"running": {"startedAt": started_at}}, is_ready=True)
    container |= {"resources": applied, "allocatedResources": applied.get("requests", {})}
    return _status(pod, "Running", container, is_ready=True) | {"startTime": started_at}


def ended(pod: Pod, started_at: str | None, end: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a Pod whose container has ended.

    Args:
        pod: what was run.
        started_at: when it was started, None where it was not.
        end: `exitCode`, `reason` and `message`.
    """
    terminated = {"startedAt": started_at, "finishedAt": now(), **end}
    container = _container(pod, {"terminated": terminated}, is_ready=False)
    return _status(pod, "Failed" if end["exitCode"] else "Succeeded", container, is_ready=False)


def refused(pod: Pod, why: str) -> dict[str, Any]:
    """Return the status of a Pod that the node does not run."""
    return {"phase": "Failed", "reason": "Unsupported", "message": why}


def _container(pod: Pod, state: Mapping[str, Any], *, is_ready: bool) -> dict[str, Any]:
    container = pod.spec.containers[0]
    return {
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "containerID": f"process://{pod.metadata.uid}",
        "restartCount": 0,
        "ready": is_ready,
        "started": is_ready,
        "state": state,
    }


def _status(
    pod: Pod, phase: str, container: Mapping[str, Any], *, is_ready: bool
) -> dict[str, Any]:
    reason = "" if is_ready else "PodCompleted" if phase == "Succeeded" else "PodFailed"
    return {
        "phase": phase,
        "observedGeneration": pod.metadata.generation,
        "podIP": address(pod),
        "podIPs": [{"ip": address(pod)}],
        "hostIP": ADDRESS,
        "conditions": [
            condition("Initialized", holds=True),
            condition("ContainersReady", holds=is_ready, reason=reason),
            condition("Ready", holds=is_ready, reason=reason),
        ],
        "containerStatuses": [container],
    }


def requested(all_resources: Sequence[Mapping[str, Mapping[str, str]]], name: str) -> float:
    """Return what several containers request of one resource, in cores or bytes."""
    return sum(amount(resources, "requests", name) for resources in all_resources)
