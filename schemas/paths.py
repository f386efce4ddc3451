"""Checks of names and paths before anything is written.

Names of a job file must not lead out of the folder that they are joined to. A job file may lie at
a URL; files that only a local disk can hold, such as tokens, may not. On a network filesystem two
hosts may not see each other's locks; a run there gets a warning.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from presage.schemas.errors import SchemaError, StorageError
from presage.schemas.storage.location import Location

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
MAX_NAME = 128
"""Longest name, in characters: names of files are at most 255 bytes and have suffixes."""
MOUNTS = Path("/proc/self/mountinfo")

NETWORK_FILESYSTEMS = frozenset(
    {
        # Locks depend on mount options and the server; clients cache directories.
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda"),
        # Shared folders of a host system: host and guest have separate locks.
        *("9p", "virtiofs", "vboxsf", "vmhgfs", "drvfs", "prl_fs"),
        # Cluster filesystems: locks may be per host, as with Lustre's `localflock`.
        *("ceph", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2", "glusterfs", "ocfs2", "gfs2"),
    }
)
"""Types in /proc/self/mountinfo that several hosts may have mounted. `fuse.*` counts as one, as its
backend is unknown, except `LOCAL_FUSE`."""
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})
"""Local FUSE filesystems, used by rootless containers; `fuseblk` is a local disk, too."""
ALLOW_OUTSIDE = "--allow-outside"
ALLOW_OUTSIDE_HELP = "allow data.schema outside the folder of the job file"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_FILE_URL = re.compile(r"file:(?:///|/(?!/))(.*)", re.DOTALL)
_OCTAL = re.compile(r"\\([0-7]{3})")


def check_names(key: str, names: Iterable[str]) -> None:
    """Raise ValueError if a name cannot be a directory and column."""
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{key} must be named with letters, digits, '_' and '-', got {name!r}; rename it"
            )
        check_length(key, name)


def check_length(key: str, name: str) -> None:
    """Raise ValueError if a name is too long for files."""
    if len(name) > MAX_NAME:
        raise ValueError(
            f"{key} must have at most {MAX_NAME} characters, got {len(name)} in {name[:16]!r}...; "
            "shorten it"
        )


def is_below(path: str) -> bool:
    """Return whether a relative path stays below the folder that it is joined to.

    Example:
        >>> is_below("samples/00000.parquet"), is_below("a/../../b"), is_below("/etc/passwd")
        (True, False, False)
    """
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in path


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path or `file://` URL as a local path.

    Raises:
        SchemaError: it is another URL.

    Example:
        >>> local_path("file:///data/set")
        PosixPath('/data/set')
    """
    text = os.fspath(path)
    if match := _FILE_URL.fullmatch(text):
        return Path("/" + match[1])
    if not _URL.match(text):
        return Path(text)
    raise SchemaError(
        f"path must be local, got {text!r}; mount or copy it, and give its local path"
    )


def path_or_url(text: str | Path | Location) -> Path | Location:
    """Return a local path as it is given, and the location of an object store: an argument type.

    Raises:
        StorageError: the scheme is unknown, or the URL has no bucket.
    """
    if not isinstance(text, str):
        return text
    location = Location.parse(text)
    return location if location.local is None else local_path(text)


def resolve_beside(file: Path | Location, name: str) -> Path | Location:
    """Return a path or URL that a file contains; a relative path starts at the file's folder.

    Example:
        >>> resolve_beside(Path("jobs/job.yaml"), "schema.pbtxt")
        PosixPath('jobs/schema.pbtxt')
        >>> str(resolve_beside(Location("s3://bucket/jobs/job.yaml"), "../schema.pbtxt"))
        's3://bucket/schema.pbtxt'
    """
    if "://" in name or Path(name).is_absolute():
        return path_or_url(name)
    if isinstance(file, Path) or file.local is not None:
        return Path(file).parent / name
    scheme, _, folder = file.parent.url.partition("://")
    bucket, _, key = folder.partition("/")
    return Location(f"{scheme}://{bucket}{os.path.normpath(PurePosixPath('/', key, name))}")


