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
from types import TracebackType
from typing import Any

from schemas.errors import SchemaError
from schemas.paths import SINGLE_WRITER
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
    read_authorities,
    read_token,
    write_token,
)

logger = logging.getLogger(__name__)
_START_SEC = 60.0
_END_SEC = 10.0
_MAX_STARTS = 5
_STARTS_SEC = 60.0
"""A store that dies oftener than `_MAX_STARTS` times in so long is not started again."""
_RETRY_SEC = 1.0
TOKEN = "token"


class LocalStores:
    """As many store processes as wanted; a context in which they run.

    One that dies is started again on its port and directory, where it replays
    its log; callers repeat their calls meanwhile. All end when this process
    does, however that happens: each reads a pipe that only this process holds.
    """

    def __init__(self, count: int, directory: Path, *, replicas: int = 1) -> None:
        """Remember what to start.

        Args:
            count: processes.
            directory: for token and logs; those of an earlier run are removed.
            replicas: processes that serve each slot.

        Raises:
            ValueError: there are fewer processes than copies.
        """
        check_replicas(replicas, count)
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
        """Of the processes that run now."""
        with self._lock:
            return [process.pid for process in self._processes]

    def __enter__(self) -> LocalStores:
        """Start all, and wait until they answer."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.token = write_token(self.directory / TOKEN)
        try:
            self._processes = [self._start(index, 0) for index in range(self._count)]
            self.addresses = [_announced(process) for process in self._processes]
        except BaseException:
            self._end()
            raise
        for index in range(self._count):
            watcher = threading.Thread(target=self._watch, args=(index,), daemon=True)
            watcher.start()
            self._watchers.append(watcher)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all, and wait for them."""
        self._end()

    def _start(self, index: int, port: int) -> subprocess.Popen[bytes]:
        slots = format_ranges(home_slots(index, self._count, self._replicas))
        arguments = ["store", "--port", str(port), "--slots", slots, "--end-with-stdin"]
        arguments += ["--directory", str(self.directory / f"store-{index:03d}")]
        arguments += ["--token-file", str(self.directory / TOKEN)]
        arguments += [SINGLE_WRITER]  # stores write below the run, which the trainer has checked
        # ^C is for the trainer, which needs them until it has saved
        return start_child(arguments, answers=True, own_session=True)

    def _watch(self, index: int) -> None:
        """Start a process again whenever it dies, unless it does so all the time."""
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
                        "store not started again: it died too often address=%s status=%s",
                        self.addresses[index],
                        status,
                    )
                    return
                deaths.append(now)
                logger.warning("store died address=%s status=%s", self.addresses[index], status)
                try:
                    started = self._start(index, port)
                except OSError as error:  # no process or memory to be had: tried again
                    logger.warning("store not started again yet: %s", error)
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


def check_replicas(replicas: int, count: int) -> None:
    """Refuse copies for which there are no stores.

    Raises:
        ValueError: there are fewer stores than copies.
    """
    if replicas > count:
        raise ValueError(
            f"replicas must be at most the number of stores, got replicas={replicas}, "
            f"stores={count}; start more stores"
        )


def _announced(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None, "a store process announces itself on its output"
    line = process.stdout.readline() if is_readable(process.stdout, _START_SEC) else b""
    if not line:
        raise SchemaError(
            f"store process {process.pid} must announce its address within {_START_SEC:g} s, "
            "got nothing; see its error above"
        )
    return str(json.loads(line)["address"])


_MOVE_SEC = 3600.0
_TELL_SEC = 10.0


def migrate_slots(
    giver: str,
    taker: str,
    slots: Ranges,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> MigrationStats:
    """Move slots of a run from one store to another while it trains; returns when they are there.

    Args:
        giver: address of the store that serves them.
        taker: address of the store that takes them, as the giver and trainers reach it; it may have
            been started with `--slots none`.
        slots: ranges.
        token_file: of the stores.
        trusted: PEM file of their authorities; the system's when None.
        certificate_name: that their certificates bear; the host of each address when None.

    Raises:
        SchemaError: a store refuses or cannot be reached; the giver has the slots still, or will
            as soon as it hears of the taker.
    """
    return _moved(giver, taker, slots, _access(token_file, trusted, certificate_name))


def gather_slots(
    givers: Sequence[str],
    taker: str,
    slots: Ranges,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> MigrationStats:
    """Move those of some slots that stores serve to one that does not, whoever of them it is.

    Who does not know for sure who serves what asks for it so, and again: what is there already
    is left alone.

    Args:
        givers: addresses of stores; the taker may be among them.
        taker: as in `migrate_slots`.
        slots: ranges; those that none of the givers serves stay where they are.
        token_file: as in `migrate_slots`.
        trusted: as in `migrate_slots`.
        certificate_name: as in `migrate_slots`.

    Returns:
        All moves together; their longest pause.

    Raises:
        SchemaError: a store refuses or cannot be reached; moves up to then stay.
    """
    access = _access(token_file, trusted, certificate_name)
    wanted, moves = mask_of(slots), list[MigrationStats]()
    for giver in dict.fromkeys(givers):
        if giver == taker:
            continue
        serves = description_from_json(
            _asked(giver, DESCRIBE, {}, _TELL_SEC, access)
        ).ownership.served
        if (mine := wanted & serves).any():
            moves.append(_moved(giver, taker, ranges_of(mine), access))
    return MigrationStats(
        num_rows=sum(one.num_rows for one in moves),
        num_rounds=max((one.num_rounds for one in moves), default=0),
        copy_sec=sum(one.copy_sec for one in moves),
        pause_sec=max((one.pause_sec for one in moves), default=0.0),
    )


def kill_store(
    address: str,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> None:
    """End a store as `kill -9` would; who started it starts it again, and nothing is lost.

    Raises:
        SchemaError: it refuses or cannot be reached.
    """
    access = _access(token_file, trusted, certificate_name)
    _asked(address, KILL, {}, _TELL_SEC, access)


def restart_store(
    address: str,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> None:
    """End a store in order and start it anew in its place, with its command line, on its port.

    Raises:
        SchemaError: it refuses or cannot be reached.
    """
    access = _access(token_file, trusted, certificate_name)
    _asked(address, RESTART, {}, _TELL_SEC, access)


def _moved(giver: str, taker: str, slots: Ranges, access: Access) -> MigrationStats:
    body = {"to": taker, "slots": slots}
    return MigrationStats(**_asked(giver, MOVE, body, _MOVE_SEC, access)["moved"])


def _access(token_file: Path, trusted: Path | None, certificate_name: str | None) -> Access:
    return Access(
        token=read_token(token_file),
        certificates=read_authorities(trusted),
        certificate_name=certificate_name,
    )


def _asked(
    address: str, action: str, body: dict[str, Any], within_sec: float, access: Access
) -> dict[str, Any]:
    with StoreConnection(address, access) as peer:
        try:
            return peer.action_once(action, body, within_sec)
        except StoreUnavailableError as error:
            raise unreachable_error(address, within_sec, error) from error
        except SlotMapChangedError as error:
            raise SchemaError(
                f"store must serve a run, got: {error}; begin training", file=address
            ) from error
