"""Execute the next action until a day is done."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from presage.scheduler.drivers.base import Processes
from presage.scheduler.drivers.job_files import local_runner_options, module_command
from presage.scheduler.drivers.observations import parse_result
from presage.scheduler.model.past_runs import BUILD
from presage.scheduler.model.plan_inputs import PlanInputs, take_snapshot
from presage.scheduler.planner.machine_sizes import machine_schedule
from presage.scheduler.planner.policy import plan, plan_summary
from presage.scheduler.retrain.decide import (
    Await,
    DayRequest,
    Finished,
    Promote,
    SegmentFact,
    newest_day,
    next_action,
)
from presage.scheduler.retrain.records import (
    Attempt,
    Begun,
    Closed,
    Done,
    Failed,
    Judged,
    Promoted,
    Record,
    Removed,
    RetrainState,
    Started,
    check_folder,
)
from presage.scheduler.retrain.root_log import RetrainLog, read_state
from presage.schemas.config.schedule import RetrainConfig
from presage.schemas.dataset.manifest import canonical_json, find_root, previous_names
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import EVALUATION, MANIFEST
from presage.schemas.machine import machine_budget
from presage.schemas.paths import ALLOW_OUTSIDE
from presage.schemas.run.records import CHECKPOINTS, RUN_FILE
from presage.schemas.run.run_manifest import read_newest_state
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions

EXIT_STOPPED = 143
"""Exit status of a command that a signal stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainContext:
    """Dependencies of one command."""

    job_file: Path | Location
    root: RetrainRoot
    config: RetrainConfig
    allow_outside: bool
    processes: Processes
    log: RetrainLog
    stopped: Callable[[], bool]
    progress: Callable[[str], None]
    clock: Callable[[], float] = time.time
    poll_sec: float = 0.2


def retrain_day(context: RetrainContext, request: DayRequest) -> Finished:
    """Execute actions until a day is done, from its current state.

    Raises:
        SchemaError: the dataset, a run or the log is damaged.
        PlanError: no sizes fit, or the folder is missing.
    """
    before = context.log.state
    check_input(before, request)
    for run in before.removed:
        remove_run(context.root, run)
    write_pointer(context.root)  # an earlier command may have died before it did
    while not context.stopped():
        state, dataset = context.log.state, read_segments(context.root)
        action = next_action(request, before, state, dataset, context.config)
        match action:
            case Finished():
                return action
            case Begun(run=run):
                context.progress(f"{run}: {action.day} is started, from {action.input}")
                _record(context, action)
            case Started():
                _start(context, action)
            case Await(started):
                _await(context, started)
            case Judged(run=run):
                verdict = "; ".join(action.reasons) or "passed"
                context.progress(f"{run}: judged against {action.against or 'nothing'}: {verdict}")
                _record(context, action)
            case Promote(run):
                _promote(context, state.attempt(run))
            case Closed():
                _close(context, action)
            case Removed(run=run):
                if _record(context, action):
                    remove_run(context.root, run)
    return Finished(EXIT_STOPPED, f"{request.day}: stopped; repeat the command to continue")


def check_input(state: RetrainState, request: DayRequest) -> None:
    """Raise PlanError if a day that is to be built has no folder."""
    if request.corrected or not state.of_day(request.day):
        check_folder(request.input, request.day)


def _record(context: RetrainContext, record: Record) -> bool:
    return context.log.append(replace(record, time_sec=context.clock()))


def _start(context: RetrainContext, started: Started) -> None:
    """Log the start of a stage with its sizes; `_await` starts its process."""
    sizes = StageSizes()
    if started.stage in ("append", "train"):
        outside = context.allow_outside
        sizes = sizes_of(context.job_file, context.root, allow_outside=outside)
    planned = f"; {sizes.summary}" if sizes.summary else ""
    context.progress(f"{started.run}: {started.stage}: {started.reason}{planned}")
    started = replace(
        started,
        workers=sizes.workers,
        num_replicas=sizes.num_replicas,
        reason=f"{started.reason}{planned}",
    )
    _record(context, started)


def _await(context: RetrainContext, started: Started) -> None:
    """Start a process unless it was started before, wait for its end, and log its result."""
    attempt, name = context.log.state.attempt(started.run), started.process
    if not context.processes.was_started(name):
        command = command_of(
            started, attempt, context.job_file, context.root, context.config, context.allow_outside
        )
        context.processes.start(name, command)
    _until_ended(
        context, name, lambda: context.stopped() or context.log.is_rolled_back(started.base)
    )
    result = parse_result(context.processes.output(name))
    if result is None:
        status = context.processes.exit_status(name).status
        line = context.processes.last_stderr_line(name)
        # A trainer that was stopped has saved its state and ends with status 0.
        status = None if status == 0 else status
        failed = Failed(
            run=started.run,
            stage=started.stage,
            status=status,
            reason=line.removeprefix("error: ") or "no message",
        )
        context.progress(f"{started.run}: {started.stage}: {failed.reason}")
        _record(context, failed)
        return
    _done(context, attempt, started, result)


