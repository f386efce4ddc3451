"""Stores that come and go leave nothing behind that later calls wait for, or that only grows."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.stores import (
    ACCESS,
    LAYOUT,
    group_over,
    kill_store,
    record_of,
    running,
    start_store,
)
from tests.trainer.test_slot_map import HIGH, LOW, SESSION, TWO, mapped, store
from trainer.stores.api import RowsLostError
from trainer.stores.remote.migration import IncomingMigrations
from trainer.stores.remote.ownership import (
    SlotMigration,
    empty_ownership,
    mask_of,
    resolve_slot_map,
)
from trainer.stores.remote.processes import migrate_slots
from trainer.stores.remote.shard import Shard

NAMES_C = {"a": replace(TWO["a"], addresses=("c",)), "b": TWO["b"]}
LOST_B = {**NAMES_C, "b": replace(store(()), session="")}
WAITING = {
    "a store that is gone and has nothing is not waited for": (NAMES_C, LOST_B, (), HIGH),
    "one that slots were given to since is": (
        NAMES_C,
        {**LOST_B, "a": replace(store(LOW, 2), addresses=("c",))},
        ("c",),
        (),
    ),
    "so is one that another new store names": (
        TWO,
        {**LOST_B, "a": TWO["a"], "d": replace(store(()), addresses=("c",))},
        ("c",),
        (),
    ),
    "and one whose slots are known": ({**TWO, "c": store((), 0)}, {**TWO, "b": None}, ("b",), ()),
}


@pytest.mark.parametrize("case", WAITING)
def test_slots_are_lost_or_waited_for(case: str) -> None:
    before, now, waiting, lost = WAITING[case]
    now = {"c": None, **now}
    result = resolve_slot_map(mapped(**before), now, SESSION, {})
    assert (result.slot_map, result.waiting, result.lost) == (None, waiting, lost)


def test_ids_of_migrations_do_not_accumulate(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "store", (), sync=False)
    shard.load()
    incoming, numbers = IncomingMigrations(shard), count()
    layouts, ownership = {"items": LAYOUT}, empty_ownership().with_slots(mask_of(LOW), 1, 7)
    for source in ("one", "two", "one", "one", "two"):
        migration = SlotMigration(
            id=f"{source}-{next(numbers)}",
            target="here",
            ownership=tuple(ownership.to_json()),
            version=shard.control.version + 1,
            keep=False,
        )
        incoming.begin(migration, "run", "process", layouts)
        incoming.complete(migration.id)
        incoming.complete(migration.id)  # it may be repeated until its source knows
        assert incoming.cancel(migration.id, "process")
        gone = replace(shard.control, ownership=empty_ownership())
        shard.log_control(gone)
    assert shard.control.completed == ("one-3", "two-4")
    shard.close()


def test_store_that_slots_were_given_to_since_is_not_forgotten(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "store", LOW, sync=False)
    shard.load()
    ownership, layouts = empty_ownership().with_slots(mask_of(LOW), 1, 7), {"items": LAYOUT}
    shard.open("run", "process", layouts, ownership=ownership, version=1, reset=True)
    shard.log_control(replace(shard.control, version=2, addresses=("c", "d")))
    for version, known in ((1, ("c", "d")), (2, ("d",))):
        shard.notify_checkpoint("process", version, ["here", "d"])
        assert shard.control.addresses == known
    shard.close()


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
        members.refresh(members.slot_map)  # as with the next change of slots
        members.access = replace(ACCESS, timeout_sec=5.0)
        kill_store(two.process.pid, tmp_path / "two")
        two.process.wait()
        options = ("--slots", "2048:4096", "--port", two.port)
        two.process = start_store(tmp_path / "two", *options).process
        with pytest.raises(RowsLostError, match=r"acknowledged writes of slots 2048:4096"):
            store.fetch(rows)


@pytest.mark.slow
def test_stores_forget_one_that_has_departed_at_the_next_checkpoint(tmp_path: Path) -> None:
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
