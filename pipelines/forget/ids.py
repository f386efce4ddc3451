"""Ids from a file, and the samples whose values they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.absent import column_types, named_type
from schemas.columns import flat_list, is_list, one_chunk
from schemas.dataset import Dataset
from schemas.errors import SchemaError, nearest
from schemas.jagged import offsets_of

ROLES = ("kept", "sparse")
"""Roles of the columns that may hold ids; the session key may have any."""


def column_of(dataset: Dataset, name: str | None) -> str:
    """Return the column that ids are values of: the session key when none is named.

    Raises:
        SchemaError: there is no such column, or it holds no ids.
    """
    key = dataset.job.data.session.key
    allowed = [f.name for f in dataset.features.features if f.role in ROLES or f.name == key]
    if name is not None and name not in allowed:
        raise SchemaError(
            f"--column must name the session key, or a kept or sparse column, got {name!r}; "
            f"{nearest(name, allowed)}"
        )
    return name or key


def id_type(dataset: Dataset, column: str) -> pa.DataType:
    """Return the type of the values of a column.

    Raises:
        SchemaError: it holds neither whole numbers nor texts.
    """
    kind = named_type(column_types(dataset)[column])
    value = kind.value_type if is_list(kind) else kind
    if not (pa.types.is_integer(value) or pa.types.is_string(value)):
        raise SchemaError(
            f"ids must be whole numbers or texts, got {column!r} of type {value}; name another "
            "--column"
        )
    return value


def read_ids(path: Path, column: str, kind: pa.DataType) -> pa.Array:
    """Read the ids of a text file, one a line, or of a Parquet file; each once, ascending.

    Args:
        path: text, or Parquet when it ends in `.parquet`: its column of that name, or its only one.
        column: what they are values of.
        kind: a type of whole numbers, or string.

    Raises:
        SchemaError: the file cannot be read, or a value is not of the type.
    """
    values = _parquet_ids(path, column) if path.suffix == ".parquet" else _text_ids(path)
    try:
        found = values.drop_null().cast(kind)
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"ids must be values of {column!r}, which is {kind}, got another one: {error}; "
            "correct the file, or name another --column",
            file=str(path),
        ) from error
    distinct = pc.unique(found)
    return distinct.take(pc.sort_indices(distinct))


def _text_ids(path: Path) -> pa.Array:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"ids must be readable as text, got {error}", file=str(path)) from error
    return pa.array([line.strip() for line in lines if line.strip()], pa.string())


def _parquet_ids(path: Path, column: str) -> pa.Array:
    try:
        names = pq.read_schema(path).names
        wanted = names[0] if len(names) == 1 else column
        if wanted not in names:
            raise SchemaError(
                f"ids must stand in a column {column!r}, got {', '.join(names)}; rename it",
                file=str(path),
            )
        return one_chunk(pq.read_table(path, columns=[wanted])[wanted])
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(
            f"ids must be readable as Parquet, got {error}", file=str(path)
        ) from error


def holding(values: pa.Array, ids: pa.Array) -> NDArray[np.bool_]:
    """Tell which samples hold one of some ids: as their value, or in their list.

    Args:
        values: of a column, one per sample.
        ids: of the type of the values.

    Example:
        >>> holding(pa.array([[1, 2], [], None, [3]], pa.large_list(pa.int64())), pa.array([2, 3]))
        array([ True, False, False,  True])
    """
    if not is_list(values.type):
        return np.asarray(pc.is_in(values, value_set=ids.cast(values.type)).to_numpy(False))
    entries, offsets = flat_list(values)
    hits = pc.is_in(entries, value_set=ids.cast(entries.type))
    before = offsets_of(hits.to_numpy(False))
    return before[offsets[1:]] > before[offsets[:-1]]
