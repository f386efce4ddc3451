"""Files at a URL: local directories and object stores behind one interface.

A dataset, a run or a checkpoint is a `Location`: a plain path, `file://`, `s3://`, `gs://`, `az://`,
or `memory://` within one process. Object stores have neither renames nor locks. Therefore files are
written once, under names that no other attempt uses, and a commit creates a file that must not
exist yet (`Location.create`). Credentials, endpoints and regions are those that the tools of each
store find, see `docs/storage.md`.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from presage.schemas.errors import SchemaError, StorageError
from presage.schemas.storage.local_files import (
    PARTIAL,
    link_new,
    list_files,
    partial_file,
    remove_incomplete,
    sync_directory,
    write_flushed,
)
from presage.schemas.storage.store_client import (
    ATTEMPTS,
    RETRY_SEC,
    RefusedError,
    ShorterError,
    call,
    pause,
    store_of,
)

SCHEMES = ("file", "s3", "gs", "az", "memory")
"""Schemes of URLs; text without a scheme is a local path."""
MANIFESTS = "_manifests"
"""Directory of the numbered manifests that commit a dataset, a run or a root of days."""


PART_BYTES, MAX_PARTS = 8 << 20, 9_000
"""Smallest part of an upload, and the most parts; S3 takes 10,000."""
_READ_BYTES = 33 << 20
"""Bytes that an open file at a store reads at once: half a split of the input, and the end of its
last line."""


CHUNK_BYTES, CHUNKS_AHEAD = 8 << 20, 4
"""Bytes of one read while a file is copied, and the reads of a file at a store at once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A listed file.

    Attributes:
        path: relative to the listed location, with slashes.
        num_bytes: size.
        modified: time of the last write, by the clock of the store.
    """

    path: str
    num_bytes: int
    modified: datetime


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A file or directory; nothing is opened before its first use. Directories are implicit.

    Methods that read raise FileNotFoundError if there is no such file; all raise StorageError if
    the store fails.

    Attributes:
        url: normalised: an absolute path, or a URL of an object store without a slash at its end.
    """

    url: str

    @classmethod
    def parse(cls, text: str | os.PathLike[str] | Location) -> Location:
        """Return the location of a path or URL.

        Raises:
            StorageError: the scheme is unknown, or the URL has no bucket.
        """
        if isinstance(text, Location):
            return text
        text = os.fspath(text)
        if not text or "\0" in text:
            raise StorageError(f"path is empty or has a null byte: {text!r}; name a directory")
        scheme, separator, rest = text.partition("://")
        if not separator and text.startswith("file:/"):
            scheme, separator, rest = "file", "://", text.removeprefix("file:")
        if not separator:
            scheme, separator, rest = text.partition(":/")
            if separator and scheme in SCHEMES:
                raise StorageError(f"URL lacks a slash; write {scheme}://{rest}", file=text)
            return cls(_absolute(text))
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise StorageError(f"scheme is unknown: {scheme!r}; use a path or {known}", file=text)
        if scheme == "file":
            host, _, path = rest.partition("/")
            if host not in ("", "localhost"):
                raise StorageError(
                    f"file URL names a host: {host!r}; write file:///PATH", file=text
                )
            return cls.parse("/" + unquote(path))
        bucket, *parts = rest.split("/")
        if not bucket or bucket != bucket.strip():
            raise StorageError(f"URL has no bucket; write {scheme}://BUCKET/PATH", file=text)
        if ".." in parts:
            raise StorageError("URL contains '..'; write the path without it", file=text)
        return cls(f"{scheme}://" + "/".join([bucket, *(p for p in parts if p not in ("", "."))]))

    def __truediv__(self, name: str) -> Location:
        """Return a location below this one."""
        return Location(f"{self.url}/{name}" if self.url != "/" else f"/{name}")

    def __str__(self) -> str:
        """Return the path or URL."""
        return self.url

    def __fspath__(self) -> str:
        """Return the path of a local location.

        Raises:
            StorageError: it is at an object store.
        """
        if self.local is None:
            raise StorageError(
                "this command needs a local path; copy the files to a local disk", file=self.url
            )
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The location that contains this one; a bucket or root directory contains itself."""
        if self.url.count("/") == 2 and self.local is None:
            return self
        return Location(self.url.rpartition("/")[0] or "/")

    def resolve(self) -> Location:
        """Return this location, with the symbolic links of a local path followed."""
        return self if self.local is None else Location(str(self.local.resolve()))

    @property
    def local(self) -> Path | None:
        """Path of a local location; None at an object store."""
        return None if "://" in self.url else Path(self.url)

    def read_bytes(self) -> bytes:
        """Read a whole file."""
        if self.local is not None:
            return self.local.read_bytes()
        # It may have been replaced between two requests of one read: then read the new file.
        with suppress(ShorterError):
            return call(self.url, lambda o: bytes(o.get(*self._object()).bytes()))
        return call(self.url, lambda o: bytes(o.get(*self._object()).bytes()))

    def read_text(self) -> str:
        """Read a whole file as UTF-8."""
        return self.read_bytes().decode()

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read byte ranges [start, end). At a store, near ones are fetched by one request.

        Raises:
            StorageError: a range ends beyond the file.
        """
        parts: Sequence[Any]
        if not ranges:
            return []
        if self.local is not None:
            with self.local.open("rb") as file:
                parts = [os.pread(file.fileno(), end - start, start) for start, end in ranges]
        else:
            parts = self._get_ranges(ranges)
        for part, (start, end) in zip(parts, ranges, strict=True):
            if len(part) != end - start:
                raise StorageError(
                    f"file ends before byte {end}: {len(part)} bytes from byte {start} on; "
                    "restore it",
                    file=self.url,
                )
        return [memoryview(part) for part in parts]

    def open(self) -> BinaryIO:
        """Open a file for reading and seeking."""
        if self.local is not None:
            return self.local.open("rb")
        return io.BufferedReader(_RemoteFile(self), _READ_BYTES)

    def chunks(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a file of known size, in order.

        At a store the next chunks are requested meanwhile.
        """
        ends = range(CHUNK_BYTES, num_bytes + CHUNK_BYTES, CHUNK_BYTES)
        ranges = [(end - CHUNK_BYTES, min(end, num_bytes)) for end in ends]
        if self.local is not None or len(ranges) < 2:
            for each in ranges:
                yield from self.read_ranges([each])
            return
        pool = ThreadPoolExecutor(CHUNKS_AHEAD, thread_name_prefix="chunks")
        try:
            reads = deque(pool.submit(self.read_ranges, [each]) for each in ranges[:CHUNKS_AHEAD])
            for each in ranges[CHUNKS_AHEAD:]:
                yield from reads.popleft().result()
                reads.append(pool.submit(self.read_ranges, [each]))
            while reads:
                yield from reads.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _get_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Read byte ranges of an object; empty ones are not requested."""
        if self.url.startswith("memory://"):  # its client panics beyond the end
            data = self.read_bytes()
            return [data[start:end] for start, end in ranges]
        full = [(start, end) for start, end in ranges if start < end]
        if not full:
            return [b""] * len(ranges)
        starts, ends = [start for start, _ in full], [end for _, end in full]
        parts = iter(
            call(self.url, lambda o: o.get_ranges(*self._object(), starts=starts, ends=ends))
        )
        return [next(parts) if start < end else b"" for start, end in ranges]

    def num_bytes(self) -> int | None:
        """Return the size of a file; None if it does not exist."""
        entry = self.stat()
        return None if entry is None else entry.num_bytes

    def stat(self) -> Entry | None:
        """Return size and time of a file; None if it does not exist."""
        if self.parent == self:  # a bucket is no file, and its reply has no size
            return None
        with suppress(FileNotFoundError, NotADirectoryError):
            if self.local is not None:
                return _local_entry("", self.local.stat()) if self.local.is_file() else None
            meta = call(self.url, lambda o: o.head(*self._object()))
            return Entry("", meta["size"], meta["last_modified"])
        return None

    def exists(self) -> bool:
        """Return whether there is a file, or at least one file below this directory."""
        return self.stat() is not None or bool(self._list(limit=1))

    def write_bytes(self, data: bytes) -> None:
        """Write a file atomically and durably; replaces one that exists."""
        if self.local is None:
            call(self.url, lambda o: o.put(*self._object(), data))
            return
        with partial_file(self.local) as partial:
            write_flushed(partial, data)
            partial.replace(self.local)
        sync_directory(self.local.parent)

    def create(self, data: bytes) -> bool:
        """Write a file that must not exist; of several writers exactly one succeeds.

        A request whose reply was lost may have been carried out, and a conflict may be reported
        although nothing was written. So the file is read back, and `data` must differ between
        writers, for instance by the writer's id.

        Returns:
            Whether the file has this content.

        Raises:
            StorageError: the store refuses, or the outcome is unknown after several attempts.
        """
        error, ends = "", time.monotonic() + RETRY_SEC
        for attempt in range(ATTEMPTS):
            error = self._try_create(data)
            if error is None:
                return True
            with suppress(FileNotFoundError, StorageError):
                return self.read_bytes() == data
            if time.monotonic() > ends:
                break
            pause(attempt)
        raise StorageError(
            f"outcome of a conditional put is unknown: {error}; run the command again when the "
            "store is reachable",
            file=self.url,
        )

    def _try_create(self, data: bytes) -> str | None:
        """Return None if the file was created, else why that is refused or unknown."""
        if self.local is not None:
            return link_new(self.local, data)
        try:
            call(
                self.url,
                lambda o: o.put(*self._object(), data, mode="create", use_multipart=False),
                conditional=True,
            )
        except RefusedError:
            raise
        except FileNotFoundError as error:
            raise StorageError(
                "store refuses to write; check bucket and key", file=self.url
            ) from error
        except StorageError as error:
            return error.message.partition(";")[0]
        return None

    @contextmanager
    def new_file(self) -> Generator[Path]:
        """Yield a local path to write to; after the body it is this file, complete.

        A task that runs twice, even concurrently, must write the same bytes: the last one wins.
        Local files are renamed and not flushed to disk.
        """
        if self.local is not None:
            with partial_file(self.local) as partial:
                yield partial
                partial.replace(self.local)
            return
        with tempfile.TemporaryDirectory(prefix="presage-") as folder:
            path = Path(folder) / self.name
            yield path
            self.upload(path)

    def upload(self, path: Path) -> None:
        """Copy a local file here, in parts if it is large."""
        if self.local is None:
            part_bytes = max(PART_BYTES, path.stat().st_size // MAX_PARTS + 1)
            call(self.url, lambda o: o.put(*self._object(), path, chunk_size=part_bytes))
            return
        with self.new_file() as partial, path.open("rb") as source, partial.open("wb") as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)

    def move_from(self, source: Path) -> None:
        """Move a local directory here, where nothing may be yet.

        On a local disk the files appear at once, at a store one after the other.
        """
        if self.local is not None and self.local.parent.stat().st_dev == source.stat().st_dev:
            with suppress(FileNotFoundError):
                self.local.rmdir()
            source.rename(self.local)
            sync_directory(self.local.parent)
            return
        for entry in Location.parse(source).entries():
            (self / entry.path).upload(source / entry.path)
        shutil.rmtree(source)

    def copy_from(self, source: Location) -> None:
        """Copy a file here: on one local disk by a hard link, within one store by the store itself.

        Between stores it is copied through a temporary file, in parts if it is large.
        """
        if self.local is not None and source.local is not None:
            try:
                with partial_file(self.local) as partial:
                    os.link(source.local, partial)
                    partial.replace(self.local)
            except FileNotFoundError:
                raise
            except OSError:  # another filesystem, or one without hard links
                self.upload(source.local)
        elif self._bucket == source._bucket:
            store, target = self._object()
            call(self.url, lambda o: o.copy(store, source._object()[1], target))
        else:
            with local_copy(source) as copy:
                if not copy.exists():
                    raise FileNotFoundError(errno.ENOENT, "no such file", source.url)
                self.upload(copy)

    @property
    def _bucket(self) -> str:
        return "" if self.local is not None else "/".join(self.url.split("/", 3)[:3])

    def entries(self, after: str | None = None) -> list[Entry]:
        """Return all files below this directory, sorted by path; none if it does not exist.

        Only those with paths greater than `after`, if not None. Empty objects `name/`, by which
        consoles of stores show a directory, are left out.
        """
        entries = sorted(self._list(after), key=lambda entry: entry.path)
        paths = [entry.path for entry in entries]

        def is_directory(entry: Entry) -> bool:
            below = f"{entry.path}/"
            place = bisect_left(paths, below)
            return not entry.num_bytes and place < len(paths) and paths[place].startswith(below)

        return [entry for entry in entries if not is_directory(entry)]

    def _list(self, after: str | None = None, limit: int | None = None) -> list[Entry]:
        if self.local is not None:
            entries = (_local_entry(*listed) for listed in list_files(self.local))
            listed = (entry for entry in entries if after is None or entry.path > after)
            return [entry for _, entry in zip(range(limit or 1 << 60), listed, strict=False)]
        store, path = self._object()
        prefix = f"{path}/" if path else ""
        offset = None if after is None else f"{prefix}{after}"

        def collect(obstore: Any) -> list[Entry]:
            listed: list[Entry] = []
            for page in obstore.list(store, path or None, offset=offset, chunk_size=1000):
                for item in page:
                    name = item["path"][len(prefix) :]
                    if name and (after is None or name > after):  # emulators ignore the offset
                        listed.append(Entry(name, item["size"], item["last_modified"]))
                if limit is not None and len(listed) >= limit:
                    break
            return listed

        return call(self.url, collect)

    def children(self) -> tuple[list[str], list[str]]:
        """Return the names of the directories and of the files in this directory, each sorted."""
        if self.local is not None:
            paths = [] if not self.local.is_dir() else list(self.local.iterdir())
            folders = [path.name for path in paths if path.is_dir()]
            files = [p.name for p in paths if p.is_file() and not p.name.endswith(PARTIAL)]
        else:
            store, path = self._object()
            level = call(self.url, lambda o: o.list_with_delimiter(store, path or None))
            folders = [prefix.rpartition("/")[2] for prefix in level["common_prefixes"]]
            files = [i["path"].rpartition("/")[2] for i in level["objects"] if i["path"] != path]
        return sorted(folders), sorted(files)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files below this directory; those that do not exist are ignored."""
        if self.local is not None:
            for path in paths:
                (self.local / path).unlink(missing_ok=True)
            return
        store, prefix = self._object()
        names = [f"{prefix}/{path}" if prefix else path for path in paths]
        for start in range(0, len(names), 1000):
            chunk = names[start : start + 1000]
            try:
                call(self.url, lambda o, chunk=chunk: o.delete(store, chunk))
            except FileNotFoundError:
                for name in chunk:
                    with suppress(FileNotFoundError):
                        call(self.url, lambda o, name=name: o.delete(store, name))

    def prune(self) -> None:
        """Remove this local directory if it is empty, and then the one that contains it.

        A process that writes a file there meanwhile makes the directory again.
        """
        if self.local is not None:
            with suppress(OSError):  # it is not empty, or was removed
                self.local.rmdir()
                self.local.parent.rmdir()

    def remove_all(self, is_ours: Callable[[str], bool] | None = None) -> int:
        """Delete every file below this directory, or those that Presage writes; return their bytes.

        Args:
            is_ours: whether the program wrote the file of a relative path; others stay, with their
                directories. None: only the program writes here.
        """
        entries = [entry for entry in self.entries() if is_ours is None or is_ours(entry.path)]
        self.remove([entry.path for entry in entries])
        if self.local is not None:  # incomplete files, directories
            if is_ours is None:
                shutil.rmtree(self.local, ignore_errors=True)
            else:
                remove_incomplete(self.local, is_ours)
        return sum(entry.num_bytes for entry in entries)

    def _object(self) -> tuple[Any, str]:
        parts = self.url.split("/", 3)
        return store_of("/".join(parts[:3])), parts[3] if len(parts) > 3 else ""


class _RemoteFile(io.RawIOBase):
    def __init__(self, location: Location) -> None:
        super().__init__()
        size = location.num_bytes()
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", location.url)
        self._location, self._size, self._position = location, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._position + len(buffer))
        if end <= self._position:
            return 0
        (data,) = self._location.read_ranges([(self._position, end)])
        buffer[: len(data)] = data
        self._position = end
        return len(data)


@contextmanager
def copy_errors_name(source: Location, copy: Path) -> Generator[None]:
    """In errors, replace the path of a temporary copy by that of its source."""
    try:
        yield
    except SchemaError as error:
        if error.file is not None and error.file.startswith(str(copy)):
            error.file = f"{source}{error.file.removeprefix(str(copy))}"
        raise


@contextmanager
def local_copy(source: Path | Location) -> Generator[Path]:
    """Yield a local path with a file or all files of a directory: itself, or a temporary copy.

    Nothing is at the path if there is nothing at the source.
    """
    source = Location.parse(source)
    if source.local is not None:
        yield source.local
        return
    with tempfile.TemporaryDirectory(prefix="presage-") as folder:
        target, entry = Path(folder) / source.name, source.stat()
        files = [(source, target, entry)] if entry is not None else []
        files += [(source / e.path, target / e.path, e) for e in source.entries()]
        for location, path, entry in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for chunk in location.chunks(entry.num_bytes):
                    file.write(chunk)
        with copy_errors_name(source, target):
            yield target


@contextmanager
def new_folder(target: Location) -> Generator[Path]:
    """Yield a local folder to fill; after the body its files are at the target, MANIFEST.json last.

    The target must be empty or missing. A local one is the folder itself, which is not created.
    """
    if target.local is not None:
        yield target.local
        return
    with tempfile.TemporaryDirectory(prefix="presage-") as folder:
        yield Path(folder)
        entries = Location.parse(folder).entries()
        for entry in sorted(entries, key=lambda entry: entry.path == "MANIFEST.json"):
            (target / entry.path).upload(Path(folder) / entry.path)


def _absolute(path: str) -> str:
    """Return an absolute path without `..`, and without the second slash that POSIX allows."""
    return "/" + os.path.normpath(Path(path).absolute()).lstrip("/")


def _local_entry(path: str, status: os.stat_result) -> Entry:
    return Entry(path, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
