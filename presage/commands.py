"""The commands of all packages by task, and the help of `presage`."""

from __future__ import annotations

import platform
from importlib import metadata

from presage import ROOT
from presage.schemas.errors import suggest_name_or

TASKS: dict[str, dict[str, tuple[str, str]]] = {
    "Prepare data": {
        "demo": ("pipelines", "write an example: a job, its log, and a dataset"),
        "init": ("pipelines", "write a first job for the files of a folder"),
        "preview": ("pipelines", "check a job on the first rows of its input"),
        "build": ("pipelines", "build a dataset from raw files"),
        "append": ("pipelines", "add one more segment to a dataset"),
        "seal": ("pipelines", "mark a dataset complete: append is refused"),
        "unseal": ("pipelines", "remove the mark: append is allowed again"),
        "rewrite": ("pipelines", "make a Parquet dataset smaller; keep all rows"),
        "generate": ("pipelines", "write the synthetic log of a job"),
    },
    "Look at data": {
        "report": ("pipelines", "write a page about a dataset and its runs"),
        "expand": ("pipelines", "write the samples back, one row each"),
        "oracle": ("pipelines", "predict the cache, and build other indexes"),
    },
    "Train": {
        "train": ("trainer", "train a job on a dataset"),
        "evaluate": ("trainer", "metrics of a run on the evaluation split"),
        "diff": ("trainer", "compare two runs bit by bit"),
    },
    "Serve": {
        "export": ("trainer", "one CPU artifact of a run's model, to serve"),
        "publish": ("trainer", "rows that changed between two checkpoints"),
        "apply": ("trainer", "apply published rows to an exported model"),
        "score": ("pipelines", "score samples by an exported model"),
    },
    "Schedule": {
        "plan": ("scheduler", "sizes of both pools, cost, time, memory, reasons"),
        "run": ("scheduler", "start the pools of all jobs, and adjust them"),
        "status": ("scheduler", "show what a scheduler does or did"),
        "retrain": ("scheduler", "one day: append, train, evaluate, gate, promote or roll back"),
        "replay": ("scheduler", "decide again on the events of a log, and compare"),
        "fit": ("scheduler", "fit a throughput model for each job of a CSV file"),
        "simulate": ("scheduler", "compare policies on a trace, with faults"),
    },
    "Maintain": {
        "doctor": ("scheduler", "report what this machine lacks, and how to fix it"),
        "verify": ("pipelines", "recompute counts and checksums"),
        "erase": ("pipelines", "delete the samples of some ids"),
        "vacuum": ("pipelines", "remove what no manifest names any more"),
    },
    "Operate replicas and stores by hand": {
        "replica": ("trainer", "run one replica of train --replicas"),
        "store": ("trainer", "serve rows to trainers, over Arrow Flight"),
        "migrate-slots": ("trainer", "move slots between stores of a run"),
    },
}
"""Task to its commands: their package, and the line of its parser's help."""

PACKAGES = {
    command: package for commands in TASKS.values() for command, (package, _) in commands.items()
}
"""Package of each command. `python -m trainer verify` and `erase`, for runs, are not among them:
the same commands for datasets are."""

COMPLETION = "completion"
"""The command of `presage` itself."""


def summary(command: str) -> str:
    """Return the line about a command."""
    if command == COMPLETION:
        return "print the completion script for bash or zsh"
    return next(commands[command][1] for commands in TASKS.values() if command in commands)


def help_text() -> str:
    """Return what `presage --help` prints."""
    width = max(len(command) for command in PACKAGES)
    lines = ["usage: presage COMMAND ...", ""]
    for task, commands in TASKS.items():
        lines += [f"{task}:", *(f"  {name:<{width}}  {summary(name)}" for name in commands), ""]
    lines += [
        f"  {COMPLETION:<{width}}  {summary(COMPLETION)}",
        "",
        "`presage COMMAND --help` lists the options of a command. For a run instead of a dataset",
        "there are `python -m presage.trainer verify` and `python -m presage.trainer erase`.",
    ]
    return "\n".join(lines)


def version_text() -> str:
    """Return what `presage --version` prints."""
    try:
        version = metadata.version("presage")
    except metadata.PackageNotFoundError:
        version = f"in {ROOT}, not installed"
    return f"presage {version}, Python {platform.python_version()}"


def unknown_command(name: str) -> str:
    """Return the error line for a command that does not exist."""
    advice = suggest_name_or(name, [*PACKAGES, COMPLETION], "run presage --help for all commands")
    return f"presage: error: unknown command: {name!r}; {advice}"
