"""The plan's state in a checkpoint: a resumed run reads what one that never stopped would have.

A file for each table, 48 bytes for each row that the cache may hold: which rows are cached, where
they lie, when they were used and will be again. Their values are the checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.plan_slots import UNUSED, Keyframe

KEYFRAME = "plan.npz"
_ROWS = "rows"


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The cache of one table before a step.

    Attributes:
        keyframe: state of the plan.
        rows: (n,) int64, the table's row of each of the keyframe's numbers.
    """

    keyframe: Keyframe
    rows: NDArray[np.int64]

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which rows lie in the cache; the others are read for a step to come."""
        return self.keyframe.last_use != UNUSED


def save_cached(folder: Path, cached: CachedRows) -> None:
    """Write the state of a table's plan into the table's folder of a checkpoint."""
    frame = cached.keyframe
    arrays = {field.name: getattr(frame, field.name) for field in fields(frame)}
    np.savez(folder / KEYFRAME, allow_pickle=False, **arrays, **{_ROWS: cached.rows})


def load_cached(checkpoint: Path, tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the state of the plan of each table, none where the run had no planned cache.

    Args:
        checkpoint: folder whose files have been verified.
        tables: all tables of the run.

    Raises:
        SchemaError: a file is no state of a plan.
    """
    paths = {table: checkpoint / table / KEYFRAME for table in tables}
    if not all(path.is_file() for path in paths.values()):
        return {}
    return {table: _load(path) for table, path in paths.items()}


def _load(path: Path) -> CachedRows:
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays: dict[str, Any] = {f.name: found[f.name] for f in fields(Keyframe)}
            rows = found[_ROWS]
    except (KeyError, ValueError, BadZipFile) as error:
        raise SchemaError(
            "plan of a checkpoint must be arrays by name, got other content; "
            "remove this checkpoint to use the one before it",
            file=str(path),
        ) from error
    for name in ("train_step", "num_slots"):
        arrays[name] = int(arrays[name])
    return CachedRows(Keyframe(**arrays), rows)
