"""The plan's state in a checkpoint: a resumed run reads what one that never stopped would have.

Of each table 48 bytes for each row that the cache may hold: which rows are cached, where
they lie, when they were used and will be again. Their values are the checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.jagged import Array
from schemas.plan_slots import UNUSED, Keyframe
from trainer.arrays import from_bytes

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


def arrays_of_cached(cached: Mapping[str, CachedRows]) -> dict[str, Array]:
    """Return the state of all tables' plans as named arrays."""
    found: dict[str, Array] = {}
    for table, each in cached.items():
        for field in fields(each.keyframe):
            value = getattr(each.keyframe, field.name)
            found[f"{table}/{field.name}"] = np.asarray(value, np.int64)
        found[f"{table}/{_ROWS}"] = each.rows
    return found


def load_cached(path: Path, tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the state of the plan of each table, none where the run had no planned cache.

    Args:
        path: file of a checkpoint, which may not be there.
        tables: all tables of the run.

    Raises:
        SchemaError: the file is no state of a plan.
    """
    if not path.is_file():
        return {}
    arrays = from_bytes(path.read_bytes(), file=str(path))
    try:
        return cached_of(arrays, tables)
    except (KeyError, TypeError) as error:
        raise SchemaError(
            "plan of a checkpoint must be arrays by table and name, got other content; "
            "remove this checkpoint to use the one before it",
            file=str(path),
        ) from error


def cached_of(arrays: Mapping[str, Array], tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return what `arrays_of_cached` was given.

    Raises:
        KeyError: an array is missing.
    """
    return {table: _cached_rows(table, arrays) for table in tables}


def _cached_rows(table: str, arrays: Mapping[str, Array]) -> CachedRows:
    found: dict[str, Any] = {f.name: arrays[f"{table}/{f.name}"] for f in fields(Keyframe)}
    for name in ("train_step", "num_slots"):
        found[name] = int(found[name])
    return CachedRows(Keyframe(**found), arrays[f"{table}/{_ROWS}"])
