"""`scheduler retrain`: one day, or several in order."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.table import Table

from presage.scheduler.drivers.base import stop_signals
from presage.scheduler.drivers.children import ThisMachine
from presage.scheduler.retrain.decide import EXIT_REFUSED, DayRequest, Finished
from presage.scheduler.retrain.drive import (
    RetrainContext,
    RetrainRoot,
    check_input,
    read_pointer,
    retrain_day,
    write_pointer,
)
from presage.scheduler.retrain.records import (
    Attempt,
    RetrainState,
    days_between,
    folder_of_day,
    parse_days,
)
from presage.scheduler.retrain.root_log import RetrainLog, read_state, roll_back
from presage.schemas.config.job import Job, load_job
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.paths import ALLOW_OUTSIDE, ALLOW_OUTSIDE_HELP, path_or_url, resolve_beside
from presage.schemas.storage.location import Location

COLUMNS = ("day", "segment", "version", "run", "NE", "AUC", "calibration", "promoted", "why not")


def run_rows(state: RetrainState) -> list[dict[str, Any]]:
    """Return a JSON object for each run, by day and attempt."""
    rows: list[dict[str, Any]] = []
    for attempt in sorted(state.attempts, key=lambda a: (a.day, state.attempts.index(a))):
        metrics = attempt.metrics("evaluate")
        rows.append(
            {
                "day": attempt.day,
                "segment": attempt.segment,
                "version": version_of(state, attempt),
                "run": attempt.run,
                "base": attempt.base,
                "trained": list(attempt.segments),
                "ne": None if metrics is None else metrics.ne,
                "auc": None if metrics is None else metrics.auc,
                "calibration": None if metrics is None else metrics.calibration,
                "promoted": attempt.promoted is not None and attempt.rolled_back is None,
                "is_last_good": attempt.run == state.last_good,
                "is_removed": attempt.run in state.removed,
                "why_not": why_not(attempt),
            }
        )
    return rows


def version_of(state: RetrainState, attempt: Attempt) -> int | None:
    """Return the version of its day's segment that an attempt has, from 1; None without one."""
    versions: list[str] = []
    for other in state.of_day(attempt.day):
        if other.segment is not None and (not versions or versions[-1] != other.segment):
            versions.append(other.segment)
        if other.run == attempt.run:
            return len(versions) if other.segment is not None else None
    raise AssertionError("an attempt belongs to its day")


def why_not(attempt: Attempt) -> str:
    """Return why a run is not promoted; empty if it is."""
    if attempt.rolled_back is not None:
        return f"rolled back with {attempt.rolled_back.run}"
    if attempt.promoted is not None:
        return ""
    if attempt.closed is not None:
        return attempt.closed.reason
    if attempt.judged is not None:
        return "; ".join(attempt.judged.reasons)
    last = attempt.failures[-1] if attempt.failures else None
    status = f"unfinished: {attempt.stage or 'verdict'} is next"
    return status if last is None else f"{status}; {last.stage} failed: {last.reason}"


