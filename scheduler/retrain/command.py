"""`python -m scheduler retrain`: one day, or several in order."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from scheduler.alone import alone
from scheduler.drivers.asking import asked_to_end
from scheduler.drivers.process.machine import ThisMachine
from scheduler.retrain.commands import Flags
from scheduler.retrain.days import days_between, days_of, folder_of_day
from scheduler.retrain.decide import REFUSED, Asked, Finished
from scheduler.retrain.drive import Retraining, retrain_day
from scheduler.retrain.log import STATE, Log, read_state
from scheduler.retrain.root import Root, read_pointer
from scheduler.retrain.state import State
from schemas.errors import PlanError, SchemaError
from schemas.job import Job, load_job
from schemas.paths import (
    ALLOW_OUTSIDE,
    ALLOW_OUTSIDE_HELP,
    SINGLE_WRITER,
    SINGLE_WRITER_HELP,
    check_writable,
    local_path,
)


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
    with _alone(root), Log(root.folder / STATE) as log, asked_to_end() as stopped:
        work = Retraining(
            job_file=arguments.job.resolve(),
            root=root,
            config=job.schedule.retrain,
            flags=Flags(arguments.single_writer, arguments.allow_outside),
            processes=ThisMachine().of_job(job.name, root.processes),
            log=log,
            stopped=stopped,
            say=say,
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
    must = "root must have one retraining at a time"
    return alone(root.folder, must, "wait for it, or end it")
