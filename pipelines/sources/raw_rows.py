"""Raw files, their rows as Arrow tables, each with its origin, and conversion to declared types.

A row's origin is one integer: the index of its file in the sorted listing, and its row in the
file. Origins break ties in the order of samples and locate the row of a reject.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.sources.rejects import (
    BUILD_REJECTS_SCHEMA,
    Reject,
    file_reject,
    isolate_bad,
    python_rows,
    rejects_table,
    row_texts,
)
from presage.pipelines.sources.types import arrow_type, type_text, with_plain_column
from presage.schemas.arrays import is_list, one_chunk
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.files import sha256_of
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.paths import is_below, local_path
from presage.schemas.raw_files import visible
from presage.schemas.storage.location import Location

# Folders of raw files, local or remote.


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory of raw files; paths in it are relative, with `/`.

    Attributes:
        root: a local path, or the URL of an object store such as `gs://bucket/logs`.
        only: the files to list; all of the directory tree when empty.
    """

    root: str
    only: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether the root is a local path."""
        return "://" not in self.root

    @property
    def location(self) -> Location:
        """The root."""
        return Location.parse(os.path.realpath(self.root) if self.is_local else self.root)

    def contains(self, location: Location) -> bool:
        """Return whether a location is the root or below it, with symbolic links followed."""
        root = self.location.resolve().url
        return f"{location.resolve()}/".startswith(f"{root.rstrip('/')}/")

    def files(self) -> Mapping[str, int | None]:
        """Return the files in the directory tree, with their sizes if the listing has them.

        Names that begin with a dot are left out: tools keep unfinished files under them.

        Raises:
            SchemaError: it cannot be listed, or has no such file as one of `only`.
        """
        sizes = dict(self._only_files()) if self.only else self.all_files()
        return visible(sizes)

    def all_files(self) -> Mapping[str, int | None]:
        """Return the files of the directory tree under any name; raises as `files`."""
        return dict(self._local_files() if self.is_local else self._stored_files())

    def _only_files(self) -> Iterator[tuple[str, int | None]]:
        for name in self.only:
            path = PurePosixPath(name).as_posix()
            try:
                if not is_below(path) or (self.is_local and not Path(self.root, path).is_file()):
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                yield path, None if self.is_local else self.size(path)
            except FileNotFoundError as error:
                raise SchemaError(
                    f"input has no file {name!r}; write the path of one with --only, relative to "
                    "--input",
                    file=self.root,
                ) from error

    def _local_files(self) -> Iterator[tuple[str, None]]:
        root = Path(self.root)
        if not root.is_dir():
            raise SchemaError("there is no input: no directory; check the path", file=self.root)
        for name, subfolders, files in os.walk(root, onerror=_unreadable, followlinks=True):
            folder = Path(name)
            parents = {p.resolve() for p in (folder, *folder.parents) if p.is_relative_to(root)}
            # A link to a parent folder would be followed forever.
            subfolders[:] = [s for s in subfolders if (folder / s).resolve() not in parents]
            for path in (folder / file for file in files):
                if path.is_symlink() and not path.exists():
                    raise SchemaError(
                        "link leads to nothing; remove it, or restore what it leads to",
                        file=str(path),
                    )
                if path.is_file():
                    yield path.relative_to(root).as_posix(), None

    def _stored_files(self) -> Iterator[tuple[str, int]]:
        entries = self.location.entries()
        if not entries:
            raise SchemaError("there is no input: no directory; check the path", file=self.root)
        for entry in entries:
            yield entry.path, entry.num_bytes

    def is_link(self, path: str) -> bool:
        """Return whether the path of a file contains a symbolic link."""
        root = Path(self.root)
        return self.is_local and (root / path).resolve() != root.resolve() / path

    def real_path(self, path: str) -> str:
        """Return the path with symbolic links resolved."""
        return str(Path(self.root, path).resolve()) if self.is_local else path

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            OSError: the file does not exist.
        """
        size = (self.location / path).num_bytes()
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return size

    def open(self, path: str) -> BinaryIO:
        """Open a file for random reads, without decompression.

        Raises:
            OSError: the file does not exist.
        """
        return (self.location / path).open()

    def arrow_file(self, path: str) -> pa.NativeFile:
        """Open a file for Arrow's readers, memory-mapped if it is local.

        Raises:
            OSError: the file does not exist.
        """
        if not self.is_local:
            return pa.PythonFile(self.open(path), mode="r")
        return pa.memory_map(f"{self.root}/{path}") if self.size(path) else pa.BufferReader(b"")

    def sha256(self, path: str) -> str:
        """Return the hash of a file's bytes, hex.

        Raises:
            OSError: it cannot be read.
        """
        return sha256_of(self.location / path)


