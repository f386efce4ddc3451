"""Slots move between store processes while rows are written, and stores come and go."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import slot_of_row
from presage.trainer.__main__ import main
from presage.trainer.stores.remote import shard as shard_module
from presage.trainer.stores.remote.client import RemoteStore
from presage.trainer.stores.remote.connection import read_access
from presage.trainer.stores.remote.ownership import MoveRequest, ranges_of
from presage.trainer.stores.remote.processes import migrate_slots
from presage.trainer.stores.remote.shard import Shard
from presage.trainer.stores.remote.wire import ARRIVING, CONTENTS, LEAVING, WRITE, Request
from presage.trainer.stores.store import RowsLostError, SlotMapChangedError
from tests.trainer.local_stores import LocalStore
from tests.trainer.processes import wait_for
from tests.trainer.stores import (
    ACCESS,
    TOKEN,
    TableOf,
    control_of,
    group_over,
    kill_store,
    one_store_map,
    record_of,
    running,
    start_store,
    whole,
)

NUM_ROWS = 3000
HALF = ((0, 2048),)
SMALL = ("--message-bytes", "4096")  # a hundred rows: a move is many messages


class Writer:
    """Writes some rows each step, and knows what the last step of each was."""

    def __init__(self, store: TableOf[RemoteStore]) -> None:
        self.store = store
        self.last_step = np.full(NUM_ROWS, -1)
        self.step = 0
        self._ending = threading.Event()

    def write_step(self) -> None:
        rows = np.flatnonzero(np.random.default_rng(self.step).random(NUM_ROWS) < 0.2)
        self.store.write(rows, record_of(self.step, len(rows)), self.step)
        self.last_step[rows] = self.step
        self.step += 1

    def check(self) -> None:
        """Compare all rows, read one way and the other."""
        rows, records = whole(self.store)
        assert rows.tolist() == np.flatnonzero(self.last_step >= 0).tolist()
        assert (records.values == records.state).all()
        assert records.state[:, 0].tolist() == self.last_step[rows].tolist()
        assert self.store.fetch(rows).state[:, 0].tolist() == self.last_step[rows].tolist()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write beside, all the time."""

        def write_on() -> None:
            while not self._ending.is_set():
                self.write_step()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(write_on)
            try:
                yield
            finally:
                self._ending.set()
                done.result()
                self._ending.clear()


def token_of(directory: Path) -> Path:
    return directory.with_suffix(".token")


def owned(group: RemoteStore) -> dict[str, int]:
    """Return how many slots each store owns, as the stores say."""
    found = group.members.describe_all()
    return {a: int(s.owned.sum()) for a, s in found.items()}


def test_rows_of_slots_that_move_are_read_and_written_by_the_coordinator_alone(
    tmp_path: Path,
) -> None:
    shard, rows = Shard(tmp_path / "store", sync=False), np.arange(50)
    shard.load()
    shard.open(control_of(one_store_map(((0, 4096),))))
    request, records = Request(op=WRITE, session="process"), record_of(0.0, 50)
    shard.write(request, {"items": rows}, records)
    contents = replace(request, op=CONTENTS)
    assert len(shard.contents(contents, "items", 100)[0]) == 50
    with pytest.raises(SlotMapChangedError, match="in slots of other stores"):
        shard.write(replace(request, op=ARRIVING), {"items": rows}, records)
    shard.apply_map(one_store_map(((0, 4096),), 1, moving=HALF), "here")
    request, contents = replace(request, epoch=1), replace(contents, epoch=1)
    with pytest.raises(SlotMapChangedError, match=r"^slots are moving between stores$"):
        shard.contents(contents, "items", 100)
    with pytest.raises(SlotMapChangedError, match="in slots of other stores"):
        shard.write(request, {"items": rows}, records)
    leaving, _, _ = shard.contents(replace(contents, op=LEAVING), "items", 100)
    assert leaving.tolist() == rows[slot_of_row(rows) < 2048].tolist()
    staying = rows[slot_of_row(rows) >= 2048]
    shard.write(
        replace(request, train_step=4), {"items": staying}, records.take(slice(0, len(staying)))
    )
    shard.apply_map(one_store_map(((2048, 4096),), 2), "here")
    assert sorted(shard.tables["items"].rows.tolist()) == staying.tolist()
    with pytest.raises(SchemaError, match=r"^slots are assigned whose rows were never received$"):
        shard.apply_map(one_store_map(((0, 4096),), 3), "here")
    shard.apply_map(one_store_map((), 1), "here")  # an older map comes late
    assert shard.control.epoch == 2
    shard.close()


