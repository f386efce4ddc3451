"""The log of retrained days in a root, which several hosts may share.

A root may be at an object store, where nothing can be appended to a file: each record is a new
version of a numbered manifest (`presage.schemas.storage.versions`). Like the log of the scheduler,
it is a snapshot and the records since. There is a new one after SNAPSHOT_RECORDS versions; those
before the last but one are emptied. An owner begins with a version without a record.

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
from dataclasses import dataclass, field
from typing import Any, Self

from presage.scheduler.controller.log import decode, encode
from presage.scheduler.retrain.decide import check_rollback
from presage.scheduler.retrain.records import (
    Record,
    RetrainState,
    RolledBack,
    apply_record,
    record_from_json,
    record_to_json,
)
from presage.schemas.dataset.manifest import decode_manifest, encode_manifest
from presage.schemas.errors import SchemaError
from presage.schemas.storage.leases import Lease, live_leases
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Version, Versions, backoff, writer_id

EXPIRY_SEC = 60
"""Time after which another host takes over from one that does not renew its lease."""
READ_SEC = 20
"""Time between two checks for a rollback while a stage runs."""
SNAPSHOT_RECORDS = 64
"""Versions after which the state is written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogManifest:
    """One version of the log."""

    owner: str
    """Id of the lease of the process that wrote the version."""
    writer: str
    state: Mapping[str, Any] | None = None
    """State of all days, as JSON; versions before it are not needed."""
    record: Mapping[str, Any] | None = None
    """What happened since the version before, as JSON; None if there is a state, or a new owner."""
    snapshot: int
    """Number of the newest earlier version with a state; 0 without one."""
    parent_sha256: str | None = None
    """Hash of the version before it."""
    format: int = 1


@dataclass(frozen=True, slots=True)
class _Position:
    """The newest version of a log, and the state after it.

    Attributes:
        version: None before the first one.
        owner: id of the owner's lease.
        snapshots: numbers of the last two versions with a state, 0 for none.
    """

    version: Version | None = None
    owner: str = ""
    snapshots: tuple[int, int] = (0, 0)
    state: RetrainState = field(default_factory=RetrainState)


class RetrainLog:
    """The log, owned by this process, and the state of its records; a context."""

    def __init__(self, root: Location) -> None:
        self._root = root
        self._versions = Versions(root)
        self._lease = Lease(root, f"{socket.gethostname()}:{os.getpid()}", EXPIRY_SEC)
        self._at = _Position()
        self._read_again_at = 0.0  # on the monotonic clock

    @property
    def state(self) -> RetrainState:
        """The state after the last record."""
        return self._at.state

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
        at = _read(self._versions)
        for lease in live_leases(self._root):
            if lease.id == at.owner and not _has_ended(lease.holder):
                raise SchemaError(
                    f"another retraining uses this root: {lease.holder}; wait for it, or stop it",
                    file=str(self._root),
                )
        return self._commit(at, None)

    def append(self, record: Record) -> bool:
        """Append a record durably, and apply it to the state.

        Returns:
            Whether it was appended; if not, the state has a rollback that was recorded meanwhile,
            and the next record is to be decided again.

        Raises:
            SchemaError: another process has taken over.
        """
        if self._commit(self._at, record):
            return True
        self._at = _read(self._versions)
        if self._at.owner != self._lease.id:
            raise SchemaError(
                "another retraining has taken over this root; repeat the command to see its result",
                file=str(self._root),
            )
        return False

    def is_rolled_back(self, run: str | None) -> bool:
        """Return whether a run is rolled back; others' records are read every `READ_SEC`."""
        newest = self._at.version
        if run is None or newest is None or time.monotonic() < self._read_again_at:
            return False
        self._read_again_at = time.monotonic() + READ_SEC
        if self._versions.newest_number() == newest.number:
            return False
        return any(a.run == run and a.rolled_back for a in read_state(self._root).attempts)

    def _commit(self, at: _Position, record: Record | None) -> bool:
        after = _commit(self._versions, at, self._lease.id, record)
        if after is None:
            return False
        self._at = after
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
    versions: Versions, at: _Position, owner: str, record: Record | None
) -> _Position | None:
    """Write the next version, None as the record of a new owner; None if another was faster."""
    number = 1 if at.version is None else at.version.number + 1
    state = at.state if record is None else apply_record(at.state, record)
    is_snapshot = at.version is None or number > at.snapshots[1] + SNAPSHOT_RECORDS
    manifest = LogManifest(
        owner=owner,
        writer=writer_id(),
        state=encode(RetrainState, state) if is_snapshot else None,
        record=None if is_snapshot or record is None else record_to_json(record),
        snapshot=at.snapshots[1],
        parent_sha256=None if at.version is None else at.version.sha256,
    )
    version = versions.commit(at.version, encode_manifest(manifest))
    if version is None:
        return None
    if not is_snapshot:
        return _Position(version, owner, at.snapshots, state)
    versions.retire(range(max(1, at.snapshots[0]), at.snapshots[1]))
    return _Position(version, owner, (at.snapshots[1], number), state)


def roll_back(root: Location, run: str, now: float) -> RetrainState:
    """Withdraw the promotion of a run, and of all runs that started from it; return the state.

    Nothing is done if it was withdrawn before. The owner of the log continues: it closes an attempt
    that started from such a run, and starts a new one.

    Raises:
        PlanError: the run is not promoted, or no earlier one is left.
        SchemaError: the log is damaged.
    """
    versions = Versions(root)
    for _ in backoff():
        at = _read(versions)
        if any(a.run == run and a.rolled_back is not None for a in at.state.attempts):
            return at.state
        check_rollback(at.state, run)
        after = _commit(versions, at, at.owner, RolledBack(time_sec=now, run=run))
        if after is not None:
            return after.state
    raise AssertionError("`backoff` does not end")


def read_state(root: Location) -> RetrainState:
    """Return the state of a log; a missing log is empty.

    Raises:
        SchemaError: it is damaged.
    """
    return _read(Versions(root)).state


def _read(versions: Versions) -> _Position:
    """Return the end of a log: its newest snapshot, and the records since."""
    newest = version = versions.newest()
    records: list[Mapping[str, Any]] = []
    owner = ""
    while version is not None:
        path = versions.path(version.number)
        manifest = decode_manifest(LogManifest, version.data, path, "restore the root")
        owner = owner or manifest.owner
        try:
            if manifest.state is not None:
                state = decode(RetrainState, manifest.state)
                for body in reversed(records):
                    state = apply_record(state, record_from_json(body))
                return _Position(newest, owner, (manifest.snapshot, version.number), state)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SchemaError(
                f"log is of another version: {error!r}; use the release that wrote it",
                file=str(versions.directory),
            ) from error
        if manifest.record is not None:
            records.append(manifest.record)
        version = versions.read(version.number - 1)
    if newest is None:
        return _Position()
    if versions.newest_number() != newest.number:  # emptied since
        return _read(versions)
    raise SchemaError("log has no snapshot; restore the root", file=str(versions.directory))
