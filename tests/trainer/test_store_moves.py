"""Slots move between real store processes while rows are written, whatever is killed."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from tests.trainer.processes import PATIENCE, wait_for
from tests.trainer.stores import (
    ACCESS,
    LAYOUT,
    TOKEN,
    StoreProcess,
    TableOf,
    group_over,
    one_store_map,
    record_of,
    running,
    start_store,
    whole,
)
from trainer.__main__ import main
from trainer.stores.api import SlotMapChangedError, StoreUnavailableError
from trainer.stores.remote.client import RemoteStore
from trainer.stores.remote.connection import StoreConnection, read_access
from trainer.stores.remote.migration import MigrationStats
from trainer.stores.remote.ownership import SlotMigration, description_from_json
from trainer.stores.remote.processes import gather_slots, kill_store, migrate_slots, restart_store
from trainer.stores.remote.shard import Shard
from trainer.stores.remote.wire import DESCRIBE, Request

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


def served(group: RemoteStore) -> dict[str, int]:
    """Return how many slots each store says it serves."""
    found = group.members.describe_all()
    return {a: int(s.served.sum()) for a, s in found.items() if s is not None}


def test_contents_lack_no_rows_that_are_handed_over(tmp_path: Path) -> None:
    shard, rows = Shard(tmp_path / "store", ((0, 4096),), sync=False), np.arange(50)
    shard.load()
    shard.open("run", {"items": LAYOUT}, one_store_map(((0, 4096),)), "here")
    request = Request(op="contents", session="process")
    shard.write(request, {"items": rows}, np.zeros((50, 5), np.float32))
    assert len(shard.contents(request, "items", 100)[0]) == 50
    outgoing = SlotMigration(id="move", target="there", slots=HALF, keep=False)
    with shard.lock:
        shard.log_control(replace(shard.control, outgoing=outgoing))
    with pytest.raises(SlotMapChangedError, match=r"^slots of the store are being handed over$"):
        shard.contents(request, "items", 100)
    shard.close()


@pytest.mark.slow
def test_slots_move_while_rows_are_written_and_clients_follow(tmp_path: Path) -> None:
    one, two = (
        start_store(tmp_path / "one", *SMALL),
        start_store(tmp_path / "two", *SMALL, "--slots", "none"),
    )
    with running(one, two):
        writer = Writer(group_over(one.address)["items"])
        for _ in range(20):
            writer.write_step()
        with writer.writing():
            token = token_of(tmp_path / "one")
            moved = migrate_slots(one.address, two.address, HALF, read_access(token))
            time.sleep(0.3)
        assert moved.num_rows > NUM_ROWS / 3
        group = writer.store.all_tables
        assert served(group) == {one.address: 2048, two.address: 2048}
        writer.check()
        group.notify_checkpoint(writer.step)
        for process in (one, two):
            process.kill()
        one.process = start_store(tmp_path / "one", *SMALL, "--port", one.port).process
        options = (*SMALL, "--slots", "none", "--port", two.port)
        two.process = start_store(tmp_path / "two", *options).process
        writer.write_step()
        writer.check()
        # another client finds the taker by the giver, whose address alone it knows
        other = group_over(one.address, joins=True)["items"]
        rows, records = whole(other)
        assert records.state[:, 0].tolist() == writer.last_step[rows].tolist()
        back = migrate_slots(two.address, one.address, HALF, read_access(token))
        assert back.num_rows == (slot_of_row(rows) < 2048).sum()
        assert whole(other)[0].tolist() == rows.tolist()
        assert served(group)[one.address] == 4096
        migrate_slots(one.address, two.address, HALF, read_access(token))
        later = group_over(one.address, session="later")["items"]
        assert served(later.all_tables) == {one.address: 2048, two.address: 2048}
        assert whole(later)[0].tolist() == []


@pytest.mark.slow
def test_slots_are_gathered_from_whoever_has_them_and_a_store_without_any_may_go(
    tmp_path: Path,
) -> None:
    one = start_store(tmp_path / "one", "--slots", "0:2048")
    two = start_store(tmp_path / "two", "--slots", "2048:4096")
    three = start_store(tmp_path / "three", "--slots", "none")
    stores, token = [s.address for s in (one, two, three)], token_of(tmp_path / "one")
    with running(one, two, three):
        writer = Writer(group_over(one.address, two.address)["items"])
        writer.write_step()
        middle = ((1024, 3072),)
        moved = gather_slots(stores, three.address, middle, read_access(token))
        assert moved.num_rows == ((slots_of_all() >= 1024) & (slots_of_all() < 3072)).sum() > 0
        again = gather_slots(stores, three.address, middle, read_access(token))
        assert (again.num_rows, again.num_rounds) == (0, 0)
        writer.write_step()
        assert served(writer.store.all_tables) == dict(zip(stores, (1024, 1024, 2048), strict=True))
        gather_slots((two.address,), one.address, ((0, 4096),), read_access(token))
        assert served(writer.store.all_tables)[two.address] == 0
        two.kill()
        writer.write_step()
        writer.check()
        # who knows the run by the address of the store that has gone, too, does not wait for it
        begun = time.monotonic()
        elastic = replace(ACCESS, elastic=True)
        joined = group_over(*stores[:2], joins=True, access=elastic)["items"]
        rows = whole(writer.store)[0].tolist()
        assert whole(joined)[0].tolist() == rows
        assert time.monotonic() - begun < ACCESS.timeout_sec
        later = group_over(one.address, session="later")["items"]
        assert served(later.all_tables) == {one.address: 2048, three.address: 2048}


def slots_of_all() -> np.ndarray:
    """Return the slot of each row that the first step writes."""
    return slot_of_row(np.flatnonzero(np.random.default_rng(0).random(NUM_ROWS) < 0.2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("killed", ["giver", "taker"])
def test_slots_have_one_owner_and_all_rows_when_a_side_of_a_move_is_killed(
    killed: str, seed: int, tmp_path: Path
) -> None:
    slow = (*SMALL, "--delay-sec", "0.005")
    one = start_store(tmp_path / "one", *SMALL)
    two = start_store(tmp_path / "two", *slow, "--slots", "none")
    rng = np.random.default_rng(seed)
    with running(one, two):
        writer = Writer(group_over(one.address)["items"])
        for _ in range(20):
            writer.write_step()
        token = token_of(tmp_path / "one")
        with writer.writing(), ThreadPoolExecutor(1) as pool:
            moving = pool.submit(migrate_slots, one.address, two.address, HALF, read_access(token))
            time.sleep(rng.uniform(0.0, 0.5))
            if killed == "giver":
                one.kill()
                one.process = start_store(tmp_path / "one", *SMALL, "--port", one.port).process
            else:
                two.kill()
                options = (*slow, "--slots", "none", "--port", two.port)
                two.process = start_store(tmp_path / "two", *options).process
            outcome = result_of(moving)
            time.sleep(0.3)
        group = writer.store.all_tables
        # a move that was in doubt is settled beside; meanwhile its slots have no owner
        wait_for(lambda: sum(served(group).values()) >= 4096)
        owners = served(group)
        assert sum(owners.values()) == 4096
        if isinstance(outcome, MigrationStats):
            assert owners == {one.address: 2048, two.address: 2048}
        writer.check()
        if owners.get(one.address) == 4096:  # it can be moved again
            migrate_slots(one.address, two.address, HALF, read_access(token))
            assert served(group) == {one.address: 2048, two.address: 2048}
            writer.write_step()
            writer.check()


def result_of(moving: "Future[MigrationStats]") -> MigrationStats | SchemaError:
    try:
        return moving.result()
    except SchemaError as error:
        return error


DIES = {
    "nothing": ((), (), {"one": 2048, "two": 2048}),
    "the source": (("one",), ("one",), {"one": 2048, "two": 2048}),
    "the target": (("two",), ("two",), {"one": 2048, "two": 2048}),
    "both": (("one", "two"), ("one", "two"), {"one": 2048, "two": 2048}),
    "the target, which is not restarted": (("two",), (), {"one": 4096}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DIES)
def test_migration_is_decided_whatever_dies_once_the_source_serves_no_more(
    case: str, tmp_path: Path
) -> None:
    killed, restarted, wanted = DIES[case]
    slots = {"one": "0:4096", "two": "none"}
    stores = {name: start_store(tmp_path / name, "--slots", slots[name]) for name in slots}
    addresses, token = {n: s.address for n, s in stores.items()}, token_of(tmp_path / "one")
    with running(*stores.values()), ThreadPoolExecutor(1) as pool:
        writer = Writer(group_over(addresses["one"])["items"])
        writer.write_step()
        members, pair = writer.store.all_tables.members, (addresses["one"], addresses["two"])
        with members._refreshing:  # pyright: ignore[reportPrivateUsage]
            moving = pool.submit(migrate_slots, *pair, HALF, read_access(token))
            wait_for(lambda: (one := members.describe_all()[addresses["one"]]) and one.outgoing)
            for name in killed:
                stores[name].kill()
            for name in restarted:
                options = ("--slots", slots[name], "--port", stores[name].port)
                stores[name].process = start_store(tmp_path / name, *options).process
        writer.write_step()
        writer.check()
        outcome, found = result_of(moving), served(writer.store.all_tables)
        assert {n: found[a] for n, a in addresses.items() if found.get(a)} == wanted
        assert isinstance(outcome, MigrationStats) == (case in ("nothing", "the target"))


@pytest.mark.slow
def test_store_is_killed_and_restarted_by_call_and_keeps_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process, token = start_store(tmp_path / "store"), token_of(tmp_path / "store")
    with running(process):
        writer = Writer(group_over(process.address)["items"])
        writer.write_step()
        before = incarnation_of(process)
        arguments = [process.address, "--token-file", str(token), "--json"]
        assert main(["restart-store", *arguments]) == 0
        assert capsys.readouterr().out == f'{{"address": "{process.address}"}}\n'
        while incarnation_of(process) == before:  # pytest's timeout ends it
            writer.write_step()
        writer.check()
        assert process.process.poll() is None, "it is the same process"
        assert main(["kill-store", *arguments]) == 0
        assert process.process.wait(PATIENCE) == -9
        process.process = start_store(tmp_path / "store", "--port", process.port).process
        writer.write_step()
        writer.check()


def incarnation_of(process: StoreProcess) -> str:
    while True:
        try:
            with StoreConnection(process.address, ACCESS) as peer:
                return description_from_json(peer.action_once(DESCRIBE, {}, 5.0)).incarnation
        except (StoreUnavailableError, SchemaError):
            time.sleep(0.05)


@pytest.mark.slow
def test_moves_that_cannot_be_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = start_store(tmp_path / "one", "--slots", "0:2048")
    two = start_store(tmp_path / "two", "--slots", "2048:4096")
    token = token_of(tmp_path / "one")
    with running(one, two):
        cases = [
            ("none", "slots none are not all served by the source in ", False),
            ("0:10", "store serves no run in ", True),
            ("0:2049", "slots 0:2049 are not all served by the source in ", False),
        ]
        for slots, message, before in sorted(cases, key=lambda case: not case[2]):
            if not before:
                group_over(one.address, two.address)
            arguments = ["--from", one.address, "--to", two.address, "--slots", slots]
            assert main(["migrate-slots", *arguments, "--token-file", str(token)]) == 1
            assert capsys.readouterr().err.startswith(f"error: {message}{one.address}; ")
        for taker, message in (
            (one.address, "the target serves 10 of the slots already"),
            ("grpc://127.0.0.1:1", "store must answer within 5 s, got "),
        ):
            arguments = ["--from", one.address, "--to", taker, "--slots", "0:10"]
            assert main(["migrate-slots", *arguments, "--token-file", str(token)]) == 1
            assert capsys.readouterr().err.startswith(f"error: {message}")
        token.write_text("another")
        message = (
            "token must be that of the store's --token-file, got another or none in "
            f"{one.address}; use the same token file for both"
        )
        for call in (kill_store, restart_store):
            with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
                call(one.address, read_access(token))
        token.write_text(TOKEN)
        assert one.process.poll() is None