def _until_ended(context: RetrainContext, name: str, stop: Callable[[], bool]) -> None:
    while context.processes.is_alive(name):
        if stop():
            context.processes.request_stop(name)
        time.sleep(context.poll_sec)


def _done(
    context: RetrainContext, attempt: Attempt, started: Started, result: dict[str, Any]
) -> None:
    if started.stage == "append":
        save_build(context.root, started.run, result)
        # The id in the dataset, not the printed one.
        result = {**result, "segment": find_segment_of_day(context.root, attempt.day)}
    _record(context, Done(run=started.run, stage=started.stage, result=result))


def _promote(context: RetrainContext, attempt: Attempt) -> None:
    path, checkpoint = newest_checkpoint(context.root, attempt.run)
    evaluate, compare = attempt.results["evaluate"], attempt.results.get("compare")
    assert attempt.judged is not None, "a promoted run was judged"
    pointer = {
        "run": attempt.run,
        "date": newest_day(context.log.state, read_segments(context.root), attempt.run),
        "checkpoint": path,
        "checkpoint_sha256": checkpoint,
        "evaluated_on": list(attempt.started["evaluate"].segments),
        "metrics": evaluate,
        "before": {"run": attempt.compared_with, "metrics": compare},
        "judged_sec": attempt.judged.time_sec,
    }
    if _record(context, Promoted(run=attempt.run, checkpoint=checkpoint, pointer=pointer)):
        write_pointer(context.root)
        context.progress(f"{attempt.run}: promoted")


