"""Choice of the runner: this process, or a runner of Beam."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from schemas.errors import SchemaError

IN_PROCESS = "InProcess"
"""Value of `--runner` for `executor.py`: one process, without Beam."""
ONE_WORKER = "--direct_num_workers=1"


def in_process(beam_args: Sequence[str], *, is_small: bool = False) -> bool:
    """Tell whether a command runs in this process.

    Args:
        beam_args: options that the command itself does not define.
        is_small: whether the work has one partition, which a second worker would not speed up:
            then this process runs it unless an option asks for a Beam runner or more workers.

    Raises:
        SchemaError: `--runner=InProcess` is combined with Beam options.

    Example:
        >>> in_process(["--runner=InProcess"]), in_process(["--runner", "FlinkRunner"])
        (True, False)
        >>> in_process([], is_small=True), in_process(["--runner=DirectRunner"], is_small=True)
        (True, False)
    """
    if all(word == ONE_WORKER for word in beam_args):
        return is_small
    requested, others = False, list[str]()
    words = iter(beam_args)
    for word in words:
        value = next(words, "") if word == "--runner" else word.removeprefix("--runner=")
        if word.partition("=")[0] == "--runner" and value == IN_PROCESS:
            requested = True
        else:
            others.append(word)
    if requested and others:
        raise SchemaError(
            f"runner {IN_PROCESS} takes no Beam options: {others[0]}; leave it out, or choose "
            "another --runner"
        )
    return requested


def runner_module(name: str) -> ModuleType:
    """Import a module of `pipelines/beam`, and with it Beam, which takes seconds."""
    return importlib.import_module(f"pipelines.beam.{name}")
