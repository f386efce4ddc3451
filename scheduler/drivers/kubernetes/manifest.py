"""Manifests of Pods and Secrets, and the cluster's configuration file."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from scheduler.drivers.base import CERTIFICATE, KEY, TOKEN, Endpoint, ResourceRequest
from schemas.config.parse import read_yaml
from schemas.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeConfig:
    """A volume that the scheduler and all Pods mount at the same path."""

    path: str
    """Absolute mount path."""
    claim: str | None = None
    """Name of a ReadWriteMany PersistentVolumeClaim; either this or `host_path`."""
    host_path: str | None = None
    """Folder with the same content on all nodes, such as a mounted network filesystem."""
    sub_path: str = ""
    """Folder of the claim to mount."""
    read_only: bool = False
    """Whether Pods mount it read-only."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid mount."""
        if not self.path.startswith("/"):
            raise ValueError(f"path must be absolute, got {self.path!r}; write the full path")
        if (self.claim is None) == (self.host_path is None):
            raise ValueError(
                f"volume must have either claim or host_path, got claim={self.claim!r}, "
                f"host_path={self.host_path!r}; give one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TolerationConfig:
    """A taint that Pods tolerate."""

    key: str
    """Key of the taint."""
    value: str | None = None
    """Value of the taint; null: any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null: any."""
    seconds: int | None = None
    """How long a Pod stays after the taint was added; null: forever. Only with NoExecute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster, and settings of all Pods."""

    namespace: str
    """Namespace of all Pods."""
    image: str
    """Image with the source tree and its requirements."""
    volumes: tuple[VolumeConfig, ...] = ()
    """Volumes with the scheduler's output, the job files and the raw files."""
    kubeconfig: str | None = None
    """Path of a kubeconfig; null inside the cluster."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one."""
    service_account: str | None = None
    """Service account of the Pods, which call no API; null: the namespace's default."""
    python: tuple[str, ...] = ("python",)
    """Command of the Python interpreter in the image."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of each Pod, such as PYTHONPATH."""
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels of nodes on which Pods may run."""
    tolerations: tuple[TolerationConfig, ...] = ()
    """Taints of nodes that Pods tolerate."""
    priority_class: str | None = None
    """Priority class of the Pods."""
    user: int | None = None
    """User and group id of the Pods, with write access to the volumes; null: those of the image."""
    secrets: str = "/run/presage"
    """Folder below which each Pod mounts the token and certificate of its job."""
    shared_loopback: bool = False
    """Whether all Pods share one loopback and connect without certificates."""
    grace: timedelta = timedelta(seconds=60)
    """Termination grace period; at least `train.limits.drain`."""
    unschedulable_after: timedelta = timedelta(minutes=5)
    """Time after which a Pod that has no node, or whose container has not started (image,
    volumes), is deleted and retried later."""
    lost_after: timedelta = timedelta(seconds=30)
    """Time after the grace period at which a terminating Pod counts as lost with its node."""

    def __post_init__(self) -> None:
        """Raise ValueError for durations below a second or a relative folder."""
        if not self.secrets.startswith("/"):
            raise ValueError(f"secrets must be absolute, got {self.secrets!r}; write the full path")
        for name in ("grace", "unschedulable_after", "lost_after"):
            seconds = getattr(self, name).total_seconds()
            if seconds < 1.0:
                raise ValueError(f"{name} must be at least 1s, got {seconds:g}s; raise it")


def read_cluster(path: Path, output: Path) -> ClusterConfig:
    """Read a cluster's configuration file.

    Args:
        path: YAML file.
        output: the scheduler's folder.

    Raises:
        SchemaError: the file is invalid, or the folder is not in a writable volume.
    """
    config = read_yaml(path, ClusterConfig)
    folder = output.resolve()
    writable = [volume for volume in config.volumes if not volume.read_only]
    if not any(folder.is_relative_to(volume.path) for volume in writable):
        raise SchemaError(
            f"output is in no volume that Pods can write: {folder}; use an --output below "
            f"{' or '.join(volume.path for volume in writable) or 'a writable volume'}",
            file=str(path),
        )
    return config


MAX_LABEL = 63
"""Maximum length of a DNS label and of a label's value."""
HASHED = 10
"""Hexadecimal digits of the hash that makes a shortened name unique."""
MANAGER = "presage-scheduler"
"""Field manager of server-side apply."""
CONTAINER = "main"
INSTANCE, JOB, POOL, PROCESS = (
    "app.kubernetes.io/instance",
    "presage/job",
    "presage/pool",
    "presage/process",
)
"""Labels; annotations of the last three hold the full names."""


def pod_name(instance: str, job: str, process: str) -> str:
    """Return the name of a process's Pod: a DNS label that is unique to the process.

    Example:
        >>> pod_name("a1", "Clicks_2", "segment-0.1")
        'clicks-2-segment-0-1-bf1ee77c5f'
    """
    return _label(f"{job}-{process}", f"{instance}/{job}/{process}")


def secret_name(instance: str, job: str) -> str:
    """Return the name of a job's Secret, different from the names of its Pods.

    Example:
        >>> secret_name("a1", "Clicks_2")
        'clicks-2-3e1e0d1d9f'
    """
    return _label(job, f"{instance}/{job}")


def labels_of(instance: str, job: str, process: str | None = None) -> dict[str, dict[str, str]]:
    """Return labels and annotations of an object of a job, or of one of its processes."""
    names = {JOB: job}
    if process is not None:
        names |= {POOL: process.partition("-")[0], PROCESS: process}
    labels = {name: label_value(value) for name, value in names.items()}
    owner = {"app.kubernetes.io/managed-by": MANAGER, INSTANCE: instance}
    return {"labels": {**owner, **labels}, "annotations": names}


def label_value(text: str) -> str:
    """Return a text as a label value, unchanged if it is valid.

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


# Secrets: one token and one certificate for all processes of a job. The certificate carries a name
# that callers verify instead of an address, since addresses change with each Pod.

POD_IP = "PRESAGE_HOST"
"""Environment variable of a Pod with its own address."""
LIFE = timedelta(days=3650)
"""Validity of a certificate: longer than any job, so it is never renewed."""
SKEW = timedelta(hours=1)
"""Tolerated clock difference between nodes."""


def endpoint_of(config: ClusterConfig, instance: str, job: str) -> Endpoint | None:
    """Return how processes of a job connect, None if all Pods share one loopback."""
    if config.shared_loopback:
        return None
    name = secret_name(instance, job)
    # Kubernetes expands `$(NAME)` in commands.
    return Endpoint(host=f"$({POD_IP})", folder=f"{config.secrets}/{name}", name=f"{name}.presage")


def secret_of(config: ClusterConfig, instance: str, job: str, endpoint: Endpoint) -> dict[str, Any]:
    """Return a job's Secret with a new token and key."""
    chain, key = make_certificate(endpoint.name, datetime.now(UTC))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(instance, job),
            "namespace": config.namespace,
            **labels_of(instance, job),
        },
        "immutable": True,
        "stringData": {TOKEN: secrets.token_urlsafe(32), CERTIFICATE: chain, KEY: key},
    }


