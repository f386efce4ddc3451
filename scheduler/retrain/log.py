"""The log of retrained days in a root, which several hosts may share.

A root may be at an object store, where nothing can be appended to a file: each record is a new
version of a numbered manifest (`schemas.versions`), with the state after it, so that no record has
to be applied again.

One process at a time owns the log. It holds a lease, and each version names the lease of its owner:
another process takes over once that lease has ended, and the earlier owner, if it was only
suspended, cannot append any more. A rollback alone is appended beside the owner, which reads it
before its next record.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from scheduler.controller.codec import decode, encode
from scheduler.retrain.decide import check_rollback
from scheduler.retrain.records import (
    Record,
    RolledBack,
    State,
    apply_record,
    record_to_json,
)
from schemas.errors import SchemaError
from schemas.leases import Lease, live_leases
from schemas.manifest import decode_manifest, encode_manifest
from schemas.storage import Location
from schemas.versions import Version, Versions, backoff, writer_id

EXPIRY_SEC = 60
"""Time after which another host takes over from one that does not renew its lease."""
READ_SEC = 20
"""Time between two checks for a rollback while a stage runs."""
KEPT_VERSIONS = 8
"""Versions that are not emptied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogManifest:
    """One version of the log."""

    owner: str
    """Id of the lease of the process that wrote the version."""
    writer: str
    state: Mapping[str, Any]
    """State of all days, as JSON."""
    record: Mapping[str, Any] | None = None
    """The record that led to it, as JSON; None if the log was only taken over."""
    parent_sha256: str | None = None
    """Hash of the version before it."""
    format: int = 1


class Log:
    """The log, owned by this process, and the state of its records; a context."""

    def __init__(self, root: Location) -> None:
        self._root = root
        self._versions = Versions(root)
        self._lease = Lease(root, f"{socket.gethostname()}:{os.getpid()}", EXPIRY_SEC)
        self._newest: Version | None = None
        self._read_again_at = 0.0  # on the monotonic clock
        self.state = State()

    def __enter__(self) -> Self:
        """Become the owner, and read the records.

        Raises:
            SchemaError: another process is the owner, or the log is damaged.
        """
        self._lease.hold(["."])
        try:
            for _ in backoff():
                if self._try_to_own():
                    return self
        except BaseException:
            self._lease.release()
            raise
        raise AssertionError("`backoff` does not end")

    def __exit__(self, *error: object) -> None:
        self._lease.release()

    def _try_to_own(self) -> bool:
        newest = self._versions.newest()
        manifest = None if newest is None else _decode(self._versions, newest)
        if manifest is not None:
            for lease in live_leases(self._root):
                if lease.id == manifest.owner and not _has_ended(lease.holder):
                    raise SchemaError(
                        f"another retraining uses this root: {lease.holder}; wait for it, or stop "
                        "it",
                        file=str(self._root),
                    )
        return self._commit(newest, _state_of(manifest, self._root))

    def append(self, record: Record) -> bool:
        """Append a record durably, and apply it to the state.

        Returns:
            Whether it was appended; if not, the state has a rollback that was recorded meanwhile,
            and the next record is to be decided again.

        Raises:
            SchemaError: another process has taken over.
        """
        if self._commit(self._newest, apply_record(self.state, record), record):
            return True
        newest = self._versions.newest()
        manifest = None if newest is None else _decode(self._versions, newest)
        if manifest is None or manifest.owner != self._lease.id:
            raise SchemaError(
                "another retraining has taken over this root; repeat the command to see its result",
                file=str(self._root),
            )
        self.state, self._newest = _state_of(manifest, self._root), newest
        return False

    def is_rolled_back(self, run: str | None) -> bool:
        """Return whether a run is rolled back; others' records are read every `READ_SEC`."""
        if run is None or self._newest is None or time.monotonic() < self._read_again_at:
            return False
        self._read_again_at = time.monotonic() + READ_SEC
        if self._versions.newest_number() == self._newest.number:
            return False
        return any(a.run == run and a.rolled_back for a in read_state(self._root).attempts)

    def _commit(self, previous: Version | None, state: State, record: Record | None = None) -> bool:
        version = _commit(self._versions, previous, self._lease.id, state, record)
        if version is None:
            return False
        self._newest, self.state = version, state
        return True


def _has_ended(holder: str) -> bool:
    """Return whether a holder, `host:process id`, is of this host and has ended."""
    host, _, process_id = holder.rpartition(":")
    if host == socket.gethostname():
        try:
            os.kill(int(process_id), 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is of another user
            return False
    return False


def _commit(
    versions: Versions, previous: Version | None, owner: str, state: State, record: Record | None
) -> Version | None:
    """Write the version after `previous`; None if another writer was faster."""
    manifest = LogManifest(
        owner=owner,
        writer=writer_id(),
        state=encode(State, state),
        record=None if record is None else record_to_json(record),
        parent_sha256=None if previous is None else previous.sha256,
    )
    version = versions.commit(previous, encode_manifest(manifest))
    if version is not None and version.number > KEPT_VERSIONS:
        versions.retire([version.number - KEPT_VERSIONS])
    return version


def roll_back(root: Location, run: str, now: float) -> State:
    """Withdraw the promotion of a run, and of all runs that started from it; return the state.

    Nothing is done if it was withdrawn before. The owner of the log goes on: it closes an attempt
    that started from such a run, and starts a new one.

    Raises:
        PlanError: the run is not promoted, or no earlier one is left.
        SchemaError: the log is damaged.
    """
    versions = Versions(root)
    for _ in backoff():
        newest = versions.newest()
        manifest = None if newest is None else _decode(versions, newest)
        state = _state_of(manifest, root)
        if any(a.run == run and a.rolled_back is not None for a in state.attempts):
            return state
        check_rollback(state, run)
        assert manifest is not None, "it has a promoted run"
        record = RolledBack(time_sec=now, run=run)
        state = apply_record(state, record)
        if _commit(versions, newest, manifest.owner, state, record) is not None:
            return state
    raise AssertionError("`backoff` does not end")


def read_state(root: Location) -> State:
    """Return the state of a log; a missing log is empty.

    Raises:
        SchemaError: it is damaged.
    """
    versions = Versions(root)
    newest = versions.newest()
    return _state_of(None if newest is None else _decode(versions, newest), root)


def _decode(versions: Versions, version: Version) -> LogManifest:
    path = versions.path(version.number)
    return decode_manifest(LogManifest, version.data, path, "restore the root")


def _state_of(manifest: LogManifest | None, root: Location) -> State:
    """Return the state of a version; without one, that before the first record."""
    if manifest is None:
        return State()
    try:
        return decode(State, manifest.state)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(
            f"log is of another version: {error!r}; use the release that wrote it", file=str(root)
        ) from error
