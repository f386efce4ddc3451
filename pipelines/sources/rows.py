"""Raw rows as Arrow tables, each with its origin, and how values become the declared types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sources.rejects import (
    FOUND_SCHEMA,
    Reject,
    as_table,
    file_reject,
    python_rows,
    row_texts,
)
from schemas.arrays import is_list, one_chunk
from schemas.errors import nearest
from schemas.manifest import InputFile

_WORDS = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string(),
    "binary": pa.binary(), "date": pa.date32(), "timestamp": pa.timestamp("us"),
    "timestamp_s": pa.timestamp("s"), "timestamp_ms": pa.timestamp("ms"),
    "timestamp_us": pa.timestamp("us"), "timestamp_ns": pa.timestamp("ns"),
}  # fmt: skip


def arrow_type(text: str) -> pa.DataType:
    """Return the Arrow type that a word such as `int64` or `list<int64>` names.

    Raises:
        ValueError: no type has that name.

    Example:
        >>> arrow_type("list<int64>")
        LargeListType(large_list<item: int64>)
        >>> arrow_type("struct<id: int64, tags: list<string>>")
        StructType(struct<id: int64, tags: large_list<item: string>>)
    """
    word = text.strip()
    if word.startswith("list<") and word.endswith(">"):
        return pa.large_list(arrow_type(word[5:-1]))
    if word.startswith("struct<") and word.endswith(">"):
        fields = [part.partition(":") for part in _parts(word[7:-1])]
        return pa.struct([pa.field(name.strip(), arrow_type(kind)) for name, _, kind in fields])
    if word not in _WORDS:
        raise ValueError(f"type must be known, got {text!r}; {nearest(word, _WORDS)}")
    return _WORDS[word]


def word_of(kind: pa.DataType) -> str | None:
    """Return the word that names a type, None when there is none.

    Example:
        >>> word_of(arrow_type("struct<id: int64, tags: list<string>>"))
        'struct<id: int64, tags: list<string>>'
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = word_of(kind.value_type)
        return inner and f"list<{inner}>"
    if pa.types.is_struct(kind):
        fields = [(field.name, word_of(field.type)) for field in kind]
        known = all(word for _, word in fields)
        return f"struct<{', '.join(f'{n}: {word}' for n, word in fields)}>" if known else None
    return next((word for word, known in _WORDS.items() if known == kind), None)


def type_text(kind: pa.DataType) -> str:
    """Return the word that names a type, or what Arrow calls one without."""
    return word_of(kind) or str(kind)


def _parts(text: str) -> list[str]:
    """Split at the commas that stand in no brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character == "<") - (character == ">")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def arrow_schema(columns: dict[str, str]) -> pa.Schema:
    """Return the schema of declared columns.

    Raises:
        ValueError: a type has no such name.
    """
    return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in columns.items()])


# Raw rows as Arrow tables, each with its origin, and how values become the declared types.
#
# A row's origin is the position of its file in the sorted listing and its row in that file, in
# one integer. Origins break ties in the order of samples and lead a reject back to its row.

ORIGIN = "_origin"
"""Column added to every raw row: file index << POSITION_BITS | row in the file."""

POSITION_BITS = 40

CHUNK_ROWS = 1 << 16
"""Most raw rows that pass through SQL at once."""

PART_BYTES = 32 << 20
"""Bytes of one part of a file that can be cut anywhere."""


_WRONG_TYPE_ROWS = 1000
"""Rows from which on a column of a part without one good value is of another type."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """One unit of reading.

    Attributes:
        source: name of the source.
        path: relative to the input directory.
        file_index: position of the file in the sorted listing.
        row_group: Parquet row group, or None.
        first_row: position in the file of the part's first row.
        offset: byte at which the part begins, where it is a range of bytes.
        num_bytes: bytes of that range; None to the end.
    """

    source: str
    path: str
    file_index: int
    row_group: int | None = None
    first_row: int = 0
    offset: int = 0
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows of one part, or the reasons why there are none.

    Attributes:
        table: rows.
        rejects: what cannot be read.
        bad_rows: rows that cannot become the declared types (`FOUND_SCHEMA`).
    """

    table: pa.Table | None
    rejects: tuple[Reject, ...] = ()
    bad_rows: pa.Table | None = None

    def all_rejects(self) -> Iterator[pa.Table]:
        """Yield rejects and bad rows as tables of `FOUND_SCHEMA`."""
        if self.rejects:
            yield as_table(self.rejects)
        if self.bad_rows is not None:
            yield self.bad_rows


Cut = tuple[list[FilePart], list[Reject]]
"""Parts of a file that can be read apart, and what of it cannot be read."""


def with_origins(table: pa.Table, file_index: int, positions: np.ndarray) -> pa.Table:
    """Add the origins of rows.

    Args:
        table: rows of one file.
        file_index: position of the file in the listing.
        positions: (num_rows,) int64, rows in the file.
    """
    return table.append_column(ORIGIN, pa.array(positions + (file_index << POSITION_BITS)))


def place_of(origin: int, listing: Sequence[InputFile]) -> tuple[str, int]:
    """Return the file and the row of an origin."""
    index, position = origin >> POSITION_BITS, origin & ((1 << POSITION_BITS) - 1)
    return listing[index].path, position


