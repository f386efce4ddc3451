"""Start, restart and stop store processes, and request moves of slots."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import from_json
from presage.trainer.runtime import close_pipes, end_children, is_readable, start_child
from presage.trainer.stores.bucket_files import clear_directory
from presage.trainer.stores.remote.connection import Access, StoreConnection, unreachable_error
from presage.trainer.stores.remote.ownership import MoveRequest, Ranges, StoreDescription
from presage.trainer.stores.remote.wire import DESCRIBE, MOVE, check_address, write_token
from presage.trainer.stores.store import StoreUnavailableError

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

    def __init__(self, count: int, directory: Path) -> None:
        """Start nothing yet; the context deletes the contents of the directory."""
        self._count = count
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
        check_address("127.0.0.1", 0)
        clear_directory(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
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
        arguments = ["store", "--port", str(port), "--end-with-stdin"]
        arguments += ["--directory", str(self.directory / f"store-{index:03d}")]
        arguments += ["--token-file", str(self.directory / TOKEN)]
        return start_child(arguments, answers=True)

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


def migrate_slots(
    sources: Sequence[str], target: str, slots: Ranges, access: Access
) -> dict[str, Any]:
    """Move slots of a run to another store; training waits meanwhile. It may be repeated.

    Args:
        sources: addresses of stores, of whose slots those in `slots` are moved.
        target: address of the store that receives them, as seen by the trainers; it need not
            serve the run yet.
        slots: ranges.
        access: to the stores.

    Returns:
        `num_slots`, `num_rows` and `pause_sec`.

    Raises:
        SchemaError: a store refuses or cannot be reached, or no process trains on the stores.
    """
    request = MoveRequest(sources=tuple(sources), target=target, slots=slots)
    with ExitStack() as stack:
        by_epoch: list[tuple[int, StoreConnection]] = []
        for source in sources:
            connection = stack.enter_context(StoreConnection(source, access))
            description = from_json(StoreDescription, connection.action(DESCRIBE, {}))
            by_epoch.append((description.epoch, connection))
        _, connection = max(by_epoch, key=lambda each: each[0])
        try:
            return connection.action_once(MOVE, asdict(request), _MOVE_SEC)["moved"]
        except StoreUnavailableError as error:
            raise unreachable_error(connection.address, _MOVE_SEC, error) from error
