"""The input files of a build: globs, Hive partitions, sizes and hashes, local or behind a URL."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast
from urllib.parse import unquote

import pyarrow as pa

from pipelines.sources.rows import RawRows, arrow_type
from schemas.config.sources import SourceConfig
from schemas.errors import SchemaError, nearest
from schemas.manifest import InputFile
from schemas.paths import local_path

_BLOCK_BYTES = 8 << 20

_CODECS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory of raw files; paths in it are relative, with `/`.

    Attributes:
        root: a local path, or a URL such as `gs://bucket/logs`.
    """

    root: str

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return "://" not in self.root

    def place(self, path: str) -> str:
        """Return the full name of a file."""
        return str(Path(self.root) / path) if self.is_local else f"{self.root.rstrip('/')}/{path}"

    def files(self) -> Mapping[str, int | None]:
        """Return the files below, at any depth, with their sizes where the listing tells them.

        Names that begin with a dot are left out: tools keep unfinished files under them.

        Raises:
            SchemaError: it cannot be listed.
        """
        listed = dict(self._local_files() if self.is_local else _remote().files(self.root))
        return {
            path: listed[path]
            for path in sorted(listed)
            if not any(part.startswith(".") for part in path.split("/"))
        }

    def _local_files(self) -> Iterator[tuple[str, None]]:
        root = Path(self.root)
        if not root.is_dir():
            raise SchemaError("input must be a directory, got none; check --input", file=self.root)
        for directory, folders, names in os.walk(root, followlinks=True):
            here = Path(directory)
            above = {p.resolve() for p in (here, *here.parents) if p.is_relative_to(root)}
            folders[:] = [f for f in folders if (here / f).resolve() not in above]  # no circles
            for name in names:
                if (here / name).is_file():
                    yield (here / name).relative_to(root).as_posix(), None

    def is_link(self, path: str) -> bool:
        """Tell whether the file is reached through a link."""
        root = Path(self.root)
        return self.is_local and (root / path).resolve() != root.resolve() / path

    def real(self, path: str) -> str:
        """Return what a link stands for; the file itself where there are no links."""
        return str(Path(self.root, path).resolve()) if self.is_local else path

    def size(self, path: str) -> int:
        """Return the bytes of a file.

        Raises:
            OSError: it is not there.
        """
        if self.is_local:
            return Path(self.root, path).stat().st_size
        return _remote().size(self.place(path), path)

    def open(self, path: str) -> BinaryIO:
        """Return a file to read from anywhere; bytes as they are stored.

        Raises:
            OSError: it is not there.
        """
        if self.is_local:
            return Path(self.root, path).open("rb")
        self.size(path)  # some filesystems only say when they are read that there is no file
        return _remote().open_stored(self.place(path))

    def arrow_file(self, path: str) -> pa.NativeFile:
        """Return a file for Arrow's readers, mapped into memory where it is local.

        Raises:
            OSError: it is not there.
        """
        if not self.is_local:
            return pa.PythonFile(self.open(path), mode="r")
        place = str(Path(self.root, path))
        return pa.memory_map(place) if self.size(path) else pa.BufferReader(b"")

    def sha256(self, path: str) -> str:
        """Return the hash of a file's bytes, hex.

        Raises:
            OSError: it cannot be read.
        """
        digest = hashlib.sha256()
        with self.open(path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()


def _remote() -> ModuleType:
    return importlib.import_module("pipelines.beam.filesystem")  # brings Beam: only for URLs


def folder_of(root: str | Path) -> Folder:
    """Return the folder that a command line names; a `file://` URL is a local one."""
    text = str(root)
    return Folder(str(local_path(text)) if text.startswith("file:") else text)


def codec_of(path: str) -> str | None:
    """Return how the name of a text file says that it is compressed, None when it does not."""
    return next((codec for end, codec in _CODECS.items() if path.endswith(end)), None)


def decompressed(stored: BinaryIO, path: str) -> BinaryIO:
    """Return the text of a file that is open."""
    codec = codec_of(path)
    if codec is None:
        return stored
    return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), codec))


