"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of files that are being written."""


def partial_path(target: Path) -> Path:
    """Return a name of its own to write a file under; the directory is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Hand out a name of its own to write to, which becomes the target when the body is done.

    A bundle that runs twice, even at once, writes the same bytes twice; the last rename stays.

    Args:
        target: final path; its directory is made.
    """
    partial = partial_path(target)
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(root: Path) -> None:
    """Remove what killed attempts left half-written below a directory."""
    for left in root.rglob(f"*{PARTIAL}"):
        left.unlink(missing_ok=True)
