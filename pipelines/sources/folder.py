"""The input directory, wherever it lies: a local one, or any that Beam's filesystems reach."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

import pyarrow as pa

from schemas.errors import SchemaError
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
    return importlib.import_module("pipelines.sources.remote")  # brings Beam: only for URLs


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
