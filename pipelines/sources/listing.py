"""The input files of a build, local or remote: opening, Hive partitions, globs, the listing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote

import pyarrow as pa

from pipelines.sources.raw_rows import RawRows
from pipelines.sources.types import arrow_type
from schemas.config.sources import SourceConfig
from schemas.dataset.files import sha256_of
from schemas.dataset.manifest import InputFile
from schemas.errors import SchemaError, suggest_name
from schemas.paths import is_below, local_path
from schemas.storage.location import Location

_READERS = 8
"""Files that are hashed at once."""


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
        return _visible(sizes)

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


def _visible(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the files without those under a name that begins with a dot, sorted."""
    hidden = re.compile(r"(^|/)\.")
    return {path: sizes[path] for path in sorted(sizes) if not hidden.search(path)}


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
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


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


def infer_partitions(paths: Sequence[str]) -> dict[str, str]:
    """Return the partition columns of a source's files, with their types.

    A column is `int64` if all its values are integers without leading zeros, `date` if all are
    dates such as 2026-03-01, else `string`; different texts are different values.

    Raises:
        SchemaError: files differ in their partition columns.
    """
    values = {path: partition_values(path) for path in paths}
    first = next(iter(values), None)
    if first is None:
        return {}
    for path, path_values in values.items():
        different = sorted(values[first].keys() ^ path_values.keys())
        if different:
            inside, outside = (first, path) if different[0] in values[first] else (path, first)
            raise SchemaError(
                f"file lacks the folder {different[0]}=... of {inside}; move it, or process such "
                "files separately",
                file=outside,
            )
    return {name: _infer_type(v[name] for v in values.values()) for name in values[first]}


def _infer_type(texts: Iterable[str | None]) -> str:
    values = {text for text in texts if text is not None}
    if values and all(_INTEGER.fullmatch(t) and -(2**63) <= int(t) < 2**63 for t in values):
        return "int64"
    return "date" if values and all(map(_is_date, values)) else "string"


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


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


def with_all_columns(rows: RawRows, values: Mapping[str, pa.Scalar], schema: pa.Schema) -> RawRows:
    """Add the partition values of a file to its rows, and nulls for columns that it lacks."""
    table = rows.table
    if table is None:
        return rows
    for field in schema:
        if field.name not in table.column_names:
            value = values.get(field.name, pa.scalar(None, field.type))
            table = table.append_column(field.name, pa.repeat(value, table.num_rows))
    return replace(rows, table=table.select(schema.names))


def undeclared_partitions(
    name: str, paths: Sequence[str], types: Mapping[str, str], columns: Iterable[str]
) -> str | None:
    """Return a note about partition columns that the job does not declare, if there are any.

    `columns` are all columns that the SQL can read.
    """
    try:
        inferred = infer_partitions(paths)
    except SchemaError:
        return None  # folders differ in their columns: not a partitioned source
    declared = {*types, *columns}
    undeclared = ", ".join(
        f"{column}: {kind}" for column, kind in inferred.items() if column not in declared
    )
    if not undeclared:
        return None
    return (
        f"source {name}: folder names such as {paths[0].rpartition('/')[0]}/ give columns that "
        f"the SQL does not see; add `partitions: {{{undeclared}}}` to read them"
    )


# The listing.


def find_files(
    folder: Folder, sources: Mapping[str, SourceConfig]
) -> dict[str, tuple[InputFile, ...]]:
    """Return the files of every source without hashes, sorted by source and path.

    Raises:
        SchemaError: the directory is missing, a source has no file, a file lacks a column of
            `partitions`, is of an unfinished job or of a table format, or is removed meanwhile.
    """
    everything = folder.files() if folder.only else folder.all_files()
    sizes = _visible(everything)
    files: dict[str, tuple[InputFile, ...]] = {}
    for name in sorted(sources):
        pattern = sources[name].files
        regex = glob_regex(pattern)
        paths = without_duplicates(folder, (path for path in sizes if regex.fullmatch(path)))
        if not paths:
            raise SchemaError(
                f"no file of source {name!r} matches {pattern!r}; {suggest_name(pattern, sizes)}",
                file=folder.root,
            )
        if not folder.only:
            check_committed(folder, paths, everything, pattern)
        for path in paths:
            typed_partitions(path, sources[name].folder_columns)
        files[name] = tuple(_with_size(folder, name, path, sizes[path]) for path in paths)
    return files


