"""Numbered manifests: one winner for each number, no lost commit, retired names stay taken."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import MANIFESTS, Location, StorageError
from presage.schemas.storage.versions import HINT, Versions, backoff, writer_id


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty directory."""
    url = str(tmp_path) if request.param == "local" else f"memory://{writer_id()}"
    return Location.parse(url)


def append(root: Location, name: str) -> None:
    """Add a name to the list that the newest version holds."""
    versions = Versions(root)
    for _ in backoff():
        newest = versions.newest()
        names = json.loads(newest.data) if newest else []
        if versions.commit(newest, json.dumps([*names, name]).encode()):
            return


def test_every_commit_of_concurrent_writers_is_in_the_newest_version(root: Location) -> None:
    def write(writer: int) -> None:
        for number in range(5):
            append(root, f"{writer}-{number}")

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = Versions(root).newest()
    assert newest is not None
    assert newest.number == 30
    names = json.loads(newest.data)
    assert sorted(names) == sorted(f"{w}-{n}" for w in range(6) for n in range(5))
    for writer in range(6):  # each writer's commits keep their order
        own = [name for name in names if name.startswith(f"{writer}-")]
        assert own == sorted(own)


def test_commit_after_an_old_version_is_refused(root: Location) -> None:
    first = Versions(root).commit(None, b"1")
    assert first is not None
    assert Versions(root).commit(first, b"2") is not None
    assert Versions(root).commit(first, b"other") is None
    assert Versions(root).commit(None, b"other") is None
    newest = Versions(root).newest()
    assert newest is not None
    assert (newest.number, newest.data) == (2, b"2")


def test_number_of_a_retired_version_is_not_used_again(root: Location) -> None:
    append(root, "a")
    append(root, "b")
    append(root, "c")
    versions = Versions(root)
    first = versions.read(1)
    versions.retire([1, 2])
    assert versions.read(1) is None
    assert versions.all_numbers() == [1, 2, 3]
    assert Versions(root).commit(first, b"late") is None
    assert Versions(root).newest_number() == 3


HINTS = {"missing": None, "old": b"1", "damaged": b"x", "empty": b""}


@pytest.mark.parametrize("hint", HINTS.values(), ids=HINTS.keys())
def test_newest_version_does_not_depend_on_the_hint(root: Location, hint: bytes | None) -> None:
    for name in "abc":
        append(root, name)
    (root / MANIFESTS).remove([HINT])
    if hint is not None:
        (root / MANIFESTS / HINT).write_bytes(hint)
    assert Versions(root).newest_number() == 3


def test_missing_newest_version_is_an_error(root: Location) -> None:
    append(root, "a")
    append(root, "b")
    (root / MANIFESTS).remove(["00000002.json"])
    with pytest.raises(SchemaError, match=r"manifest is missing in .*00000002\.json; restore it"):
        Versions(root).newest()


def test_files_that_are_no_versions_are_ignored(root: Location) -> None:
    append(root, "a")
    for name in ("x.json", "1.json", "000000020.json", "00000003.json.tmp", "a/00000004.json"):
        (root / MANIFESTS / name).write_bytes(b"9")
    assert Versions(root).all_numbers() == [1]
    assert Versions(root).newest_number() == 1


def test_first_version_needs_a_store_with_conditional_puts(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(location: Location, data: bytes) -> bool:
        location.write_bytes(data)
        return True

    monkeypatch.setattr(Location, "create", create)
    with pytest.raises(StorageError, match="ignores the condition of a conditional put"):
        Versions(root).commit(None, b"1")
    assert Versions(root).newest() is None


def test_backoff_begins_at_once_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep: Callable[[float], None] = pauses.append
    monkeypatch.setattr("presage.schemas.storage.versions.time.sleep", sleep)
    attempts: Iterator[int] = backoff()
    assert [next(attempts) for _ in range(12)] == list(range(12))
    assert len(pauses) == 11
    assert max(pauses) <= 5.0
