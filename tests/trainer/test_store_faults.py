"""Store processes that are killed, that have no room, or whose callers are too many."""

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.schemas.errors import SchemaError
from presage.trainer.stores.remote import server as server_module
from presage.trainer.stores.remote.client import RemoteStore
from presage.trainer.stores.remote.connection import StoreConnection
from presage.trainer.stores.remote.server import StoreOptions, StoreServer
from presage.trainer.stores.remote.shard import Shard
from presage.trainer.stores.remote.wire import Request, rows_batch
from presage.trainer.stores.store import BehindError, SlotMapChangedError
from tests.trainer.processes import is_gone, wait_for
from tests.trainer.stores import (
    ACCESS,
    LAYOUT,
    TOKEN,
    TableOf,
    control_of,
    group_over,
    log_bytes,
    log_files,
    one_store_map,
    record_of,
    running,
    start_store,
    whole,
)

NUM_ROWS = 200
ALL = ((0, 4096),)


def write_step(store: TableOf[RemoteStore], step: int) -> np.ndarray:
    """Write what a step makes of its rows, and return these."""
    rows = np.flatnonzero(np.random.default_rng(step).random(NUM_ROWS) < 0.3)
    store.write(rows, record_of(step, len(rows)), step)
    return rows


def assert_holds(store: TableOf[RemoteStore], last_step: dict[int, int], maybe: int = -1) -> None:
    """Compare all rows with the last step that wrote each; `maybe` may or may not be written."""
    rows, records = whole(store)
    assert (records.values == records.state).all()
    found = dict(zip(rows.tolist(), records.state[:, 0].astype(int).tolist(), strict=True))
    unsure = {row for row, step in found.items() if step == maybe}
    assert {r: s for r, s in found.items() if r not in unsure} == {
        r: s for r, s in last_step.items() if r not in unsure
    }


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 10)),
    ],
)
def test_store_killed_among_writes_has_every_acknowledged_one_after_a_restart(
    seed: int, tmp_path: Path
) -> None:
    rng, directory = np.random.default_rng(seed), tmp_path / "store"
    last_step: dict[int, int] = {}
    begun = [0]
    process = start_store(directory)
    with running(process):
        store = group_over(process.address)["items"]
        store.all_tables.members.access = type(ACCESS)(token=TOKEN, timeout_sec=6)

        def write_until_it_dies() -> None:
            for step in range(100_000):
                begun[0] = step
                if step % 50 == 49:
                    store.all_tables.notify_checkpoint(step)
                rows = write_step(store, step)
                last_step.update(dict.fromkeys(rows.tolist(), step))

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_until_it_dies)
            kill_at = rng.integers(20, 160)
            while begun[0] < kill_at and not writing.done():
                time.sleep(0.001)
            process.kill()
            with pytest.raises(SchemaError, match=r"^store did not answer within 6 s"):
                writing.result()
    assert len(last_step) > 100
    with running(start_store(directory, "--port", process.port)) as (again,):
        store = group_over(again.address, joins=True)["items"]
        assert_holds(store, last_step, maybe=begun[0])


@pytest.mark.slow
def test_checkpoint_truncates_the_log_and_keeps_the_rows(tmp_path: Path) -> None:
    directory, last_step = tmp_path / "store", {}
    with running(start_store(directory)) as (process,):
        store = group_over(process.address)["items"]
        for step in range(200):
            last_step.update(dict.fromkeys(write_step(store, step).tolist(), step))
        (_, log), long_bytes = log_files(directory), log_bytes(directory)
        store.all_tables.notify_checkpoint(200)
        wait_for(lambda: not log.exists())  # it is replaced beside the calls that follow
        assert log_bytes(directory) < long_bytes / 20
        last_step.update(dict.fromkeys(write_step(store, 200).tolist(), 200))
        process.kill()
    with running(start_store(directory, "--port", process.port)) as (again,):
        store = group_over(again.address, joins=True)["items"]
        assert_holds(store, last_step)
        with pytest.raises(BehindError):  # steps are known after a restart, too
            store.write(np.array([0]), record_of(1, 1), 1)
        assert store.fetch(np.array([0])).state[0, 0] == last_step[0]


