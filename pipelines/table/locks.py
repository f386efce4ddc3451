"""Locks on directories, and scratch directories that survive a killed build only until the next.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from schemas.layout import MANIFEST

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
        with (
            suppress(BlockingIOError),
            locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            shutil.rmtree(directory, ignore_errors=True)