def parse_store_address(text: str) -> str:
    """Return the address of a store process in its only form: clients compare addresses as text.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_store_address("s3://bucket//run/stores/0/address")
        's3://bucket/run/stores/0/address'
    """
    if re.fullmatch(r"grpc(\+tls)?://[^/]+:\d+|file:///.+", text):
        return text
    with suppress(StorageError):
        location = Location.parse(text)
        if location.local is None and location.parent != location:
            return location.url
    raise ValueError(
        "must be grpc://host:port, grpc+tls://host:port, file:///path or a URL such as "
        f"s3://bucket/path, got {text!r}; use the address that the store announced, or where it "
        "publishes it"
    )


class ArgumentParser(argparse.ArgumentParser):
    """A parser of types `Path`, `Location` and `path_or_url`, in its subparsers, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a parser; arguments are those of `argparse.ArgumentParser`."""
        super().__init__(*args, **kwargs)
        self.register("type", Path, _argument_type(local_path))
        self.register("type", Location, _argument_type(Location.parse))
        self.register("type", path_or_url, _argument_type(path_or_url))
        self.register("action", "parsers", _Commands)

    def error(self, message: str) -> NoReturn:
        """Exit with one line that names the way to all options."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _Commands(argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage, reportMissingTypeArgument]
    """Commands, whose own help begins with the line that their list has."""

    def add_parser(self, name: str, **kwargs: Any) -> Any:
        """Add a parser; arguments are those of `argparse`."""
        text = str(kwargs.get("help", ""))
        kwargs.setdefault("description", text[:1].upper() + text[1:])
        return super().add_parser(name, **kwargs)


def _argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except SchemaError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


def schema_path(
    job_file: Path | Location, schema: str, *, allow_outside: bool = False
) -> Path | Location:
    """Return the path or URL of a job's `data.schema`. Symbolic links are followed.

    Raises:
        SchemaError: it is outside the folder.
    """
    if not allow_outside and ("://" in schema or not is_below(os.path.normpath(schema))):
        raise SchemaError(
            f"data.schema must be in the folder of the job file, got {schema!r}; copy it there, "
            f"or give {ALLOW_OUTSIDE}",
            file=str(job_file),
        )
    return resolve_beside(job_file, schema)


def network_warning(path: Path, mounts: str | None = None) -> str:
    """Return a warning if other hosts may write to a path unnoticed, else an empty string.

    The path need not exist. `mounts` is the text of /proc/self/mountinfo, which is read if None.
    """
    if mounts is None:
        mounts = MOUNTS.read_text("utf-8", "surrogateescape") if MOUNTS.exists() else ""
    point, kind = find_mount(Path(os.path.realpath(path)), mounts)
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)
    if not is_fuse and kind not in NETWORK_FILESYSTEMS:
        return ""
    return (
        f"warning: output is on a network filesystem, where locks may not hold between hosts: "
        f"{str(path)!r} on {kind} (mounted at {point}); let no other process write there"
    )


def find_mount(path: Path, mounts: str) -> tuple[str, str]:
    """Return the mount point and type of the filesystem of an absolute path without links.

    `mounts` is the text of /proc/self/mountinfo.

    Returns:
        Two empty strings if no line matches.

    Example:
        >>> line = "36 35 0:31 / /mnt/a rw,noatime shared:1 - nfs4 host:/a rw"
        >>> find_mount(Path("/mnt/a/dataset"), line)
        ('/mnt/a', 'nfs4')
    """
    deepest = "", ""
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[4])
        # The later of two mounts at one point hides the earlier one.
        if path.is_relative_to(point) and len(point) >= len(deepest[0]):
            deepest = point, after.split(" ")[0]
    return deepest