def test_store_on_a_full_disk_refuses_by_name_and_loses_nothing(tmp_path: Path) -> None:
    directory, last_step = tmp_path / "store", {}
    with running(start_store(directory, file_bytes=20_000)) as (process,):
        store = group_over(process.address)["items"]
        message = (
            "no room on disk for a record: File too large in "
            f"{log_files(directory)[1]} in {process.address}; "
            "free some and retry, nothing before the record is lost"
        )

        def write_until_full() -> None:
            for step in range(100):
                last_step.update(dict.fromkeys(write_step(store, step).tolist(), step))

        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            write_until_full()
        assert len(last_step) > 100
        assert_holds(store, last_step)
        process.kill()
    with running(start_store(directory, "--port", process.port)) as (again,):
        store = group_over(again.address, joins=True)["items"]
        assert_holds(store, last_step)
        last_step.update(dict.fromkeys(write_step(store, 101).tolist(), 101))
        assert_holds(store, last_step)


def test_directory_of_a_running_store_is_refused_to_another(tmp_path: Path) -> None:
    with running(start_store(tmp_path / "store")):
        message = (
            "directory is in use by another store process in "
            f"{tmp_path / 'store'}; end it or use another --directory"
        )
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            Shard(tmp_path / "store", sync=False).load()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "of an older epoch": ({"epoch": 0}, SlotMapChangedError, "store has the slot map of epoch 1, "),
    "of a newer epoch": ({"epoch": 2}, SlotMapChangedError, "store has the slot map of epoch 1, "),
    "who knows of more writes": ({"acknowledged": 2}, SlotMapChangedError, "store lost "),
    "of another session": ({"session": "other"}, SchemaError, "session 'other' of the store was "),
}


@pytest.mark.parametrize("caller", REFUSED)
def test_store_serves_no_caller(caller: str, tmp_path: Path) -> None:
    changes, error, message = REFUSED[caller]
    shard, rows = Shard(tmp_path / "store", sync=False), np.arange(9)
    shard.load()
    shard.open(control_of(one_store_map(ALL, 1)))
    request = Request(op="write", session="process", epoch=1, acknowledged=0, train_step=1)
    assert shard.write(request, {"items": rows}, record_of(1, 9)) == 1
    for call in (
        lambda request: shard.fetch(request, {"items": rows}),
        lambda request: shard.write(request, {"items": rows}, record_of(0, 9)),
        lambda request: shard.contents(request, "items", 9),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call(replace(request, **changes))
    assert (shard.fetch(replace(request, acknowledged=1), {"items": rows})[0].block == 1).all()
    shard.close()


@pytest.mark.slow
def test_server_holds_no_more_messages_than_its_budget_while_many_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, in_flight = list[int](), list[int]()

    class Counting(threading.BoundedSemaphore):
        def __enter__(self, blocking: bool = True, timeout: float | None = None) -> bool:
            entered = super().__enter__()
            in_flight.append(1)
            counts.append(len(in_flight))
            return entered

        def __exit__(self, *error: object) -> None:
            in_flight.pop()
            self.release()

    def counting(value: int) -> Counting:
        assert value == 3
        return Counting(value)

    shard = Shard(tmp_path / "store", sync=False)
    shard.load()
    monkeypatch.setattr(server_module, "IN_FLIGHT_BYTES", 3 * 2 * 4096)
    monkeypatch.setattr(server_module, "Semaphore", counting)
    options = StoreOptions(directory=tmp_path, token=TOKEN, message_bytes=4096, delay_sec=0.2)
    server = StoreServer(shard, options)
    try:
        store = group_over(f"grpc://127.0.0.1:{server.port}")["items"]
        rows = np.arange(4096 // LAYOUT.row_bytes)
        with ThreadPoolExecutor(12) as pool:
            steps = range(48)
            list(pool.map(lambda s: store.write(rows + s, record_of(s, len(rows)), 1), steps))
        assert max(counts) == 3
        large, peer = np.arange(500), StoreConnection(f"grpc://127.0.0.1:{server.port}", ACCESS)
        request = Request(op="fetch", session="process", tables=(("items", 500),))
        with pytest.raises(
            SchemaError, match=r"^message must have at most 4096 bytes, got 500 rows"
        ):
            peer.exchange(request, rows_batch(large), LAYOUT)
    finally:
        server.shutdown()
        shard.close()


PARENT = """\
import sys
from pathlib import Path
from presage.trainer.stores.remote.processes import StoreProcesses
with StoreProcesses(2, Path(sys.argv[1])) as stores:
    print(*stores.pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_local_stores_end_with_their_parent(killed: bool, tmp_path: Path, repository: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "stores")],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(is_gone(pid) for pid in pids)
    if killed:
        parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_for(lambda: all(is_gone(pid) for pid in pids))
    assert (tmp_path / "stores" / "token").stat().st_mode & 0o777 == 0o600
