"""Store processes on this machine: started, started again when they die, ended by pid."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from schemas.errors import SchemaError
from schemas.paths import SINGLE_WRITER
from trainer.child import close_pipes, end_children, start_child
from trainer.readable import is_readable
from trainer.stores.claims import text_of
from trainer.stores.token import write_token
from trainer.stores.wire import home_of_store

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
        slots = text_of(home_of_store(index, self._count, self._replicas))
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