def first_line(error: BaseException) -> str:
    """Return one line of what an error says, its name when it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Tell whether reading failed, rather than found something wrong with the file.

    Arrow says both by OSError; only one that comes from the system has a number. A file that is
    gone will not come back, everything else may: the runner tries again.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)


HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value that Hive and Spark write for null."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def partition_values(path: str) -> dict[str, str | None]:
    """Return the values that the folders of a path name, percent-decoded, the outermost first.

    Args:
        path: relative to the input directory.

    Raises:
        SchemaError: two folders name the same column.

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
    """Return the columns that the folder names of all files give, with their types.

    A column is `int64` if all its values are integers without leading zeros, `date` if all are
    dates such as 2026-03-01, else `string`; two different texts never become one value.

    Args:
        paths: all files of a source, relative to the input directory.

    Raises:
        SchemaError: files differ in the columns that their folders name.
    """
    values = {path: partition_values(path) for path in paths}
    first = next(iter(values), None)
    if first is None:
        return {}
    for path, own in values.items():
        different = sorted(values[first].keys() ^ own.keys())
        if different:
            given, lacking = (first, path) if different[0] in values[first] else (path, first)
            raise SchemaError(
                f"all files must lie in a folder {different[0]}=..., as {given} does, got one "
                "that does not; move it, or process these files on their own",
                file=lacking,
            )
    return {name: _type_of(own[name] for own in values.values()) for name in values[first]}


def _type_of(texts: Iterable[str | None]) -> str:
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
    """Return the values of declared partition columns for the rows of one file.

    Args:
        path: relative to the input directory.
        types: column to its type, in the words of a job file.

    Raises:
        SchemaError: no folder names the column, or its value is not of the type.
    """
    values = partition_values(path) if types else {}
    scalars: dict[str, pa.Scalar] = {}
    for name, word in types.items():
        if name not in values:
            raise SchemaError(
                f"file must lie in a folder {name}=... as `partitions` says, got none; move it, "
                "or narrow `files` to the others",
                file=path,
            )
        text = values[name]
        try:
            scalars[name] = pa.scalar(text, pa.string()).cast(arrow_type(word))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"folder {name}={text} must hold {word} as `partitions` says; correct the type, "
                "or rename the folder",
                file=path,
            ) from error
    return scalars


def partition_fields(types: Mapping[str, str]) -> list[pa.Field]:
    """Return the fields of declared partition columns."""
    return [pa.field(name, arrow_type(word)) for name, word in types.items()]


def with_partitions(rows: RawRows, values: Mapping[str, pa.Scalar], names: list[str]) -> RawRows:
    """Add constant columns to rows.

    Args:
        rows: of one file.
        values: column to the value of all these rows.
        names: all columns, in the order that the rows will have.
    """
    table = rows.table
    if table is None or not values:
        return rows
    for name, value in values.items():
        table = table.append_column(name, pa.repeat(value, table.num_rows))
    return replace(rows, table=table.select(names))


