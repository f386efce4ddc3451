"""Builds that have failed: discard their directories, or continue those that were killed.

A local build with an exchange in files (`exchange.py`) can be continued: the tasks that are done
have stored their results.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelines import executor
from pipelines.context import BuildContext, BuildRequest, local_options
from pipelines.exchange import can_continue
from pipelines.shuffle import SHUFFLE
from pipelines.table.commit import discard
from pipelines.table.segment import work_directory
from pipelines.workers import WorkerDiedError
from schemas.config.job import DataConfig
from schemas.errors import SchemaError
from schemas.layout import MANIFEST, SEGMENTS
from schemas.leases import Lease, live_leases
from schemas.storage import Location, StorageError


def continued_directory(
    request: BuildRequest, context: BuildContext, key: str, lease: Lease
) -> Location | None:
    """Return the directory of a local build of the same segment that was killed, and hold it."""
    if local_options(request.beam_args) is None:
        return None
    leased = _leased_names(request.dataset, lease)
    for name, path in _local_paths(request, f"{key}-*"):
        scratch = path / SHUFFLE
        if name in leased or not can_continue(scratch):
            continue
        if not can_continue(scratch, executor.identity_of(context)):
            continue
        lease.hold([name, *vocabulary_leases(context.data)])
        if name not in _leased_names(request.dataset, lease):  # by an attempt at the same time
            request.progress(f"a build that was killed is continued: {path}")
            return request.dataset / SEGMENTS / name
    return None


def _local_paths(request: BuildRequest, pattern: str) -> list[tuple[str, Path]]:
    """Return (name of the segment's directory, local path in which it is or was built)."""
    local = request.dataset.local
    if local is not None:
        return [(path.name, path) for path in sorted((local / SEGMENTS).glob(pattern))]
    if request.work is None:
        return []
    prefix = work_directory(request.work, "").name
    paths = sorted(request.work.glob(f"{prefix}{pattern}"))
    return [(path.name.removeprefix(prefix), path) for path in paths]


def _leased_names(dataset: Location, own: Lease) -> set[str]:
    """Return the names that other leases hold."""
    leases = (lease for lease in live_leases(dataset) if lease.id != own.id)
    return {name for lease in leases for name in lease.directories}


@contextmanager
def discarded_on_error(request: BuildRequest, directory: Location) -> Iterator[None]:
    """Discard a directory if the body raises an error, unless it is committed.

    After an OSError or an interrupt, or if a worker died, the next attempt continues with a
    complete directory, or one that has an exchange.
    """
    try:
        yield
    except (OSError, KeyboardInterrupt, StorageError, WorkerDiedError):
        with suppress(OSError, StorageError):
            paths = [path for _, path in _local_paths(request, directory.name)]
            is_kept = any(can_continue(path / SHUFFLE) for path in paths)
            if not is_kept and (directory / MANIFEST).stat() is None:
                _discard(request, directory)
        raise
    except BaseException:
        _discard(request, directory)
        raise


def _discard(request: BuildRequest, directory: Location) -> None:
    if request.work is not None:
        shutil.rmtree(work_directory(request.work, directory.name), ignore_errors=True)
    discard(request.dataset, directory, request.attempt)


VOCABULARIES_LEASE = "vocabularies"
"""Name in the lease of a build that may extend vocabularies."""


def vocabulary_leases(data: DataConfig) -> tuple[str, ...]:
    """Return what a lease names, besides directories, if a job has vocabularies."""
    return (VOCABULARIES_LEASE,) if data.vocabularies else ()


def refuse_extended_vocabularies(dataset: Location, own: str, data: DataConfig) -> None:
    """Raise SchemaError if another build may extend the vocabularies of a dataset meanwhile.

    The commit would refuse the slower one of both.
    """
    if not data.vocabularies:
        return
    for lease in live_leases(dataset):
        if VOCABULARIES_LEASE in lease.directories and own not in lease.directories:
            raise SchemaError(
                f"vocabularies are being extended by another build, {lease.holder}; run this build "
                "when it has ended",
                file=str(dataset),
            )
