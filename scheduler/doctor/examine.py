"""All checks in the order in which they are told, and what they look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.doctor.finding import Finding
from scheduler.doctor.machine import (
    clock_finding,
    compiler_finding,
    disk_finding,
    port_finding,
    shared_memory_finding,
)
from scheduler.doctor.optional import (
    flink_finding,
    gpu_finding,
    java_finding,
    kubernetes_finding,
)
from scheduler.doctor.packages import python_finding, wheels_finding

PARTS = ("flink", "gpu", "kubernetes")
"""What only some set-ups need."""
SOURCES = Path(__file__).resolve().parents[2]
"""The source tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is looked at."""

    environment: Mapping[str, str]
    """Variables; PATH, HOME and XDG_CACHE_HOME are read."""
    sites: tuple[str, ...]
    """Directories with packages, the first one wins."""
    python: tuple[int, int]
    """Version of the interpreter."""
    output: Path
    """Folder of datasets and runs."""
    lock: Path = SOURCES / "requirements.lock"
    """Packages with their versions."""
    flink: Path = SOURCES / "deploy" / "flink"
    """Where Flink's versions stand."""
    shared_memory: Path = Path("/dev/shm")
    """Where copies of checkpoints are kept."""
    least_shared_bytes: int = 1 << 30
    """That must be free there; a job says how many it needs when it is started."""
    least_disk_bytes: int = 5 << 30
    """That must be free in the output."""
    port: int = 0
    """Of the status page; 0 for any."""
    cluster: Path | None = None
    """File of a cluster."""
    needed: frozenset[str] = field(default_factory=frozenset[str])
    """Of `PARTS`, those without which it is not enough."""


def examine(place: Place, now: float) -> list[Finding]:
    """Look at everything.

    Args:
        place: what is looked at.
        now: seconds since 1970.
    """
    flink, gpu = "flink" in place.needed, "gpu" in place.needed
    kubernetes = "kubernetes" in place.needed or place.cluster is not None
    return [
        python_finding(place.python),
        wheels_finding(place.lock, place.sites),
        compiler_finding(place.environment.get("PATH", "")),
        shared_memory_finding(place.shared_memory, place.least_shared_bytes),
        disk_finding(place.output, place.least_disk_bytes),
        port_finding(place.port),
        clock_finding(place.output, now),
        java_finding(place.environment, needed=flink),
        flink_finding(place.flink, place.environment, needed=flink),
        gpu_finding(place.environment, place.sites, needed=gpu),
        kubernetes_finding(place.cluster, place.output, needed=kubernetes),
    ]
