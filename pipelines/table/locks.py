"""Locks on a dataset's folder, and leftovers of killed builds."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from schemas.layout import MANIFEST

# One writer at a time where two may meet, and no trace of builds that were killed.
#
# Locks belong to open files, so the system drops those of a process that dies. A filesystem
# without locks is used without them: commits stay atomic, and only two builds of different jobs
# into one directory, at once, are not told apart.

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def locked(directory: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a directory while the body runs; wait for others that hold it.

    Args:
        directory: an existing directory; nothing is written into it.
        kind: `LOCK_EX` alone, `LOCK_SH` with others; with `LOCK_NB` it is now or never.

    Raises:
        BlockingIOError: with `LOCK_NB`, when others hold it.
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
    """Make a directory to build in, gone at the end, or when another build begins after a kill.

    What is finished, so has a manifest, stays when the system fails, for the next attempt.

    Args:
        directory: a new path.
        pattern: names beside it that only workplaces have.
        finished: returns workplaces of the same content; one that nobody holds is taken over.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with locked(directory.parent):
            resume(directory, finished())
            remove_stale(directory.parent, pattern, spared=directory)
            directory.mkdir(exist_ok=True)
            held.enter_context(locked(directory, fcntl.LOCK_SH))
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
    """Rename the first of some directories that nobody holds; do nothing if there is none."""
    for candidate in candidates:
        try:
            with locked(candidate, fcntl.LOCK_EX | fcntl.LOCK_NB):
                candidate.rename(directory)
                return
        except OSError:  # somebody works there, or it has just gone
            continue


def remove_stale(parent: Path, pattern: str, spared: Path | None = None) -> None:
    """Remove the workplaces that nobody holds, but for one."""
    for left in sorted(p for p in parent.glob(pattern) if p.is_dir() and p != spared):
        try:
            with locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            continue  # somebody works there