def render_table(state: RetrainState) -> Table:
    """Return a table of all runs."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        is_number = name in ("version", "NE", "AUC", "calibration")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "why not")
    for row in run_rows(state):
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    numbers = ["" if row[k] is None else f"{row[k]:.5f}" for k in ("ne", "auc", "calibration")]
    promoted = "yes" if row["promoted"] else "no"
    version = "" if row["version"] is None else str(row["version"])
    return [
        row["day"],
        row["segment"] or "",
        version,
        row["run"],
        *numbers,
        "now" if row["is_last_good"] else promoted,
        row["why_not"],
    ]


@dataclass(frozen=True, slots=True)
class RetrainResult:
    """The result of one command.

    Attributes:
        days: each day with its result, in order, up to the first that could not be finished.
    """

    days: Sequence[tuple[str, Finished]]
    promoted: dict[str, Any] | None

    @property
    def status(self) -> int:
        """Exit status: of the first failed day, else of a refused one."""
        statuses = [finished.status for _, finished in self.days]
        return next((s for s in statuses if s not in (0, EXIT_REFUSED)), max(statuses, default=0))

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        days = {day: {"status": r.status, "words": r.message} for day, r in self.days}
        return {"days": days, "promoted": self.promoted}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("job", type=path_or_url, metavar="JOB", help="job file, or its URL")
    command.add_argument("--date", metavar="D|D1..D2", help="a date, `yesterday`, or a range")
    command.add_argument("--from", dest="first", metavar="D1", help="first day of a range")
    command.add_argument(
        "--to", dest="last", metavar="D2", help="last day of a range; default: yesterday"
    )
    command.add_argument(
        "--input",
        metavar="DIR",
        help="raw files, with `{date}` for the day; default: schedule.retrain.input",
    )
    command.add_argument(
        "--output",
        type=Location,
        metavar="ROOT",
        help="path or URL; default: schedule.retrain.output",
    )
    command.add_argument(
        "--corrected", action="store_true", help="replace existing segments of the days"
    )
    command.add_argument("--again", action="store_true", help="train and judge refused days again")
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)
    command.add_argument(
        "--rollback", metavar="RUN", help="withdraw a promoted run and those that started from it"
    )
    command.add_argument("--list", action="store_true", help="list all runs")


def read_log_state(arguments: argparse.Namespace) -> RetrainState:
    """Return the state of all days.

    Raises:
        SchemaError: the job or the log is damaged.
        PlanError: no root is given.
    """
    root = _root_of(arguments, load_job(arguments.job))
    return read_state(root.location)


def rollback(arguments: argparse.Namespace, now: float) -> RetrainResult:
    """Withdraw the promotion of a run, also while another host retrains a day.

    Raises:
        PlanError: no root is given, or the run cannot be withdrawn.
        SchemaError: the job or the log is damaged.
    """
    if arguments.date is not None or arguments.first is not None:
        raise ValueError("--rollback and --date exclude each other; give one of them")
    root = _root_of(arguments, load_job(arguments.job))
    state = roll_back(root.location, arguments.rollback, now)
    write_pointer(root)
    message = f"{arguments.rollback} is rolled back: {state.last_good} is promoted"
    day = state.attempt(arguments.rollback).day
    return RetrainResult([(day, Finished(0, message))], read_pointer(root))


def retrain(
    arguments: argparse.Namespace, today: date, progress: Callable[[str], None]
) -> RetrainResult:
    """Retrain days in order.

    Raises:
        SchemaError: the job, the dataset, a run or the log is damaged, or the root is locked.
        PlanError: no input or root is given, no sizes fit, or there is no evaluation split.
        ValueError: a day is invalid.
    """
    job = load_job(arguments.job)
    days, root = _days(arguments, today), _root_of(arguments, job)
    _check_split(job, arguments.job)
    requests = [
        DayRequest(
            day=day,
            input=_input_of(arguments, job, day, len(days)),
            corrected=arguments.corrected,
            again=arguments.again,
        )
        for day in days
    ]
    check_input(read_state(root.location), requests[0])  # nothing is written yet
    results: list[tuple[str, Finished]] = []
    with RetrainLog(root.location) as log, stop_signals() as stopped:
        context = RetrainContext(
            job_file=arguments.job.resolve(),
            root=root,
            config=job.schedule.retrain,
            allow_outside=arguments.allow_outside,
            processes=ThisMachine().of_job(job.name, root.processes),
            log=log,
            stopped=stopped,
            progress=progress,
        )
        for request in requests:
            result = retrain_day(context, request)
            results.append((request.day, result))
            if result.status not in (0, EXIT_REFUSED):
                break
    return RetrainResult(results, read_pointer(root))


def _days(arguments: argparse.Namespace, today: date) -> list[str]:
    if (arguments.date is None) == (arguments.first is None):
        raise ValueError("give either --date or --from")
    if arguments.date is not None:
        return parse_days(arguments.date, today)
    return days_between(arguments.first, arguments.last or "yesterday", today)


def _root_of(arguments: argparse.Namespace, job: Job) -> RetrainRoot:
    configured = job.schedule.retrain.output
    if arguments.output is not None:
        return RetrainRoot(arguments.output)
    if configured is None:
        raise PlanError("neither --output nor schedule.retrain.output is set; name the root")
    return RetrainRoot(Location.parse(resolve_beside(arguments.job, configured).resolve()))


def _input_of(arguments: argparse.Namespace, job: Job, day: str, num_days: int) -> str:
    configured = job.schedule.retrain.input
    if arguments.input is None and configured is None:
        raise PlanError(
            "neither --input nor schedule.retrain.input is set; name the folder of the raw files"
        )
    if arguments.input is None and configured is not None and "://" not in configured:
        configured = str(resolve_beside(arguments.job.resolve(), configured))
    folder = folder_of_day(arguments.input or configured or "", day, num_days)
    return folder if "://" in folder else str(Path(folder).resolve())


def _check_split(job: Job, path: Path | Location) -> None:
    if job.data.split.evaluation_last is None and job.data.split.evaluation_from is None:
        raise SchemaError(
            "data.split has no evaluation split to judge models on; write "
            "split: {evaluation_last: 2h}",
            file=str(path),
        )
