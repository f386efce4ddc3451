"""The race itself: with a list of numbered manifests, and with ways to commit that lose entries."""

from __future__ import annotations

import fcntl
import json
import random
import time
from pathlib import Path

import pytest

from schemas.storage import MANIFESTS, Location
from tests.commit_race import Outcome, race
from tests.fault_proxy import FAULTS, Faults
from tests.object_store import Store

PLACES = {"file": "", "s3": "s3_store", "gs": "gcs_store", "az": "azure_store"}
pytestmark = [pytest.mark.nightly, pytest.mark.slow]


def append_manifest(url: str, entry: str) -> bool:
    """Commit an entry as the next of the numbered manifests; who loses tries again."""
    manifests = Location.parse(url) / MANIFESTS
    newest = ""
    for attempt in range(1000):
        newest = max([e.path for e in manifests.entries(after=newest or None)], default=newest)
        number = int(newest.partition(".")[0]) + 1 if newest else 0
        if (manifests / f"{number:08d}.json").create(json.dumps({"writer": entry}).encode()):
            return True
        time.sleep(random.random() * min(1.0, 0.01 * 2 ** min(attempt, 10)))
    return False


def read_manifests(url: str) -> list[str]:
    manifests = Location.parse(url) / MANIFESTS
    return [json.loads((manifests / e.path).read_bytes())["writer"] for e in manifests.entries()]


def append_by_replacing(url: str, entry: str) -> bool:
    """Read the list and replace it: what two writers do at once is lost."""
    file = Location.parse(url) / "list.json"
    entries = json.loads(file.read_bytes()) if file.exists() else []
    file.write_bytes(json.dumps([*entries, entry]).encode())
    return True


def append_by_lock(url: str, entry: str) -> bool:
    """Replace the list under a lock, which another host does not see."""
    with Path(f"{url}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return append_by_replacing(url, entry)


@pytest.mark.parametrize("place", PLACES)
def test_no_acknowledged_entry_of_a_race_is_lost_or_doubled(
    place: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "file":
        url = str(tmp_path / "list")
        race(url, append_manifest, tmp_path, {}).check(read_manifests(url))
        return
    store: Store = request.getfixturevalue(PLACES[place])
    faults = Faults(seed=24, latency_sec=0.002, rates=dict.fromkeys(FAULTS, 0.01))
    with store.behind_proxy(faults) as behind:
        url = behind.new_url()
        outcome = race(url, append_manifest, tmp_path, behind.environment)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    outcome.check(read_manifests(url))
    assert len(outcome.committed) + len(outcome.unknown) == 320
    assert set(faults.counts) == set(FAULTS)


@pytest.mark.parametrize("append", [append_by_replacing, append_by_lock])
def test_race_finds_what_a_bad_commit_loses(append: object, tmp_path: Path) -> None:
    url = str(tmp_path / "list")
    outcome = race(url, append, tmp_path, {}, num_writers=8, num_rounds=5)  # type: ignore[arg-type]
    assert len(outcome.committed) == 40
    with pytest.raises(AssertionError, match="lost"):
        outcome.check(json.loads((tmp_path / "list" / "list.json").read_bytes()))


def test_lock_holds_on_one_host(tmp_path: Path) -> None:
    url = str(tmp_path / "list")
    outcome = race(url, append_by_lock, tmp_path, {}, num_writers=8, num_rounds=5, num_hosts=1)
    assert len(outcome.committed) == 40
    outcome.check(json.loads((tmp_path / "list" / "list.json").read_bytes()))


def test_check_names_what_is_wrong() -> None:
    outcome = Outcome(frozenset({"a", "b"}), frozenset({"c"}), {"d": "StorageError: lost"})
    outcome.check(["a", "b"])
    outcome.check(["d", "b", "a"])
    for entries in (["a"], ["a", "b", "b"], ["a", "b", "c"], ["a", "b", "d", "d"]):
        with pytest.raises(AssertionError):
            outcome.check(entries)
