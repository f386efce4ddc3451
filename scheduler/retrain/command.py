"""`scheduler retrain`: one day, or several in order."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.table import Table

from scheduler.drivers.base import stop_signals
from scheduler.drivers.platforms import ThisMachine
from scheduler.files import directory_lock
from scheduler.retrain.decide import REFUSED, Asked, Finished
from scheduler.retrain.drive import Flags, Retraining, retrain_day
from scheduler.retrain.records import (
    STATE,
    Attempt,
    Log,
    State,
    days_between,
    days_of,
    folder_of_day,
    read_state,
)
from scheduler.retrain.root import Root, read_pointer
from schemas.config.job import Job, load_job
from schemas.errors import PlanError, SchemaError
from schemas.paths import (
    ALLOW_OUTSIDE,
    ALLOW_OUTSIDE_HELP,
    SINGLE_WRITER,
    SINGLE_WRITER_HELP,
    check_writable,
    local_path,
)

COLUMNS = ("day", "segment", "version", "run", "NE", "AUC", "calibration", "promoted", "why not")


def rows_of(state: State) -> list[dict[str, Any]]:
    """Return what is known of each run, by day and attempt."""
    found: list[dict[str, Any]] = []
    for attempt in sorted(state.attempts, key=lambda a: (a.day, state.attempts.index(a))):
        metrics = attempt.metrics("evaluate")
        found.append(
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
                "promoted": attempt.promoted is not None,
                "is_last_good": attempt.run == state.last_good,
                "is_removed": attempt.run in state.removed,
                "why_not": why_not(attempt),
            }
        )
    return found


def version_of(state: State, attempt: Attempt) -> int | None:
    """Return which version of its day's segment an attempt had, from 1; None before it had one."""
    versions: list[str] = []
    for other in state.of_day(attempt.day):
        if other.segment is not None and (not versions or versions[-1] != other.segment):
            versions.append(other.segment)
        if other.run == attempt.run:
            return len(versions) if other.segment is not None else None
    raise AssertionError("an attempt is among those at its day")


def why_not(attempt: Attempt) -> str:
    """Return why a run is not promoted; nothing where it is."""
    if attempt.promoted is not None:
        return ""
    if attempt.closed is not None:
        return attempt.closed.reason
    if attempt.judged is not None:
        return "; ".join(attempt.judged.reasons)
    last = attempt.failures[-1] if attempt.failures else None
    where = f"unfinished: {attempt.stage or 'verdict'} is next"
    return where if last is None else f"{where}; {last.stage} failed: {last.reason}"


