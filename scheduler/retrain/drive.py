"""Run the next action until a day is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.drivers.base import Processes
from scheduler.drivers.local.commands import local_runner_options, module_command
from scheduler.model.snapshot import Snapshot, take_snapshot
from scheduler.planner.machine_sizes import machine_budget, machine_schedule
from scheduler.planner.policy import plan
from scheduler.planner.reasons import plan_summary
from scheduler.retrain.decide import (
    Asked,
    Await,
    Begin,
    Close,
    Finished,
    Judge,
    Promote,
    Remove,
    Run,
    next_step,
)
from scheduler.retrain.records import (
    Attempt,
    Begun,
    Closed,
    Done,
    Failed,
    Judged,
    Log,
    Promoted,
    Removed,
    Started,
    check_folder,
)
from scheduler.retrain.root import (
    Root,
    checkpoint_of,
    facts_of,
    keep_build,
    newest_day,
    remove_run,
    segment_of_day,
    write_pointer,
)
from schemas.config.schedule import RetrainConfig
from schemas.paths import ALLOW_OUTSIDE, SINGLE_WRITER


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the plan comes to."""

    workers: int
    """Workers of the build of a segment."""
    num_replicas: int
    """Trainer replicas."""
    words: str
    """The plan in one line."""


ALONE = Sizes(workers=1, num_replicas=1, words="")
"""Of a stage that has one process."""


def sizes_of(job_file: Path, root: Root, *, allow_outside: bool = False) -> Sizes:
    """Return the sizes of the best plan for a day like those of the dataset.

    Raises:
        SchemaError: a file is missing or damaged.
        PlanError: nothing fits.
    """
    dataset = root.dataset if root.has_dataset else None
    snapshot = _of_one_day(
        take_snapshot(job_file, dataset, root.folder, allow_outside=allow_outside), root
    )
    schedule, machine = snapshot.job.schedule, machine_budget()
    own = schedule.budget
    budget = replace(own, cpus=min(own.cpus, machine.cpus), memory=min(own.memory, machine.memory))
    training = replace(schedule.training, max_stores=0)
    alone = replace(snapshot.job, schedule=replace(schedule, training=training))
    snapshot = replace(snapshot, job=alone)
    config, changes = machine_schedule(snapshot, budget, shares_cores=machine.cpus < own.cpus)
    decision = plan(snapshot, config)
    chosen = decision.chosen
    return Sizes(
        workers=chosen.workers_per_job,
        num_replicas=chosen.num_replicas,
        words="; ".join([plan_summary(decision), *changes]),
    )


