"""The log and the pointer of a root: one owner at a time, nothing lost, nothing appended late."""

import json
import multiprocessing
import re
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest

from presage.scheduler.retrain.drive import (
    RetrainRoot,
    newest_checkpoint,
    read_pointer,
    write_pointer,
)
from presage.scheduler.retrain.records import Begun, Promoted, Record, RetrainState, apply_record
from presage.scheduler.retrain.root_log import SNAPSHOT_RECORDS, RetrainLog, read_state, roll_back
from presage.schemas.config.schedule import RetrainConfig
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.storage.leases import LEASES
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions
from tests.scheduler.retrain.world import KilledError, World, good_but_for

DAYS = [f"2026-01-0{i}" for i in range(1, 5)]


@pytest.fixture
def root(tmp_path: Path) -> Location:
    """An empty root."""
    return Location.parse(tmp_path / "root")


@pytest.fixture
def world() -> World:
    """Days of every kind: promoted, turned down, failed, corrected, removed, rolled back."""
    world = World(
        config=RetrainConfig(keep=2),
        quality=good_but_for(f"{DAYS[1]}-v1"),
        failing={f"{DAYS[2]}.1.train.1": (-9, "killed")},
    )
    for day in DAYS[:3]:
        world.retrain(day)
    world.versions[DAYS[1]] = 2
    world.retrain(DAYS[1], corrected=True)
    world.retrain(DAYS[1], corrected=True)
    world.retrain(DAYS[3])
    assert world.roll_back(f"{DAYS[3]}.1")
    assert {type(r).__name__ for r in world.records} == {
        k.__name__ for k in Record.__subclasses__()
    }
    return world


def test_records_that_are_written_are_read(world: World, root: Location) -> None:
    with RetrainLog(root) as log:
        for record in world.records:
            log.append(record)
    assert read_state(root) == world.state == log.state
    with RetrainLog(root) as log:
        assert log.state == world.state
    newest = Versions(root).newest()
    assert newest is not None
    assert "record" not in json.loads(newest.data)  # it was taken over


@pytest.mark.slow
def test_log_of_a_record_is_as_long_as_the_record(root: Location) -> None:
    """Snapshots are some of the versions, and the versions before the last but one are empty."""
    world = World()
    for day in range(1, 29):
        world.retrain(f"2026-02-{day:02d}")
    with RetrainLog(root) as log:
        for record in world.records:
            log.append(record)
    versions = Versions(root)
    numbers = versions.all_numbers()
    assert len(numbers) == len(world.records) + 1 > 3 * SNAPSHOT_RECORDS
    kept = {n: json.loads(v.data) for n in numbers if (v := versions.read(n))}
    snapshots = [n for n, body in kept.items() if "state" in body]
    assert len(snapshots) == 2
    assert min(kept) == snapshots[0]
    assert len(kept) < 2 * SNAPSHOT_RECORDS
    assert max(len(str(b)) for n, b in kept.items() if n not in snapshots) < 2000
    for _ in range(2):
        with RetrainLog(root) as log:
            assert log.state == world.state
        newest = versions.newest()
        assert newest is not None
        assert len(newest.data) < 2000, "nor does an owner write all days again"


def test_log_of_a_run_that_was_never_begun_is_refused(world: World, root: Location) -> None:
    with RetrainLog(root) as log, pytest.raises(KeyError):
        log.append(world.records[1])
    assert read_state(root) == RetrainState()
    assert isinstance(world.records[0], Begun)
    with RetrainLog(root) as log:
        log.append(replace(world.records[0], run="a.1"))
    assert read_state(root).attempts[0].run == "a.1"


def _hold(root: Location, path: Path) -> None:
    with RetrainLog(root):
        path.write_text("held")
        time.sleep(600)


@pytest.mark.slow
def test_root_that_another_process_owns_is_refused_until_it_dies(
    root: Location, tmp_path: Path
) -> None:
    holder = multiprocessing.get_context("spawn").Process(
        target=_hold, args=(root, tmp_path / "held")
    )
    holder.start()
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        message = (
            f"another retraining uses this root: {socket.gethostname()}:{holder.pid} in {root}; "
            "wait for it, or stop it"
        )
        with pytest.raises(SchemaError) as error, RetrainLog(root):
            pass
        assert str(error.value) == message
    finally:
        holder.kill()
        holder.join()
    with RetrainLog(root):  # whoever was killed owns nothing
        pass


def test_owner_whose_lease_has_ended_cannot_append_any_more(world: World, root: Location) -> None:
    with RetrainLog(root) as first:
        first.append(world.records[0])
        (root / LEASES).remove(
            [entry.path for entry in (root / LEASES).entries()]
        )  # as if suspended
        with RetrainLog(root) as second:
            second.append(world.records[1])
            message = f"another retraining has taken over this root in {root}; repeat the command"
            with pytest.raises(SchemaError, match=re.escape(message)):
                first.append(world.records[1])
    assert read_state(root) == reduce(apply_record, world.records[:2], RetrainState())


