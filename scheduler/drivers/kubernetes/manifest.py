"""Manifests of Pods and Secrets, from the cluster's configuration file."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from scheduler.drivers.base import CHAIN, KEY, TOKEN, Needs, Reach
from schemas.config.parse import read_yaml
from schemas.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeConfig:
    """A folder that the scheduler and all Pods see under one path."""

    path: str
    """Where it is mounted, absolute."""
    claim: str | None = None
    """Name of a PersistentVolumeClaim that many nodes may write; or"""
    host_path: str | None = None
    """a folder of each node that is the same on all, such as a mounted network filesystem."""
    sub_path: str = ""
    """Folder of the claim that is mounted."""
    read_only: bool = False
    """Whether Pods only read it."""

    def __post_init__(self) -> None:
        """Refuse what is no mount."""
        if not self.path.startswith("/"):
            raise ValueError(f"path must be absolute, got {self.path!r}; write the full path")
        if (self.claim is None) == (self.host_path is None):
            raise ValueError(
                f"volume must be a claim or a host_path, got claim={self.claim!r} and "
                f"host_path={self.host_path!r}; give one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TolerationConfig:
    """A taint of nodes that Pods may run on all the same."""

    key: str
    """Of the taint."""
    value: str | None = None
    """Of the taint; any when null."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; any when null."""
    seconds: int | None = None
    """How long a Pod stays after the taint came; for ever when null. Only with NoExecute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where Pods run."""

    namespace: str
    """Of all Pods."""
    image: str
    """With the source tree and its requirements."""
    volumes: tuple[VolumeConfig, ...] = ()
    """Folders; the scheduler's output, job files and raw files lie in them."""
    kubeconfig: str | None = None
    """File with the address of the API server; null inside the cluster."""
    context: str | None = None
    """Of the kubeconfig; its current one when null."""
    service_account: str | None = None
    """Of the Pods, which call no API; the namespace's default when null."""
    python: tuple[str, ...] = ("python",)
    """The interpreter, in the image."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of each Pod, such as PYTHONPATH."""
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels of the nodes that Pods run on."""
    tolerations: tuple[TolerationConfig, ...] = ()
    """Taints of nodes that Pods may run on."""
    priority_class: str | None = None
    """Of the Pods."""
    user: int | None = None
    """User and group that Pods run as, who may write the volumes; those of the image when null."""
    secrets: str = "/run/presage"
    """Folder below which each Pod sees the token and the certificate of its job."""
    shared_loopback: bool = False
    """Whether all Pods share one loopback, where they reach each other without a certificate."""
    grace: timedelta = timedelta(seconds=60)
    """How long a process that is asked to end may take: `train.limits.drain`, and some."""
    unschedulable_after: timedelta = timedelta(minutes=5)
    """A Pod that found no node for so long, or whose container was not made so long after (its
    image, its volumes), is given up, and tried again later."""
    lost_after: timedelta = timedelta(seconds=30)
    """A Pod that its node has not ended so long after its grace is taken for lost with the node."""

    def __post_init__(self) -> None:
        """Refuse times that are none, and a folder that may be anywhere."""
        if not self.secrets.startswith("/"):
            raise ValueError(f"secrets must be absolute, got {self.secrets!r}; write the full path")
        for name in ("grace", "unschedulable_after", "lost_after"):
            seconds = getattr(self, name).total_seconds()
            if seconds < 1.0:
                raise ValueError(f"{name} must be at least 1s, got {seconds:g}s; raise it")


def read_cluster(path: Path, output: Path) -> ClusterConfig:
    """Read the file.

    Args:
        path: YAML.
        output: the scheduler's folder.

    Raises:
        SchemaError: the file is none, or Pods would not see the folder.
    """
    config = read_yaml(path, ClusterConfig)
    folder = output.resolve()
    writable = [volume for volume in config.volumes if not volume.read_only]
    if not any(folder.is_relative_to(volume.path) for volume in writable):
        raise SchemaError(
            f"output must lie in a volume that Pods write, got {folder}; use an --output below "
            f"{' or '.join(volume.path for volume in writable) or 'one, and name it'}",
            file=str(path),
        )
    return config


MAX_LABEL = 63
"""Bytes of a name in the DNS, and of a label's value."""
HASHED = 10
"""Hexadecimal digits that make a shortened name one of its own."""
MANAGER = "presage-scheduler"
"""Who owns the fields that we apply."""
CONTAINER = "main"
INSTANCE, JOB, POOL, PROCESS = (
    "app.kubernetes.io/instance",
    "presage/job",
    "presage/pool",
    "presage/process",
)
"""Labels; as annotations, the last three hold the names unshortened."""