def _of_one_day(snapshot: Snapshot, root: Root) -> Snapshot:
    """Return a snapshot whose samples are those of a mean day."""
    if not snapshot.facts.measured:
        return snapshot
    days = len(facts_of(root))
    facts = snapshot.facts
    return replace(
        snapshot,
        facts=replace(
            facts,
            num_samples=-(-facts.num_samples // days),
            num_train_samples=-(-facts.num_train_samples // days),
        ),
    )


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
    evaluate = [
        *module_command("trainer"),
        "evaluate",
        str(job_file),
        "--dataset",
        str(root.dataset),
    ]
    evaluate += ["--run", str(root.run(run)), "--segments", ",".join(started.segments)]
    return [*evaluate, "--json"]


def _append(started: Started, attempt: Attempt, job_file: Path, root: Root) -> list[str]:
    """Return the command that builds the segment of a day; it changes nothing that is there."""
    source = ["--input", attempt.input, "--day", attempt.day, "--json"]
    source += local_runner_options(started.workers)
    if not root.has_dataset:
        build = [
            *module_command("pipelines"),
            "build",
            str(job_file),
            "--output",
            str(root.dataset),
        ]
        return [*build, *source]
    append = [*module_command("pipelines"), "append", str(job_file), "--dataset", str(root.dataset)]
    is_there = attempt.day in {fact.day for fact in facts_of(root)}
    replaced = ["--replace"] if attempt.corrected and is_there else []
    return [*append, *replaced, *source]


def _train(started: Started, job_file: Path, root: Root, config: RetrainConfig) -> list[str]:
    """Return the command that begins a run, or goes on with it."""
    train = [*module_command("trainer"), "train", str(job_file), "--dataset", str(root.dataset)]
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


STOPPED = 143
"""Exit status of a command that was asked to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """What one command works with."""

    job_file: Path
    """The job."""
    root: Root
    """Folder of it all."""
    config: RetrainConfig
    """Of the job."""
    flags: Flags
    """Options of the commands of all stages, besides paths."""
    processes: Processes
    """Where stages run."""
    log: Log
    """Open log of the root."""
    stopped: Callable[[], bool]
    """Tells whether the command was asked to end."""
    say: Callable[[str], None]
    """Told what is done, and why."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    poll_sec: float = 0.2
    """Time between two looks at a process."""


def retrain_day(work: Retraining, asked: Asked, source: str) -> Finished:
    """Bring a day to its end, from wherever it stands.

    Args:
        work: what is worked with.
        asked: the day.
        source: folder of its raw files.

    Raises:
        SchemaError: the dataset, a run or the log is damaged.
        PlanError: no sizes fit, or the folder is not there.
    """
    before = work.log.state
    if asked.corrected or not before.of_day(asked.day):
        check_folder(source, asked.day)
    for run in before.removed:
        remove_run(work.root, run)
    while not work.stopped():
        state, dataset = work.log.state, facts_of(work.root)
        step = next_step(asked, before, state, dataset, work.config)
        match step:
            case Finished():
                return step
            case Begin(run):
                _begin(work, asked, run, source)
            case Run():
                _start(work, step)
            case Await(run, started):
                _await(work, started)
            case Judge(run, reasons, against):
                _judge(work, run, reasons, against)
            case Promote(run):
                _promote(work, state.attempt(run))
            case Close():
                _close(work, step)
            case Remove(run):
                work.log.append(Removed(time_sec=work.clock(), run=run))
                remove_run(work.root, run)
    return Finished(STOPPED, f"{asked.day}: asked to end; the same command goes on")


def _begin(work: Retraining, asked: Asked, run: str, source: str) -> None:
    work.say(f"{run}: {asked.day} is begun, from {source}")
    work.log.append(
        Begun(
            time_sec=work.clock(),
            run=run,
            day=asked.day,
            input=source,
            corrected=asked.corrected,
            again=asked.again,
        )
    )


def _start(work: Retraining, step: Run) -> None:
    """Write down that a stage is started; what waits for it starts it."""
    sizes = ALONE
    if step.stage in ("append", "train"):
        outside = work.flags.allow_outside
        sizes = sizes_of(work.job_file, work.root, allow_outside=outside)
    words = f"; {sizes.words}" if sizes.words else ""
    work.say(f"{step.run}: {step.stage}: {step.reason}{words}")
    work.log.append(
        Started(
            time_sec=work.clock(),
            run=step.run,
            stage=step.stage,
            process=step.process,
            base=step.base,
            segments=step.segments,
            workers=sizes.workers,
            num_replicas=sizes.num_replicas,
            reason=f"{step.reason}{words}",
        )
    )


def _await(work: Retraining, started: Started) -> None:
    """Start a process unless somebody has, wait for its end, and write down what it left."""
    attempt, name = work.log.state.attempt(started.run), started.process
    if not work.processes.was_started(name):
        command = command_of(started, attempt, work.job_file, work.root, work.config, work.flags)
        work.processes.start(name, command)
    _until_ended(work, name, work.stopped)
    result = result_of(work.processes.output(name))
    if result is None:
        status, said = (
            work.processes.exit_status(name).status,
            work.processes.last_stderr_line(name),
        )
        # A trainer that was asked to end has saved and says so, with status 0.
        status = None if status == 0 else status
        failed = Failed(
            time_sec=work.clock(),
            run=started.run,
            stage=started.stage,
            status=status,
            reason=said.removeprefix("error: ") or "it said nothing",
        )
        work.say(f"{started.run}: {started.stage}: {failed.reason}")
        work.log.append(failed)
        return
    _done(work, attempt, started, result)


def _until_ended(work: Retraining, name: str, is_to_end: Callable[[], bool]) -> None:
    """Wait for a process's end, and ask it to come to it as long as that is wanted."""
    while work.processes.is_alive(name):
        if is_to_end():
            work.processes.request_stop(name)
        time.sleep(work.poll_sec)


def result_of(output: str) -> dict[str, Any] | None:
    """Return the object that a command has printed; None where it did not come to its end.

    A number that is none, such as the NE of a model that has blown up, is None in it.

    Example:
        >>> result_of('{"ne": NaN}'), result_of('{"stopped": "SIGTERM"}'), result_of('{"ne"')
        ({'ne': None}, None, None)
    """
    lines = output.strip().splitlines()
    try:
        body = json.loads(lines[-1], parse_constant=lambda _: None) if lines else None
    except ValueError:
        return None
    return body if isinstance(body, dict) and "stopped" not in body else None


def _done(work: Retraining, attempt: Attempt, started: Started, result: dict[str, Any]) -> None:
    if started.stage == "append":
        keep_build(work.root, started.run, result)
        # What is in the dataset counts, not what was printed.
        result = {**result, "segment": segment_of_day(work.root, attempt.day)}
    work.log.append(
        Done(time_sec=work.clock(), run=started.run, stage=started.stage, result=result)
    )


def _judge(work: Retraining, run: str, reasons: tuple[str, ...], against: str | None) -> None:
    verdict = "; ".join(reasons) or "good enough"
    work.say(f"{run}: judged against {against or 'nothing'}: {verdict}")
    work.log.append(
        Judged(time_sec=work.clock(), run=run, passed=not reasons, reasons=reasons, against=against)
    )


def _promote(work: Retraining, attempt: Attempt) -> None:
    """Let the pointer name a run, and write down that it does; done twice it is done once."""
    place, checkpoint = checkpoint_of(work.root, attempt.run)
    evaluate, compare = attempt.done["evaluate"], attempt.done.get("compare")
    assert attempt.judged is not None, "what is promoted was judged"
    write_pointer(
        work.root,
        {
            "run": attempt.run,
            "date": newest_day(work.log.state, facts_of(work.root), attempt.run),
            "checkpoint": place,
            "checkpoint_sha256": checkpoint,
            "evaluated_on": list(attempt.started["evaluate"].segments),
            "metrics": evaluate,
            "before": {"run": attempt.compared_with, "metrics": compare},
            "judged_sec": attempt.judged.time_sec,
        },
    )
    work.log.append(Promoted(time_sec=work.clock(), run=attempt.run, checkpoint=checkpoint))
    work.say(f"{attempt.run}: promoted")


def _close(work: Retraining, step: Close) -> None:
    """End what still runs of an attempt, and close it."""
    pending = work.log.state.attempt(step.run).pending
    if pending is not None:
        _until_ended(work, pending.process, lambda: True)
    work.say(f"{step.run}: closed: {step.reason}")
    work.log.append(
        Closed(
            time_sec=work.clock(),
            run=step.run,
            final=step.final,
            status=step.status,
            reason=step.reason,
        )
    )
