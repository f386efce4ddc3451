"""Holding a folder of the dataset while it is read: pipelines remove none that is held."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from schemas.errors import SchemaError
from schemas.layout import MANIFEST


class Held:
    """The folders that are read now.

    A lock belongs to the open folder, so the system drops it with the process; it goes with this
    object, too. Where a filesystem has no locks nothing is held: an index then lasts until the
    second segment after it.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._handles: list[int] = []
        weakref.finalize(self, _close, self._handles)

    def __call__(self, *folders: Path) -> None:
        """Hold these folders, and those before no longer.

        Raises:
            SchemaError: a folder is gone, or goes as this is asked.
        """
        before = self._handles.copy()
        self._handles.clear()
        try:
            for folder in folders:
                self._handles.append(_held(folder))
        finally:
            _close(before)


def _close(handles: list[int]) -> None:
    while handles:
        os.close(handles.pop())


def _held(folder: Path) -> int:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SchemaError(
            "folder must be there while it is read, got none; open the dataset again",
            file=str(folder),
        ) from error
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)  # waits for one who removes it at this moment
    if not (folder / MANIFEST).is_file():
        os.close(handle)
        raise SchemaError(
            "folder must be there while it is read, got one that is being removed; open the "
            "dataset again",
            file=str(folder),
        )
    return handle
