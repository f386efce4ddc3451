"""Which files of a raw log count: globs, hidden files, folders of unfinished jobs and of tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import TypeVar

from presage.schemas.errors import SchemaError

T = TypeVar("T")


def visible(sizes: Mapping[str, T]) -> dict[str, T]:
    """Return the files without those under a name that begins with a dot, sorted."""
    hidden = re.compile(r"(^|/)\.")
    return {path: sizes[path] for path in sorted(sizes) if not hidden.search(path)}


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


_TABLE_LOGS = re.compile(r"(?:(.*)/)?(_delta_log|\.hoodie|metadata)/(?:.*/)?([^/]+)")
"""Root of a table of Delta Lake, Hudi or Iceberg, folder of its log, and a file of that."""


def check_committed(
    root: str, paths: Iterable[str], everything: Iterable[str], pattern: str = ""
) -> None:
    """Check that files are not those of an unfinished job, or of a table that has a log.

    Args:
        root: of the files.
        paths: of the files to read.
        everything: paths of all files.
        pattern: glob of `paths`, which may begin names with `_` itself.

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
                file=f"{root}/{table}".rstrip("/"),
            )
        if unfinished is not None and unfinished.search(path):
            raise SchemaError(
                "files in a folder whose name begins with `_` belong to unfinished jobs; remove or "
                "rename the folder",
                file=path,
            )
