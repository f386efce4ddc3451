"""Local files that get their final names when they are complete."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.storage import PARTIAL


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
