"""Do the declared look-ups fit samples and side tables? Asked before the work, of no rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from pipelines.samples.keys import common_type
from pipelines.samples.sides import taken_columns
from pipelines.samples.steps import tables_in
from pipelines.sources.rows import ORIGIN
from schemas.errors import SchemaError, nearest
from schemas.job import DataConfig
from schemas.manifest import InputFile

BROADCAST_BYTES = 256 << 20
"""Side tables whose files have at most so many bytes are at hand in every worker."""


def broadcast_sides(data: DataConfig, listing: Sequence[InputFile]) -> frozenset[str]:
    """Return the side tables that every worker holds; the others meet the samples by key.

    Raises:
        SchemaError: the job's SQL reads a larger one.
    """
    sizes = {s: sum(f.num_bytes for f in listing if f.source == s) for s in data.sides}
    small = frozenset(name for name, size in sizes.items() if size <= BROADCAST_BYTES)
    for name in sorted(tables_in(data) & set(sizes) - small):
        raise SchemaError(
            f"side {name!r} must be at most {BROADCAST_BYTES} bytes to be a table in SQL, got "
            f"{sizes[name]}; look it up by data.samples.joins"
        )
    return small


def key_types(
    data: DataConfig, samples: pa.Schema, sides: Mapping[str, pa.Schema]
) -> dict[str, pa.DataType]:
    """Return the common type of each side table's key and of the columns that look it up.

    Args:
        data: the job's data section.
        samples: what SQL yields.
        sides: columns of each side table.

    Raises:
        SchemaError: a column is missing, a type does not fit, or a new column has a name twice.
    """
    found: dict[str, pa.DataType] = {}
    for name, config in data.sides.items():
        schema = sides[name]
        _check_column(f"data.sides.{name}.key", config.key, schema)
        if config.time is not None:
            _check_time(f"data.sides.{name}.time", config.time, schema)
        kinds = {name: schema.field(config.key).type}
        for index, join in enumerate(data.samples.joins):
            if join.side == name:
                key = join.key or config.key
                _check_column(f"data.samples.joins[{index}].key", key, samples)
                kinds[f"the samples' {key}"] = samples.field(key).type
        found[name] = common_type(kinds, f"data.sides.{name}.key")
    taken = list(samples.names)
    for index, join in enumerate(data.samples.joins):
        config, place = data.sides[join.side], f"data.samples.joins[{index}]"
        if config.time is None and join.as_of is not None:
            raise SchemaError(
                f"{place}.as_of must be for a side table with time, got {join.side!r} without; "
                f"declare data.sides.{join.side}.time"
            )
        if config.time is not None:
            _check_time(f"{place}.as_of", join.as_of or data.session.time, samples)
        for new, column in taken_columns(join, config, sides[join.side].names).items():
            _check_column(f"{place}.columns", column, sides[join.side])
            if new in taken:
                raise SchemaError(
                    f"{place}.columns must be new to the samples, got {new!r}; give it another "
                    f"name: columns: {{{join.side}_{new}: {column}}}"
                )
            taken.append(new)
    return found


def _check_column(place: str, name: str, schema: pa.Schema) -> None:
    if name not in schema.names:
        known = [n for n in schema.names if n != ORIGIN]
        raise SchemaError(f"{place} must be a column, got {name!r}; {nearest(name, known)}")


def _check_time(place: str, name: str, schema: pa.Schema) -> None:
    _check_column(place, name, schema)
    if not pa.types.is_timestamp(schema.field(name).type):
        raise SchemaError(
            f"{place} must be a timestamp, got {schema.field(name).type} for {name!r}; "
            "declare it as one"
        )
