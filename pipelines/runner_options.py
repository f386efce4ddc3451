"""Options of a command about its runner: this machine without Beam, or a runner of Beam."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from presage.schemas.errors import SchemaError

IN_PROCESS = "InProcess"
"""Value of `--runner` that holds the samples in memory, whatever the size of the input."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a command runs on this machine, without Beam.

    Attributes:
        num_workers: maximum number of workers; 0 for all that fit the machine.
        in_memory: whether a segment is held in memory, by threads, or exchanged in files, by
            processes; None lets its size decide.
    """

    num_workers: int = 0
    in_memory: bool | None = None


def local_options(beam_args: Sequence[str]) -> LocalOptions | None:
    """Return how a command runs without Beam, None if its options name a runner of Beam.

    `beam_args` are options that the command itself does not define.

    Raises:
        SchemaError: an option is unknown or invalid.

    Example:
        >>> local_options(["--direct_num_workers=2"])
        LocalOptions(num_workers=2, in_memory=None)
        >>> local_options(["--runner", "FlinkRunner"])
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--runner")
    try:
        runner, words = parser.parse_known_args(beam_args)
        parser.add_argument("--direct_num_workers", type=int, default=0)
        parser.add_argument("--direct_running_mode")
        known, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise SchemaError(f"option is invalid: {error}; see --help") from error
    if runner.runner not in (None, IN_PROCESS):
        return None
    if runner.runner == IN_PROCESS and words:
        raise SchemaError(
            f"runner {IN_PROCESS} takes no Beam options: {words[0]}; leave it out, or choose "
            "another --runner"
        )
    if known.direct_num_workers < 0:
        raise SchemaError(
            f"direct_num_workers must not be negative, got {known.direct_num_workers}; 0 means "
            "all processors"
        )
    if others:
        raise SchemaError(
            f"unknown option: {others[0]}; see --help, and --runner for those of Beam"
        )
    in_memory = True if runner.runner == IN_PROCESS else None
    if known.direct_running_mode == "multi_processing":
        in_memory = False
    return LocalOptions(known.direct_num_workers, in_memory)


def beam_build() -> ModuleType:
    """Import `presage.pipelines.beam.jobs`, and with it Beam, which takes seconds."""
    return importlib.import_module("presage.pipelines.beam.jobs")
