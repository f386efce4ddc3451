"""`scheduler doctor`: its options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler.doctor.checks import PARTS, Machine
from schemas.config.parse import parse_size


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="folder of datasets and runs"
    )
    command.add_argument(
        "--lock", type=Path, metavar="FILE", help="required packages; default: requirements.lock"
    )
    command.add_argument(
        "--shared-memory",
        type=Path,
        metavar="DIR",
        help="train.checkpoint.copy_to if it is set; default: /dev/shm",
    )
    command.add_argument(
        "--least-shared",
        type=parse_size,
        default=1 << 30,
        metavar="SIZE",
        help="required free shared memory",
    )
    command.add_argument(
        "--least-disk",
        type=parse_size,
        default=5 << 30,
        metavar="SIZE",
        help="required free space in --output",
    )
    command.add_argument("--port", type=int, default=0, help="of the status page; default: any")
    command.add_argument("--cluster", type=Path, metavar="FILE", help="configuration of a cluster")
    command.add_argument(
        "--need",
        action="append",
        default=[],
        choices=PARTS,
        help="optional part that is needed; may be repeated",
    )


def machine_of(
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    sites: Sequence[str],
    python: tuple[int, int],
    now_sec: float,
) -> Machine:
    """Return the machine to check, as the options describe it."""
    paths = {"lock": arguments.lock, "shared_memory": arguments.shared_memory}
    needed = frozenset(arguments.need)
    return Machine(
        environment=environment,
        sites=tuple(sites),
        python=python,
        output=arguments.output,
        now_sec=now_sec,
        least_shared_bytes=arguments.least_shared,
        least_disk_bytes=arguments.least_disk,
        port=arguments.port,
        cluster=arguments.cluster,
        needed=needed if arguments.cluster is None else needed | {"kubernetes"},
        **{name: path for name, path in paths.items() if path is not None},
    )
