"""Which files a source has: globs, links, sizes and hashes, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipelines.sources.folder import Folder
from pipelines.sources.partitions import typed_partitions
from schemas.errors import SchemaError, nearest
from schemas.job_sources import SourceConfig
from schemas.manifest import InputFile


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
