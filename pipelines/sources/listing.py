"""The input files of a build: globs, the listing with sizes and content hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial

from presage.pipelines.sources.raw_rows import Folder, partition_values, typed_partitions
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.raw_files import check_committed, glob_regex, visible

_READERS = 8
"""Files that are hashed at once."""


def find_files(
    folder: Folder, sources: Mapping[str, SourceConfig]
) -> dict[str, tuple[InputFile, ...]]:
    """Return the files of every source without hashes, sorted by source and path.

    Raises:
        SchemaError: the directory is missing, a source has no file, a file lacks a column of
            `partitions`, is of an unfinished job or of a table format, or is removed meanwhile.
    """
    everything = folder.files() if folder.only else folder.all_files()
    sizes = visible(everything)
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
            check_committed(folder.root, paths, everything, pattern)
        for path in paths:
            typed_partitions(path, sources[name].folder_columns)
        files[name] = tuple(_with_size(folder, name, path, sizes[path]) for path in paths)
    return files


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


def without_duplicates(folder: Folder, paths: Iterable[str]) -> list[str]:
    """Return paths without links to the files of other ones, sorted."""
    chosen: dict[str, str] = {}
    for path in sorted(paths, key=lambda p: (folder.is_link(p), p)):
        chosen.setdefault(folder.real_path(path), path)
    return sorted(chosen.values())


# Partition columns that the folder names of a source show.

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


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
