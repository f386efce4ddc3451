"""`python -m scheduler`: fit throughput, size pools, compare policies, run jobs, retrain them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from scheduler.controller.log import describe_job, jobs_summary, recover, replay_summary
from scheduler.doctor import command as doctor
from scheduler.doctor.checks import examine, findings_to_json, format_finding
from scheduler.drivers.beam_runners import segment_runner
from scheduler.drivers.driver import DriverOptions
from scheduler.drivers.platforms import check_driver
from scheduler.drivers.run import RunRequest, inputs_of, plan_jobs, run_jobs
from scheduler.model.measurements import fit_file, fit_summary
from scheduler.model.snapshot import Snapshot, take_snapshot
from scheduler.planner.machine_sizes import (
    cluster_schedule,
    fill_budget,
    machine_budget,
    machine_schedule,
)
from scheduler.planner.policy import plan
from scheduler.planner.reasons import explain_plan, plan_summary, plan_to_json
from scheduler.retrain import command as retraining
from scheduler.retrain.command import render_table, run_rows
from scheduler.simulator import command as simulation
from scheduler.status.board import serving
from scheduler.status.terminal import board_of, port_of, render, watching
from schemas.config.schedule import ScheduleConfig
from schemas.errors import PlanError, SchemaError
from schemas.paths import (
    ALLOW_OUTSIDE,
    ALLOW_OUTSIDE_HELP,
    SINGLE_WRITER,
    SINGLE_WRITER_HELP,
    ArgumentParser,
    check_writable,
)

FILE_WIDTH = 160
"""Columns of what is printed into a file."""
PRINTED = 20
"""Decisions and incidents that `status` prints; its page has more."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(prog="python -m scheduler", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fit", help="a model of throughput for each job of a CSV file")
    command.add_argument("measurements", type=Path, metavar="MEASUREMENTS.csv")
    command.add_argument(
        "--holdout",
        action="append",
        default=[],
        metavar="COLUMN=VALUE,...",
        help="rows to predict instead; a value may begin with >=, <=, > or <; may be repeated",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_fit)
    command = commands.add_parser("plan", help="sizes of both pools, cost, time, memory, reasons")
    command.add_argument("job", type=Path, metavar="JOB", help="job file")
    command.add_argument("--dataset", type=Path, help="dataset that tells sizes of the data")
    command.add_argument(
        "--history",
        type=Path,
        help="folder with finished runs and build.json files; by default beside --dataset",
    )
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)
    command.add_argument("--explain", action="store_true", help="a table and the reasons")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_plan)
    command = commands.add_parser("simulate", help="policies on a trace, with accidents")
    simulation.add_arguments(command)
    command.set_defaults(run=_simulate)
    command = commands.add_parser("run", help="start and keep the pools of all jobs")
    command.add_argument("jobs", type=Path, nargs="+", metavar="JOB", help="job files")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="raw files of a job, by its name where there are several; the log of its "
        "data.generate where it is left out",
    )
    command.add_argument(
        "--output", type=Path, default=Path("scheduled"), metavar="DIR", help="folder of it all"
    )
    command.add_argument(
        "--budget",
        type=Path,
        metavar="FILE",
        help="of all jobs together; this machine, with --cluster what the jobs may have each",
    )
    command.add_argument(
        "--driver", choices=("process", "kubernetes"), help="that of the jobs when left out"
    )
    command.add_argument("--cluster", type=Path, metavar="FILE", help="where Pods run")
    command.add_argument(
        "--runner", type=Path, metavar="FILE", help="where segment jobs run; Beam's local runner"
    )
    command.add_argument(SINGLE_WRITER, action="store_true", help=SINGLE_WRITER_HELP)
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)
    command.add_argument("--dry-run", action="store_true", help="what would be decided first")
    command.add_argument(
        "--status",
        type=port_of,
        default=0,
        metavar="PORT|off",
        help="of the status page on loopback; any that is free when left out",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_run)
    command = commands.add_parser(
        "retrain", help="one day: append, train, evaluate, gate, promote or roll back"
    )
    retraining.add_arguments(command)
    command.set_defaults(run=_retrain)
    command = commands.add_parser("status", help="what a scheduler does, or did")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="its --output")
    command.add_argument(
        "--serve",
        type=port_of,
        nargs="?",
        const=0,
        metavar="PORT",
        help="serve the status page on loopback until ^C; any port that is free when left out",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_status)
    command = commands.add_parser("replay", help="the same decisions from the recorded events")
    command.add_argument("log", type=Path, metavar="LOG", help="log of a scheduler")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_replay)
    command = commands.add_parser("doctor", help="what this machine lacks, and how to mend it")
    doctor.add_arguments(command)
    command.set_defaults(run=_doctor)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's ends as one line on stderr and 1.

    Returns:
        0, or 1; of `retrain` also 3, when a day was turned down, and 143, when it was asked to end.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except (SchemaError, PlanError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _fit(arguments: argparse.Namespace) -> None:
    found = fit_file(arguments.measurements, arguments.holdout)
    if arguments.json:
        print(json.dumps(asdict(found)))
        return
    for job, fit in found.jobs.items():
        print(fit_summary(job, fit))
    if found.num_skipped:
        print(f"skipped {found.num_skipped} rows without a speed", file=sys.stderr)


def _plan(arguments: argparse.Namespace) -> None:
    snapshot = take_snapshot(
        arguments.job,
        arguments.dataset,
        arguments.history,
        allow_outside=arguments.allow_outside,
    )
    config, changes = _limits_of(snapshot)
    for line in changes:
        _say(line)
    decision = plan(snapshot, config)
    if arguments.json:
        print(json.dumps(plan_to_json(snapshot, config, decision)))
    if arguments.explain:
        # Beside --json the table is progress: stdout holds the object alone.
        Console(stderr=arguments.json).print(explain_plan(snapshot, config, decision))
    elif not arguments.json:
        print(plan_summary(decision))


def _limits_of(snapshot: Snapshot) -> tuple[ScheduleConfig, tuple[str, ...]]:
    """Return the schedule that is planned for, and what of it was changed to fit this machine."""
    declared = snapshot.job.schedule
    if declared.driver == "kubernetes":
        return cluster_schedule(declared), ()
    budget = fill_budget(declared.budget, machine_budget())
    return machine_schedule(snapshot, budget, shares_cores=budget.cpus != declared.budget.cpus)


def _simulate(arguments: argparse.Namespace) -> None:
    found = simulation.run(arguments)
    for note in simulation.notes(found):
        _say(note)
    if arguments.json:
        print(json.dumps(simulation.to_json(found)))
        return
    for line in simulation.summary_lines(found):
        print(line)


def _run(arguments: argparse.Namespace) -> None:
    check_writable(arguments.output, single_writer=arguments.single_writer)
    check_driver(arguments.driver, arguments.cluster, arguments.jobs, arguments.output)
    request = RunRequest(
        job_files=arguments.jobs,
        inputs=inputs_of(arguments.input, arguments.jobs),
        output=arguments.output,
        budget=arguments.budget,
        cluster=arguments.cluster,
        driver=DriverOptions(
            output=arguments.output,
            runner=segment_runner(arguments.runner, arguments.output),
        ),
        single_writer=arguments.single_writer,
        allow_outside=arguments.allow_outside,
    )
    if arguments.dry_run:
        for planned in plan_jobs(request):
            action, command = planned.action, shlex.join(planned.command)
            print(f"{action.job}: {action.verb} {action.process}: {action.reason}")
            if command:
                print(f"{action.job}: command {action.process}: {command}")
        return
    with watching(arguments.output, arguments.status, Console(stderr=True), _say) as say:
        state = run_jobs(replace(request, driver=replace(request.driver, progress=say)))
    if arguments.json:
        print(json.dumps(jobs_summary(state)))
    else:
        for job in state.jobs.values():
            print(f"{job.name}: {describe_job(job)}")
    if failed := [job.name for job in state.jobs.values() if job.phase == "failed"]:
        raise PlanError(f"jobs must finish, got {', '.join(failed)} that failed; see the reasons")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _retrain(arguments: argparse.Namespace) -> int:
    if arguments.list:
        state = retraining.read_log_state(arguments)
        if arguments.json:
            print(json.dumps({"last_good": state.last_good, "runs": run_rows(state)}))
        else:
            console = Console()
            width = console.width if console.is_terminal else FILE_WIDTH
            Console(width=width).print(render_table(state))
        return 0
    outcome = retraining.retrain(arguments, datetime.now(UTC).date(), _say)
    if arguments.json:
        print(json.dumps(outcome.as_json()))
    for _, found in outcome.days:
        if found.status:
            _say(f"error: {found.words}")
        elif not arguments.json:
            print(found.words)
    return outcome.status


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
        console = Console()
        width = console.width if console.is_terminal else FILE_WIDTH
        Console(width=width).print(render(view, PRINTED, PRINTED))


def _replay(arguments: argparse.Namespace) -> None:
    found = recover(arguments.log)
    if arguments.json:
        print(json.dumps(replay_summary(found)))
        return
    print(
        f"{found.num_events:,} events lead to the same {found.num_decisions:,} decisions"
        f"{', ' + str(len(found.missing)) + ' of them not logged' if found.missing else ''}"
    )
    for job in found.state.jobs.values():
        print(f"{job.name}: {describe_job(job)}")


def _doctor(arguments: argparse.Namespace) -> None:
    machine = doctor.machine_of(arguments, os.environ, sys.path, sys.version_info[:2], time.time())
    findings = examine(machine)
    if arguments.json:
        print(json.dumps(findings_to_json(findings)))
    else:
        for finding in findings:
            print(format_finding(finding))
    if missing := [finding.name for finding in findings if finding.state == "lacks"]:
        raise PlanError(f"machine lacks {', '.join(missing)}; see the findings")


if __name__ == "__main__":
    sys.exit(main())
