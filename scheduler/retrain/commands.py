"""The command line of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scheduler.drivers.process.commands import module, on_this_machine
from scheduler.retrain.records import Started
from scheduler.retrain.root import Root, facts_of
from scheduler.retrain.state import Attempt
from schemas.job_retrain import RetrainConfig
from schemas.paths import ALLOW_OUTSIDE, SINGLE_WRITER


@dataclass(frozen=True, slots=True)
class Flags:
    """Options of the commands of all stages, besides paths.

    Attributes:
        single_writer: whether nothing else writes below the root.
        allow_outside: whether the job's schema may lie outside the folder of the job file.
    """

    single_writer: bool = False
    allow_outside: bool = False

    @property
    def write(self) -> list[str]:
        """Return those of commands that write."""
        return [SINGLE_WRITER] if self.single_writer else []

    @property
    def build(self) -> list[str]:
        """Return those of commands that build."""
        return [*self.write, *([ALLOW_OUTSIDE] if self.allow_outside else [])]


def command_of(
    started: Started,
    attempt: Attempt,
    job_file: Path,
    root: Root,
    config: RetrainConfig,
    flags: Flags,
) -> list[str]:
    """Return the command of a stage.

    Args:
        started: what is started.
        attempt: at the day.
        job_file: the job.
        root: folder of it all.
        config: of the job.
        flags: of the user.
    """
    if started.stage == "append":
        return [*_append(started, attempt, job_file, root), *flags.build]
    if started.stage == "train":
        return [*_train(started, job_file, root, config), *flags.write]
    run = started.run if started.stage == "evaluate" else started.base
    assert run is not None, "a comparison names the run that it is made with"
    evaluate = [*module("trainer"), "evaluate", str(job_file), "--dataset", str(root.dataset)]
    evaluate += ["--run", str(root.run(run)), "--segments", ",".join(started.segments)]
    return [*evaluate, "--json"]


def _append(started: Started, attempt: Attempt, job_file: Path, root: Root) -> list[str]:
    """Return the command that builds the segment of a day; it changes nothing that is there."""
    source = ["--input", attempt.input, "--day", attempt.day, "--json"]
    source += on_this_machine(started.workers)
    if not root.has_dataset:
        build = [*module("pipelines"), "build", str(job_file), "--output", str(root.dataset)]
        return [*build, *source]
    append = [*module("pipelines"), "append", str(job_file), "--dataset", str(root.dataset)]
    is_there = attempt.day in {fact.day for fact in facts_of(root)}
    replaced = ["--replace"] if attempt.corrected and is_there else []
    return [*append, *replaced, *source]


def _train(started: Started, job_file: Path, root: Root, config: RetrainConfig) -> list[str]:
    """Return the command that begins a run, or goes on with it."""
    train = [*module("trainer"), "train", str(job_file), "--dataset", str(root.dataset)]
    train += ["--output", str(root.run(started.run)), "--segments", ",".join(started.segments)]
    if started.base is not None:
        train += ["--start-from", str(root.run(started.base))]
        if config.expire_days is not None:
            train += ["--expire-days", str(config.expire_days)]
    if root.has_run(started.run):
        train.append("--resume")
    if started.num_replicas > 1:
        train += ["--replicas", str(started.num_replicas)]
    return [*train, "--json"]