def test_move_without_a_process_that_trains_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "COORDINATOR_SEC", 0.05)
    shard = Shard(tmp_path / "store", sync=False)
    shard.load()
    request = MoveRequest(sources=("here",), target="there", slots=HALF)
    with pytest.raises(SchemaError, match=r"^store serves no run; start training first$"):
        shard.request_move(request)
    shard.open(control_of(one_store_map(((0, 4096),))))
    message = "no process trains on the stores; start training, and move again"
    with pytest.raises(SchemaError, match=f"^{message}$"):
        shard.request_move(request)
    assert shard.describe()["requested"] is None
    shard.close()


@pytest.mark.slow
def test_slots_move_while_rows_are_written_and_clients_follow(tmp_path: Path) -> None:
    one, two = (start_store(tmp_path / "one", *SMALL), start_store(tmp_path / "two", *SMALL))
    with running(one, two):
        writer = Writer(group_over(one.address)["items"])
        for _ in range(20):
            writer.write_step()
        access = read_access(token_of(tmp_path / "one"))
        with writer.writing():
            moved = migrate_slots([one.address], two.address, HALF, access)
            time.sleep(0.3)
        assert moved["num_slots"] == 2048
        assert moved["num_rows"] > NUM_ROWS / 3
        group = writer.store.all_tables
        assert owned(group) == {one.address: 2048, two.address: 2048}
        writer.check()
        group.notify_checkpoint(writer.step)
        for process in (one, two):
            process.kill()
        one.process = start_store(tmp_path / "one", *SMALL, "--port", one.port).process
        options = (*SMALL, "--port", two.port)
        two.process = start_store(tmp_path / "two", *options).process
        writer.write_step()
        writer.check()
        # another client finds the target by the source, whose address alone it knows
        other = group_over(one.address, joins=True)["items"]
        rows, records = whole(other)
        assert records.state[:, 0].tolist() == writer.last_step[rows].tolist()
        back = migrate_slots([two.address], one.address, HALF, access)
        assert back["num_rows"] == (slot_of_row(rows) < 2048).sum()
        assert whole(other)[0].tolist() == rows.tolist()
        assert owned(group)[one.address] == 4096
        migrate_slots([one.address], two.address, HALF, access)
        later = group_over(one.address, session="later")["items"]
        assert owned(later.all_tables) == {one.address: 2048, two.address: 2048}
        assert whole(later)[0].tolist() == []


@pytest.mark.slow
def test_slots_move_from_all_their_stores_and_a_store_without_slots_may_leave(
    tmp_path: Path,
) -> None:
    one = start_store(tmp_path / "one")
    two = start_store(tmp_path / "two")
    three = start_store(tmp_path / "three")
    stores, access = (
        [s.address for s in (one, two, three)],
        read_access(token_of(tmp_path / "one")),
    )
    with running(one, two, three):
        writer = Writer(group_over(one.address, two.address)["items"])
        writer.write_step()
        middle = ((1024, 3072),)
        moved = migrate_slots(stores, three.address, middle, access)
        assert moved["num_rows"] == ((slots_of_all() >= 1024) & (slots_of_all() < 3072)).sum() > 0
        again = migrate_slots(stores, three.address, middle, access)
        assert (again["num_rows"], again["num_slots"]) == (0, 0)
        writer.write_step()
        assert owned(writer.store.all_tables) == dict(zip(stores, (1024, 1024, 2048), strict=True))
        migrate_slots([two.address], one.address, ((0, 4096),), access)
        assert owned(writer.store.all_tables)[two.address] == 0
        two.kill()
        writer.write_step()
        writer.check()
        # who knows the run by the address of the store that has gone, too, does not wait for it
        patient = replace(ACCESS, timeout_sec=3600.0)
        joined = group_over(*stores[:2], joins=True, access=patient)["items"]
        rows = whole(writer.store)[0].tolist()
        assert whole(joined)[0].tolist() == rows
        later = group_over(one.address, session="later")["items"]
        assert owned(later.all_tables) == {one.address: 2048, three.address: 2048}


