"""Files and directories that get their final names when complete, and locks on directories.

Locks belong to open files, so the system releases those of a process that dies. On a filesystem
without locks, commits stay atomic, but two concurrent builds of different jobs into one directory
are not detected.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from schemas.layout import MANIFEST
from schemas.manifest import DatasetManifest, read_dataset

PARTIAL = ".partial"
"""Suffix of incomplete files."""


def partial_path(target: Path) -> Path:
    """Return a unique temporary path next to a file; create the directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to the target after the body.

    A Beam bundle that runs twice, even concurrently, writes the same bytes; the last rename wins.
    """
    partial = partial_path(target)
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(root: Path) -> None:
    """Remove the incomplete files of killed attempts below a directory."""
    for path in root.rglob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)


logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def locked(directory: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock on an existing directory while the body runs; nothing is written into it.

    Args:
        directory: the directory.
        kind: `LOCK_EX` or `LOCK_SH`, as of `fcntl.flock`; with `LOCK_NB` without waiting.

    Raises:
        BlockingIOError: with `LOCK_NB`, if another process holds it, or there are no locks.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, kind, directory)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, kind: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if kind & fcntl.LOCK_NB:
            raise BlockingIOError from error
        logger.warning("filesystem has no locks directory=%s", directory)


@contextmanager
def locked_root(dataset: Path) -> Iterator[DatasetManifest]:
    """Hold the lock of a dataset while the body runs; yield its root manifest.

    Raises:
        SchemaError: there is no dataset.
    """
    read_dataset(dataset)  # the lock needs an existing directory
    with locked(dataset):
        yield read_dataset(dataset)


@contextmanager
def scratch_directory(
    directory: Path, pattern: str, finished: Callable[[], Iterable[Path]] = tuple
) -> Iterator[None]:
    """Create a directory to build in; remove it after the body.

    Scratch directories of killed builds are removed first. After an OSError or an interrupt, a
    directory with a manifest, so with complete content, is kept for the next attempt.

    Args:
        directory: a new path.
        pattern: glob pattern of the scratch directories beside it.
        finished: returns complete scratch directories of the same content; the first one that is
            not locked is reused.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with locked(directory.parent):
            resume(directory, finished())
            remove_stale(directory.parent, pattern, keep=directory)
            directory.mkdir(exist_ok=True)
            stack.enter_context(locked(directory, fcntl.LOCK_SH))
        try:
            yield
        except (OSError, KeyboardInterrupt):
            if not (directory / MANIFEST).exists():
                shutil.rmtree(directory, ignore_errors=True)
            raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)


def resume(directory: Path, candidates: Iterable[Path]) -> None:
    """Rename the first candidate that is not locked to `directory`, if there is one."""
    for candidate in candidates:
        try:
            with locked(candidate, fcntl.LOCK_EX | fcntl.LOCK_NB):
                candidate.rename(directory)
                return
        except OSError:  # it is locked, or was removed
            continue


def remove_stale(parent: Path, pattern: str, keep: Path | None = None) -> None:
    """Remove the scratch directories that are not locked, except `keep`."""
    for directory in sorted(p for p in parent.glob(pattern) if p.is_dir() and p != keep):
        remove_unlocked(directory)


def remove_unlocked(directory: Path) -> int | None:
    """Remove a directory and return its bytes; return None if it is locked, or gone."""
    with (
        suppress(BlockingIOError, FileNotFoundError),
        locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB),
    ):
        num_bytes = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        shutil.rmtree(directory, ignore_errors=True)
        return num_bytes
    return None