def undeclared_partitions(
    name: str, paths: Sequence[str], types: Mapping[str, str], columns: Iterable[str]
) -> str | None:
    """Return a note about columns that folder names give and the SQL does not see, if any.

    Args:
        name: of the source.
        paths: all its files, relative to the input directory.
        types: its `partitions`.
        columns: all columns that the SQL sees.
    """
    try:
        inferred = infer_partitions(paths)
    except SchemaError:
        return None  # not a partitioned source: its folders differ in what they name
    declared = {*types, *columns}
    undeclared = ", ".join(
        f"{column}: {word}" for column, word in inferred.items() if column not in declared
    )
    if not undeclared:
        return None
    return (
        f"source {name}: folder names such as {paths[0].rpartition('/')[0]}/ give columns that "
        f"the SQL does not see; add `partitions: {{{undeclared}}}` to read them"
    )


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a source: its path below the input directory, and its size."""

    path: str
    num_bytes: int


def find_files(
    folder: Folder, sources: Mapping[str, SourceConfig]
) -> dict[str, tuple[FoundFile, ...]]:
    """Find the files of every source, sorted by source and path; reads none of them.

    Raises:
        SchemaError: the directory is missing, a source has no file, its folders do not give the
            columns of `partitions`, or a file goes meanwhile.
    """
    files = folder.files()
    files_of: dict[str, tuple[FoundFile, ...]] = {}
    for name in sorted(sources):
        pattern = sources[name].files
        matches = regex_of(pattern)
        matching = once(folder, (path for path in files if matches.fullmatch(path)))
        if not matching:
            raise SchemaError(
                f"source {name!r} must have files, got none for {pattern!r}; "
                f"{nearest(pattern, files)}",
                file=folder.root,
            )
        for path in matching:
            typed_partitions(path, sources[name].partitions)
        files_of[name] = tuple(_sized(folder, path, files[path]) for path in matching)
    return files_of


def list_inputs(folder: Folder, sources: Mapping[str, SourceConfig]) -> tuple[InputFile, ...]:
    """Find the files of every source, sorted by source and path, with sizes and content hashes.

    Raises:
        SchemaError: as `find_files`.
    """
    return tuple(
        _described(folder, name, file)
        for name, files in find_files(folder, sources).items()
        for file in files
    )


def _sized(folder: Folder, path: str, size: int | None) -> FoundFile:
    try:
        return FoundFile(path, folder.size(path) if size is None else size)
    except FileNotFoundError as error:
        raise _gone(path) from error


def _described(folder: Folder, source: str, file: FoundFile) -> InputFile:
    try:
        sha256 = folder.sha256(file.path)
    except FileNotFoundError as error:
        raise _gone(file.path) from error
    return InputFile(source=source, path=file.path, num_bytes=file.num_bytes, sha256=sha256)


def _gone(path: str) -> SchemaError:
    return SchemaError(
        "file must stay while it is listed, got none; wait until the log is complete", file=path
    )


def regex_of(pattern: str) -> re.Pattern[str]:
    """Return what a glob means: `*` and `?` stay in one folder, `**` stands for any folders.

    Example:
        >>> [bool(regex_of("day/*.json").fullmatch(p)) for p in ("day/a.json", "day/b/a.json")]
        [True, False]
        >>> [bool(regex_of("**/*.json").fullmatch(p)) for p in ("a.json", "day/b/a.json")]
        [True, True]
    """
    text = ""
    for part in pattern.split("/"):
        if part == "**":
            text += r"(?:[^/]+/)*"
        else:
            text += _regex_of_name(part) + "/"
    return re.compile(text.removesuffix("/") if pattern.split("/")[-1] != "**" else text + "[^/]+")


def _regex_of_name(pattern: str) -> str:
    text, rest = "", pattern
    while rest:
        found = re.match(r"\[(!?)(\]?[^\]]*)\]", rest)
        if rest[0] == "*":
            text, rest = text + "[^/]*", rest.lstrip("*")
        elif rest[0] == "?":
            text, rest = text + "[^/]", rest[1:]
        elif found:
            members = re.sub(r"([\\\[\]^])", r"\\\1", found[2])
            text, rest = f"{text}(?!/)[{'^' * bool(found[1])}{members}]", rest[found.end() :]
        else:
            text, rest = text + re.escape(rest[0]), rest[1:]
    return text


def once(folder: Folder, paths: Iterable[str]) -> list[str]:
    """Return paths without those that are links to the file of another one, sorted."""
    chosen: dict[str, str] = {}
    for path in sorted(paths, key=lambda p: (folder.is_link(p), p)):
        chosen.setdefault(folder.real(path), path)
    return sorted(chosen.values())