def pod_name(instance: str, job: str, process: str) -> str:
    """Return the name of a process's Pod: one label of the DNS, different for different processes.

    Example:
        >>> pod_name("a1", "Clicks_2", "segment-0.1")
        'clicks-2-segment-0-1-bf1ee77c5f'
    """
    return _label(f"{job}-{process}", f"{instance}/{job}/{process}")


def secret_name(instance: str, job: str) -> str:
    """Return the name of a job's Secret, which no process's Pod has.

    Example:
        >>> secret_name("a1", "Clicks_2")
        'clicks-2-3e1e0d1d9f'
    """
    return _label(job, f"{instance}/{job}")


def labels_of(instance: str, job: str, process: str | None = None) -> dict[str, dict[str, str]]:
    """Return labels and annotations of what belongs to a job, or to one process of it."""
    names = {JOB: job}
    if process is not None:
        names |= {POOL: process.partition("-")[0], PROCESS: process}
    labels = {name: label_value(value) for name, value in names.items()}
    owner = {"app.kubernetes.io/managed-by": MANAGER, INSTANCE: instance}
    return {"labels": {**owner, **labels}, "annotations": names}


def label_value(text: str) -> str:
    """Return a text as the value of a label: itself where it is one.

    Example:
        >>> label_value("segment-0.1")
        'segment-0.1'
    """
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    return _label(text, text)


def _label(readable: str, whole: str) -> str:
    digest = hashlib.sha256(whole.encode()).hexdigest()[:HASHED]
    plain = re.sub(r"[^a-z0-9]+", "-", readable.lower()).strip("-")
    head = plain[: MAX_LABEL - HASHED - 1].strip("-")
    name = f"{head}-{digest}" if head else digest
    return name if name[0].isalpha() else f"p{name[: MAX_LABEL - 1]}"


# What the processes of one job know, and nobody else: their token, their certificate, its key.
#
# One certificate for all: an address is known when its Pod is there, and Pods come and go, so the
# certificate bears the name of the job's Secret, which callers ask for in the place of an
# address.

SELF = "PRESAGE_HOST"
"""Variable of a Pod with its own address."""
LIFE = timedelta(days=3650)
"""Longer than a job: its certificate goes with it, and is not renewed."""
SKEW = timedelta(hours=1)
"""Clocks of nodes may differ by so much."""


def reach_of(config: ClusterConfig, instance: str, job: str) -> Reach | None:
    """Return how processes of a job reach each other, None where their Pods share one loopback.

    Args:
        config: of the cluster.
        instance: of the scheduler.
        job: its name.
    """
    if config.shared_loopback:
        return None
    name = secret_name(instance, job)
    # The node puts the address there, as for each `$(NAME)` of a variable that it knows.
    return Reach(host=f"$({SELF})", folder=f"{config.secrets}/{name}", name=f"{name}.presage")


def secret_of(config: ClusterConfig, instance: str, job: str, reach: Reach) -> dict[str, Any]:
    """Return a job's Secret, with a new token and a new key."""
    chain, key = make_certificate(reach.name, datetime.now(UTC))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(instance, job),
            "namespace": config.namespace,
            **labels_of(instance, job),
        },
        "immutable": True,
        "stringData": {TOKEN: secrets.token_urlsafe(32), CHAIN: chain, KEY: key},
    }


def make_certificate(name: str, now: datetime) -> tuple[str, str]:
    """Return a certificate that is its own authority, and its key, as PEM.

    Args:
        name: that it bears, and no other.
        now: the time, with its zone.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "presage")])
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFE)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, clear = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return made.public_bytes(pem).decode(), key.private_bytes(pem, form, clear).decode()


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