def places_of_rows(
    origins: pa.ChunkedArray, listing: Sequence[InputFile]
) -> tuple[pa.Array, pa.Array]:
    """Return the files and the rows in them of origins."""
    numbers = origins.to_numpy()
    paths = pa.array([file.path for file in listing], pa.string())
    files = paths.take(pa.array(numbers >> POSITION_BITS))
    return files, pa.array(numbers & ((1 << POSITION_BITS) - 1))


def typed_chunks(
    table: pa.Table, part: FilePart, schema: pa.Schema, words: Mapping[str, str]
) -> Iterator[RawRows]:
    """Yield rows as the declared types, in chunks; a value that does not fit rejects its row.

    Args:
        table: rows of a part with their origins, as the file has them.
        part: where they are from.
        schema: the types that they must have.
        words: column to its type as the user knows it.
    """
    rejects: list[pa.Table] = []
    for name, text in words.items():
        wanted = schema.field(name).type
        if table.schema.field(name).type == wanted:
            continue
        castable = _castable(table[name].type, wanted)
        bad = list(_not_castable(table[name], wanted)) if castable else []
        narrow = pa.types.is_integer(wanted) and pa.types.is_integer(table[name].type)
        all_bad = len(bad) >= _WRONG_TYPE_ROWS and len(bad) == len(table[name].drop_null())
        if not castable or (all_bad and not narrow):
            reason = f"column {name!r} must be {text}, got {table[name].type}; declare or repair it"
            bad_rows = pa.concat_tables(rejects) if rejects else None
            yield RawRows(None, (file_reject(part.path, reason),), bad_rows)
            return
        if bad:
            rejects.append(_bad_values(table.take(pa.array(bad)), part, name, wanted, text))
            table = table.take(pa.array(np.delete(np.arange(table.num_rows), bad)))
        cast = table[name].cast(wanted)
        table = table.set_column(table.column_names.index(name), name, cast)
    if rejects:
        yield RawRows(None, bad_rows=pa.concat_tables(rejects))
    yield from in_chunks(table)


def _castable(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Tell whether any value of a type can become one of another."""
    try:
        pa.array([], kind).cast(wanted)
    except pa.ArrowNotImplementedError:
        return False
    return True


def in_chunks(table: pa.Table) -> Iterator[RawRows]:
    """Yield rows in chunks that are small enough for SQL."""
    for start in range(0, table.num_rows, CHUNK_ROWS):
        yield RawRows(table.slice(start, CHUNK_ROWS))


def _not_castable(column: pa.ChunkedArray, wanted: pa.DataType, first: int = 0) -> Iterator[int]:
    """Yield the rows that cannot become the wanted type, ascending, found by bisection."""
    try:
        column.cast(wanted)
    except pa.ArrowException:
        if len(column) == 1:
            yield first
            return
        rows = np.arange(len(column))  # taken, since a slice of lists is cast with all their values
        for part in np.array_split(rows, 2):
            yield from _not_castable(column.take(pa.array(part)), wanted, first + int(part[0]))


def _misfit(value: pa.Array, wanted: pa.DataType, path: str) -> tuple[str, pa.DataType, pa.Array]:
    """Return the innermost field of a value that cannot become its type, and that type.

    Args:
        value: (1,), which cannot become the wanted type; no slice, since lists are cast with all
            values of what they are sliced from.
        wanted: the type.
        path: of the value in its row.
    """
    if pa.types.is_struct(wanted) and pa.types.is_struct(value.type):
        for field in wanted:
            if value.type.get_field_index(field.name) >= 0:
                inner = pc.struct_field(value, field.name)
                if next(_not_castable(pa.chunked_array([inner]), field.type), None) is not None:
                    return _misfit(inner, field.type, f"{path}.{field.name}")
    elif is_list(wanted) and is_list(value.type):
        inner = pc.list_flatten(value)
        row = next(_not_castable(pa.chunked_array([inner]), wanted.value_type), None)
        if row is not None:
            return _misfit(inner.take(pa.array([row])), wanted.value_type, f"{path}[]")
    return path, wanted, value


def _bad_values(
    rows: pa.Table, part: FilePart, name: str, wanted: pa.DataType, text: str
) -> pa.Table:
    """Return rows whose value of a column does not fit as rejects."""
    if pa.types.is_nested(wanted):
        column = one_chunk(rows[name])
        each = (column.take(pa.array([row])) for row in range(rows.num_rows))
        misfits = [_misfit(value, wanted, name) for value in each]
        shown = [python_rows(pa.table({"": value}))[0][""] for _, _, value in misfits]
        named = [(path, text if kind is wanted else type_text(kind)) for path, kind, _ in misfits]
    else:
        shown = [value[name] for value in python_rows(rows.select([name]))]
        named = [(name, text)] * rows.num_rows
    reasons = [
        f"column {path!r} must be {word}, got {value!r}"
        for (path, word), value in zip(named, shown, strict=True)
    ]
    positions = rows[ORIGIN].to_numpy() & ((1 << POSITION_BITS) - 1)
    files = pa.repeat(pa.scalar(part.path, pa.string()), rows.num_rows)
    texts = row_texts(rows.drop_columns([ORIGIN]))
    rows_unknown = pa.repeat(pa.scalar(False), rows.num_rows)
    columns = [files, pa.array(positions), pa.array(reasons, pa.string()), texts, rows_unknown]
    return pa.table(columns, schema=FOUND_SCHEMA)
