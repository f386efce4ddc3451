"""Leases: files by which readers keep what they read from being removed.

A lease names directories of a dataset, and expires unless its holder renews it: that of a process
which dies ends by itself. Expiry is measured by the clock of the store that holds the file, so
clocks of hosts may differ. A process that may not write, for instance with read-only credentials,
reads without a lease and relies on the time for which `vacuum` keeps what was replaced.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from weakref import WeakKeyDictionary

from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location, StorageError
from presage.schemas.storage.probes import store_time

LEASES = "_leases"
"""Directory of leases."""
EXPIRY_SEC = 600
"""Time after its last renewal for which a lease is valid."""
RENEWALS = 4
"""Renewals within this time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease that is valid: who holds it, and names of directories that must not be removed."""

    id: str
    holder: str
    directories: frozenset[str]


class Lease:
    """A lease that a thread renews until it is released or the process ends.

    After a fork the child has no lease. A failed renewal is logged and tried again.
    """

    def __init__(self, directory: Location, holder: str, expiry_sec: float = EXPIRY_SEC) -> None:
        """Hold nothing yet; a lease is valid for `expiry_sec` after its last renewal."""
        self._file = directory / LEASES / f"{uuid.uuid4().hex}.json"
        self._directories: tuple[str, ...] = ()
        self._holder, self._expiry_sec = holder, expiry_sec
        self._is_written = True  # at the last attempt
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._finalizer = weakref.finalize(self, _release, self._file, self._ended, os.getpid())

    @property
    def id(self) -> str:
        """Name of its file."""
        return self._file.name

    def hold(self, directories: Iterable[str]) -> None:
        """Name the directories that must not be removed, instead of those before."""
        self._directories = tuple(sorted(set(directories)))
        self.renew()
        if self._thread is None:
            renewal = weakref.ref(self), self._ended, self._expiry_sec / RENEWALS
            self._thread = threading.Thread(target=_renew, args=renewal, daemon=True)
            _renewals[self._thread] = self._ended
            self._thread.start()

    def release(self) -> None:
        """End the lease."""
        self._finalizer()

    def __enter__(self) -> Lease:
        """Return this lease, which ends with the context."""
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def renew(self) -> None:
        """Write the file again; the first of several errors is logged."""
        try:
            self._write()
            self._is_written = True
        except (StorageError, OSError) as error:
            if self._is_written:
                logger.warning("lease cannot be written file=%s error=%s", self._file, error)
            self._is_written = False

    def _write(self) -> None:
        directories = self._directories
        body = {"holder": self._holder, "directories": directories, "expiry_sec": self._expiry_sec}
        self._file.write_bytes(json.dumps(body).encode())
        if self._ended.is_set():  # it was released meanwhile
            _remove(self._file)
        elif self._directories != directories:  # named meanwhile, and perhaps written before
            self._write()


def _renew(lease: weakref.ref[Lease], ended: threading.Event, pause_sec: float) -> None:
    while not ended.wait(pause_sec):
        if (current := lease()) is not None:
            current.renew()
        del current  # a lease ends with its last reference


_renewals: WeakKeyDictionary[threading.Thread, threading.Event] = WeakKeyDictionary()
"""Threads of this process with their `ended`."""


@atexit.register
def _end_renewals() -> None:
    for thread, ended in [*_renewals.items()]:
        ended.set()
        thread.join()


def _release(file: Location, ended: threading.Event, process_id: int) -> None:
    ended.set()
    if process_id == os.getpid():  # not in a child that was forked
        _remove(file)


def _remove(file: Location) -> None:
    with suppress(StorageError, OSError):
        file.parent.remove([file.name])
        file.parent.prune()


def live_leases(directory: Location, now: datetime | None = None) -> list[LeaseRecord]:
    """Return the leases that have not expired, by the clock of the store, which is read if None.

    Raises:
        SchemaError: a lease is not readable.
    """
    entries = (directory / LEASES).entries()
    if entries and now is None:
        now = store_time(directory)
    leases: list[LeaseRecord] = []
    for entry in entries:
        try:
            record, expiry_sec = _parse(directory / LEASES / entry.path)
        except FileNotFoundError:  # it was released meanwhile
            continue
        assert now is not None, "read above"
        if now <= entry.modified + timedelta(seconds=expiry_sec):
            leases.append(record)
    return leases


def _parse(path: Location) -> tuple[LeaseRecord, float]:
    data = path.read_bytes()
    try:
        body = json.loads(data)
        names = frozenset(str(name) for name in body["directories"])
        return LeaseRecord(path.name, str(body["holder"]), names), float(body["expiry_sec"])
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"lease is not readable: {error}; remove the file if no process uses the dataset",
            file=str(path),
        ) from error


def remove_expired(directory: Location, now: datetime) -> None:
    """Remove leases that expired at least a day ago."""
    old = [
        entry.path
        for entry in (directory / LEASES).entries()
        if entry.modified < now - timedelta(days=1, seconds=EXPIRY_SEC)
    ]
    (directory / LEASES).remove(old)
