"""Days retrained in a root at a store, by schedulers of several hosts: the bits of one on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from presage.scheduler.retrain.records import RetrainState
from presage.scheduler.retrain.root_log import read_state
from presage.schemas.storage.location import Location
from tests.integration.days import DAYS, Site
from tests.integration.test_retrain import make_first, make_undisturbed
from tests.object_store import Store
from tests.shared import make_once
from tests.trainer.processes import run_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
ONE, TWO, THREE, _ = DAYS


@pytest.fixture(scope="module")
def undisturbed(repository: Path) -> Site:
    """Three undisturbed days on disk."""
    return Site(repository, make_once(make_undisturbed, str(repository)))


@pytest.fixture(scope="module")
def late(repository: Path) -> Site:
    """Three days on disk, of which the second comes last."""
    return Site(repository, make_once(make_late, str(repository)))


def make_late(folder: Path, repository: str) -> None:
    """Retrain the third day, then the second."""
    site = Site(Path(repository), make_once(make_first, repository)).copy(folder)
    for day in (THREE, TWO):
        done = site.retrain("--date", day)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def rolled_back(repository: Path) -> Site:
    """Three days on disk, of which the second is rolled back before the third comes."""
    return Site(repository, make_once(make_rolled_back, str(repository)))


def make_rolled_back(folder: Path, repository: str) -> None:
    """Retrain two days, withdraw the second, and retrain the third."""
    site = Site(Path(repository), make_once(make_first, repository)).copy(folder)
    for words in (("--date", TWO), ("--rollback", f"{TWO}.1"), ("--date", THREE)):
        done = site.retrain(*words)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def root(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A root at a store."""
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    return Location.parse(f"{s3_store.new_url()}/root")


def start(site: Site, root: Location, host: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the command on a host, which has a temporary and a cache folder of its own."""
    host.mkdir(exist_ok=True)
    environment = site.environment | {"TMPDIR": str(host), "XDG_CACHE_HOME": str(host)}
    command = site.command("scheduler", "retrain", str(site.job), "--output", str(root), *words)
    with (host / "log").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def results_of(state: RetrainState) -> dict[str, object]:
    """Return what the last attempt of each day came to, without the names of segments."""
    return {
        attempt.day: (attempt.results["evaluate"], attempt.base, attempt.promoted is not None)
        for attempt in state.attempts
        if attempt.closed is None
    }


def assert_same_promoted_run(site: Site, root: Location) -> None:
    """Compare the bits and the metrics of the promoted run with those on disk."""
    pointer = json.loads((root / "PROMOTED").read_bytes())
    for name in ("date", "metrics"):
        assert pointer[name] == site.promoted[name]
    runs = [str(root / "runs" / pointer["run"]), str(site.root / "runs" / site.promoted["run"])]
    same = site.run("trainer", "diff", *runs)
    assert same.returncode == 0, same.stdout + same.stderr


def has_started(root: Location, run: str, stage: str) -> bool:
    """Return whether a stage of a run was started."""
    return any(stage in a.started for a in read_state(root).attempts if a.run == run)


def test_two_schedulers_of_one_root_come_to_what_one_comes_to(
    undisturbed: Site, root: Location, tmp_path: Path
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    days = [f"{ONE}..{TWO}", f"{ONE}..{THREE}"]
    while True:
        both = [start(undisturbed, root, h, "--date", d) for h, d in zip(hosts, days, strict=True)]
        statuses = [process.wait() for process in both]
        logs = [(host / "log").read_text() for host in hosts]
        assert set(statuses) <= {0, 1}, logs
        for status, text in zip(statuses, logs, strict=True):
            assert status == 0 or "another retraining uses this root" in text, text
        if statuses == [0, 0]:
            break
    state = read_state(root)
    assert results_of(state) == results_of(undisturbed.state)
    assert state.last_good == f"{THREE}.1"
    assert_same_promoted_run(undisturbed, root)


def test_scheduler_that_dies_is_continued_on_another_host(
    undisturbed: Site, root: Location, tmp_path: Path
) -> None:
    for number, (day, stage) in enumerate(((ONE, "append"), (ONE, "train"), (TWO, "train"))):
        process = start(undisturbed, root, tmp_path / f"host-{number}", "--date", f"{ONE}..{TWO}")
        run_until(process, partial(has_started, root, f"{day}.1", stage))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end_stages(tmp_path / f"host-{number}")
    last = tmp_path / "last"
    process = start(undisturbed, root, last, "--date", f"{ONE}..{TWO}")
    assert process.wait() == 0, (last / "log").read_text()
    expected = {
        day: result for day, result in results_of(undisturbed.state).items() if day != THREE
    }
    assert results_of(read_state(root)) == expected


def end_stages(host: Path) -> None:
    """Kill the processes that a scheduler has started on a host, as if the host was lost."""
    for path in host.glob("presage/retrain/*/*.pid"):
        text = path.read_text()
        if text:
            try:
                os.killpg(int(text.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_day_that_comes_late_waits_for_the_host_that_trains_a_later_one(
    late: Site, root: Location, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert start(late, root, a, "--date", ONE).wait() == 0, (a / "log").read_text()
    first = start(late, root, a, "--date", THREE)
    run_until(first, partial(has_started, root, f"{THREE}.1", "train"))
    assert start(late, root, b, "--date", TWO).wait() == 1
    assert "another retraining uses this root" in (b / "log").read_text()
    assert first.wait() == 0, (a / "log").read_text()
    assert start(late, root, b, "--date", TWO).wait() == 0, (b / "log").read_text()
    state = read_state(root)
    assert state.promoted == late.state.promoted == (f"{ONE}.1", f"{THREE}.1", f"{TWO}.1")
    assert results_of(state) == results_of(late.state)
    assert_same_promoted_run(late, root)


@pytest.mark.parametrize("stage", ["train", pytest.param("compare", marks=pytest.mark.chaos)])
def test_rollback_while_a_day_trains_on_another_host_is_one_before_that_day(
    stage: str, rolled_back: Site, root: Location, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert start(rolled_back, root, a, "--date", f"{ONE}..{TWO}").wait() == 0
    trains = start(rolled_back, root, a, "--date", THREE)
    run_until(trains, partial(has_started, root, f"{THREE}.1", stage))
    withdraws = start(rolled_back, root, b, "--rollback", f"{TWO}.1")
    assert withdraws.wait() == 0, (b / "log").read_text()
    assert json.loads((root / "PROMOTED").read_bytes())["run"] == f"{ONE}.1"
    assert trains.wait() == 0, (a / "log").read_text()
    state = read_state(root)
    assert state.promoted == (f"{ONE}.1", f"{THREE}.2")
    closed, last = state.of_day(THREE)
    assert closed.closed is not None
    assert closed.closed.reason == f"{TWO}.1 was rolled back"
    assert last.base == f"{ONE}.1"
    assert len(last.segments) == 2
    assert not (root / "runs" / closed.run).exists()
    assert results_of(state) == results_of(rolled_back.state)
    assert_same_promoted_run(rolled_back, root)
