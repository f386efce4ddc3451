"""All samples of a dataset in one file, as SQL views, and as a content hash."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.pipelines.samples.statements import quoted_name
from presage.pipelines.sources.types import sql_type
from presage.schemas.arrays import Jagged, comparable, hash_keys, is_list, offsets_of, one_chunk
from presage.schemas.dataset.defaults import missing_column_defaults
from presage.schemas.dataset.opened import OpenDataset, Segment, open_dataset
from presage.schemas.dataset.samples import column_names, read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import splitmix64
from presage.schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    MICROSECONDS,
    SECONDS,
    SEGMENTS,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    inverse_column,
    tombstones_path,
    window_columns,
)
from presage.schemas.storage.location import Location


def expand(
    dataset_path: Location | Path, output: Location | Path, model_inputs: bool = False
) -> int:
    """Write all samples of a dataset to one Parquet file; return their number.

    Args:
        dataset_path: the dataset.
        output: the file to write.
        model_inputs: whether to include the columns that transforms and sampling added.

    Raises:
        SchemaError: the output is a directory, or the dataset does not match its manifests.
    """
    output = Location.parse(output)
    if output.local is not None and output.local.is_dir():
        raise SchemaError(f"output is a directory: {output}; name a file in it")
    tables = read_samples(open_dataset(dataset_path), model_inputs)
    first = next(tables)  # a committed segment has samples
    count = 0
    with (
        output.new_file() as path,
        pq.ParquetWriter(path, first.schema, compression="zstd") as writer,
    ):
        for table in chain([first], tables):
            writer.write_table(table)
            count += table.num_rows
    return count


# `view.sql`: DuckDB views of a dataset that join the star schema to one row per sample. They are
# `samples`, the columns of the job's SQL, and `model_inputs`, which has the columns of transforms,
# too. Local paths are relative to the dataset: `cd DATASET && duckdb -init view.sql`. The file is
# derived from the manifests; no hash covers it, and readers of the format ignore it.

VIEW = "view.sql"


def view_sql(dataset: OpenDataset) -> str:
    """Return the statements that create both views, with the columns in the schema's order.

    Null lists and empty lists are distinguished; the order of rows is undefined.
    """
    head = "-- One row per sample. Run from this directory: duckdb -init view.sql\n"
    return head + "\n".join(
        f"CREATE OR REPLACE VIEW {name} AS\n"
        + "\nUNION ALL\n".join(
            _select_segment(dataset, segment, column_names(dataset, model_inputs))
            for segment in dataset.segments
        )
        + ";\n"
        for name, model_inputs in (("samples", False), ("model_inputs", True))
    )


def _select_segment(dataset: OpenDataset, segment: Segment, columns: Sequence[str]) -> str:
    defaults = {
        name: f"CAST({_literal(value.as_py())} AS {sql_type(value.type)})"
        for name, value in missing_column_defaults(dataset, segment).items()
    }
    groups = dataset.job.data.group_of_column
    stored = {c: _column_sql(segment, groups.get(c), c) for c in columns if c not in defaults}
    selected = [f"{stored.get(c) or defaults[c]} AS {quoted_name(c)}" for c in columns]
    lines = [f"SELECT {', '.join(selected)}", *_from_lines(dataset, segment, list(stored))]
    return "\n".join([*lines, *_exclude_deleted(dataset, segment)])


def _from_lines(dataset: OpenDataset, segment: Segment, columns: Sequence[str]) -> Iterator[str]:
    """Yield the FROM clause, and a JOIN for each table that has one of the columns."""
    numbered = bool(segment.tombstones.num_rows)
    yield f"FROM {_files(segment, 'samples', numbered=numbered)} AS {quoted_name('s')}"
    groups = dataset.job.data.group_of_column
    for group in dataset.job.data.groups:
        members = [c for c in columns if groups.get(c) == group]
        if not members:
            continue
        table = quoted_name(f"g:{group}")
        yield (
            f"JOIN {_files(segment, 'groups', group)} AS {table} ON {table}.{BLOCK} = s.{BLOCK} "
            f"AND {table}.{UNIQUE_INDEX} = s.{quoted_name(inverse_column(group))}"
        )
        if _has(segment, "tuples", group):
            tuples = quoted_name(f"t:{group}")
            yield (
                f"JOIN {_files(segment, 'tuples', group)} AS {tuples} "
                f"ON {tuples}.{TUPLE_INDEX} = {table}.{TUPLE_INDEX}"
            )
        for column in members:
            if _has(segment, "buffers", column):
                buffers, owner = quoted_name(f"b:{column}"), _owner_table(segment, group)
                yield (
                    f"LEFT JOIN {_files(segment, 'buffers', column)} AS {buffers} ON "
                    f"{buffers}.{BUFFER_INDEX} = {owner}.{quoted_name(window_columns(column)[0])}"
                )


def _exclude_deleted(dataset: OpenDataset, segment: Segment) -> list[str]:
    """Return the condition that excludes deleted samples, if there are any."""
    sha256 = dataset.manifest.tombstones_sha256
    if sha256 is None or not segment.tombstones.num_rows:
        return []
    path = tombstones_path(sha256)
    if dataset.directory.local is None:
        path = f"{dataset.directory}/{path}"
    return [
        f"WHERE NOT EXISTS (FROM read_parquet({_literal(path)}) AS x "
        f"WHERE x.segment = {_literal(segment.id)} AND x.block = s.{BLOCK} "
        "AND x.file_row = s.file_row_number)"
    ]


def _column_sql(segment: Segment, group: str | None, column: str) -> str:
    """Return the expression of a column's value."""
    owner = "s" if group is None else _owner_table(segment, group)
    stored = f"{owner}.{quoted_name(column)}"
    if column in (segment.manifest.split_times or ()):
        return f"make_timestamp({stored}.{SECONDS} * 1000000 + {stored}.{MICROSECONDS})"
    if not _has(segment, "buffers", column):
        return stored
    _, start, length = (f"{owner}.{quoted_name(name)}" for name in window_columns(column))
    values = f"{quoted_name(f'b:{column}')}.{quoted_name(column)}"
    return (
        f"CASE WHEN {length} >= 0 THEN coalesce({values}[{start} + 1 : {start} + {length}], []) END"
    )