def slots_of_all() -> np.ndarray:
    """Return the slot of each row that the first step writes."""
    return slot_of_row(np.flatnonzero(np.random.default_rng(0).random(NUM_ROWS) < 0.2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("killed", ["source", "target"])
def test_slots_have_one_owner_and_all_rows_when_a_side_of_a_move_is_killed(
    killed: str, seed: int, tmp_path: Path
) -> None:
    slow = (*SMALL, "--delay-sec", "0.005")
    one = start_store(tmp_path / "one", *SMALL)
    two = start_store(tmp_path / "two", *slow)
    rng = np.random.default_rng(seed)
    with running(one, two):
        writer = Writer(group_over(one.address)["items"])
        for _ in range(20):
            writer.write_step()
        access = read_access(token_of(tmp_path / "one"))
        with writer.writing(), ThreadPoolExecutor(1) as pool:
            moving = pool.submit(migrate_slots, [one.address], two.address, HALF, access)
            time.sleep(rng.uniform(0.0, 0.7))
            if killed == "source":
                one.kill()
                one.process = start_store(tmp_path / "one", *SMALL, "--port", one.port).process
            else:
                two.kill()
                options = (*slow, "--port", two.port)
                two.process = start_store(tmp_path / "two", *options).process
            outcome = result_of(moving)
        group = writer.store.all_tables
        writer.write_step()
        writer.check()
        owners = {address: count for address, count in owned(group).items() if count}
        assert owners in ({one.address: 4096}, {one.address: 2048, two.address: 2048})
        if not isinstance(outcome, SchemaError):
            assert owners == {one.address: 2048, two.address: 2048}
        migrate_slots([one.address], two.address, HALF, access)  # it may be repeated
        assert owned(group) == {one.address: 2048, two.address: 2048}
        writer.write_step()
        writer.check()


def result_of(moving: Future[dict[str, Any]]) -> dict[str, Any] | SchemaError:
    try:
        return moving.result()
    except SchemaError as error:
        return error


@pytest.mark.slow
def test_moves_that_cannot_be_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = start_store(tmp_path / "one")
    two = start_store(tmp_path / "two", *SMALL)
    token = token_of(tmp_path / "one")
    with running(one, two):

        def message_of(target: str) -> str:
            arguments = ["--from", one.address, "--to", target, "--slots", "0:10"]
            assert main(["migrate-slots", *arguments, "--token-file", str(token)]) == 1
            return capsys.readouterr().err

        message = f"error: store serves no run in {one.address}; start training first"
        assert message_of(two.address).startswith(message)
        store = group_over(one.address, access=replace(ACCESS, timeout_sec=5.0))["items"]
        store.write(np.arange(50), record_of(1.0, 50), 1)
        for target, text in (
            (two.address, "store must take messages of 4194304 bytes as the others do, got 4096 "),
            ("grpc://127.0.0.1:1", "failed to connect"),
        ):
            found = message_of(target)
            assert found.startswith("error: ")
            assert text in found
        assert owned(store.all_tables) == {one.address: 4096}
        token.write_text("another")
        message = (
            "token is missing, or differs from that of the store's --token-file in "
            f"{one.address}; use the same token file for both"
        )
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            migrate_slots([one.address], two.address, HALF, read_access(token))
        token.write_text(TOKEN)
        assert store.fetch(np.arange(50)).state.tolist() == [[1.0]] * 50


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
        moving = pool.submit(migrate_slots, [store.address], other.address, HALF, ACCESS)
        wait_for(lambda: store.shard.describe()["requested"] is not None)
        second.members.refresh(current)
        assert second.members.slot_map is current
        group_over(store.address, session="later")
        assert moving.result()["num_slots"] == 2048
        assert ranges_of(other.shard.control.owned) == HALF
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
