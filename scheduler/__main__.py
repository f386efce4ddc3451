"""`python -m scheduler`: fit throughput, size the pools of a job, check a scheduler's log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from scheduler.explain import as_json, explain, summary
from scheduler.machine.log import recover
from scheduler.machine.words import pools_in_words, replayed
from scheduler.measurements import fit_file, fit_summary
from scheduler.policy import plan
from scheduler.snapshot import take_snapshot
from schemas.errors import PlanError, SchemaError


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m scheduler", description=__doc__)
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
        "--history", type=Path, help="folder with finished runs and build.json files"
    )
    command.add_argument("--explain", action="store_true", help="a table and the reasons")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_plan)
    command = commands.add_parser("replay", help="the same decisions from the recorded events")
    command.add_argument("log", type=Path, metavar="LOG", help="log of a scheduler")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command.set_defaults(run=_replay)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's ends as one line on stderr and 1."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (SchemaError, PlanError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


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
    snapshot = take_snapshot(arguments.job, arguments.dataset, arguments.history)
    config = snapshot.job.schedule
    decision = plan(snapshot, config)
    if arguments.json:
        print(json.dumps(as_json(snapshot, config, decision)))
    if arguments.explain:
        # Beside --json the table is progress: stdout holds the object alone.
        Console(stderr=arguments.json).print(explain(snapshot, config, decision))
    elif not arguments.json:
        print(summary(decision))


def _replay(arguments: argparse.Namespace) -> None:
    found = recover(arguments.log)
    if arguments.json:
        print(json.dumps(replayed(found)))
        return
    print(
        f"{found.num_events:,} events lead to the same {found.num_decisions:,} decisions"
        f"{', ' + str(len(found.missing)) + ' of them not logged' if found.missing else ''}"
    )
    for job in found.state.jobs.values():
        print(f"{job.name}: {pools_in_words(job)}")


if __name__ == "__main__":
    sys.exit(main())
