"""Real store processes, for tests."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.trainer.elastic.membership import Membership, ReplicaOptions
from presage.trainer.stores.remote.client import RemoteStore, open_remote_store
from presage.trainer.stores.remote.connection import Access
from presage.trainer.stores.remote.ownership import (
    Ranges,
    ShardControl,
    SlotMap,
    mask_of,
    slot_map_of,
)
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    Store,
    TableLayout,
    WriteBack,
    concat_records,
    empty_records,
)
from tests.trainer.processes import children_of, suspend

TOKEN = "a-token-of-tests"
ACCESS = Access(token=TOKEN, timeout_sec=120.0)
"""A store that is started again loads its libraries first, on however busy a machine."""
LAYOUT = TableLayout(table="items", dim=4, state_width=1, dtype="float32", seed=3)
S = TypeVar("S", bound=Store)


@dataclass(slots=True)
class StoreProcess:
    """One that runs."""

    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def kill(self) -> None:
        """End it as a lack of memory would."""
        self.process.kill()
        self.process.wait()


def start_store(
    directory: Path, *options: str, token: str = TOKEN, file_bytes: int | None = None
) -> StoreProcess:
    """Start `python -m presage.trainer store` and wait for its announcement.

    Args:
        directory: of the store; the token file lies beside it.
        options: more of the command line.
        token: what callers must present.
        file_bytes: limit of the size of its files.
    """
    token_file = directory.with_suffix(".token")
    token_file.parent.mkdir(parents=True, exist_ok=True)
    token_file.write_text(f"{token}\n")

    arguments = ["--directory", str(directory), "--token-file", str(token_file), *options]
    process, line = _announced(arguments)
    for _ in range(30):  # its port may have been given to a connection of another process
        if line or "--port" not in options:
            break
        time.sleep(1.0)
        process, line = _announced(arguments)
    assert line, "a store announces itself"
    if file_bytes is not None:  # from outside: a hook after fork crashes where threads run
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    return StoreProcess(process, json.loads(line)["address"])


def _announced(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Start a store and return what it announces, nothing where it ends at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "store", *arguments],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        process.stdout.close()
    return process, line


@contextmanager
def running(*stores: StoreProcess) -> Iterator[tuple[StoreProcess, ...]]:
    """End processes after a test, by their ids, and what was opened meanwhile."""
    try:
        yield stores
    finally:
        while _opened:
            _opened.pop().close()
        for store in stores:
            store.process.kill()
            store.process.wait()
            if store.process.stdout is not None:
                store.process.stdout.close()


def stores_of(run: Path) -> dict[int, int]:
    """Return the number of each store of a run that is there, and its process."""
    found: dict[int, int] = {}
    for pid, command in children_of(os.getpid()).items():
        for argument in command:
            if argument.startswith(f"{run / 'store'}/store-"):
                found[int(argument[-3:])] = pid
    return found


def kill_stores(run: Path, *numbers: int, forget: bool = False) -> None:
    """Kill stores, with their directories if the node dies."""
    there = stores_of(run)
    for number in numbers:
        directory = run / "store" / f"store-{number:03d}"
        if number in there:
            kill_store(there[number], directory if forget else None)
        elif forget:
            shutil.rmtree(directory, ignore_errors=True)


def kill_store(pid: int, directory: Path | None = None) -> None:
    """Kill a store, with its directory: that is gone before another store is started in it."""
    if directory is not None:
        suspend(pid)
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def log_files(directory: Path) -> list[Path]:
    """Return the files of a store in the order in which they are read."""
    return [*sorted(directory.glob("base-*.bin")), *sorted(directory.glob("log-*.bin"))]


def log_bytes(directory: Path) -> int:
    """Return the bytes of the files of a store."""
    return sum(path.stat().st_size for path in log_files(directory))


class TableOf(Generic[S]):
    """One table of a store, which is read and written without the others."""

    def __init__(self, store: S, layout: TableLayout = LAYOUT) -> None:
        self.all_tables, self.layout = store, layout

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        return self.all_tables.fetch(0, {self.layout.table: rows})[self.layout.table]

    def write(self, rows: NDArray[np.int64], records: Records, train_step: int = -1) -> None:
        self.all_tables.write(train_step, {self.layout.table: WriteBack(rows, records)})

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        return self.all_tables.contents(self.layout.table)


class HasContents(Protocol):
    @property
    def layout(self) -> TableLayout: ...

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]: ...


def group_over(
    *addresses: str,
    layouts: Mapping[str, TableLayout] | None = None,
    access: Access = ACCESS,
    owner: str = "run",
    session: str = "process",
    joins: bool = False,
) -> dict[str, TableOf[RemoteStore]]:
    """Open stores of one table, or of `layouts`."""
    tables = layouts or {LAYOUT.table: LAYOUT}
    store = open_remote_store(
        addresses, access, tables, owner=None if joins else owner, session=session
    )
    _opened.append(store)
    return {table: TableOf(store, layout) for table, layout in tables.items()}


_opened: list[RemoteStore] = []


def one_store_map(
    slots: Ranges, epoch: int = 0, session: str = "process", moving: Ranges = ()
) -> SlotMap:
    """Return a slot map with some slots of a store `here`, and the others of another one."""
    owned = {"here": mask_of(slots), "there": ~mask_of(slots)}
    return slot_map_of(session, epoch, owned, moving)


def control_of(slot_map: SlotMap, layouts: Mapping[str, TableLayout] | None = None) -> ShardControl:
    """Return what opens the store `here`, of one table or of `layouts`."""
    tables = layouts or {LAYOUT.table: LAYOUT}
    return ShardControl(owner="run", layouts=tables, slot_map=slot_map, address="here")


def member_of(
    lighthouse: str, name: str, token: str, heartbeat_sec: float, wait_sec: float
) -> Membership:
    """Return a member of the quorums of a lighthouse."""
    access = Access(token=token, timeout_sec=wait_sec)
    return Membership(
        ReplicaOptions(
            number=0, name=name, lighthouse=lighthouse, access=access, heartbeat_sec=heartbeat_sec
        )
    )


def record_of(value: float, count: int) -> Records:
    """Return records of `LAYOUT` of which every number is the same."""
    state = np.full((count, 1), value, np.float32)
    return as_records(np.repeat(state, 4, axis=1), state)


def as_records(values: np.ndarray, state: np.ndarray) -> Records:
    """Return records of (n, dim) values and (n, state_width) state."""
    return Records(np.concatenate([values, state], axis=1), values.shape[1])


def whole(table: HasContents) -> RowsAndRecords:
    """Return all rows of a table at once."""
    parts = [(np.empty(0, np.int64), empty_records(table.layout, 0)), *table.contents()]
    return np.concatenate([rows for rows, _ in parts]), concat_records([r for _, r in parts])


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