def make_certificate(name: str, now: datetime) -> tuple[str, str]:
    """Return a self-signed certificate and its private key as PEM.

    Args:
        name: its only DNS name.
        now: the current time, with time zone.
    """
    # 10 MiB that only a cluster needs.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "presage")])
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFE)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return certificate.public_bytes(pem).decode(), key.private_bytes(pem, pkcs8, plain).decode()


_EXEC = 'exec "$@" > "$0.out" 2> "$0.err"'
"""Executes the arguments, with output files in the scheduler's folder."""
_SECRET = "secret"
"""Name of the volume of the job's Secret."""
IDLE = {"cpu": "50m", "memory": "256Mi"}
"""Requests, without limits, of processes outside the budget: a coordinator that does not train, a
slot move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process to run as a Pod."""

    job: str
    """Name of the job."""
    name: str
    """Name of the process."""
    command: Sequence[str]
    """Its first word is this machine's Python interpreter."""
    request: ResourceRequest
    """Resources to reserve."""
    folder: Path
    """Folder of its output files."""

    @property
    def needs_secret(self) -> bool:
        """Whether it connects to other processes of its job."""
        return not self.name.startswith("segment-")


def pod_of(config: ClusterConfig, instance: str, task: Task) -> dict[str, Any]:
    """Return the manifest of a process's Pod, with exactly the fields that we own."""
    endpoint = endpoint_of(config, instance, task.job) if task.needs_secret else None
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(config.grace.total_seconds()),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(config, task, endpoint)],
        "volumes": [
            *(_volume(n, v) for n, v in enumerate(config.volumes)),
            *_secret(config, endpoint),
        ],
        "nodeSelector": dict(config.node_selector),
        "tolerations": [_toleration(t) for t in config.tolerations],
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


