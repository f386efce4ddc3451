"""What a store can do, and its clock."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime

from presage.schemas.errors import StorageError
from presage.schemas.storage.location import MANIFESTS, Location


@contextmanager
def _probe(directory: Location) -> Generator[Location]:
    """Yield the location of a new file, which is no manifest; remove it after the body."""
    probe = directory / MANIFESTS / f"probe-{uuid.uuid4().hex}"
    try:
        yield probe
    except BaseException:
        with suppress(StorageError):
            probe.parent.remove([probe.name])
        raise
    probe.parent.remove([probe.name])


def check_conditional_put(directory: Location) -> None:
    """Check that a store honours the condition of a conditional put.

    Raises:
        StorageError: two puts of one name, each on condition that it is absent, both succeeded.
    """
    with _probe(directory) as probe:
        first, second = probe.create(b"first"), probe.create(b"second")
    if not first or second:
        raise StorageError(
            "store ignores the condition of a conditional put, so a concurrent commit could be "
            "lost; use a store that supports it, see docs/storage.md",
            file=directory.url,
        )


def store_time(directory: Location) -> datetime:
    """Return the time by the clock of the store, to the second, as `Entry.modified` has it."""
    with _probe(directory) as probe:
        probe.write_bytes(b"time")
        entry = probe.stat()
    if entry is None:
        raise StorageError("store has lost a file just written; use another store", file=probe.url)
    return entry.modified
