"""Manifests of Pods and Secrets, and the cluster's configuration file."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from presage.scheduler.drivers.base import CERTIFICATE, KEY, TOKEN, Endpoint, ResourceRequest
from presage.schemas.config.parse import read_yaml
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster, and settings of all Pods."""

    namespace: str
    image: str
    """Image with Presage and its requirements."""
    pod_template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """PodTemplateSpec, to which the fields of each process are added; the container is `main`."""
    kubeconfig: str | None = None
    """Path of a kubeconfig; null inside the cluster."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one."""
    python: tuple[str, ...] = ("python",)
    """Command of the Python interpreter in the image."""
    secrets: str = "/run/presage"
    """Folder below which each Pod mounts the token and certificate of its job."""
    work: str = "/var/lib/presage"
    """Folder of the node's own disk that each Pod has for itself, until it ends."""
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
        try:
            names = [container["name"] for container in self.pod_spec.get("containers", ())]
            _ = [mount["mountPath"] for mount in self.container.get("volumeMounts", ())]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"pod_template is not a PodTemplateSpec: {error!r}; write it as in a Pod"
            ) from error
        if names not in ([], [CONTAINER]):
            raise ValueError(
                f"pod_template must have no container besides {CONTAINER!r}, got {names}; rename it"
            )

    @property
    def pod_spec(self) -> Mapping[str, Any]:
        """Specification of the Pods in the template."""
        return self.pod_template.get("spec", {})

    @property
    def container(self) -> Mapping[str, Any]:
        """The container in the template."""
        return next(iter(self.pod_spec.get("containers", ())), {})


def read_cluster(path: Path) -> ClusterConfig:
    """Read a cluster's configuration file; raise SchemaError if it is invalid."""
    return read_yaml(path, ClusterConfig)


def check_volumes(
    config: ClusterConfig, path: Path, storage: Location, inputs: Iterable[Location]
) -> None:
    """Raise SchemaError if Pods cannot reach local files; those at a URL need no volume."""
    mounts = config.container.get("volumeMounts", ())
    readable = [mount["mountPath"] for mount in mounts]
    writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    needs = [("write to", "--storage", storage, writable)]
    needs += [("read", "--input", location, readable) for location in inputs]
    for verb, option, location, paths in needs:
        folder = None if location.local is None else location.local.resolve()
        if folder is None or any(folder.is_relative_to(path) for path in paths):
            continue
        below = "".join(f" or a path below {path}" for path in paths)
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
    """Return the manifest of a process's Pod: the template with the fields that we own."""
    endpoint = endpoint_of(config, instance, task.job) if task.needs_secret else None
    volumes: list[dict[str, Any]] = [
        {"name": _WORK, "emptyDir": {}},
        {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},
    ]
    if endpoint is not None:
        secret = {"secretName": endpoint.folder.rpartition("/")[2], "defaultMode": 0o444}
        volumes.append({"name": _SECRET, "secret": secret})
    container = _merged(config.container, _container(config, task, endpoint))
    own = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(instance, task.job, task.name),
            "namespace": config.namespace,
            **labels_of(instance, task.job, task.name),
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(config.grace.total_seconds()),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "volumes": volumes,
        },
    }
    pod = _merged(config.pod_template, own)
    return {**pod, "spec": {**pod["spec"], "containers": [container]}}


def _merged(template: Any, own: Any) -> Any:
    """Return a template with own fields, which win; lists are joined."""
    if isinstance(template, Mapping) and isinstance(own, Mapping):
        both = {name: _merged(template[name], own[name]) for name in template if name in own}
        return {**template, **own, **both}
    if isinstance(template, list) and isinstance(own, list):
        return [*template, *own]
    return own


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
    variables: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = [
        {"name": _WORK, "mountPath": config.work},
        {"name": _MEMORY, "mountPath": MEMORY_FOLDER},
    ]
    if endpoint is not None:
        pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
        variables.append({"name": POD_IP, "valueFrom": pod_ip})
        mounts.append({"name": _SECRET, "mountPath": endpoint.folder, "readOnly": True})
    program = [*config.python, *task.command[1:]]
    if not task.name.startswith("store-"):  # the address that it prints would hide its errors
        program = ["/bin/sh", "-c", _EXEC, TERMINATION_LOG, *program]
    return {
        "name": CONTAINER,
        "image": config.image,
        "command": program,
        "env": variables,
        "resources": resources_of(task.request),
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
