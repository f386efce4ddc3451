"""The file that says which cluster Pods run in, and what each of them is like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

from schemas.declare import read_yaml
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