def _close(context: RetrainContext, closed: Closed) -> None:
    pending = context.log.state.attempt(closed.run).pending
    if pending is not None:
        _until_ended(context, pending.process, lambda: True)
    context.progress(f"{closed.run}: closed: {closed.reason}")
    _record(context, closed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Sizes of a stage."""

    workers: int = 1
    num_replicas: int = 1
    summary: str = ""
    """The plan in one line."""


def sizes_of(
    job_file: Path | Location, root: RetrainRoot, *, allow_outside: bool = False
) -> StageSizes:
    """Return the sizes of the best plan for a mean day of the dataset.

    Raises:
        SchemaError: a file is missing or damaged.
        PlanError: no sizes fit.
    """
    dataset = root.dataset if root.has_dataset else None
    snapshot = _snapshot_of_one_day(
        take_snapshot(job_file, dataset, root.location, allow_outside=allow_outside), root
    )
    schedule = snapshot.job.schedule
    training = replace(schedule.training, max_stores=0)
    job = replace(snapshot.job, schedule=replace(schedule, training=training))
    snapshot = replace(snapshot, job=job)
    config, changes = machine_schedule(snapshot, machine_budget())
    decision = plan(snapshot, config)
    chosen = decision.chosen
    return StageSizes(
        workers=chosen.workers_per_job,
        num_replicas=chosen.num_replicas,
        summary="; ".join([plan_summary(decision), *changes]),
    )


def _snapshot_of_one_day(snapshot: PlanInputs, root: RetrainRoot) -> PlanInputs:
    if not snapshot.facts.measured:
        return snapshot
    facts, num_days = snapshot.facts, len(read_segments(root))
    return replace(
        snapshot,
        facts=replace(
            facts,
            num_samples=-(-facts.num_samples // num_days),
            num_train_samples=-(-facts.num_train_samples // num_days),
        ),
    )


def command_of(
    started: Started,
    attempt: Attempt,
    job_file: Path | Location,
    root: RetrainRoot,
    config: RetrainConfig,
    allow_outside: bool,
) -> list[str]:
    """Return the command of a stage."""
    if started.stage == "append":
        outside = [ALLOW_OUTSIDE] if allow_outside else []
        return [*_append(started, attempt, job_file, root), *outside]
    if started.stage == "train":
        return _train(started, job_file, root, config)
    run = started.run if started.stage == "evaluate" else started.base
    assert run is not None, "a comparison has a base"
    evaluate = [*module_command("trainer"), "evaluate", str(job_file)]
    evaluate += ["--dataset", str(root.dataset)]
    evaluate += ["--run", str(root.run(run)), "--segments", ",".join(started.segments)]
    return [*evaluate, "--json"]


def _append(
    started: Started, attempt: Attempt, job_file: Path | Location, root: RetrainRoot
) -> list[str]:
    source = ["--input", attempt.input, "--day", attempt.day, "--json"]
    source += local_runner_options(started.workers)
    if not root.has_dataset:
        build = [*module_command("pipelines"), "build", str(job_file)]
        return [*build, "--output", str(root.dataset), *source]
    append = [*module_command("pipelines"), "append", str(job_file), "--dataset", str(root.dataset)]
    exists = attempt.day in {segment.day for segment in read_segments(root)}
    replace_flag = ["--replace"] if attempt.corrected and exists else []
    return [*append, *replace_flag, *source]


def _train(
    started: Started, job_file: Path | Location, root: RetrainRoot, config: RetrainConfig
) -> list[str]:
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


# The folder of a retrained job.

POINTER = "PROMOTED"
"""File with the promoted run, which is to be served."""


@dataclass(frozen=True, slots=True)
class RetrainRoot:
    """Places of a retrained job."""

    location: Location

    @property
    def dataset(self) -> Location:
        """The dataset of all days."""
        return self.location / "dataset"

    @property
    def has_dataset(self) -> bool:
        """Whether a first day was built."""
        return find_root(self.dataset) is not None

    @property
    def processes(self) -> Path:
        """Local folder of pids and output of processes."""
        if self.location.local is not None:
            return self.location.local / "processes"
        name = hashlib.sha256(self.location.url.encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / "presage" / "retrain" / name

    @property
    def pointer(self) -> Location:
        """File with the promoted run."""
        return self.location / POINTER

    def run(self, name: str) -> Location:
        """Return the place of a run."""
        return self.location / "runs" / name

    def has_run(self, name: str) -> bool:
        """Return whether a run was started, so that it can be resumed."""
        run = self.run(name)
        return (run / RUN_FILE).stat() is not None or read_newest_state(run) is not None


def read_segments(root: RetrainRoot) -> tuple[SegmentFact, ...]:
    """Return the segments of the dataset in order; empty without a dataset.

    Raises:
        SchemaError: the dataset is damaged.
    """
    if not root.has_dataset:
        return ()
    dataset = open_dataset(root.dataset)
    return tuple(
        SegmentFact(
            id=segment.id,
            day=segment.day,
            has_evaluation=segment.manifest.splits.get(EVALUATION, (0, 0))[1] > 0,
            former_ids=previous_names(dataset.manifest.lineage, segment.id),
        )
        for segment in dataset.segments
    )


def find_segment_of_day(root: RetrainRoot, day: str) -> str:
    """Return the segment of a day.

    Raises:
        SchemaError: the dataset has none.
    """
    ids = [segment.id for segment in read_segments(root) if segment.day == day]
    if not ids:
        raise SchemaError(
            f"dataset has no segment of {day}; append the day again", file=str(root.dataset)
        )
    return ids[-1]


def newest_checkpoint(root: RetrainRoot, run: str) -> tuple[str, str]:
    """Return the newest checkpoint of a run.

    Returns:
        Its path relative to the root, and the SHA-256 of its manifest in hex.

    Raises:
        SchemaError: there is none.
    """
    place = root.run(run)
    state = None if place.local is not None else read_newest_state(place)
    if state is None:
        folders, _ = (place / CHECKPOINTS).children()
        hashes = {name: _manifest_hash(place / CHECKPOINTS / name) for name in folders}
    else:
        files = state.manifest.files
        matches = (_CHECKPOINT_MANIFEST.fullmatch(name) for name in files)
        hashes = {m[1]: files[m[0]][0].sha256 for m in matches if m}
    complete = {name: digest for name, digest in hashes.items() if digest and name.isdigit()}
    if not complete:
        raise SchemaError("run has no checkpoint; train it with --again", file=str(place))
    newest = max(complete, key=int)
    return f"runs/{run}/{CHECKPOINTS}/{newest}", complete[newest]


_CHECKPOINT_MANIFEST = re.compile(rf"{CHECKPOINTS}/([0-9]+)/{re.escape(MANIFEST)}")


def _manifest_hash(checkpoint: Location) -> str | None:
    try:
        return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def write_pointer(root: RetrainRoot) -> None:
    """Replace the pointer by that of the log, if it differs.

    Of several processes the one that writes last reads the newest log.
    """
    while True:
        newest = Versions(root.location).newest_number()
        body = read_state(root.location).pointer
        if body is not None and read_pointer(root) != body:
            root.pointer.write_bytes(f"{canonical_json(body)}\n".encode())
        if Versions(root.location).newest_number() == newest:
            return


def read_pointer(root: RetrainRoot) -> dict[str, Any] | None:
    """Return the pointer; None before the first promotion.

    Raises:
        SchemaError: it is no JSON.
    """
    try:
        return json.loads(root.pointer.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError("pointer is not JSON; restore it", file=str(root.pointer)) from error


def save_build(root: RetrainRoot, run: str, result: Mapping[str, Any]) -> None:
    """Store the measurements of a build for the next plan."""
    (root.location / "builds" / run / BUILD).write_bytes(f"{canonical_json(result)}\n".encode())


def remove_run(root: RetrainRoot, run: str) -> None:
    """Remove a run, or the rest of it after an interrupted removal."""
    root.run(run).remove_all()
