"""Slots in two store processes: writes go to both, and one may die with its directory."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.config.train import StoresConfig
from schemas.errors import SchemaError
from tests.trainer.processes import wait_for
from tests.trainer.stores import ACCESS, LAYOUT, TableOf, kill_store
from tests.trainer.test_store_moves import Writer
from trainer.stores.api import RowsLostError
from trainer.stores.remote.client import RemoteStore, open_remote_store
from trainer.stores.remote.connection import Access, read_access
from trainer.stores.remote.ownership import StoreDescription, ranges_of
from trainer.stores.remote.processes import TOKEN, StoreProcesses, migrate_slots


def group_over(stores: StoreProcesses, replicas: int = 2) -> TableOf[RemoteStore]:
    access = Access(token=stores.token, timeout_sec=ACCESS.timeout_sec)
    tables = {LAYOUT.table: LAYOUT}
    opened = open_remote_store(
        stores.addresses, access, tables, owner="run", session="s", replicas=replicas
    )
    return TableOf(opened)


def wait_for_copies(group: RemoteStore) -> None:
    wait_for(lambda: (group.members.slot_map.num_copies == 2).all())


def kill(stores: StoreProcesses, number: int, *, forget: bool) -> None:
    kill_store(stores.pids[number], stores.directory / f"store-{number:03d}" if forget else None)


@pytest.mark.slow
def test_any_node_may_die_after_the_other_when_copies_are_whole_again(tmp_path: Path) -> None:
    with StoreProcesses(3, tmp_path / "stores", replicas=2) as stores:
        writer = Writer(group_over(stores))
        for _ in range(10):
            writer.write_step()
        with writer.writing():
            for number, forget in ((0, True), (1, False), (2, True), (0, False)):
                members = writer.store.all_tables.members
                before = members.slot_map
                kill(stores, number, forget=forget)
                wait_for(lambda m=members, before=before: m.slot_map is not before)
                wait_for_copies(writer.store.all_tables)
        writer.check()
        writer.store.all_tables.notify_checkpoint(writer.step)
        writer.write_step()
        for number in range(3):  # what each store holds is the same, wherever it is read
            kill(stores, number, forget=True)
            writer.check()
            wait_for_copies(writer.store.all_tables)
        writer.store.all_tables.close()


@pytest.mark.slow
def test_stores_are_called_by_nobody_any_more_when_they_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling, answered = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    def refuse(index: int, port: int) -> None:
        raise BlockingIOError("no process to be had")

    def ask_slowly() -> dict[str, StoreDescription | None]:
        calling.set()
        answered.wait()
        return {}

    with StoreProcesses(2, tmp_path / "stores", replicas=2) as stores:
        writer = Writer(group_over(stores))
        monkeypatch.setattr(stores, "_start", refuse)  # so that copies lack all the time
        kill(stores, 0, forget=True)
        writer.write_step()
        group = writer.store.all_tables
        assert (group.members.slot_map.num_copies == 1).all()
        monkeypatch.setattr(group.members, "describe_all", ask_slowly)
        wait_for(calling.is_set)  # by who has copies made again
        threading.Timer(1.0, answered.set).start()
        group.close()
        # a call that outlives the interpreter ends the process by SIGSEGV
        assert answered.is_set()
        assert "slots" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.slow
def test_slots_of_a_copy_move_and_both_copies_stay_in_force(tmp_path: Path) -> None:
    with StoreProcesses(3, tmp_path / "stores", replicas=2) as stores:
        writer = Writer(group_over(stores))
        for _ in range(10):
            writer.write_step()
        first, _, third = stores.addresses
        token = stores.directory / TOKEN
        with writer.writing():
            moved = migrate_slots(first, third, ((0, 500),), read_access(token))
        assert moved.num_rows > 0
        writer.write_step()
        slot_map = writer.store.all_tables.members.slot_map
        assert (slot_map.num_copies == 2).all()
        place = slot_map.addresses.index(third)
        assert ranges_of((slot_map.copies == place).any(0)) == ((0, 500), (1365, 4096))
        with pytest.raises(SchemaError, match=r"^the target serves"):
            migrate_slots(stores.addresses[1], third, ((0, 500),), read_access(token))
        writer.check()
        kill(stores, 2, forget=True)
        writer.check()
        writer.store.all_tables.close()


def test_both_nodes_dead_at_once_is_said_and_never_first_values(tmp_path: Path) -> None:
    with StoreProcesses(2, tmp_path / "stores", replicas=2) as stores:
        writer = Writer(group_over(stores))
        writer.write_step()
        for number in range(2):
            kill(stores, number, forget=True)
        message = (
            r"^no store has the acknowledged writes of slots 0:4096; "
            r"go back to the newest checkpoint with --resume$"
        )
        with pytest.raises(RowsLostError, match=message):
            writer.store.fetch(np.arange(10))
        writer.store.all_tables.close()


def test_more_copies_than_stores_are_refused(tmp_path: Path) -> None:
    message = (
        r"^replicas must be at most the number of stores, got replicas=2, stores=1; "
        r"start more stores$"
    )
    with pytest.raises(ValueError, match=message):
        StoreProcesses(1, tmp_path / "stores", replicas=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 3}, "replicas must be 1 or 2, got 3; write 2 for a copy"),
        (
            {"replicas": 2, "addresses": ("grpc://a:1",), "token_file": "token"},
            "replicas must be at most the number of stores, got replicas=2, addresses=1; "
            "start more stores",
        ),
    ],
)
def test_job_with_copies_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        StoresConfig(**settings)


def test_store_that_dies_all_the_time_is_not_started_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StoreProcesses(1, tmp_path / "stores") as stores:
        seen: set[int] = set()
        deadline = time.monotonic() + 120
        while "died too often" not in caplog.text:
            assert time.monotonic() < deadline
            for pid in set(stores.pids) - seen:
                os.kill(pid, 9)
                seen.add(pid)
            time.sleep(0.02)
        assert len(seen) == 6
        assert threading.active_count() >= 1


@pytest.mark.slow
def test_store_that_cannot_be_started_at_once_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreProcesses(1, tmp_path / "stores") as stores:
        writer = Writer(group_over(stores, 1))
        writer.write_step()
        start, refused = stores._start, []

        def start_later(index: int, port: int) -> object:
            if len(refused) < 2:
                refused.append(index)
                raise BlockingIOError("no process to be had")
            return start(index, port)

        monkeypatch.setattr(stores, "_start", start_later)
        kill(stores, 0, forget=False)
        writer.write_step()
        writer.check()
        assert len(refused) == 2
        writer.store.all_tables.close()