_TABLE_LOGS = re.compile(r"(?:(.*)/)?(_delta_log|\.hoodie|metadata)/(?:.*/)?([^/]+)")
"""Root of a table of Delta Lake, Hudi or Iceberg, folder of its log, and a file of that."""


def check_committed(
    folder: Folder, paths: Iterable[str], everything: Iterable[str], pattern: str = ""
) -> None:
    """Check that files are not those of an unfinished job, or of a table that has a log.

    `everything` are all files, `pattern` a glob that may begin names with `_` itself.

    Raises:
        SchemaError: one is.
    """
    unfinished = None if re.search(r"(^|/)_", pattern) else re.compile(r"(^|/)_[^/=]*/")
    logs = filter(None, map(_TABLE_LOGS.fullmatch, everything))
    tables = {
        log[1] or "": log[2]
        for log in logs
        if log[2] != "metadata" or log[3].endswith(".metadata.json")
    }
    for path in paths:
        folders = [str(parent).removeprefix(".") for parent in PurePosixPath(path).parents]
        table = next((name for name in folders if name in tables), None)
        if table is not None:
            log = tables[table].replace("metadata", "Iceberg metadata")
            raise SchemaError(
                f"folder belongs to a table format ({log}), whose log determines the files of the "
                "table; write the table to plain Parquet first",
                file=f"{folder.root}/{table}".rstrip("/"),
            )
        if unfinished is not None and unfinished.search(path):
            raise SchemaError(
                "files in a folder whose name begins with `_` belong to unfinished jobs; remove or "
                "rename the folder",
                file=path,
            )


def list_inputs(folder: Folder, sources: Mapping[str, SourceConfig]) -> tuple[InputFile, ...]:
    """Return the files of every source, sorted by source and path, with sizes and content hashes.

    Raises:
        SchemaError: as `find_files`.
    """
    files = [file for files in find_files(folder, sources).values() for file in files]
    with ThreadPoolExecutor(_READERS) as pool:  # hashing runs without Python's lock
        return tuple(pool.map(partial(_with_hash, folder), files))


def _with_size(folder: Folder, source: str, path: str, size: int | None) -> InputFile:
    try:
        num_bytes = folder.size(path) if size is None else size
    except FileNotFoundError as error:
        raise _removed(path) from error
    return InputFile(source=source, path=path, num_bytes=num_bytes, sha256="")


def _with_hash(folder: Folder, file: InputFile) -> InputFile:
    try:
        return replace(file, sha256=folder.sha256(file.path))
    except FileNotFoundError as error:
        raise _removed(file.path) from error


def _removed(path: str) -> SchemaError:
    return SchemaError(
        "file was removed while it was listed; wait until the log is complete", file=path
    )


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob: `*` and `?` match in one folder, `**` any folders.

    Example:
        >>> [bool(glob_regex("day/*.json").fullmatch(p)) for p in ("day/a.json", "day/b/a.json")]
        [True, False]
        >>> [bool(glob_regex("**/*.json").fullmatch(p)) for p in ("a.json", "day/b/a.json")]
        [True, True]
    """
    text = ""
    for name in pattern.split("/"):
        if name == "**":
            text += r"(?:[^/]+/)*"
        else:
            text += _name_regex(name) + "/"
    return re.compile(text.removesuffix("/") if pattern.split("/")[-1] != "**" else text + "[^/]+")


def _name_regex(pattern: str) -> str:
    text, rest = "", pattern
    while rest:
        character_set = re.match(r"\[(!?)(\]?[^\]]*)\]", rest)
        if rest[0] == "*":
            text, rest = text + "[^/]*", rest.lstrip("*")
        elif rest[0] == "?":
            text, rest = text + "[^/]", rest[1:]
        elif character_set:
            members = re.sub(r"([\\\[\]^])", r"\\\1", character_set[2])
            text += f"(?!/)[{'^' * bool(character_set[1])}{members}]"
            rest = rest[character_set.end() :]
        else:
            text, rest = text + re.escape(rest[0]), rest[1:]
    return text


def without_duplicates(folder: Folder, paths: Iterable[str]) -> list[str]:
    """Return paths without links to the files of other ones, sorted."""
    chosen: dict[str, str] = {}
    for path in sorted(paths, key=lambda p: (folder.is_link(p), p)):
        chosen.setdefault(folder.real_path(path), path)
    return sorted(chosen.values())
