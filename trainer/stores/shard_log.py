"""The directory of a store process: one log that is appended to, or written anew."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from schemas.errors import SchemaError
from schemas.manifest import sync_directory
from trainer.stores.entries import Entry, read_entries
from trainer.stores.redo_log import RedoLog

_NAME_DIGITS = 8


class ShardLog:
    """The newest whole log is the state; one process at a time has the directory."""

    def __init__(self, directory: Path, *, sync: bool) -> None:
        """Keep what is needed; `load` opens the files.

        Args:
            directory: where the log lies.
            sync: whether each record waits for the device.
        """
        self.directory = directory
        self._sync = sync
        self._generation = 0
        self._log: RedoLog | None = None
        self._held: int | None = None

    def load(self) -> Iterator[Entry]:
        """Take the directory, yield what its newest log says, and open that to be appended to.

        Raises:
            SchemaError: another process has the directory, or its log is damaged.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._held = _hold(self.directory)
        for leftover in self.directory.glob("*.partial"):
            leftover.unlink()
        logs = sorted(self.directory.glob("log-*.bin"))
        if not logs:
            return
        yield from read_entries(logs[-1])
        for old in logs[:-1]:
            old.unlink()
        self._generation = int(logs[-1].stem.removeprefix("log-"))
        self._log = RedoLog(logs[-1], sync=self._sync)

    def append(self, entry: Entry) -> None:
        """Append one record.

        Raises:
            SchemaError: there is no room; the log is as it was.
        """
        assert self._log is not None, "a session is only known with its log"
        self._log.append(entry.parts())

    def flush_to_disk(self) -> None:
        """Wait until all records lie on the device."""
        assert self._log is not None, "a session is only known with its log"
        self._log.flush_to_disk()

    def replace(self, entries: Iterable[Entry]) -> None:
        """Write a new log and put it in the place of the old one.

        Raises:
            SchemaError: there is no room; then the old log stays.
        """
        generation = self._generation + 1
        path = self.directory / f"log-{generation:0{_NAME_DIGITS}}.bin"
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        log = RedoLog(partial, sync=False)
        try:
            for entry in entries:
                log.append(entry.parts())
            log.flush_to_disk()
            partial.rename(path)
        except (SchemaError, OSError):
            partial.unlink(missing_ok=True)
            raise
        finally:
            log.close()
        sync_directory(self.directory)
        if self._log is not None:
            self._log.close()
        self._log = RedoLog(path, sync=self._sync)
        for old in self.directory.glob("log-*.bin"):
            if old != path:
                old.unlink()
        self._generation = generation

    def close(self) -> None:
        """Close the log and let the directory go."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _hold(directory: Path) -> int:
    held = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise SchemaError(
            "directory must be of one store, got one that another process holds; "
            "end it or use another --directory",
            file=str(directory),
        ) from error
    return held
