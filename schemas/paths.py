"""Names that become paths, and places that are written to: refused before anything is written.

A name of a job file stays below the folder that it is joined to. A URL is no folder of this
machine. On a network filesystem two hosts can write at once without seeing each other's locks,
so writing there requires `--single-writer`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from schemas.errors import SchemaError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
MOUNTS = Path("/proc/self/mountinfo")

NETWORK_FILESYSTEMS = frozenset(
    {
        # Locks depend on mount options and on the server, and clients cache directories.
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda"),
        # Folders of another system, where locks of the two are not the same.
        *("9p", "virtiofs", "vboxsf", "vmhgfs", "drvfs", "prl_fs"),
        # Cluster filesystems: with Lustre's `localflock`, and its like, locks are of one host.
        *("ceph", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2", "glusterfs", "ocfs2", "gfs2"),
    }
)
"""Types, as /proc/self/mountinfo gives them, that several hosts may have mounted; so has every
`fuse.*`, of which nothing tells what is behind it, but for `LOCAL_FUSE`."""
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})
"""What containers without root have in the place of overlayfs; `fuseblk` is a local disk, too."""

SINGLE_WRITER = "--single-writer"
SINGLE_WRITER_HELP = (
    "allow a network filesystem: no other process, on any host, writes there meanwhile"
)
ALLOW_OUTSIDE = "--allow-outside"
ALLOW_OUTSIDE_HELP = "allow data.schema outside the folder of the job file"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_FILE_URL = re.compile(r"file:(?:///|/(?!/))(.*)", re.DOTALL)
_OCTAL = re.compile(r"\\([0-7]{3})")


def check_names(key: str, names: Iterable[str]) -> None:
    """Refuse names that cannot be directories and columns.

    Raises:
        ValueError: naming the first.
    """
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{key} must be named by letters, digits, '_' and '-', got {name!r}; rename it"
            )


def is_below(path: str) -> bool:
    """Tell whether a relative path stays below the folder that it is joined to.

    Example:
        >>> is_below("samples/00000.parquet"), is_below("a/../../b"), is_below("/etc/passwd")
        (True, False, False)
    """
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in path


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return a place of this machine, without `file://`.

    Raises:
        SchemaError: it is a URL of anything else.

    Example:
        >>> local_path("file:///data/set")
        PosixPath('/data/set')
    """
    text = os.fspath(place)
    if match := _FILE_URL.fullmatch(text):
        return Path("/" + match[1])
    if not _URL.match(text):
        return Path(text)
    raise SchemaError(
        f"path must be a folder or file of this machine, got {text!r}; mount or copy it, and give "
        "its local path"
    )


class ArgumentParser(argparse.ArgumentParser):
    """A parser, as are those of its commands, whose arguments of `type=Path` are local places."""

    def __init__(
        self, *args: Any, renamed: Mapping[str, str] = MappingProxyType({}), **kwargs: Any
    ) -> None:
        """Read paths by `local_path`.

        Args:
            args: of `argparse.ArgumentParser`.
            renamed: old names of commands and options to the new ones; old ones are refused.
            kwargs: of `argparse.ArgumentParser`.
        """
        super().__init__(*args, **kwargs)
        self._renamed = renamed
        self.register("type", Path, _path_argument)

    # the overloads of the base have one generic type for the namespace
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; exit with one line that gives the new name of one that was renamed."""
        words = list(sys.argv[1:] if args is None else args)
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        for word in [*options, *words[:1]]:
            if word in self._renamed:
                kind = "option" if word.startswith("--") else "command"
                line = f"{kind} was renamed: {word}; use {self._renamed[word]}"
                self.exit(2, f"{self.prog}: error: {line}\n")
        return super().parse_known_args(words, namespace)


def _path_argument(text: str) -> Path:
    try:
        return local_path(text)
    except SchemaError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def schema_path(job_file: Path, schema: str, *, allow_outside: bool = False) -> Path:
    """Return the file that a job's `data.schema` names.

    Links are followed: whoever made them had the folder.

    Args:
        job_file: the job file.
        schema: relative to its folder.
        allow_outside: whether it may lie elsewhere.

    Raises:
        SchemaError: it lies outside the folder.
    """
    if not allow_outside and not is_below(os.path.normpath(schema)):
        raise SchemaError(
            f"data.schema must lie in the folder of the job file, got {schema!r}; copy it there, "
            f"or give {ALLOW_OUTSIDE}",
            file=str(job_file),
        )
    return job_file.parent / schema


def check_writable(place: Path, *, single_writer: bool = False, mounts: str | None = None) -> None:
    """Refuse to write where another host could write at the same time, unseen.

    Args:
        place: a dataset, a run or their folder; it need not exist.
        single_writer: whether no other host writes there.
        mounts: text of /proc/self/mountinfo; read where None.

    Raises:
        SchemaError: it lies on a network filesystem.
    """
    if single_writer:
        return
    if mounts is None:
        mounts = MOUNTS.read_text("utf-8", "surrogateescape") if MOUNTS.exists() else ""
    point, kind = find_mount(Path(os.path.realpath(place)), mounts)
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)
    if is_fuse or kind in NETWORK_FILESYSTEMS:
        raise SchemaError(
            f"output must not lie on a network filesystem, where writers on two hosts lose data, "
            f"got {str(place)!r} on {kind} (mounted at {point}); use a local disk, or give "
            f"{SINGLE_WRITER} if nothing else writes there"
        )


def find_mount(path: Path, mounts: str) -> tuple[str, str]:
    """Return where the filesystem of a path is mounted, and its type.

    Args:
        path: absolute, without links.
        mounts: text of /proc/self/mountinfo.

    Returns:
        Two empty texts where no line has it.

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
        # Of two at one point the later one lies on top.
        if path.is_relative_to(point) and len(point) >= len(deepest[0]):
            deepest = point, after.split(" ")[0]
    return deepest