def _owner_table(segment: Segment, group: str) -> str:
    """Return the table that has the columns of a group."""
    return quoted_name(f"t:{group}" if _has(segment, "tuples", group) else f"g:{group}")


def _has(segment: Segment, *folders: str) -> bool:
    return "/".join(folders) in segment.manifest.directories


def _files(segment: Segment, *folders: str, numbered: bool = False) -> str:
    local = segment.directory.local is not None
    root = f"{SEGMENTS}/{segment.directory.name}" if local else segment.directory.url
    path = "/".join((root, *map(glob.escape, folders), "*.parquet"))
    return f"read_parquet({_literal(path)}{', file_row_number = true' if numbered else ''})"


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value).lower() if isinstance(value, bool) else repr(value)
    return "'" + str(value).replace("'", "''") + "'"


# The content hash of a table, which is equal for equal rows in any order. Each row has a 64-bit
# hash of its values. The hashes are added, so neither order, files nor batches matter, but repeated
# rows count. Widths of integers and kinds of strings and lists are not distinguished: compare
# schemas for that.

_NULL = np.uint64(0x6E756C6C)
_SECOND = np.uint64(0x9FB21C651E98DF25)


@dataclass(frozen=True, slots=True)
class ContentHash:
    """The hash of a multiset of rows; `a + b` is the hash of the union.

    `first` is the sum of the rows' hashes, `second` that of second hashes of these, modulo 2**64.
    """

    num_rows: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: ContentHash) -> ContentHash:
        """Return the hash of the union."""
        mask = (1 << 64) - 1
        return ContentHash(
            self.num_rows + other.num_rows,
            (self.first + other.first) & mask,
            (self.second + other.second) & mask,
        )

    def __str__(self) -> str:
        """Return the hash as text: 32 hex digits and the number of rows."""
        return f"{self.first:016x}{self.second:016x}-{self.num_rows}"


def content_hash(batches: Iterable[pa.Table | pa.RecordBatch]) -> ContentHash:
    """Return the hash of all rows of batches with the same column names.

    Raises:
        SchemaError: the type of a column cannot be hashed.
    """
    total = ContentHash()
    for batch in batches:
        if batch.num_rows:
            total += _of_rows(row_hashes(batch))
    return total


def _of_rows(hashes: NDArray[np.uint64]) -> ContentHash:
    others = splitmix64(hashes ^ _SECOND)
    return ContentHash(len(hashes), int(hashes.sum()), int(others.sum()))


def row_hashes(batch: pa.Table | pa.RecordBatch) -> NDArray[np.uint64]:
    """Return a hash of each row, independent of the order of its columns."""
    return _row_hashes({name: value_hashes(batch[name]) for name in batch.schema.names})


def hash_of_values(hashes: Mapping[str, NDArray[np.uint64]]) -> ContentHash:
    """Return the hash of rows from the `value_hashes` of each column, (num_rows,)."""
    return _of_rows(_row_hashes(hashes))


def _row_hashes(hashes: Mapping[str, NDArray[np.uint64]]) -> NDArray[np.uint64]:
    names = sorted(hashes)
    salts = [hash_keys(comparable(pa.array([name])))[0] for name in names]
    return hash_keys([splitmix64(hashes[n] ^ s) for n, s in zip(names, salts, strict=True)])


def value_hashes(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return a hash of each value, (num_rows,) uint64, independent of the batch.

    Raises:
        SchemaError: the type cannot be hashed.
    """
    array = one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = one_chunk(array.dictionary_decode())
    if array.null_count == 0:
        return _present(array)
    hashes = np.full(len(array), _NULL)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    hashes[valid] = _present(pc.drop_null(array))
    return hashes


def _present(array: pa.Array) -> NDArray[np.uint64]:
    kind = array.type
    if len(array) == 0 or pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if pa.types.is_struct(kind):
        fields = [value_hashes(array.field(i)) for i in range(kind.num_fields)]
        return hash_keys(fields) if fields else np.full(len(array), _NULL)
    if pa.types.is_map(kind) or is_list(kind):
        return hash_keys([_list_of_hashes(array)])
    if pa.types.is_decimal(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        array = array.cast(pa.string() if pa.types.is_decimal(kind) else pa.int64())
    elif pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        array = array.cast(pa.int64())
    try:
        return hash_keys(comparable(array))
    except SchemaError as error:
        raise SchemaError(
            f"values cannot be compared: type {kind}; cast the column before"
        ) from error


def _list_of_hashes(array: pa.Array) -> Jagged:
    if is_list(array.type):
        lengths = pc.list_value_length(array).to_numpy().astype(np.int64)
        return Jagged(value_hashes(pc.list_flatten(array)), offsets_of(lengths))
    offsets = array.offsets.to_numpy().astype(np.int64)  # a map
    entries = [a.slice(offsets[0], offsets[-1] - offsets[0]) for a in (array.keys, array.items)]
    hashes = hash_keys([value_hashes(e) for e in entries])
    return Jagged(hashes, offsets - offsets[0])
