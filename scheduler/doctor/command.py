"""`scheduler doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.doctor.checks import (
    Finding,
    clock_finding,
    compiler_finding,
    disk_finding,
    flink_finding,
    gpu_finding,
    java_finding,
    kubernetes_finding,
    port_finding,
    python_finding,
    shared_memory_finding,
    wheels_finding,
)
from schemas.config.parse import parse_size

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


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="folder of datasets and runs"
    )
    command.add_argument("--lock", type=Path, metavar="FILE", help="requirements.lock by default")
    command.add_argument(
        "--shared-memory", type=Path, metavar="DIR", help="train.checkpoint.copy_to where it is set"
    )
    command.add_argument(
        "--least-shared", type=parse_size, default=1 << 30, metavar="SIZE", help="free there"
    )
    command.add_argument(
        "--least-disk", type=parse_size, default=5 << 30, metavar="SIZE", help="free in --output"
    )
    command.add_argument("--port", type=int, default=0, help="of the status page; any by default")
    command.add_argument("--cluster", type=Path, metavar="FILE", help="where Pods run")
    command.add_argument(
        "--need", action="append", default=[], choices=PARTS, help="not optional; may be repeated"
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def place_of(
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    sites: Sequence[str],
    python: tuple[int, int],
) -> Place:
    """Return what the options ask to look at.

    Args:
        arguments: of the command.
        environment: variables.
        sites: directories with packages.
        python: version of the interpreter.
    """
    named = {"lock": arguments.lock, "shared_memory": arguments.shared_memory}
    return Place(
        environment=environment,
        sites=tuple(sites),
        python=python,
        output=arguments.output,
        least_shared_bytes=arguments.least_shared,
        least_disk_bytes=arguments.least_disk,
        port=arguments.port,
        cluster=arguments.cluster,
        needed=frozenset(arguments.need),
        **{name: path for name, path in named.items() if path is not None},
    )
