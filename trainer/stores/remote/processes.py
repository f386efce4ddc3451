"""Start, restart, move and stop store processes."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import SchemaError
from trainer.runtime import close_pipes, end_children, is_readable, start_child
from trainer.stores.api import SlotMapChangedError, StoreUnavailableError
from trainer.stores.remote.connection import Access, StoreConnection, unreachable_error
from trainer.stores.remote.migration import MigrationStats
from trainer.stores.remote.ownership import (
    Ranges,
    description_from_json,
    format_ranges,
    home_slots,
    mask_of,
    ranges_of,
)
from trainer.stores.remote.wire import (
    DESCRIBE,
    KILL,
    MOVE,
    RESTART,
    write_token,
)

logger = logging.getLogger(__name__)
_START_SEC = 60.0
_END_SEC = 10.0
_MAX_STARTS = 5
_STARTS_SEC = 60.0
"""A store that dies more than `_MAX_STARTS` times in this period is not restarted."""
_RETRY_SEC = 1.0
TOKEN = "token"


class StoreProcesses:
    """Store processes that run inside the context.

    A process that dies is restarted on its port and directory, where it replays its log; callers
    retry meanwhile. All end when this process does, even if it is killed: each reads a pipe that
    only this process holds.
    """

    def __init__(self, count: int, directory: Path, *, replicas: int = 1) -> None:
        """Start nothing yet.

        Args:
            count: processes.
            directory: for token and logs; its contents are deleted.
            replicas: processes per slot.

        Raises:
            ValueError: `replicas` exceeds `count`.
        """
        if replicas > count:
            raise ValueError(
                f"replicas must be at most the number of stores, got replicas={replicas}, "
                f"stores={count}; start more stores"
            )
        self._count = count
        self._replicas = replicas
        self.directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.addresses: list[str] = []
        self.token = ""

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        with self._lock:
            return [process.pid for process in self._processes]

    def __enter__(self) -> StoreProcesses:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.token = write_token(self.directory / TOKEN)
        try:
            self._processes = [self._start(index, 0) for index in range(self._count)]
            self.addresses = [_read_address(process) for process in self._processes]
        except BaseException:
            self._end()
            raise
        for index in range(self._count):
            watcher = threading.Thread(target=self._watch, args=(index,), daemon=True)
            watcher.start()
            self._watchers.append(watcher)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self, index: int, port: int) -> subprocess.Popen[bytes]:
        slots = format_ranges(home_slots(index, self._count, self._replicas))
        arguments = ["store", "--port", str(port), "--slots", slots, "--end-with-stdin"]
        arguments += ["--directory", str(self.directory / f"store-{index:03d}")]
        arguments += ["--token-file", str(self.directory / TOKEN)]
        # own session: the trainer needs the stores until it has saved after ^C
        return start_child(arguments, answers=True, own_session=True)

    def _watch(self, index: int) -> None:
        """Restart a process when it dies, unless it dies too often."""
        port = int(self.addresses[index].rpartition(":")[2])
        deaths: deque[float] = deque(maxlen=_MAX_STARTS)
        while True:
            status = self._processes[index].wait()
            with self._lock:
                if self._ending.is_set():
                    return
                now = time.monotonic()
                if len(deaths) == _MAX_STARTS and now - deaths[0] < _STARTS_SEC:
                    logger.error(
                        "store not restarted: it died too often address=%s status=%s",
                        self.addresses[index],
                        status,
                    )
                    return
                deaths.append(now)
                logger.warning("store died address=%s status=%s", self.addresses[index], status)
                try:
                    started = self._start(index, port)
                except OSError as error:  # no process or memory available: retried
                    logger.warning("store not restarted yet: %s", error)
                else:
                    close_pipes(self._processes[index])
                    self._processes[index] = started
                    continue
            self._ending.wait(_RETRY_SEC)

    def _end(self) -> None:
        with self._lock:
            self._ending.set()
        end_children(self._processes, _END_SEC)
        for watcher in self._watchers:
            watcher.join()


def _read_address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None, "a store process announces itself on its output"
    line = process.stdout.readline() if is_readable(process.stdout, _START_SEC) else b""
    if not line:
        raise SchemaError(
            f"store process {process.pid} did not start within {_START_SEC:g} s; see its error"
        )
    return str(json.loads(line)["address"])


_MOVE_SEC = 3600.0
_ACTION_SEC = 10.0


def migrate_slots(source: str, target: str, slots: Ranges, access: Access) -> MigrationStats:
    """Move slots of a run from one store to another while it trains; returns when completed.

    Args:
        source: address of the store that serves them.
        target: address of the store that receives them, as seen by the source and the trainers; it
            may have been started with `--slots none`.
        slots: ranges.
        access: to the stores.

    Raises:
        SchemaError: a store refuses or cannot be reached, or no process trains on the stores; the
            source keeps the slots unless its coordinator decides otherwise later.
    """
    body = {"target": target, "slots": slots}
    return MigrationStats(**_call_once(source, MOVE, body, _MOVE_SEC, access)["moved"])


def gather_slots(
    sources: Sequence[str], target: str, slots: Ranges, access: Access
) -> MigrationStats:
    """Move slots to one store from whichever stores serve them.

    For callers that do not know the slot map; may be repeated, because slots that the target serves
    already are not moved.

    Args:
        sources: addresses of stores; the target may be among them.
        target: as in `migrate_slots`.
        slots: ranges; those that no source serves are not moved.
        access: to the stores.

    Returns:
        Totals of all migrations; the maximum of pauses.

    Raises:
        SchemaError: a store refuses or cannot be reached; completed migrations stay.
    """
    requested, migrations = mask_of(slots), list[MigrationStats]()
    for source in dict.fromkeys(sources):
        if source == target:
            continue
        description = _call_once(source, DESCRIBE, {}, _ACTION_SEC, access)
        served = description_from_json(description).served
        if (chosen := requested & served).any():
            migrations.append(migrate_slots(source, target, ranges_of(chosen), access))
    return MigrationStats(
        num_rows=sum(one.num_rows for one in migrations),
        num_rounds=max((one.num_rounds for one in migrations), default=0),
        copy_sec=sum(one.copy_sec for one in migrations),
        pause_sec=max((one.pause_sec for one in migrations), default=0.0),
    )


def kill_store(address: str, access: Access) -> None:
    """Kill a store with SIGKILL; its supervisor restarts it, and no acknowledged write is lost.

    Raises:
        SchemaError: the store refuses or cannot be reached.
    """
    _call_once(address, KILL, {}, _ACTION_SEC, access)


def restart_store(address: str, access: Access) -> None:
    """Restart a store in order, with its command line on its port.

    Raises:
        SchemaError: the store refuses or cannot be reached.
    """
    _call_once(address, RESTART, {}, _ACTION_SEC, access)


def _call_once(
    address: str, action: str, body: dict[str, Any], timeout_sec: float, access: Access
) -> dict[str, Any]:
    with StoreConnection(address, access) as connection:
        try:
            return connection.action_once(action, body, timeout_sec)
        except StoreUnavailableError as error:
            raise unreachable_error(address, timeout_sec, error) from error
        except SlotMapChangedError as error:
            raise SchemaError(
                f"store serves no run: {error}; start training first", file=address
            ) from error
