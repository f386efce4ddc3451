"""`python -m scheduler doctor`: its options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler.doctor.examine import PARTS, Place
from schemas.declare import parse_size


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
