"""One writer at a time where two may meet, and no trace of builds that were killed.

Locks belong to open files, so the system drops those of a process that dies. A
filesystem without locks is used without them: commits stay atomic, and only
two builds of different jobs into one directory, at once, are not told apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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
def workplace(directory: Path, pattern: str) -> Iterator[None]:
    """Make a directory to build in, gone at the end, or when another build begins after a kill.

    Args:
        directory: a new path.
        pattern: names beside it that only workplaces have.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with locked(directory.parent):
            sweep(directory.parent, pattern)
            directory.mkdir()
            held.enter_context(locked(directory, fcntl.LOCK_SH))
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        yield


def sweep(parent: Path, pattern: str) -> None:
    """Remove the workplaces that nobody holds."""
    for left in sorted(p for p in parent.glob(pattern) if p.is_dir()):
        try:
            with locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            continue  # somebody works there
