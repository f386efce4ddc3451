"""Stores that come and go leave nothing behind that later calls wait for, or that only grows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import SchemaError
from tests.trainer.local_stores import LocalStore
from tests.trainer.processes import wait_for
from tests.trainer.stores import (
    ACCESS,
    group_over,
    kill_store,
    record_of,
    running,
    start_store,
)
from trainer.stores.api import RowsLostError
from trainer.stores.remote.ownership import ranges_of
from trainer.stores.remote.processes import migrate_slots

LOW = ((0, 2048),)


def test_process_whose_session_was_replaced_does_not_take_its_rows_for_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.start()
    with running():
        former, _ = (
            group_over(store.address, session=session)["items"].all_tables.members
            for session in ("former", "later")
        )
        with pytest.raises(SchemaError, match=r"^session 'former' of the store was replaced"):
            former.refresh(former.slot_map)
    store.kill()


def test_request_waits_for_the_process_that_opened_the_session(tmp_path: Path) -> None:
    store, other = (LocalStore(tmp_path / name) for name in "ab")
    store.start()
    other.start()
    with running(), ThreadPoolExecutor(1) as pool:
        first, second = (
            group_over(store.address, joins=joins)["items"].all_tables for joins in (False, True)
        )
        first.close()
        current = second.members.slot_map
        moving = pool.submit(migrate_slots, [store.address], other.address, LOW, ACCESS)
        wait_for(lambda: store.shard.describe()["requested"] is not None)
        second.members.refresh(current)
        assert second.members.slot_map is current
        group_over(store.address, session="later")
        assert moving.result()["num_slots"] == 2048
        assert ranges_of(other.shard.control.owned) == LOW
    store.kill()
    other.kill()


@pytest.mark.slow
def test_rows_of_a_lost_store_are_lost_at_once_though_another_store_has_departed(
    tmp_path: Path,
) -> None:
    one = start_store(tmp_path / "one")
    two = start_store(tmp_path / "two")
    three = start_store(tmp_path / "three")
    rows, part = np.arange(500), ((0, 1024),)
    with running(one, two, three):
        store = group_over(one.address, two.address)["items"]
        store.write(rows, record_of(1, 500), 1)
        migrate_slots([one.address], three.address, part, ACCESS)
        store.write(rows, record_of(2, 500), 2)
        migrate_slots([three.address], one.address, part, ACCESS)
        store.write(rows, record_of(3, 500), 3)
        three.kill()
        members = store.all_tables.members
        members.access = replace(ACCESS, timeout_sec=5.0)
        kill_store(two.process.pid, tmp_path / "two")
        two.process.wait()
        options = ("--port", two.port)
        two.process = start_store(tmp_path / "two", *options).process
        with pytest.raises(RowsLostError, match=r"acknowledged writes of slots 2048:4096"):
            store.fetch(rows)


@pytest.mark.slow
def test_stores_forget_one_that_has_departed(tmp_path: Path) -> None:
    one = start_store(tmp_path / "one")
    two = start_store(tmp_path / "two")
    rows, part = np.arange(500), ((0, 1024),)
    with running(one, two):
        store = group_over(one.address)["items"]
        store.write(rows, record_of(1, 500), 1)
        group = store.all_tables
        migrate_slots([one.address], two.address, part, ACCESS)
        store.write(rows, record_of(2, 500), 2)
        group.notify_checkpoint(2)
        assert set(group.members.describe_all()) == {one.address, two.address}
        migrate_slots([two.address], one.address, part, ACCESS)
        store.write(rows, record_of(3, 500), 3)
        two.kill()  # no row is fetched from it any more: the checkpoint meets it first
        group.notify_checkpoint(3)
        assert set(group.members.describe_all()) == {one.address}
        one.kill()
        one.process = start_store(tmp_path / "one", "--port", one.port).process
        assert (store.fetch(rows).state == 3).all()
        assert set(group.members.describe_all()) == {one.address}
