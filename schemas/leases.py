"""Leases: files by which readers keep what they read from being removed.

A lease names directories of a dataset, and expires unless its holder renews it: that of a process
which dies ends by itself. Expiry is measured by the clock of the store that holds the file, so
clocks of hosts may differ. A process that may not write, for instance with read-only credentials,
reads without a lease and relies on the time for which `vacuum` keeps what was replaced.
"""

from __future__ import annotations

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

from schemas.errors import SchemaError
from schemas.storage import Location, StorageError, store_time

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

    After a fork the child has no lease. Errors of renewals are logged: the holder goes on.
    """

    def __init__(self, directory: Location, holder: str, expiry_sec: float = EXPIRY_SEC) -> None:
        """Hold nothing yet; a lease is valid for `expiry_sec` after its last renewal."""
        file = directory / LEASES / f"{uuid.uuid4().hex}.json"
        self._body = _Body(file, holder, expiry_sec)
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, _release, self._body, os.getpid())

    @property
    def id(self) -> str:
        """Name of its file."""
        return self._body.file.name

    def hold(self, directories: Iterable[str]) -> None:
        """Name the directories that must not be removed, instead of those before."""
        self._body.directories = tuple(sorted(set(directories)))
        self._body.try_to_write()
        if self._thread is None:
            self._thread = threading.Thread(target=self._body.renew, daemon=True)
            self._thread.start()

    def release(self) -> None:
        """End the lease."""
        self._finalizer()

    def __enter__(self) -> Lease:
        """Return this lease, which ends with the context."""
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Body:
    """The file of a lease; not the lease itself, which ends when nobody refers to it."""

    def __init__(self, file: Location, holder: str, expiry_sec: float) -> None:
        self.file = file
        self.directories: tuple[str, ...] = ()
        self.ended = threading.Event()
        self._is_written = True  # at the last attempt
        self._holder = holder
        self._expiry_sec = expiry_sec

    def write(self) -> None:
        directories = self.directories
        body = {"holder": self._holder, "directories": directories, "expiry_sec": self._expiry_sec}
        self.file.write_bytes(json.dumps(body).encode())
        if self.ended.is_set():  # it was released meanwhile
            _remove(self.file)
        elif self.directories != directories:  # named meanwhile, and perhaps written before
            self.write()

    def try_to_write(self) -> None:
        try:
            self.write()
            self._is_written = True
        except (StorageError, OSError) as error:
            if self._is_written:
                logger.warning("lease cannot be written file=%s error=%s", self.file, error)
            self._is_written = False

    def renew(self) -> None:
        while not self.ended.wait(self._expiry_sec / RENEWALS):
            self.try_to_write()


def _release(body: _Body, process_id: int) -> None:
    body.ended.set()
    if process_id == os.getpid():  # not in a child that was forked
        _remove(body.file)


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
