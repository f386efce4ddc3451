"""Manifests of Pods and Secrets, and the cluster's configuration file."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from scheduler.drivers.base import CERTIFICATE, KEY, TOKEN, Endpoint, ResourceRequest
from schemas.config.parse import read_yaml
from schemas.errors import SchemaError
from schemas.storage import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeConfig:
    """A volume that all Pods mount, at the path at which the scheduler sees it, too."""

    path: str
    """Absolute mount path."""
    claim: str | None = None
    """Name of a PersistentVolumeClaim that many nodes can mount; either this or `host_path`."""
    host_path: str | None = None
    """Folder with the same content on all nodes, such as a mounted network filesystem."""
    sub_path: str = ""
    """Folder of the claim to mount."""
    read_only: bool = False
    """Whether Pods mount it read-only."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path must be absolute, got {self.path!r}; write the full path")
        if (self.claim is None) == (self.host_path is None):
            raise ValueError(
                f"volume must have either claim or host_path, got claim={self.claim!r}, "
                f"host_path={self.host_path!r}; give one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesConfig:
    """An object whose keys become environment variables of each Pod."""

    secret: str | None = None
    """Name of a Secret; either this or `config_map`."""
    config_map: str | None = None
    """Name of a ConfigMap."""

    def __post_init__(self) -> None:
        if (self.secret is None) == (self.config_map is None):
            raise ValueError(
                f"source must have either secret or config_map, got "
                f"secret={self.secret!r}, config_map={self.config_map!r}; give one of them"
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
    """Image with Presage and its requirements."""
    volumes: tuple[VolumeConfig, ...] = ()
    """Volumes with files that Pods read or write by path; none if all are at URLs."""
    kubeconfig: str | None = None
    """Path of a kubeconfig; null inside the cluster."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one."""
    service_account: str | None = None
    """Service account of the Pods, such as one with an identity at the object store; they call no
    API of the cluster. null: the namespace's default."""
    python: tuple[str, ...] = ("python",)
    """Command of the Python interpreter in the image."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of each Pod."""
    environment_from: tuple[VariablesConfig, ...] = ()
    """Secrets and ConfigMaps of the namespace with more of them, such as credentials of the object
    store."""
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
    work: str = "/var/lib/presage"
    """Folder of the node's own disk that each Pod has for itself, until it ends."""
    disk: int | None = None
    """Bytes of that disk that each Pod reserves; a text such as `20GiB`. null: none, no limit."""
    grace: timedelta = timedelta(seconds=60)
    """Termination grace period; at least `train.limits.drain`."""
    unschedulable_after: timedelta = timedelta(minutes=5)
    """Time after which a Pod that has no node, or whose container has not started (image,
    volumes), is deleted and retried later."""
    lost_after: timedelta = timedelta(seconds=30)
    """Time after the grace period at which a terminating Pod counts as lost with its node."""

    def __post_init__(self) -> None:
        for name, path in (("secrets", self.secrets), ("work", self.work)):
            if not path.startswith("/"):
                raise ValueError(f"{name} must be absolute, got {path!r}; write the full path")
        for name in ("grace", "unschedulable_after", "lost_after"):
            seconds = getattr(self, name).total_seconds()
            if seconds < 1.0:
                raise ValueError(f"{name} must be at least 1s, got {seconds:g}s; raise it")


def read_cluster(path: Path) -> ClusterConfig:
    """Read a cluster's configuration file; raise SchemaError if it is invalid."""
    return read_yaml(path, ClusterConfig)


def check_volumes(
    config: ClusterConfig, path: Path, storage: Location, inputs: Iterable[Location]
) -> None:
    """Raise SchemaError if Pods cannot reach local files; those at a URL need no volume."""
    writable = [volume for volume in config.volumes if not volume.read_only]
    needs = [("write to", "--storage", storage, writable)]
    needs += [("read", "--input", location, [*config.volumes]) for location in inputs]
    for verb, option, location, volumes in needs:
        folder = None if location.local is None else location.local.resolve()
        if folder is None or any(folder.is_relative_to(volume.path) for volume in volumes):
            continue
        below = "".join(f" or a path below {volume.path}" for volume in volumes)
        raise SchemaError(
            f"Pods cannot {verb} {folder}, which none of their volumes has; give {option} a URL"
            f"{below}",
            file=str(path),
        )


MAX_LABEL = 63
"""Maximum length of a DNS label and of a label's value."""
HASHED = 10
"""Hexadecimal digits of the hash that makes a shortened name unique."""
MANAGER = "presage-scheduler"
"""Field manager of server-side apply."""
CONTAINER = "main"
GPU = "nvidia.com/gpu"
"""Resource of the GPUs that NVIDIA's device plugin offers on a node."""
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


def endpoint_of(config: ClusterConfig, instance: str, job: str) -> Endpoint:
    """Return how processes of a job connect."""
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
    """Return a self-signed certificate and its private key as PEM."""
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


TERMINATION_LOG = "/dev/termination-log"
"""File of a container whose content the node reports when the container has ended."""
MEMORY_FOLDER = "/dev/shm"
"""Where trainers keep copies of checkpoints that are not written yet. Without a volume a container
has 64 MiB there; with one, as much as its memory limit allows."""
_EXEC = 'exec "$@" > "$0"'
"""Executes the arguments with standard output in that file. Standard error is the container's log,
whose end the node reports if a container has failed and that file is empty."""
_SECRET, _WORK, _MEMORY = "secret", "work", "memory"
"""Names of the volumes of the job's Secret, of the folder `work` and of `MEMORY_FOLDER`."""
IDLE = {"cpu": "50m", "memory": "256Mi"}
"""Requests, without limits, of processes outside the budget: a coordinator that does not train, a
slot move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A process to run as a Pod."""

    job: str
    name: str
    command: Sequence[str]
    """Its first word is this machine's Python interpreter."""
    request: ResourceRequest

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
            *_own_volumes(config),
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
    amounts |= {GPU: str(request.gpus)} if request.gpus else {}
    return {"requests": amounts, "limits": dict(amounts)}


def resize_patch(request: ResourceRequest) -> dict[str, Any]:
    """Return the patch that changes the limits of a running Pod."""
    return {"spec": {"containers": [{"name": CONTAINER, "resources": resources_of(request)}]}}


def _container(config: ClusterConfig, task: Task, endpoint: Endpoint | None) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [
        {"name": k, "value": v} for k, v in sorted(config.environment.items())
    ]
    mounts = [_mount(n, volume) for n, volume in enumerate(config.volumes)]
    mounts.append({"name": _WORK, "mountPath": config.work})
    mounts.append({"name": _MEMORY, "mountPath": MEMORY_FOLDER})
    if endpoint is not None:
        pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
        variables.append({"name": POD_IP, "valueFrom": pod_ip})
        mounts.append({"name": _SECRET, "mountPath": endpoint.folder, "readOnly": True})
    program = [*config.python, *task.command[1:]]
    if not task.name.startswith("store-"):  # the address that it prints would hide its errors
        program = ["/bin/sh", "-c", _EXEC, TERMINATION_LOG, *program]
    container = {
        "name": CONTAINER,
        "image": config.image,
        "command": program,
        "env": variables,
        "envFrom": [_variables(source) for source in config.environment_from],
        "resources": _with_disk(resources_of(task.request), config.disk),
        # Processes adapt to other limits without a restart.
        "resizePolicy": [
            {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            {"resourceName": "memory", "restartPolicy": "NotRequired"},
        ],
        "volumeMounts": mounts,
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    return {name: value for name, value in container.items() if value != []}


def _variables(source: VariablesConfig) -> dict[str, Any]:
    if source.secret is not None:
        return {"secretRef": {"name": source.secret}}
    return {"configMapRef": {"name": source.config_map}}


def _with_disk(resources: dict[str, Any], disk: int | None) -> dict[str, Any]:
    """Add a reservation of the node's disk; a node evicts a Pod that takes more."""
    if disk is None:
        return resources
    amount, limits = {"ephemeral-storage": str(disk)}, resources.get("limits", {})
    return {"requests": {**resources["requests"], **amount}, "limits": {**limits, **amount}}


def _own_volumes(config: ClusterConfig) -> list[dict[str, Any]]:
    size = {} if config.disk is None else {"sizeLimit": str(config.disk)}
    return [
        {"name": _WORK, "emptyDir": size},
        {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},
    ]


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
