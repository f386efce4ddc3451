"""Statistics of accesses for sharding planners, as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import from_json

# Statistics of tables for TorchRec's sharding planner: a JSON file written by `pipelines`.
#
# Keys are those of TorchRec's `ParameterConstraints` if it has them, with one entry per feature of
# the table in the order of the job. A bag is the lookup of one unique tuple, as in the trainer's
# batches: `pooling_factors` are values per bag and `num_poolings` bags per sample.

HINTS_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHints:
    """Lookup statistics of one table."""

    feature_names: tuple[str, ...]
    pooling_factors: tuple[float, ...]
    """Mean number of values of a bag, by feature."""
    num_poolings: tuple[float, ...]
    """Bags per sample, by feature; below 1 if samples share them."""
    batch_sizes: tuple[int, ...]
    """Samples of a batch, by feature."""
    num_rows: int
    num_unique_rows: int
    """Distinct rows of the whole run."""
    unique_rows_per_step: float
    """Mean number of distinct rows of a step."""
    hot_rows: tuple[tuple[float, float], ...]
    """(fraction of the distinct rows, fraction of all accesses), hottest rows first."""
    lru_misses: tuple[tuple[float, float], ...]
    """(fraction of the table's rows that a cache holds, fraction of repeated accesses that an LRU
    cache of this size misses), ascending, from (0, 1)."""


def write_hints(path: Path | Location, tables: Mapping[str, TableHints]) -> None:
    """Write hints, sorted by table."""
    hints = {name: asdict(tables[name]) for name in sorted(tables)}
    body = {"format": HINTS_FORMAT, "tables": hints}
    replace_bytes(path, f"{json.dumps(body, indent=1)}\n".encode())


def read_hints(path: Path) -> Mapping[str, TableHints]:
    """Read hints; raise SchemaError if the file is invalid."""
    try:
        body: Any = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != HINTS_FORMAT:
            raise ValueError(f"format must be {HINTS_FORMAT}, got {body['format']!r}")
        return from_json(Mapping[str, TableHints], body["tables"])
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"file does not hold sharding hints: {error}; write it with "
            "`python -m presage.pipelines oracle DATASET --hints FILE`",
            file=str(path),
        ) from error