def test_owner_reads_a_rollback_before_its_next_record(root: Location) -> None:
    world = World()
    for day in DAYS[:2]:
        world.retrain(day)
    run, previous = f"{DAYS[1]}.1", f"{DAYS[0]}.1"
    begun = replace(world.records[0], run=f"{DAYS[2]}.1")
    with RetrainLog(root) as log:
        for record in world.records:
            log.append(record)
        assert not log.is_rolled_back(run)
        with ThreadPoolExecutor(4) as pool:  # four that want the same: one record
            states = list(pool.map(lambda now: roll_back(root, run, float(now)), range(4)))
        assert {state.promoted for state in states} == {(previous,)}
        assert log.state.last_good == run
        log._read_again_at = 0.0  # as if some time had passed
        assert log.is_rolled_back(run)
        assert not log.append(begun)
        assert log.state == states[0] == read_state(root)
        assert log.state.pointer == {"run": previous}
        assert log.append(begun)
    write_pointer(RetrainRoot(root))
    assert read_pointer(RetrainRoot(root)) == {"run": previous}
    assert [a.run for a in read_state(root).attempts] == [previous, run, f"{DAYS[2]}.1"]
    message = f"run is not promoted: {DAYS[2]}.1; promoted are: {previous}"
    with pytest.raises(PlanError) as error:
        roll_back(root, f"{DAYS[2]}.1", 0.0)
    assert str(error.value) == message


class StoredWorld(World):
    """Days whose records are appended to the log of a root."""

    log: RetrainLog

    def append(self, record: Record) -> None:
        assert self.log.append(record)
        super().append(record)


def test_month_that_hosts_retrain_in_turn_at_a_store_is_that_of_one() -> None:
    """Each host is killed after 100 records; the next one continues from what is stored."""
    month = [f"2026-03-{i:02d}" for i in range(1, 32)]
    root = Location.parse(f"memory://{uuid.uuid4().hex}/root")
    alone, world, num_hosts = World(), StoredWorld(), 0
    for day in month:
        alone.retrain(day)
    while world.state.last_good != f"{month[-1]}.1":
        num_hosts += 1
        with suppress(KilledError), RetrainLog(root) as world.log:
            assert world.log.state == world.state
            ends = len(world.records) + 100
            for day in month:
                world.retrain(day, lives=ends - len(world.records))
    assert num_hosts > 3
    assert read_state(root) == world.state == alone.state


def test_of_processes_that_begin_at_once_one_becomes_the_owner(root: Location) -> None:
    won: list[int] = []
    over = threading.Event()

    def own(number: int) -> None:
        with suppress(SchemaError), RetrainLog(root):
            won.append(number)
            over.wait()

    threads = [threading.Thread(target=own, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while len(won) + sum(not thread.is_alive() for thread in threads) < 8:
        time.sleep(0.01)
    assert len(won) == 1
    over.set()
    for thread in threads:
        thread.join()


def test_pointer_is_that_of_the_last_promotion(world: World, root: Location) -> None:
    place = RetrainRoot(root)
    with RetrainLog(root) as log:
        write_pointer(place)
        assert read_pointer(place) is None
        for record in world.records:
            log.append(record)
    write_pointer(place)
    last = [r for r in world.records if isinstance(r, Promoted)][-2]  # the newest is rolled back
    assert read_pointer(place) == last.pointer
    place.pointer.write_bytes(b"{}")  # of a process that was suspended before it wrote
    write_pointer(place)
    assert read_pointer(place) == last.pointer
    place.pointer.write_bytes(b"{")
    message = f"pointer is not JSON in {place.pointer}; restore it"
    with pytest.raises(SchemaError) as error:
        read_pointer(place)
    assert str(error.value) == message


def test_checkpoint_of_a_run_is_its_newest_complete_one(tmp_path: Path) -> None:
    root = RetrainRoot(Location.parse(tmp_path))
    (root.run("a.1") / "checkpoints" / "11" / "x").write_bytes(b"")  # without a manifest
    for step in ("9", "10"):
        (root.run("a.1") / "checkpoints" / step / MANIFEST).write_bytes(step.encode())
    place, digest = newest_checkpoint(root, "a.1")
    assert place == "runs/a.1/checkpoints/10"
    assert digest == "4a44dc15364204a80fe80e9039455cc1608281820fe2b24f1e5233ade6af1dd5"
    message = f"run has no checkpoint in {root.run('b.1')}; train it with --again"
    with pytest.raises(SchemaError, match=re.escape(message)):
        newest_checkpoint(root, "b.1")
