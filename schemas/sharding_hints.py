"""Statistics of tables for TorchRec's sharding planner: a JSON file written by `pipelines`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from schemas.errors import SchemaError, suggest_name

# What a planner of table sharding asks of the data: a JSON file that `pipelines` writes.
#
# Keys are those of TorchRec's `ParameterConstraints` where it has them, one entry per feature of
# the table in the job's order. A bag is what one unique tuple looks up, as the trainer's batches
# have it, so `pooling_factors` are values per bag and `num_poolings` bags per sample.

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHints:
    """What is known of the look-ups of one table."""

    feature_names: tuple[str, ...]
    """Features that look into it."""
    pooling_factors: tuple[float, ...]
    """Mean values of a bag, by feature."""
    num_poolings: tuple[float, ...]
    """Bags per sample, by feature; below 1 where samples share them."""
    batch_sizes: tuple[int, ...]
    """Samples of a batch, by feature."""
    num_rows: int
    """Rows of the table."""
    num_unique_rows: int
    """Distinct rows that the whole run looks up."""
    unique_rows_per_step: float
    """Mean distinct rows of a step."""
    hot_rows: tuple[tuple[float, float], ...]
    """Shares (of the distinct rows, of all accesses): the hottest rows first."""
    lru_misses: tuple[tuple[float, float], ...]
    """(share of the table's rows that a cache holds, share of repeated accesses that a least
    recently used cache of this size misses), ascending, from (0, 1) on."""


def write_hints(path: Path, tables: Mapping[str, TableHints]) -> None:
    """Write hints, sorted by table."""
    body = {"format": FORMAT, "tables": {name: asdict(tables[name]) for name in sorted(tables)}}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_hints(path: Path) -> dict[str, TableHints]:
    """Read hints.

    Raises:
        SchemaError: the file holds something else; the message names the table and the key.
    """
    try:
        body: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SchemaError(f"file must hold JSON, got {error}; write it anew", file=str(path)) from (
            error
        )
    if not isinstance(body, dict) or body.get("format") != FORMAT or "tables" not in body:
        raise SchemaError(
            f"file must be hints of format {FORMAT}, got others; write it by "
            "`python -m pipelines oracle DATASET --hints FILE`",
            file=str(path),
        )
    return {name: _table(name, found, path) for name, found in body["tables"].items()}


def _table(name: str, found: Mapping[str, Any], path: Path) -> TableHints:
    known = [f.name for f in fields(TableHints)]
    for key in known:
        if key not in found:
            raise SchemaError(
                "hints must have every key, got none; write them anew",
                file=str(path),
                place=f"{name}.{key}",
            )
    for key in found:
        if key not in known:
            raise SchemaError(
                f"hints must have known keys, got {key!r}; {suggest_name(key, known)}",
                file=str(path),
                place=name,
            )
    return TableHints(**{key: _tuples(value) for key, value in found.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