def table_of(state: State) -> Table:
    """Return the table of all runs."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        is_number = name in ("version", "NE", "AUC", "calibration")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "why not")
    for row in rows_of(state):
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
class Outcome:
    """How the days stand.

    Attributes:
        days: each with how it stands, in order, up to the first that could not be finished.
        promoted: what the pointer says.
    """

    days: Sequence[tuple[str, Finished]]
    promoted: dict[str, Any] | None

    @property
    def status(self) -> int:
        """Return the exit status: of what could not be done first, then of what was refused."""
        statuses = [finished.status for _, finished in self.days]
        return next((s for s in statuses if s not in (0, REFUSED)), max(statuses, default=0))

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        days = {day: {"status": found.status, "words": found.words} for day, found in self.days}
        return {"days": days, "promoted": self.promoted}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("job", type=Path, metavar="JOB", help="job file")
    command.add_argument(
        "--date", metavar="D|D1..D2", help="the day, or several in order; a date or `yesterday`"
    )
    command.add_argument("--from", dest="first", metavar="D1", help="the first of several days")
    command.add_argument("--to", dest="last", metavar="D2", help="the last of them; yesterday")
    command.add_argument(
        "--input",
        metavar="DIR",
        help="raw files of the day, `{date}` stands for it; schedule.retrain.input by default",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="ROOT",
        help="folder of it all; schedule.retrain.output by default",
    )
    command.add_argument(
        "--corrected", action="store_true", help="replace the segments of days that are there"
    )
    command.add_argument(
        "--again", action="store_true", help="train and judge days once more that were turned down"
    )
    command.add_argument(SINGLE_WRITER, action="store_true", help=SINGLE_WRITER_HELP)
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)
    command.add_argument("--list", action="store_true", help="what happened to each day")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def listed(arguments: argparse.Namespace) -> State:
    """Return what happened to all days of a root.

    Raises:
        SchemaError: the job or the log is damaged.
        PlanError: nothing says where the root is.
    """
    root = _root_of(arguments, load_job(arguments.job))
    return read_state(root.folder / STATE)


def retrain(arguments: argparse.Namespace, today: date, say: Callable[[str], None]) -> Outcome:
    """Bring the days that are asked for to their end, in order.

    Args:
        arguments: of the command line.
        today: the date now, in UTC.
        say: told what is done, and why.

    Raises:
        SchemaError: the job, the dataset, a run or the log is damaged, or the root is held.
        PlanError: nothing says where the input or the root is, no sizes fit, or nothing is held
            back.
        ValueError: a day is none.
    """
    job = load_job(arguments.job)
    days, root = _days(arguments, today), _root_of(arguments, job)
    _check_split(job, arguments.job)
    folders = {day: _input_of(arguments, job, day, len(days)) for day in days}
    check_writable(root.folder, single_writer=arguments.single_writer)
    found: list[tuple[str, Finished]] = []
    with _alone(root), Log(root.folder / STATE) as log, stop_signals() as stopped:
        work = Retraining(
            job_file=arguments.job.resolve(),
            root=root,
            config=job.schedule.retrain,
            flags=Flags(arguments.single_writer, arguments.allow_outside),
            processes=ThisMachine().of_job(job.name, root.processes),
            log=log,
            stopped=stopped,
            progress=say,
        )
        for day in days:
            asked = Asked(day=day, corrected=arguments.corrected, again=arguments.again)
            finished = retrain_day(work, asked, folders[day])
            found.append((day, finished))
            if finished.status not in (0, REFUSED):
                break
    return Outcome(found, read_pointer(root))


def _days(arguments: argparse.Namespace, today: date) -> list[str]:
    if (arguments.date is None) == (arguments.first is None):
        raise ValueError("day must be given once, got --date and --from both or none; give one")
    if arguments.date is not None:
        return days_of(arguments.date, today)
    return days_between(arguments.first, arguments.last or "yesterday", today)


def _root_of(arguments: argparse.Namespace, job: Job) -> Root:
    said = job.schedule.retrain.output
    if arguments.output is not None:
        return Root(arguments.output.resolve())
    if said is None:
        raise PlanError(
            "output must be given, got neither --output nor schedule.retrain.output; name the "
            "folder of it all"
        )
    return Root((arguments.job.parent / local_path(said)).resolve())


def _input_of(arguments: argparse.Namespace, job: Job, day: str, num_days: int) -> str:
    said = job.schedule.retrain.input
    if arguments.input is None and said is None:
        raise PlanError(
            "input must be given, got neither --input nor schedule.retrain.input; name the folder "
            "of the day's raw files"
        )
    if arguments.input is None and said is not None and "://" not in said:
        said = str(arguments.job.resolve().parent / said)
    folder = folder_of_day(arguments.input or said or "", day, num_days)
    return folder if "://" in folder else str(Path(folder).resolve())


def _check_split(job: Job, path: Path) -> None:
    """Refuse a job that holds nothing back: no model of it could be judged."""
    if job.data.split.evaluation_last is None and job.data.split.evaluation_from is None:
        raise SchemaError(
            "data.split must hold samples back to judge models on, got none; write "
            "split: {evaluation_last: 2h}",
            file=str(path),
        )


def _alone(root: Root) -> AbstractContextManager[None]:
    problem = "another retraining uses this folder"
    return directory_lock(root.folder, problem, "wait for it, or stop it")
