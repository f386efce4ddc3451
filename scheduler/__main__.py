"""`python -m scheduler`: fit throughput, size pools, compare policies, run jobs, retrain them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    from presage.schemas.entry import run_command

    run_command(lambda: import_module("presage.scheduler.__main__").main)

import argparse
import json
import shlex
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial

from rich.console import Console, RenderableType

from presage.scheduler.controller.replay import (
    describe_job,
    describe_replay,
    jobs_summary,
    replay,
    replay_summary,
)
from presage.scheduler.drivers.beam_runners import segment_runner
from presage.scheduler.drivers.driver import DriverOptions
from presage.scheduler.drivers.run_jobs import (
    RunRequest,
    check_driver,
    inputs_of,
    plan_jobs,
    raise_gc_threshold,
    run_jobs,
)
from presage.scheduler.model.measurements import fit_file, fit_summary
from presage.scheduler.model.plan_inputs import PlanInputs, take_snapshot
from presage.scheduler.model.pools import counted
from presage.scheduler.planner.machine_sizes import cluster_schedule, fill_budget, machine_schedule
from presage.scheduler.planner.policy import explain_plan, plan, plan_summary, plan_to_json
from presage.scheduler.retrain import retrain as retraining
from presage.scheduler.retrain.retrain import render_table, run_rows
from presage.scheduler.simulator import command as simulation
from presage.scheduler.status.board import serving
from presage.scheduler.status.terminal import board_of, port_of, render, watching
from presage.schemas.config.schedule import ScheduleConfig
from presage.schemas.errors import PlanError, SchemaError, printable
from presage.schemas.machine import machine_budget
from presage.schemas.paths import (
    ALLOW_OUTSIDE,
    ALLOW_OUTSIDE_HELP,
    ArgumentParser,
    local_path,
    network_warning,
    path_or_url,
)
from presage.schemas.storage.location import Location

FILE_WIDTH = 160
"""Columns of tables that are not printed to a terminal."""
PRINTED = 20
"""Decisions and incidents that `status` prints; the page shows more."""


def build_parser(prog: str = "python -m presage.scheduler") -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (summary, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        add_arguments(command)
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        command.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m presage.scheduler") -> int:
    """Run one command; user errors are reported as one line on stderr.

    Returns:
        0, or 1 on an error; of `retrain` also 3 if a day was refused, and 143 if it was stopped.
    """
    arguments = build_parser(prog).parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except (SchemaError, PlanError, ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1


def _add_fit_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "measurements", type=Path, metavar="MEASUREMENTS.csv", help="speeds at sizes of the pools"
    )
    command.add_argument(
        "--holdout",
        action="append",
        default=[],
        metavar="COLUMN=VALUE,...",
        help="rows to predict instead; a value may start with >=, <=, > or <; may be repeated",
    )


def _fit(arguments: argparse.Namespace) -> None:
    fits = fit_file(arguments.measurements, arguments.holdout)
    if arguments.json:
        print(json.dumps(asdict(fits)))
        return
    for job, fit in fits.jobs.items():
        print(fit_summary(job, fit))
    if fits.num_skipped:
        print(f"skipped {fits.num_skipped} rows without a speed", file=sys.stderr)


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", type=path_or_url, metavar="JOB", help="job file, or its URL")
    command.add_argument("--dataset", type=Location, help="dataset with the sizes of the data")
    command.add_argument(
        "--history",
        type=path_or_url,
        help="folder with finished runs and build.json files; default: beside --dataset",
    )
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)
    command.add_argument("--explain", action="store_true", help="print a table and the reasons")


def _plan(arguments: argparse.Namespace) -> None:
    snapshot = take_snapshot(
        arguments.job,
        arguments.dataset,
        arguments.history,
        allow_outside=arguments.allow_outside,
    )
    config, changes = _limited_schedule(snapshot)
    for line in changes:
        print(line, file=sys.stderr)
    decision = plan(snapshot, config)
    if arguments.json:
        print(json.dumps(plan_to_json(snapshot, config, decision)))
    if arguments.explain:
        # With --json the table goes to stderr.
        Console(stderr=arguments.json).print(explain_plan(snapshot, config, decision))
    elif not arguments.json:
        print(plan_summary(decision))


def _limited_schedule(snapshot: PlanInputs) -> tuple[ScheduleConfig, tuple[str, ...]]:
    declared = snapshot.job.schedule
    if declared.driver == "kubernetes":
        return cluster_schedule(declared), ()
    return machine_schedule(snapshot, fill_budget(declared.budget, machine_budget()))


def _simulate(arguments: argparse.Namespace) -> None:
    comparison = simulation.run(arguments)
    for note in simulation.notes(comparison):
        print(note, file=sys.stderr)
    if arguments.json:
        print(json.dumps(simulation.to_json(comparison)))
        return
    for line in simulation.summary_lines(comparison):
        print(line)


def _add_run_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "jobs", type=path_or_url, nargs="+", metavar="JOB", help="job files, or their URLs"
    )
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="path or URL of the raw files of a job, by name if there are several jobs; default: "
        "a synthetic log as in data.generate",
    )
    command.add_argument(
        "--output",
        type=_folder,
        default=Path("scheduled"),
        metavar="DIR",
        help="folder of the scheduler: its log and the records of processes",
    )
    command.add_argument(
        "--storage",
        type=Location,
        metavar="URL",
        help="where job files, datasets and runs are, below the name of each job; default: "
        "--output",
    )
    command.add_argument(
        "--budget",
        type=Path,
        metavar="FILE",
        help="budget of all jobs; default: this machine, with --cluster the jobs' own budgets",
    )
    command.add_argument(
        "--driver", choices=("process", "kubernetes"), help="default: that of the jobs"
    )
    command.add_argument(
        "--cluster", type=Path, metavar="FILE", help="configuration of the cluster"
    )
    command.add_argument(
        "--runner", type=Path, metavar="FILE", help="Beam runner of segment jobs; default: local"
    )
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)
    command.add_argument("--dry-run", action="store_true", help="print the first decisions only")
    command.add_argument(
        "--status",
        type=port_of,
        default=0,
        metavar="PORT|off",
        help="port of the status page on loopback; default: any free port",
    )


def _folder(text: str) -> Path:
    try:
        return local_path(text)
    except SchemaError as error:
        raise argparse.ArgumentTypeError(
            f"must be a local folder, got {text!r}; give --storage {text} for the jobs' files"
        ) from error


def _run(arguments: argparse.Namespace) -> None:
    storage = arguments.storage or Location.parse(arguments.output.resolve())
    for folder in {arguments.output, storage.local or arguments.output}:
        if warning := network_warning(folder):
            print(warning, file=sys.stderr)
    inputs = inputs_of(arguments.input, arguments.jobs)
    check_driver(arguments.driver, arguments.cluster, arguments.jobs, storage, inputs.values())
    request = RunRequest(
        job_files=arguments.jobs,
        inputs=inputs,
        output=arguments.output,
        storage=storage,
        budget=arguments.budget,
        cluster=arguments.cluster,
        driver=DriverOptions(
            output=arguments.output,
            runner=segment_runner(arguments.runner, arguments.output),
        ),
        allow_outside=arguments.allow_outside,
    )
    if arguments.dry_run:
        for action, command in plan_jobs(request):
            print(f"{action.job}: {action.verb} {action.process}: {action.reason}")
            if command:
                print(f"{action.job}: command {action.process}: {shlex.join(command)}")
        return
    lines = partial(print, file=sys.stderr, flush=True)
    with watching(arguments.output, arguments.status, Console(stderr=True), lines) as progress:
        raise_gc_threshold()
        state = run_jobs(replace(request, driver=replace(request.driver, progress=progress)))
    if arguments.json:
        print(json.dumps(jobs_summary(state)))
    else:
        for job in state.jobs.values():
            print(f"{job.name}: {describe_job(job)}")
    if failed := [job.name for job in state.jobs.values() if job.phase == "failed"]:
        raise PlanError(f"jobs failed: {', '.join(failed)}; see the reasons")


def _print_wide(renderable: RenderableType) -> None:
    console = Console()
    width = console.width if console.is_terminal else FILE_WIDTH
    Console(width=width).print(renderable)


def _retrain(arguments: argparse.Namespace) -> int:
    if arguments.list:
        state = retraining.read_log_state(arguments)
        if arguments.json:
            print(json.dumps({"last_good": state.last_good, "runs": run_rows(state)}))
        else:
            _print_wide(render_table(state))
        return 0
    now = datetime.now(UTC)
    if arguments.rollback is not None:
        outcome = retraining.rollback(arguments, now.timestamp())
    else:
        progress = partial(print, file=sys.stderr, flush=True)
        outcome = retraining.retrain(arguments, now.date(), progress)
    if arguments.json:
        print(json.dumps(outcome.to_json()))
    for _, result in outcome.days:
        if result.status:
            print(f"error: {result.message}", file=sys.stderr)
        elif not arguments.json:
            print(result.message)
    return outcome.status


def _add_status_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="FOLDER", help="--output of the scheduler")
    command.add_argument(
        "--serve",
        type=port_of,
        nargs="?",
        const=0,
        metavar="PORT",
        help="serve the status page on loopback until ^C; default: any free port",
    )


def _status(arguments: argparse.Namespace) -> None:
    board = board_of(arguments.folder)
    view = board.view()
    if arguments.json:
        print(json.dumps(asdict(view)))
    if arguments.serve is not None:
        with serving(board, arguments.serve) as address, suppress(KeyboardInterrupt):
            print(f"status page: {address}", file=sys.stderr if arguments.json else None)
            sys.stdout.flush()
            threading.Event().wait()
    elif not arguments.json:
        _print_wide(render(view, PRINTED, PRINTED))


def _add_replay_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("log", type=Path, metavar="LOG", help="log of a scheduler")


def _replay(arguments: argparse.Namespace) -> None:
    result = replay(arguments.log)
    others = result.others
    if arguments.json:
        print(json.dumps(replay_summary(result)))
    else:
        print(describe_replay(result))
        for difference in result.differences[:PRINTED]:
            print(difference.describe())
        for job in result.state.jobs.values():
            print(f"{job.name}: {describe_job(job)}")
    if others:
        raise PlanError(
            f"{counted(len(others), 'decision')} of the log would be another today, the first at "
            f"{others[0].place}; replay it with the release that wrote it"
        )


def _add_doctor_arguments(command: argparse.ArgumentParser) -> None:
    import_module("presage.doctor").add_arguments(command)


def _doctor(arguments: argparse.Namespace) -> None:
    import_module("presage.doctor").run(arguments)


COMMANDS = {
    "fit": ("fit a throughput model for each job of a CSV file", _add_fit_arguments, _fit),
    "plan": ("sizes of both pools, cost, time, memory, reasons", _add_plan_arguments, _plan),
    "simulate": ("compare policies on a trace, with faults", simulation.add_arguments, _simulate),
    "run": ("start the pools of all jobs, and adjust them", _add_run_arguments, _run),
    "retrain": (
        "one day: append, train, evaluate, gate, promote or roll back",
        retraining.add_arguments,
        _retrain,
    ),
    "status": ("show what a scheduler does or did", _add_status_arguments, _status),
    "replay": ("decide again on the events of a log, and compare", _add_replay_arguments, _replay),
    "doctor": (
        "report what this machine lacks, and how to fix it",
        _add_doctor_arguments,
        _doctor,
    ),
}
"""Summary, function that adds the arguments, and function that runs, of each command."""