def resources_of(request: ResourceRequest) -> dict[str, Any]:
    """Return equal requests and limits, so that no process takes what is reserved for another.

    Example:
        >>> resources_of(ResourceRequest(cpus=0.5, memory_bytes=1 << 30))["limits"]
        {'cpu': '500m', 'memory': '1073741824'}
    """
    if not request.memory_bytes:
        return {"requests": dict(IDLE)}
    amounts = {"cpu": f"{round(1000 * request.cpus)}m", "memory": str(request.memory_bytes)}
    return {"requests": amounts, "limits": dict(amounts)}


def resize_patch(request: ResourceRequest) -> dict[str, Any]:
    """Return the patch that changes the limits of a running Pod."""
    return {"spec": {"containers": [{"name": CONTAINER, "resources": resources_of(request)}]}}


def _container(config: ClusterConfig, task: Task, endpoint: Endpoint | None) -> dict[str, Any]:
    output = str(task.folder / task.name)
    variables: list[dict[str, Any]] = [
        {"name": k, "value": v} for k, v in sorted(config.environment.items())
    ]
    mounts = [_mount(n, volume) for n, volume in enumerate(config.volumes)]
    if endpoint is not None:
        pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
        variables.append({"name": POD_IP, "valueFrom": pod_ip})
        mounts.append({"name": _SECRET, "mountPath": endpoint.folder, "readOnly": True})
    program = [*config.python, *task.command[1:]]
    return {
        "name": CONTAINER,
        "image": config.image,
        "command": ["/bin/sh", "-c", _EXEC, output, *program],
        "env": variables,
        "resources": resources_of(task.request),
        # Processes adapt to other limits without a restart.
        "resizePolicy": [
            {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            {"resourceName": "memory", "restartPolicy": "NotRequired"},
        ],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _volume(number: int, volume: VolumeConfig) -> dict[str, Any]:
    if volume.claim is not None:
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        return {"name": f"folder-{number}", "persistentVolumeClaim": claim}
    return {"name": f"folder-{number}", "hostPath": {"path": volume.host_path}}


def _secret(config: ClusterConfig, endpoint: Endpoint | None) -> list[dict[str, Any]]:
    if endpoint is None:
        return []
    # Users other than root read it as members of fsGroup, or as others.
    mode = 0o444 if config.user is None else 0o440
    name = endpoint.folder.rpartition("/")[2]
    return [{"name": _SECRET, "secret": {"secretName": name, "defaultMode": mode}}]


def _mount(number: int, volume: VolumeConfig) -> dict[str, Any]:
    mount = {"name": f"folder-{number}", "mountPath": volume.path, "readOnly": volume.read_only}
    return {**mount, "subPath": volume.sub_path} if volume.sub_path else mount


def _toleration(toleration: TolerationConfig) -> dict[str, Any]:
    optional = {
        "value": toleration.value,
        "effect": toleration.effect,
        "tolerationSeconds": toleration.seconds,
    }
    return {
        "key": toleration.key,
        "operator": "Exists" if toleration.value is None else "Equal",
        **{name: value for name, value in optional.items() if value is not None},
    }
