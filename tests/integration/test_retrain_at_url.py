"""Days retrained in a root at a store, by schedulers of several hosts: the bits of one on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scheduler.retrain.log import read_state
from scheduler.retrain.records import State
from schemas.storage import Location
from tests.integration.days import DAYS, Site
from tests.integration.test_retrain import make_calm
from tests.object_store import Store
from tests.shared import make_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ONE, TWO, THREE, _ = DAYS


@pytest.fixture(scope="module")
def calm(repository: Path) -> Site:
    """Three days on disk that nobody disturbed."""
    return Site(repository, make_once(make_calm, str(repository)))


@pytest.fixture
def root(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A root at a store."""
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    return Location.parse(f"{s3_store.new_url()}/root")


def start(site: Site, root: Location, days: str, host: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start the command on a host, which has a temporary and a cache folder of its own."""
    host.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(site.repository), "TMPDIR": str(host)}
    environment["XDG_CACHE_HOME"] = str(host)
    words = ["scheduler", "retrain", str(site.job), "--date", days, "--output", str(root)]
    with (host / "said").open("ab") as said:
        return subprocess.Popen(
            site.command(*words), env=environment, stdout=said, stderr=said, start_new_session=True
        )


def results_of(state: State) -> dict[str, object]:
    """Return what the last attempt of each day came to, without the names of segments."""
    return {
        attempt.day: (attempt.results["evaluate"], attempt.base, attempt.promoted is not None)
        for attempt in state.attempts
        if attempt.closed is None
    }


def test_two_schedulers_of_one_root_come_to_what_one_comes_to(
    calm: Site, root: Location, tmp_path: Path
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    days = [f"{ONE}..{TWO}", f"{ONE}..{THREE}"]
    while True:
        both = [start(calm, root, *each) for each in zip(days, hosts, strict=True)]
        statuses = [process.wait() for process in both]
        said = [(host / "said").read_text() for host in hosts]
        assert set(statuses) <= {0, 1}, said
        for status, text in zip(statuses, said, strict=True):
            assert status == 0 or "another retraining uses this root" in text, text
        if statuses == [0, 0]:
            break
    state = read_state(root)
    assert results_of(state) == results_of(calm.state)
    pointer = json.loads((root / "PROMOTED").read_bytes())
    assert pointer["metrics"] == calm.promoted["metrics"]
    assert pointer["run"] == f"{THREE}.1"


def test_scheduler_that_dies_is_continued_on_another_host(
    calm: Site, root: Location, tmp_path: Path
) -> None:
    for number, pause_sec in enumerate((2.0, 6.0, 10.0)):
        process = start(calm, root, f"{ONE}..{TWO}", tmp_path / f"host-{number}")
        time.sleep(pause_sec)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end_stages(tmp_path / f"host-{number}")
    last = tmp_path / "last"
    assert start(calm, root, f"{ONE}..{TWO}", last).wait() == 0, (last / "said").read_text()
    expected = {day: result for day, result in results_of(calm.state).items() if day != THREE}
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
