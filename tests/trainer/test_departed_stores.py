"""Stores that come and go leave nothing behind that later calls wait for, or that only grows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from tests.trainer.local_stores import LocalStore
from tests.trainer.stores import (
    ACCESS,
    LAYOUT,
    group_over,
    kill_store,
    one_store_map,
    record_of,
    running,
    start_store,
)
from trainer.stores.api import RowsLostError
from trainer.stores.remote import migration as migration_module
from trainer.stores.remote.migration import IncomingMigrations, OutgoingMigrations
from trainer.stores.remote.ownership import SlotMigration, ranges_of
from trainer.stores.remote.processes import migrate_slots
from trainer.stores.remote.shard import Shard
from trainer.stores.remote.wal import RecordLog, RowsEntry
from trainer.stores.remote.wire import Request

LOW, HIGH = ((0, 2048),), ((2048, 4096),)


def test_store_is_emptied_with_its_last_slots_and_takes_none_whose_rows_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, layouts, rows = (
        Shard(tmp_path / "store", LOW, sync=False),
        {"items": LAYOUT},
        np.arange(9),
    )
    shard.load()
    shard.open("run", layouts, one_store_map(LOW, 0), "here")
    with shard.lock:
        shard.write_entry(RowsEntry({"items": rows}, rows, np.zeros((9, 5), np.float32)))
    shard.open("run", layouts, one_store_map(LOW, 0), "here")  # the call is repeated
    assert len(shard.tables["items"]) == 9
    leaving = SlotMigration(id="leaving", target="there", slots=LOW, keep=False)
    with shard.lock:
        shard.log_control(replace(shard.control, outgoing=leaving))
    shard.apply_map(one_store_map(LOW, 0), "here")  # its own map comes again
    assert not shard.control.served.any()
    shard.apply_map(one_store_map((), 1), "here")
    assert len(shard.tables["items"]) == 0
    with pytest.raises(SchemaError, match=r"^slots are assigned whose rows were never received"):
        shard.apply_map(one_store_map(LOW, 2), "here")
    incoming, on_device = IncomingMigrations(shard), list[int]()
    monkeypatch.setattr(
        RecordLog, "flush_to_disk", lambda log: on_device.append(log.path.stat().st_size)
    )
    migrations = [SlotMigration(id=i, target="here", slots=LOW, keep=False) for i in "012"]
    for number, migration in enumerate(migrations):  # the last one counts
        incoming.begin(migration, "run", layouts, one_store_map((), 1))
        assert not shard.control.served.any()
        sent = np.arange(100 * number, 100 * number + 100)
        sent = sent[slot_of_row(sent) < 2048]
        block = np.zeros((len(sent), 5), np.float32)
        incoming.receive(migration.id, RowsEntry({"items": sent}, sent, block))
        assert shard.tables["items"].rows.tolist() == sent.tolist()
    with pytest.raises(SchemaError, match=r"^slots are assigned whose rows were never received"):
        shard.apply_map(one_store_map(LOW, 2), "here")
    with pytest.raises(SchemaError, match=r"^migration '1' is not in progress; move again$"):
        incoming.complete("1")
    incoming.complete("2")
    incoming.complete("2")  # it may be repeated
    [log] = (tmp_path / "store").glob("log-*.bin")
    assert on_device[-1] == log.stat().st_size, "the source deletes its rows"
    shard.apply_map(one_store_map(LOW, 2), "here")
    shard.apply_map(one_store_map((), 1), "here")  # an older map comes late
    assert ranges_of(shard.control.served) == LOW
    with pytest.raises(SchemaError, match=r"^the target serves 2048 of the slots already"):
        incoming.begin(migrations[0], "run", layouts, one_store_map(LOW, 2))
    with pytest.raises(SchemaError, match=r"^the target has a newer slot map than the source"):
        incoming.begin(migrations[0], "run", layouts, one_store_map((), 1))
    with pytest.raises(SchemaError, match=r"^the target has a newer slot map than the source"):
        incoming.begin(migrations[0], "run", layouts, one_store_map((), 1, "older session"))
    with pytest.raises(SchemaError, match=r"^the target has lost the rows of its slots"):
        incoming.begin(migrations[0], "run", layouts, one_store_map(HIGH, 3, "another session"))
    shard.close()


def test_rows_that_were_received_stay_until_the_slot_map_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, layouts = Shard(tmp_path / "store", (), sync=False), {"items": LAYOUT}
    monkeypatch.setattr(migration_module, "_UNDECIDED_SEC", 30.0)
    shard.load()
    rows, incoming = np.arange(99), IncomingMigrations(shard)
    rows = rows[slot_of_row(rows) < 2048]
    first, second = (
        SlotMigration(id=id, target="here", slots=slots, keep=False)
        for id, slots in (("first", LOW), ("second", HIGH))
    )
    incoming.begin(first, "run", layouts, one_store_map((), 1))
    incoming.receive("first", RowsEntry({"items": rows}, rows, np.ones((len(rows), 5), np.float32)))
    incoming.begin(first, "run", layouts, one_store_map((), 1))  # the call is repeated
    incoming.complete("first")
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(incoming.begin, second, "run", layouts, one_store_map((), 1))
        wait([begun], 0.1)
        shard.apply_map(one_store_map(LOW, 2), "here")
        with pytest.raises(SchemaError, match=r"^the target has a newer slot map than the source"):
            begun.result()
    assert ranges_of(shard.control.served) == LOW
    assert (shard.control.incoming, shard.control.received) == (None, False)
    incoming.begin(second, "run", layouts, one_store_map(LOW, 2))
    incoming.complete("second")
    shard.apply_map(one_store_map(LOW, 3), "here")  # the slots stay at the source
    assert (shard.control.incoming, shard.control.received) == (None, False)
    request = Request(op="fetch", session="process", epoch=3)
    assert (shard.fetch(request, {"items": rows})[0] == 1).all()
    shard.close()


def test_next_migration_of_a_store_is_refused_until_the_last_one_is_decided(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "store", LOW, sync=False)
    shard.load()
    shard.open("run", {"items": LAYOUT}, one_store_map(LOW), "here")
    first, second = (
        SlotMigration(id=str(slots), target="grpc://127.0.0.1:1", slots=slots, keep=False)
        for slots in (((0, 100),), ((100, 200),))
    )
    with shard.lock:
        shard.log_control(replace(shard.control, outgoing=first))
    with pytest.raises(SchemaError, match=r"^the last migration from this store is not decided"):
        OutgoingMigrations(shard, replace(ACCESS, timeout_sec=0.1)).move(second)
    assert shard.control.outgoing == first
    shard.close()


def test_process_whose_session_was_replaced_does_not_take_its_rows_for_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", ((0, 4096),))
    store.start()
    with running():
        former, _ = (
            group_over(store.address, session=session)["items"].all_tables.members
            for session in ("former", "later")
        )
        with pytest.raises(SchemaError, match=r"^session 'former' of the store was replaced"):
            former.refresh(former.slot_map)
    store.kill()


def test_only_the_process_that_opened_the_session_decides_slot_maps(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", ((0, 4096),))
    store.start()
    with running():
        first, other = (
            group_over(store.address, joins=joins)["items"].all_tables for joins in (False, True)
        )
        first.close()
        leaving = SlotMigration(id="leaving", target="grpc://127.0.0.1:1", slots=LOW, keep=False)
        with store.shard.lock:
            store.shard.log_control(replace(store.shard.control, outgoing=leaving))
        current = other.members.slot_map
        other.members.refresh(current)
        assert other.members.slot_map is current
        assert store.shard.control.outgoing == leaving
    store.kill()


@pytest.mark.slow
def test_rows_of_a_lost_store_are_lost_at_once_though_another_store_has_departed(
    tmp_path: Path,
) -> None:
    one = start_store(tmp_path / "one", "--slots", "0:2048")
    two = start_store(tmp_path / "two", "--slots", "2048:4096")
    three = start_store(tmp_path / "three", "--slots", "none")
    rows, part = np.arange(500), ((0, 1024),)
    with running(one, two, three):
        store = group_over(one.address, two.address)["items"]
        store.write(rows, record_of(1, 500), 1)
        migrate_slots(one.address, three.address, part, ACCESS)
        store.write(rows, record_of(2, 500), 2)
        migrate_slots(three.address, one.address, part, ACCESS)
        store.write(rows, record_of(3, 500), 3)
        three.kill()
        members = store.all_tables.members
        members.access = replace(ACCESS, timeout_sec=5.0)
        kill_store(two.process.pid, tmp_path / "two")
        two.process.wait()
        options = ("--slots", "2048:4096", "--port", two.port)
        two.process = start_store(tmp_path / "two", *options).process
        with pytest.raises(RowsLostError, match=r"acknowledged writes of slots 2048:4096"):
            store.fetch(rows)


@pytest.mark.slow
def test_stores_forget_one_that_has_departed(tmp_path: Path) -> None:
    one = start_store(tmp_path / "one")
    two = start_store(tmp_path / "two", "--slots", "none")
    rows, part = np.arange(500), ((0, 1024),)
    with running(one, two):
        store = group_over(one.address)["items"]
        store.write(rows, record_of(1, 500), 1)
        group = store.all_tables
        migrate_slots(one.address, two.address, part, ACCESS)
        store.write(rows, record_of(2, 500), 2)
        group.notify_checkpoint(2)
        assert set(group.members.describe_all()) == {one.address, two.address}
        migrate_slots(two.address, one.address, part, ACCESS)
        store.write(rows, record_of(3, 500), 3)
        two.kill()  # no row is fetched from it any more: the checkpoint meets it first
        group.notify_checkpoint(3)
        assert set(group.members.describe_all()) == {one.address}
        one.kill()
        one.process = start_store(tmp_path / "one", "--port", one.port).process
        assert (store.fetch(rows).state == 3).all()
        assert set(group.members.describe_all()) == {one.address}
