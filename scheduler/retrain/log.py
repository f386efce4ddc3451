"""The log of retrained days in a root, which several hosts may share.

The log is a numbered manifest with all records: a record is appended by committing the next version
(`schemas.versions`). One process at a time owns the log. It holds a lease, and each version names
the lease of its owner: another process takes over once that lease has ended, and the earlier owner,
if it was only suspended, cannot append any more.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from scheduler.files import whole_bytes
from scheduler.retrain.records import (
    Record,
    State,
    apply_record,
    record_from_json,
    record_to_json,
)
from schemas.errors import SchemaError
from schemas.leases import Lease, live_leases
from schemas.manifest import decode_manifest, encode_manifest
from schemas.storage import Location
from schemas.versions import Version, Versions, backoff, writer_id

OLD_LOG = "state.jsonl"
"""File of the records in a root of an earlier release, one JSON object a line."""
EXPIRY_SEC = 60
"""Time after which another host takes over from one that does not renew its lease."""
KEPT_VERSIONS = 8
"""Versions that are not emptied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogManifest:
    """One version of the log."""

    records: tuple[Mapping[str, Any], ...]
    """Records as JSON objects, oldest first."""
    owner: str
    """Id of the lease of the process that wrote the version."""
    writer: str
    """Id of the version."""
    parent_sha256: str | None = None
    """Hash of the version before it."""
    format: int = 1
    """Format version."""


class Log:
    """The log, owned by this process, and the state of its records; a context."""

    def __init__(self, root: Location) -> None:
        """Create a log; the context takes it over."""
        self._root = root
        self._versions = Versions(root)
        self._lease = Lease(root, f"{socket.gethostname()}:{os.getpid()}", EXPIRY_SEC)
        self._newest: Version | None = None
        self._records: tuple[Mapping[str, Any], ...] = ()
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
        """End the lease."""
        self._lease.release()

    def _try_to_own(self) -> bool:
        newest = self._versions.newest()
        manifest = None if newest is None else _decode(self._versions, newest)
        if manifest is not None:
            for lease in live_leases(self._root):
                if lease.id == manifest.owner:
                    raise SchemaError(
                        f"another retraining uses this root: {lease.holder}; wait for it, or stop "
                        "it",
                        file=str(self._root),
                    )
        records = _read_old_log(self._root) if manifest is None else manifest.records
        state = _state_of(records, self._root)
        if not self._commit(newest, records):
            return False
        self.state = state
        return True

    def append(self, record: Record) -> None:
        """Append a record durably, and apply it to the state.

        Raises:
            SchemaError: another process has taken over.
        """
        state = apply_record(self.state, record)
        if not self._commit(self._newest, (*self._records, record_to_json(record))):
            raise SchemaError(
                "another retraining has taken over this root; repeat the command to see its result",
                file=str(self._root),
            )
        self.state = state

    def _commit(self, previous: Version | None, records: tuple[Mapping[str, Any], ...]) -> bool:
        manifest = LogManifest(
            records=records,
            owner=self._lease.id,
            writer=writer_id(),
            parent_sha256=None if previous is None else previous.sha256,
        )
        version = self._versions.commit(previous, encode_manifest(manifest))
        if version is None:
            return False
        self._newest, self._records = version, records
        if version.number > KEPT_VERSIONS:
            self._versions.retire([version.number - KEPT_VERSIONS])
        return True


def read_state(root: Location) -> State:
    """Return the state of a log; a missing log is empty.

    Raises:
        SchemaError: it is damaged.
    """
    versions = Versions(root)
    newest = versions.newest()
    records = _read_old_log(root) if newest is None else _decode(versions, newest).records
    return _state_of(records, root)


def _decode(versions: Versions, version: Version) -> LogManifest:
    path = versions.path(version.number)
    return decode_manifest(LogManifest, version.data, path, "restore the root")


def _read_old_log(root: Location) -> tuple[Mapping[str, Any], ...]:
    """Return the records of a root of an earlier release, without an incomplete last line."""
    path = root / OLD_LOG
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()
    whole, _ = whole_bytes(content)
    try:
        return tuple(json.loads(line) for line in content[:whole].splitlines())
    except ValueError as error:
        raise SchemaError("line is no record; restore the file", file=str(path)) from error


def _state_of(records: tuple[Mapping[str, Any], ...], root: Location) -> State:
    state = State()
    for number, record in enumerate(records, start=1):
        try:
            state = apply_record(state, record_from_json(record))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SchemaError(
                f"record is not valid: {str(record)[:80]!r} ({error!r}); restore the log",
                file=str(root),
                location=str(number),
            ) from error
    return state
