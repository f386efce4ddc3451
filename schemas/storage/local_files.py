"""Files on a local disk or NFS: atomic and durable writes, exclusive creation, listing."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from presage.schemas.errors import StorageError

PARTIAL = ".partial"
"""Suffix of incomplete files."""
_OF_PARTIAL = re.compile(rf"\..*\.[0-9a-f]{{32}}{re.escape(PARTIAL)}")


@contextmanager
def partial_file(target: Path) -> Generator[Path]:
    """Yield a path beside a file that no other process uses; remove it after the body."""
    _make_directory(target.parent)
    partial = target.with_name(f".{target.name[:60]}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents; flush the name of each that is new."""
    while not directory.is_dir():
        _make_directory(directory.parent)
        with suppress(FileNotFoundError):  # its parent was empty, and was removed
            directory.mkdir(exist_ok=True)
            sync_directory(directory.parent)


def write_flushed(path: Path, data: bytes) -> None:
    """Write and flush a file; its empty directory may be removed meanwhile, and is made again."""
    while True:
        with suppress(FileNotFoundError), path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return
        _make_directory(path.parent)


def link_new(target: Path, data: bytes) -> str | None:
    """Create a complete file under a name; return None, or why the name is taken.

    Raises:
        StorageError: the filesystem has no hard links.
    """
    with partial_file(target) as partial:
        write_flushed(partial, data)
        try:
            os.link(partial, target)
        except FileExistsError as error:
            return str(error)
        except OSError as error:
            raise StorageError(
                f"file cannot be created: {error.strerror}; commits need a filesystem with hard "
                "links",
                file=str(target),
            ) from error
    sync_directory(target.parent)
    return None


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to disk, such as renamed files."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_incomplete(
    directory: Path, is_ours: Callable[[str], bool], before: float = math.inf
) -> None:
    """Delete incomplete files below a directory, and directories without files, as `remove_all`.

    Only those that were last changed `before` this time, in seconds since 1970.
    """
    folders = [
        (Path(folder), _is_older(Path(folder), before), names)
        for folder, _, names in os.walk(directory, topdown=False)
    ]
    for folder, is_older, names in folders:
        for path in (folder / name for name in names if name.endswith(PARTIAL)):
            is_known = _OF_PARTIAL.fullmatch(path.name) or is_ours(
                path.relative_to(directory).as_posix()
            )
            if is_known and _is_older(path, before):
                path.unlink(missing_ok=True)
        if is_older:
            with suppress(OSError):  # it has files
                folder.rmdir()


def _is_older(path: Path, before: float) -> bool:
    with suppress(FileNotFoundError):  # another process has removed it
        return path.stat().st_mtime <= before
    return False


def list_files(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of each complete file below a directory; none if it does not exist.

    Files that another process removes meanwhile are left out.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = directory / name
        if path.is_dir():
            yield from list_files(path, f"{prefix}{name}/")
        elif not name.endswith(PARTIAL):
            with suppress(FileNotFoundError):
                yield f"{prefix}{name}", path.stat()
