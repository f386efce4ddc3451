"""The Pod of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.drivers.kubernetes.names import CONTAINER, labels_of, pod_name
from scheduler.drivers.kubernetes.secret import SELF, reach_of
from scheduler.drivers.kubernetes.settings import ClusterConfig, TolerationConfig, VolumeConfig
from scheduler.drivers.processes import Needs, Reach

_BEGIN = 'exec "$@" > "$0.out" 2> "$0.err"'
"""Becomes the program of the arguments; what it says lies where the scheduler sees it."""
_SECRET = "secret"
"""Name of the volume with what the processes of a job have in common."""
IDLE = {"cpu": "50m", "memory": "256Mi"}
"""Asked for, without a limit, for a process for which nothing is booked: a lead that does not
train, a move of slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process that is to be a Pod."""

    job: str
    """Whose."""
    name: str
    """Of the process."""
    command: Sequence[str]
    """Begins with this machine's Python interpreter."""
    needs: Needs
    """What is booked for it."""
    folder: Path
    """Where its output goes."""

    @property
    def is_reached(self) -> bool:
        """Return whether it serves others of its job, or calls them."""
        return not self.name.startswith("segment-")


def pod_of(config: ClusterConfig, instance: str, task: Task) -> dict[str, Any]:
    """Return the Pod as it is applied: all that is here is ours, and nothing else.

    Args:
        config: of the cluster.
        instance: of the scheduler.
        task: the process.
    """
    reach = reach_of(config, instance, task.job) if task.is_reached else None
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(config.grace.total_seconds()),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(config, task, reach)],
        "volumes": [
            *(_volume(n, v) for n, v in enumerate(config.volumes)),
            *_secret(config, reach),
        ],
        "nodeSelector": dict(config.node_selector),
        "tolerations": [_toleration(one) for one in config.tolerations],
        "serviceAccountName": config.service_account,
        "priorityClassName": config.priority_class,
    }
    if config.user is not None:
        user = {"runAsUser": config.user, "runAsGroup": config.user, "fsGroup": config.user}
        spec["securityContext"] = user
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(instance, task.job, task.name),
            "namespace": config.namespace,
            **labels_of(instance, task.job, task.name),
        },
        "spec": {name: value for name, value in spec.items() if value or value is False},
    }


def resources_of(needs: Needs) -> dict[str, Any]:
    """Return requests and limits: the same, so that nobody takes what is booked for another.

    Example:
        >>> resources_of(Needs(cpus=0.5, memory_bytes=1 << 30))["limits"]
        {'cpu': '500m', 'memory': '1073741824'}
    """
    if not needs.memory_bytes:
        return {"requests": dict(IDLE)}
    booked = {"cpu": f"{round(1000 * needs.cpus)}m", "memory": str(needs.memory_bytes)}
    return {"requests": booked, "limits": dict(booked)}


def resize_patch(needs: Needs) -> dict[str, Any]:
    """Return the change of a running Pod to other limits."""
    return {"spec": {"containers": [{"name": CONTAINER, "resources": resources_of(needs)}]}}


def _container(config: ClusterConfig, task: Task, reach: Reach | None) -> dict[str, Any]:
    said = str(task.folder / task.name)
    given: list[dict[str, Any]] = [
        {"name": k, "value": v} for k, v in sorted(config.environment.items())
    ]
    seen = [_mount(n, volume) for n, volume in enumerate(config.volumes)]
    if reach is not None:
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        given.append({"name": SELF, "valueFrom": own})
        seen.append({"name": _SECRET, "mountPath": reach.folder, "readOnly": True})
    program = [*config.python, *task.command[1:]]
    return {
        "name": CONTAINER,
        "image": config.image,
        "command": ["/bin/sh", "-c", _BEGIN, said, *program],
        "env": given,
        "resources": resources_of(task.needs),
        # A process learns of more memory by having it: nothing of it need be started again.
        "resizePolicy": [
            {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            {"resourceName": "memory", "restartPolicy": "NotRequired"},
        ],
        "volumeMounts": seen,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _volume(number: int, volume: VolumeConfig) -> dict[str, Any]:
    if volume.claim is not None:
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        return {"name": f"folder-{number}", "persistentVolumeClaim": claim}
    return {"name": f"folder-{number}", "hostPath": {"path": volume.host_path}}


def _secret(config: ClusterConfig, reach: Reach | None) -> list[dict[str, Any]]:
    if reach is None:
        return []
    # Who runs as another than root reads it by the group, which the user has where it is given.
    mode = 0o444 if config.user is None else 0o440
    name = reach.folder.rpartition("/")[2]
    return [{"name": _SECRET, "secret": {"secretName": name, "defaultMode": mode}}]


def _mount(number: int, volume: VolumeConfig) -> dict[str, Any]:
    mount = {"name": f"folder-{number}", "mountPath": volume.path, "readOnly": volume.read_only}
    return {**mount, "subPath": volume.sub_path} if volume.sub_path else mount


def _toleration(one: TolerationConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"key": one.key, "operator": "Exists" if one.value is None else "Equal"}
    rest = {"value": one.value, "effect": one.effect, "tolerationSeconds": one.seconds}
    return {**found, **{name: value for name, value in rest.items() if value is not None}}
