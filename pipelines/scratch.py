"""Local files that get their final names when they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.local_files import PARTIAL, partial_path
from schemas.storage import Location


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


def remove_partial(root: Location | Path) -> None:
    """Remove the incomplete files of killed attempts below a directory; a store has none."""
    local = Location.parse(root).local
    for path in [] if local is None else local.rglob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)
