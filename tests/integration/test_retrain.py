"""Days of the demo's log as real builds and trainings: in order, killed, corrected, refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from presage.scheduler.retrain.root_log import read_state
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.storage.location import Location
from tests.integration.days import DAYS, Site, make_site
from tests.shared import make_once
from tests.trainer.processes import run_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ONE, TWO, THREE, FOUR = DAYS


@pytest.fixture(scope="module")
def first(repository: Path) -> Site:
    """The job, the generated log cut into days, and the first day retrained."""
    return Site(repository, make_once(make_first, str(repository)))


def make_first(folder: Path, repository: str) -> None:
    """Retrain the first day."""
    site = make_site(Path(repository), folder)
    done = site.retrain("--date", ONE)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def undisturbed(repository: Path) -> Site:
    """Three days, the last two backfilled by one undisturbed command."""
    return Site(repository, make_once(make_undisturbed, str(repository)))


def make_undisturbed(folder: Path, repository: str) -> None:
    """Retrain three days, of which the first is done."""
    site = Site(Path(repository), make_once(make_first, repository)).copy(folder)
    done = site.retrain("--date", f"{ONE}..{THREE}", "--json")
    assert done.returncode == 0, done.stderr
    assert [found["status"] for found in json.loads(done.stdout)["days"].values()] == [0, 0, 0]


def test_retrain_of_days_in_order_starts_from_each_day_and_promotes_the_last(
    undisturbed: Site,
) -> None:
    attempts, promoted = undisturbed.state.attempts, undisturbed.promoted
    assert [a.base for a in attempts] == [None, f"{ONE}.1", f"{TWO}.1"]
    assert [s.day for s in open_dataset(undisturbed.root / "dataset").segments] == DAYS[:3]
    assert (promoted["run"], promoted["date"]) == (f"{THREE}.1", THREE)
    for attempt in attempts:
        verified = undisturbed.run(
            "trainer", "verify", str(undisturbed.root / "runs" / attempt.run)
        )
        assert verified.returncode == 0, verified.stderr
    again = undisturbed.run(
        *(
            "trainer",
            "evaluate",
            str(undisturbed.job),
            "--dataset",
            str(undisturbed.root / "dataset"),
            "--json",
        ),
        *("--run", str(undisturbed.root / "runs" / f"{THREE}.1"), "--segments", THREE),
    )
    assert json.loads(again.stdout) == promoted["metrics"], again.stderr
    assert promoted["before"]["run"] == f"{TWO}.1"
    assert promoted["before"]["metrics"]["num_samples"] == promoted["metrics"]["num_samples"]


def test_retrain_of_a_day_that_is_done_changes_nothing_and_prints_so(undisturbed: Site) -> None:
    before = read_state(Location.parse(undisturbed.root))
    done = undisturbed.retrain("--date", TWO)
    assert (done.returncode, done.stdout) == (0, f"{TWO} is done: {TWO}.1 is promoted\n")
    assert read_state(Location.parse(undisturbed.root)) == before


def test_retrain_list_shows_each_day(undisturbed: Site) -> None:
    table = undisturbed.retrain("--list").stdout
    assert [line.split()[0] for line in table.splitlines()[1:]] == DAYS[:3]
    listed = json.loads(undisturbed.retrain("--list", "--json").stdout)
    assert listed["last_good"] == f"{THREE}.1"
    assert [run["ne"] for run in listed["runs"]] == [
        a.results["evaluate"]["ne"] for a in undisturbed.state.attempts
    ]


def pids_of(site: Site, stage: str) -> set[int]:
    """Return the ids of all processes of a stage so far."""
    files = (site.root / "processes").glob(f"{stage}.*.pid")
    return {int(text) for text in (file.read_text() for file in files) if text}


Kill = tuple[str, signal.Signals, bool]
KILLS: list[Kill] = [
    ("append", signal.SIGKILL, True),
    ("append", signal.SIGKILL, False),
    ("train", signal.SIGKILL, True),
    ("train", signal.SIGTERM, False),
    ("evaluate", signal.SIGKILL, False),
    ("compare", signal.SIGKILL, True),
]
"""The stage in which the command gets a signal, and whether its process is killed, too."""


def signal_in_stage(
    site: Site, day: str, stage: str, sent: signal.Signals, *, child_too: bool
) -> None:
    """Begin a day, or continue it, and send the command a signal in a stage."""
    before = pids_of(site, f"{day}.1.{stage}")
    with (site.folder / f"log-{day}-{stage}").open("wb") as log:
        process = subprocess.Popen(
            site.command("scheduler", "retrain", str(site.job), "--date", day),
            env=site.environment,
            stderr=log,
        )
    run_until(process, lambda: pids_of(site, f"{day}.1.{stage}") - before)
    (child,) = pids_of(site, f"{day}.1.{stage}") - before
    process.send_signal(sent)
    assert process.wait() == (143 if sent == signal.SIGTERM else -sent)
    if child_too:
        os.killpg(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "kills", [KILLS[1:3], pytest.param(KILLS, marks=pytest.mark.chaos)], ids=["two", "all"]
)
def test_killed_retraining_continues_with_the_same_bits(
    kills: list[Kill], first: Site, undisturbed: Site, tmp_path: Path
) -> None:
    site = first.copy(tmp_path)
    for stage, sent, child_too in kills:
        signal_in_stage(site, TWO, stage, sent, child_too=child_too)
    done = site.retrain("--date", TWO)
    assert done.returncode == 0, done.stderr
    run = f"runs/{TWO}.1"
    same = site.run("trainer", "diff", str(site.root / run), str(undisturbed.root / run))
    assert same.returncode == 0, same.stdout + same.stderr
    assert [a.run for a in site.state.attempts] == [f"{ONE}.1", f"{TWO}.1"]
    metrics = [a.results["evaluate"] for a in site.state.attempts]
    assert metrics == [a.results["evaluate"] for a in undisturbed.state.attempts[:2]]


def test_retrain_of_a_corrected_day_begins_before_it_and_promotes_its_new_version(
    undisturbed: Site, tmp_path: Path
) -> None:
    site = undisturbed.copy(tmp_path)
    part = site.folder / "logs" / TWO / "part.parquet"
    pq.write_table(pq.read_table(part).slice(0, 1500), part)
    # Correct paths of the copy; the job names them relative to itself.
    done = site.retrain("--date", TWO, "--corrected")
    assert done.returncode == 0, done.stderr
    segments = open_dataset(site.root / "dataset").segments
    assert [s.day for s in segments] == DAYS[:3]
    last = site.state.attempts[-1]
    assert (last.run, last.base) == (f"{TWO}.2", f"{ONE}.1")
    assert last.segments == tuple(s.id for s in segments[1:])
    assert last.segment != undisturbed.state.attempts[1].segment
    assert site.promoted["run"] == f"{TWO}.2"
    assert site.promoted["date"] == THREE
    again = site.retrain("--date", TWO, "--corrected")
    assert (again.returncode, again.stdout) == (0, f"{TWO} is done: {TWO}.2 has trained it\n")


def test_retrain_of_a_day_beyond_a_limit_leaves_the_pointer_and_ends_with_3(
    undisturbed: Site, tmp_path: Path
) -> None:
    site = undisturbed.copy(tmp_path)
    site.job.write_text(site.job.read_text().replace("max_ne: 3", "max_ne: 0.01"))
    before = (site.root / "PROMOTED").read_bytes()
    done = site.retrain("--date", FOUR)
    assert done.returncode == 3
    line = done.stderr.splitlines()[-1]
    reason = rf"{FOUR}\.1: NE \d\.\d+ is above 0\.01 \(gate\.max_ne\)"
    assert re.fullmatch(rf"error: {FOUR} was refused, {THREE}\.1 stays promoted: {reason}", line), (
        line
    )
    assert (site.root / "PROMOTED").read_bytes() == before
    assert site.retrain("--date", FOUR).stderr == f"{line}\n"


def test_retrain_of_a_day_without_logs_is_refused(undisturbed: Site) -> None:
    done = undisturbed.retrain("--date", "2026-01-09")
    assert done.returncode == 1
    assert done.stderr == (
        "error: input of 2026-01-09 is no folder: "
        f"{undisturbed.folder / 'logs' / '2026-01-09'}; wait for the logs, or set --input\n"
    )