def _unreadable(error: OSError) -> None:
    raise SchemaError(
        f"folder cannot be listed: {error.strerror}; allow it, or move the folder away",
        file=error.filename,
    ) from error


def folder_of(root: str | Path, only: tuple[str, ...] = ()) -> Folder:
    """Return the folder of a path or a URL; a `file://` URL becomes a local path.

    Raises:
        StorageError: the scheme of the URL is unknown, or it has no bucket.
    """
    folder = Folder(str(local_path(root)) if str(root).startswith("file:") else str(root), only)
    if not folder.is_local:
        Location.parse(folder.root)
    return folder


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, the name of its type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Return whether an error comes from the system, so that a retry may help.

    Arrow raises OSError for damaged files, too, but without an error number. A missing file is
    permanent.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)


# Columns from folder names such as `day=2026-03-01` (Hive partitions).

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Folder value of null in Hive and Spark."""


def partition_values(path: str) -> dict[str, str | None]:
    """Return the partition values of a path, percent-decoded, outermost folder first.

    Raises:
        SchemaError: two folders have values of one column.

    Example:
        >>> partition_values("day=2026-03-01/city=A%2FB/a.parquet")
        {'day': '2026-03-01', 'city': 'A/B'}
    """
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, equals, text = folder.partition("=")
        name = unquote(name)
        if not equals or not name:
            continue
        if name in values:
            raise SchemaError(
                f"two folders of a path give column {name!r}; rename one of them", file=path
            )
        values[name] = None if text == HIVE_NULL else unquote(text)
    return values


def typed_partitions(path: str, types: Mapping[str, str]) -> dict[str, pa.Scalar]:
    """Return the values of declared partition columns for one file.

    Raises:
        SchemaError: a column has no folder, or its value is not of the type.
    """
    values = partition_values(path) if types else {}
    scalars: dict[str, pa.Scalar] = {}
    for name, kind in types.items():
        if name not in values:
            raise SchemaError(
                f"file is not in a folder {name}=..., which `partitions` declares; move it, or "
                "narrow `files` to the others",
                file=path,
            )
        text = values[name]
        try:
            scalars[name] = pa.scalar(text, pa.string()).cast(arrow_type(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"folder {name}={text} is not of type {kind}, which `partitions` declares; correct "
                "the type, or rename the folder",
                file=path,
            ) from error
    return scalars


def partition_fields(types: Mapping[str, str]) -> list[pa.Field]:
    """Return the fields of declared partition columns."""
    return [pa.field(name, arrow_type(kind)) for name, kind in types.items()]


def microseconds(moment: datetime | timedelta) -> int:
    """Return microseconds, since 1970 (UTC) for a moment."""
    if isinstance(moment, datetime):
        moment = moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return moment // timedelta(microseconds=1)


# Input splits, and raw rows with their origins.

ORIGIN = "_origin"
"""Column added to every raw row: file index << POSITION_BITS | row in the file."""
POSITION_BITS = 40
POSITION_MASK = (1 << POSITION_BITS) - 1

CHUNK_ROWS = 1 << 16
"""Maximum raw rows in one run of the SQL."""
SPLIT_BYTES = 32 << 20
"""Target bytes of a split in formats that can be divided at any row."""
STORED_SPLIT_BYTES = 64 << 20
"""The same for files at an object store, and there the least bytes of a Parquet split if the file
has as many. A split takes three or four requests, so that a GB takes at most 50."""

MAX_COPIED_BYTES = 8 << 20
"""Maximum bytes of a file, decompressed, of which the first rows are copied."""
_WRONG_TYPE_ROWS = 1000
"""A column with this many values in a split, none of which can be cast, has the wrong type."""


@dataclass(frozen=True, slots=True)
class InputSplit:
    """A range of rows or bytes of one input file, which is read by itself.

    Attributes:
        source: name of the source.
        path: relative to the input directory.
        file_index: index of the file in the sorted listing.
        row_group: first Parquet row group, or None.
        num_row_groups: number of consecutive row groups.
        first_row: row in the file of the split's first row.
        offset: first byte of the split, if it is a byte range.
        num_bytes: length of that range; None to the end of the file.
    """

    source: str
    path: str
    file_index: int
    row_group: int | None = None
    first_row: int = 0
    offset: int = 0
    num_bytes: int | None = None
    num_row_groups: int = 1

    @property
    def row_groups(self) -> list[int]:
        """The row groups of a split of a Parquet file."""
        assert self.row_group is not None, "Parquet splits are row groups"
        return [*range(self.row_group, self.row_group + self.num_row_groups)]


@dataclass(frozen=True, slots=True)
class RawRows:
    """A chunk of rows of one split, and its rejects.

    `table` is None if the chunk has rejects only; `bad_rows` are rejects of rows that cannot be
    cast.
    """

    table: pa.Table | None
    rejects: tuple[Reject, ...] = ()
    bad_rows: pa.Table | None = None

    def all_rejects(self) -> Iterator[pa.Table]:
        """Yield all rejects as tables of `BUILD_REJECTS_SCHEMA`."""
        if self.rejects:
            yield rejects_table(self.rejects)
        if self.bad_rows is not None:
            yield self.bad_rows


SplitsAndRejects = tuple[list[InputSplit], list[Reject]]
"""Parts of a file that can be read independently, and rejects of what cannot be read."""


def columns_in_file(
    split: InputSplit, config: SourceConfig, schema: pa.Schema, file_schema: pa.Schema
) -> tuple[list[str], Reject | None]:
    """Return the columns to read from a file, and the reject of one that cannot be read.

    It is one that lacks a declared column, or has a column twice; undeclared ones are null where a
    file lacks them.
    """
    counts = Counter(file_schema.names)
    names = [name for name in schema.names if name != ORIGIN]
    for name in names:
        if not counts[name] and config.columns:
            advice = suggest_name(name, file_schema.names)
            return [], file_reject(split.path, f"column {name!r} is missing; {advice}")
        if counts[name] > 1:
            reason = f"column {name!r} occurs {counts[name]} times; rename all but one"
            return [], file_reject(split.path, reason)
    return [name for name in names if counts[name]], None


def with_origins(table: pa.Table, file_index: int, positions: np.ndarray) -> pa.Table:
    """Append the origins of rows of one file; `positions` is (num_rows,) int64."""
    return table.append_column(ORIGIN, pa.array(positions + (file_index << POSITION_BITS)))


def with_positions(table: pa.Table, name: str) -> pa.Table:
    """Append the position of each row in its file as a column."""
    positions = table[ORIGIN].to_numpy() & POSITION_MASK
    return table.append_column(name, pa.array(positions))


def file_and_row(origin: int, listing: Sequence[InputFile]) -> tuple[str, int]:
    """Return the path and the row in the file of an origin."""
    index, position = origin >> POSITION_BITS, origin & POSITION_MASK
    return listing[index].path, position


def files_and_rows(
    origins: pa.ChunkedArray, listing: Sequence[InputFile]
) -> tuple[pa.Array, pa.Array]:
    """Return the paths and the rows in these files of a column of origins."""
    numbers = origins.to_numpy()
    paths = pa.array([file.path for file in listing], pa.string())
    files = paths.take(pa.array(numbers >> POSITION_BITS))
    return files, pa.array(numbers & POSITION_MASK)


# Conversion to the declared types.


def typed_chunks(
    table: pa.Table, split: InputSplit, schema: pa.Schema, type_names: Mapping[str, str]
) -> Iterator[RawRows]:
    """Yield rows cast to the declared types, in chunks; a value that does not fit rejects its row.

    The table has the types of the file; `type_names` are those of the job file, for messages.
    """
    rejects: list[pa.Table] = []
    for name, text in type_names.items():
        target = schema.field(name).type
        if table.schema.field(name).type == target:
            continue
        table = with_plain_column(table, name)
        if table.schema.field(name).type == target:
            continue
        castable = _castable(table[name].type, target)
        bad = _not_castable(table[name], target) if castable else []
        narrowed = pa.types.is_integer(target) and pa.types.is_integer(table[name].type)
        all_bad = len(bad) >= _WRONG_TYPE_ROWS and len(bad) == len(table[name].drop_null())
        if not castable or (all_bad and not narrowed):
            reason = f"column {name!r} must be {text}, got {table[name].type}; declare or repair it"
            bad_rows = pa.concat_tables(rejects) if rejects else None
            yield RawRows(None, (file_reject(split.path, reason),), bad_rows)
            return
        if bad:
            rejects.append(_value_rejects(table.take(pa.array(bad)), split, name, target, text))
            table = table.take(pa.array(np.delete(np.arange(table.num_rows), bad)))
        cast = table[name].cast(target)
        table = table.set_column(table.column_names.index(name), name, cast)
    if rejects:
        yield RawRows(None, bad_rows=pa.concat_tables(rejects))
    yield from in_chunks(table)


def in_chunks(table: pa.Table) -> Iterator[RawRows]:
    """Yield rows in chunks of at most `CHUNK_ROWS`."""
    for start in range(0, table.num_rows, CHUNK_ROWS):
        yield RawRows(table.slice(start, CHUNK_ROWS))


def _castable(kind: pa.DataType, target: pa.DataType) -> bool:
    """Return whether Arrow has a cast between two types."""
    try:
        pa.array([], kind).cast(target)
    except pa.ArrowNotImplementedError:
        return False
    return True


def _not_castable(column: pa.ChunkedArray, target: pa.DataType) -> list[int]:
    """Return the rows that cannot be cast, ascending."""

    def cast(start: int, end: int) -> None:
        # take: a cast of a slice of lists casts all their values
        column.take(pa.array(np.arange(start, end))).cast(target)

    try:
        column.cast(target)
    except pa.ArrowException:
        return [row for row, _ in isolate_bad(len(column), cast, (pa.ArrowException,))[1]]
    return []


def _value_rejects(
    rows: pa.Table, split: InputSplit, name: str, target: pa.DataType, text: str
) -> pa.Table:
    """Return the rejects of rows whose value of one column cannot be cast."""
    if pa.types.is_nested(target):
        column = one_chunk(rows[name])
        values = (column.take(pa.array([row])) for row in range(rows.num_rows))
        misfits = [_innermost_misfit(value, target, name) for value in values]
        shown = [python_rows(pa.table({"": value}))[0][""] for _, _, value in misfits]
        fields = [(path, text if kind is target else type_text(kind)) for path, kind, _ in misfits]
    else:
        shown = [value[name] for value in python_rows(rows.select([name]))]
        fields = [(name, text)] * rows.num_rows
    reasons = [
        f"column {path!r} must be {kind}, got {value!r}"
        for (path, kind), value in zip(fields, shown, strict=True)
    ]
    positions = rows[ORIGIN].to_numpy() & POSITION_MASK
    files = pa.repeat(pa.scalar(split.path, pa.string()), rows.num_rows)
    texts = row_texts(rows.drop_columns([ORIGIN]))
    rows_unknown = pa.repeat(pa.scalar(False), rows.num_rows)
    columns = [files, pa.array(positions), pa.array(reasons, pa.string()), texts, rows_unknown]
    return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)


def _innermost_misfit(
    value: pa.Array, target: pa.DataType, path: str
) -> tuple[str, pa.DataType, pa.Array]:
    """Return the path, target type and value of the innermost field that cannot be cast.

    `value` is (1,), cannot be cast, and is not a slice, as Arrow casts all values of a sliced list
    array.
    """
    if pa.types.is_struct(target) and pa.types.is_struct(value.type):
        for field in target:
            if value.type.get_field_index(field.name) >= 0:
                inner = pc.struct_field(value, field.name)
                if _not_castable(pa.chunked_array([inner]), field.type):
                    return _innermost_misfit(inner, field.type, f"{path}.{field.name}")
    elif is_list(target) and is_list(value.type):
        inner = pc.list_flatten(value)
        rows = _not_castable(pa.chunked_array([inner]), target.value_type)
        if rows:
            return _innermost_misfit(inner.take(pa.array(rows[:1])), target.value_type, f"{path}[]")
    return path, target, value
