"""Leases: valid while renewed, by the clock of the store."""

import gc
import json
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.storage.leases import LEASES, Lease, live_leases, remove_expired
from presage.schemas.storage.location import Location
from presage.schemas.storage.probes import store_time


@pytest.fixture
def root(tmp_path: Path) -> Location:
    """An empty directory."""
    return Location.parse(tmp_path)


def held(root: Location) -> list[frozenset[str]]:
    return [lease.directories for lease in live_leases(root)]


def test_lease_names_what_its_holder_uses_until_it_is_released(root: Location) -> None:
    with Lease(root, "run a") as lease:
        assert held(root) == []
        lease.hold(["x", "y"])
        assert held(root) == [frozenset({"x", "y"})]
        lease.hold(["z"])
        assert held(root) == [frozenset({"z"})]
        assert [record.holder for record in live_leases(root)] == ["run a"]
    assert held(root) == []
    assert (root / LEASES).entries() == []


def test_lease_ends_with_its_last_reference(root: Location) -> None:
    lease = Lease(root, "run")
    lease.hold(["x"])
    assert held(root)
    del lease
    gc.collect()
    assert held(root) == []


def test_lease_expires_by_the_clock_of_the_store(root: Location) -> None:
    with Lease(root, "run", expiry_sec=100) as lease:
        lease.hold(["x"])
        now = store_time(root)
        assert live_leases(root, now + timedelta(seconds=99))
        assert not live_leases(root, now + timedelta(seconds=101))


def test_holder_renews_its_lease(root: Location) -> None:
    with Lease(root, "run", expiry_sec=0.4) as lease:
        lease.hold(["x"])
        (entry,) = (root / LEASES).entries()
        deadline = time.monotonic() + 30
        while (root / LEASES).entries()[0].modified == entry.modified:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert held(root)


def _fork_and_release(path: Path) -> None:
    """Release in a forked child; end with status 0 if the lease of this process is valid then."""
    root = Location.parse(path)
    lease = Lease(root, "run")
    lease.hold(["x"])
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    os._exit(os.waitpid(child, 0)[1] or not held(root))


def test_child_of_a_fork_does_not_release_the_lease(tmp_path: Path) -> None:
    """The fork is in a new process: threads of this one, such as of stores, may be in a fork."""
    parent = multiprocessing.get_context("spawn").Process(
        target=_fork_and_release, args=(tmp_path,)
    )
    parent.start()
    parent.join(30)
    assert parent.exitcode == 0


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"holder": 1, "directories": 2}', b"\xff"])
def test_file_that_is_no_lease_is_refused_by_name(root: Location, data: bytes) -> None:
    (root / LEASES / "x.json").write_bytes(data)
    with pytest.raises(SchemaError, match=r"lease is not readable: .* in .*/x\.json; remove"):
        live_leases(root)


def test_lease_that_cannot_be_written_is_logged(
    root: Location, caplog: pytest.LogCaptureFixture
) -> None:
    (root / LEASES).write_bytes(b"a file is in the way")
    with Lease(root, "run") as lease:
        lease.hold(["x"])
    assert "lease cannot be written" in caplog.text


def test_expired_leases_are_removed_after_a_day(root: Location) -> None:
    body = {"holder": "x", "directories": [], "expiry_sec": 1}
    (root / LEASES / "x.json").write_bytes(json.dumps(body).encode())
    now = store_time(root)
    remove_expired(root, now + timedelta(hours=23))
    assert len((root / LEASES).entries()) == 1
    remove_expired(root, now + timedelta(days=2))
    assert (root / LEASES).entries() == []


def test_lease_that_is_renewed_while_it_is_released_ends(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(root, "run")
    write = Location.write_bytes

    def released_before(file: Location, data: bytes) -> None:
        lease.release()
        write(file, data)

    monkeypatch.setattr(Location, "write_bytes", released_before)
    lease.hold(["x"])
    assert (root / LEASES).entries() == []


def test_names_that_are_added_during_a_renewal_are_held_after_it(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Location.write_bytes
    with Lease(root, "run") as lease:
        lease.hold(["x"])

        def added_before(file: Location, data: bytes) -> None:
            monkeypatch.setattr(Location, "write_bytes", write)
            lease.hold(["x", "y"])
            write(file, data)

        monkeypatch.setattr(Location, "write_bytes", added_before)
        lease.renew()
        assert held(root) == [frozenset({"x", "y"})]
