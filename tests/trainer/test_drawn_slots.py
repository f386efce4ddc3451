"""Whatever is drawn to happen to stores, each acknowledged row is read as it was last written."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import slot_of_row
from presage.trainer.stores.remote import members as members_module
from presage.trainer.stores.remote.client import RemoteStore, open_remote_store
from presage.trainer.stores.remote.processes import migrate_slots
from presage.trainer.stores.store import RowsLostError, SlotMapChangedError, StoreUnavailableError
from tests.trainer.local_stores import LocalStore
from tests.trainer.processes import wait_for
from tests.trainer.stores import ACCESS, LAYOUT, TableOf, record_of, whole

NUM_ROWS, NUM_EVENTS = 600, 6
PATIENT = replace(ACCESS, timeout_sec=60.0)
CHANCES = {"kill": 0.35, "move": 0.3, "forget": 0.1, "hold": 0.1, "save": 0.05, "coordinate": 0.1}
SEEDS = [
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4)),
    *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(4, 100)),
]


class Training:
    """One writer, whose rows go back to nothing when a new process opens the stores."""

    def __init__(self, stores: list[LocalStore]) -> None:
        self.stores = stores
        self.may_lose = False
        self.step, self.num_sessions = 0, 0
        self.error: BaseException | None = None
        self._ending = threading.Event()
        self._must_open = threading.Event()
        self.former: list[TableOf[RemoteStore]] = []
        self.begin_session()

    def begin_session(self) -> None:
        """Open the stores in a new session; the former process lives on and knows nothing."""
        self.session = secrets.token_hex(4)
        wait_for(lambda: all(store.is_alive for store in self.stores))
        self.table = self.opened(joins=False)
        self.former.append(self.table)
        self.acknowledged = np.full(NUM_ROWS, -1)
        self.num_sessions += 1

    def opened(self, *, joins: bool) -> TableOf[RemoteStore]:
        addresses = [store.address for store in self.stores[:-1]]  # the last one is moved to
        tables = {LAYOUT.table: LAYOUT}
        store = open_remote_store(
            addresses, PATIENT, tables, owner=None if joins else "run", session=self.session
        )
        return TableOf(store)

    def write_step(self) -> None:
        rows = np.flatnonzero(np.random.default_rng(self.step).random(NUM_ROWS) < 0.2)
        self.table.write(rows, record_of(self.step, len(rows)), self.step)
        self.acknowledged[rows] = self.step
        self.step += 1

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                if self._must_open.is_set():
                    self._must_open.clear()
                    self.begin_session()
                self.write_step()
            except RowsLostError:
                assert self.may_lose, "no store has died with its directory"
                self.begin_session()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write, and read as another process, all the time."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self.run)
            try:
                yield
            finally:
                self._ending.set()
                done.result()

    def coordinate_anew(self) -> None:
        self._must_open.set()

    def knows_newest_map(self, store: LocalStore) -> bool:
        members = self.table.all_tables.members
        with suppress(SchemaError, StoreUnavailableError, SlotMapChangedError):
            members.refresh(members.slot_map)
        return store.shard.control.epoch == members.slot_map.epoch

    def check(self) -> None:
        """Compare all rows, as this and another process read them and as each store has them."""
        self.write_step()
        for table in (self.table, self.opened(joins=True)):
            rows, records = whole(table)
            assert rows.tolist() == np.flatnonzero(self.acknowledged >= 0).tolist()
            assert records.state[:, 0].tolist() == self.acknowledged[rows].tolist()
            assert table.fetch(rows).state[:, 0].tolist() == self.acknowledged[rows].tolist()
            if table is not self.table:
                table.all_tables.close()
        slot_map, slots = self.table.all_tables.members.slot_map, slot_of_row(np.arange(NUM_ROWS))
        assert slot_map.moving == ()
        num_owners = np.zeros(NUM_ROWS, int)
        for store in self.stores:
            owned = slot_map.slots_of(store.address)[slots]
            num_owners += owned
            if store.shard.control.session == self.session:
                wait_for(lambda store=store: self.knows_newest_map(store))
                assert (store.shard.control.owned[slots] == owned).all()
                assert (store.last_steps(NUM_ROWS) == np.where(owned, self.acknowledged, -1)).all()
            else:
                assert not owned.any()
        assert (num_owners == 1).all()
        for former in self.former[:-1]:
            with pytest.raises(SchemaError):
                former.write(np.arange(10), record_of(10**6, 10), 10**6)


class Schedule:
    """Events that are drawn."""

    def __init__(self, seed: int, training: Training, stack: ExitStack) -> None:
        self._rng = np.random.default_rng(seed)
        self._training = training
        self._pool = stack.enter_context(ThreadPoolExecutor(8))
        self._actions: list[Future[Any]] = []
        self.happened: list[str] = []

    def act(self) -> None:
        kind = str(self._rng.choice([*CHANCES], p=[*CHANCES.values()]))
        stores = self._training.stores
        store = stores[self._rng.integers(len(stores))]
        self.happened.append(f"{kind} {stores.index(store)}")
        if kind in ("kill", "forget"):
            self._kill(store, forget=kind == "forget")
        elif kind == "move":
            self._move(store, stores[self._rng.integers(len(stores))])
        elif kind == "hold":
            self._actions.append(self._pool.submit(store.hold, self._rng.uniform(0.1, 0.8)))
        elif kind == "save":
            with suppress(SchemaError):  # a new session has been opened
                self._training.table.all_tables.notify_checkpoint(self._training.step)
        else:
            self._training.coordinate_anew()
        time.sleep(self._rng.choice([0.0, 0.01, 0.1, 0.4]))

    def _kill(self, store: LocalStore, *, forget: bool) -> None:
        if not store.is_alive:
            return
        self._training.may_lose |= forget
        store.kill(forget=forget)
        delay = self._rng.choice([0.0, 0.05, 0.5])

        def start_again() -> None:
            time.sleep(delay)
            store.start()

        self._actions.append(self._pool.submit(start_again))

    def _move(self, source: LocalStore, target: LocalStore) -> None:
        first, count = int(self._rng.integers(4096)), int(self._rng.integers(1, 2048))
        if source is not target:
            slots = ((first, min(4096, first + count)),)
            self._actions.append(
                self._pool.submit(
                    suppressed, migrate_slots, [source.address], target.address, slots, PATIENT
                )
            )

    def finish(self) -> None:
        """Wait until all that was begun has ended."""
        while self._actions:
            self._actions.pop().result()


def suppressed(function: Any, *arguments: Any) -> None:
    with suppress(SchemaError):
        function(*arguments)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_faults_of_stores_change_no_row(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "_DESCRIBE_SEC", 0.3)
    count = 2 + seed % 2
    stores = [LocalStore(tmp_path / f"store-{k}") for k in range(count + 1)]
    with ExitStack() as stack:
        for store in stores:
            store.start()
            stack.callback(lambda store=store: store.is_alive and store.kill())
        training = Training(stores)
        stack.callback(lambda: [former.all_tables.close() for former in training.former])
        schedule = Schedule(seed, training, stack)
        with training.running():
            for _ in range(NUM_EVENTS):
                schedule.act()
            schedule.finish()
        training.check()
