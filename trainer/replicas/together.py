"""What all replicas of a run must know alike: a file in the folder that they are started with."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import SchemaError
from schemas.events import TOGETHER
from schemas.horizon import Known
from schemas.manifest import canonical_json, replace_bytes
from trainer.replicas.stores import SharedStores
from trainer.stores.failures import StoreLostError

TOKEN = "token"
"""File of the run with what its replicas present to each other."""
ROWS_LOST = "rows-lost"
"""File of the run with the lighthouse of the attempt of which rows are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """One attempt at a run."""

    job: str
    """Job file."""
    dataset: str
    """Dataset folder."""
    lighthouse: str
    """`http://host:port`."""
    heartbeat_sec: float
    """Time without a sign of life after which a replica is dead."""
    embedding: str
    """Where rows lie, as `--embedding` says."""
    expanded: bool
    """Undo the deduplication."""
    steps: int | None
    """Stop before this step."""
    follow: bool
    """Whether segments may come."""
    known: Known
    """What all know of the dataset when they begin."""
    retained_bytes: int
    """Most bytes of rows that the writer lets wait before they go to the stores."""
    copy_bytes: int
    """Of the largest copy of a checkpoint; 0 where none is taken beside training."""
    shared: SharedStores | None
    """Stores of the run; None where every replica has all rows in memory."""


def write_together(run: Path, together: Together) -> None:
    """Let replicas know."""
    replace_bytes(run / TOGETHER, canonical_json(asdict(together)).encode())


def read_together(run: Path) -> Together:
    """Return what `write_together` wrote.

    Raises:
        SchemaError: nobody leads the run, or the file is of another release.
    """
    path = run / TOGETHER
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        shared = body["shared"]
        if shared is not None:
            shared = SharedStores(**{**shared, "addresses": tuple(shared["addresses"])})
        return Together(**{**body, "known": Known(**body["known"]), "shared": shared})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SchemaError(
            f"run must be one that replicas are asked to join, got {error}; begin it with "
            "python -m trainer train --replicas 0",
            file=str(path),
        ) from error


@contextmanager
def telling_lost_rows(run: Path, lighthouse: str) -> Generator[None]:
    """Let whoever leads an attempt know when it cannot go on, since rows are lost.

    Args:
        run: run folder.
        lighthouse: of the attempt.
    """
    try:
        yield
    except StoreLostError:
        replace_bytes(run / ROWS_LOST, lighthouse.encode())
        raise


def rows_are_lost(run: Path, lighthouse: str) -> bool:
    """Tell whether a replica of an attempt has found that it cannot go on."""
    try:
        return (run / ROWS_LOST).read_text(encoding="utf-8") == lighthouse
    except FileNotFoundError:
        return False
