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
import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from schemas.errors import SchemaError

T = TypeVar("T")

SCHEMES = ("file", "s3", "gs", "az", "memory")
"""Schemes of URLs; text without a scheme is a local path."""
MANIFESTS = "_manifests"
"""Directory of the numbered manifests that commit a dataset, a run or a root of days."""
PARTIAL = ".partial"
"""Suffix of incomplete local files."""
CREATE_ATTEMPTS = 8
"""Attempts of a conditional put whose outcome is unknown: about half a minute with the pauses."""
_READ_BYTES = 4 << 20
"""Bytes that an open file at a store reads at once."""
RETRY_SEC, TIMEOUT_SEC, CONNECT_SEC = 90, 60, 10
"""Time for all attempts of a request, for one attempt, and for connecting."""
MAX_RETRIES = 10
CHUNK_BYTES = 32 << 20
"""Bytes in memory while a file is copied."""


class StorageError(SchemaError):
    """A store cannot be reached, or refuses a request."""


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
        scheme, separator, rest = text.partition("://")
        if not separator and text.startswith("file:/"):
            scheme, separator, rest = "file", "://", text.removeprefix("file:")
        if not separator:
            return cls(os.path.normpath(Path(text).absolute()))
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise StorageError(f"scheme is unknown: {scheme!r}; use a path or {known}", file=text)
        if scheme == "file":
            host, _, path = rest.partition("/")
            if host not in ("", "localhost"):
                raise StorageError(
                    f"file URL names a host: {host!r}; write file:///PATH", file=text
                )
            return cls(os.path.normpath("/" + unquote(path)))
        if not urlsplit(text).netloc:
            raise StorageError(f"URL has no bucket; write {scheme}://BUCKET/PATH", file=text)
        return cls(text.rstrip("/"))

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
        """The location that contains this one."""
        return Location(self.url.rpartition("/")[0] or "/")

    @property
    def local(self) -> Path | None:
        """Path of a local location; None at an object store."""
        return None if "://" in self.url else Path(self.url)

    def read_bytes(self) -> bytes:
        """Read a whole file.

        Raises:
            FileNotFoundError: it does not exist.
            StorageError: the store failed.
        """
        if self.local is not None:
            return self.local.read_bytes()
        return _call(self, lambda o: bytes(o.get(*self._object()).bytes()))

    def read_text(self) -> str:
        """Read a whole file as UTF-8; raises as `read_bytes`."""
        return self.read_bytes().decode()

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read byte ranges [start, end). At a store, near ones are fetched by one request.

        Raises:
            FileNotFoundError: the file does not exist.
            StorageError: the store failed, or a range ends beyond the file.
        """
        parts: Sequence[Any]
        if not ranges:
            return []
        if self.local is not None:
            with self.local.open("rb") as file:
                parts = [os.pread(file.fileno(), end - start, start) for start, end in ranges]
        else:
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            parts = _call(self, lambda o: o.get_ranges(*self._object(), starts=starts, ends=ends))
        for part, (start, end) in zip(parts, ranges, strict=True):
            if len(part) != end - start:
                raise StorageError(
                    f"file must have bytes {start} to {end}, got {len(part)} of them; restore it",
                    file=self.url,
                )
        return [memoryview(part) for part in parts]

    def open(self) -> BinaryIO:
        """Open a file for reading and seeking.

        Raises:
            FileNotFoundError: it does not exist.
            StorageError: the store failed.
        """
        if self.local is not None:
            return self.local.open("rb")
        return io.BufferedReader(_RemoteFile(self), _READ_BYTES)

    def chunks(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a file of known size, in order; raises as `read_ranges`."""
        for start in range(0, num_bytes, CHUNK_BYTES):
            yield from self.read_ranges([(start, min(start + CHUNK_BYTES, num_bytes))])

    def num_bytes(self) -> int | None:
        """Return the size of a file; None if it does not exist."""
        entry = self.stat()
        return None if entry is None else entry.num_bytes

    def stat(self) -> Entry | None:
        """Return size and time of a file; None if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if self.local is not None:
                return _local_entry(self.local, "") if self.local.is_file() else None
            meta = _call(self, lambda o: o.head(*self._object()))
            return Entry("", meta["size"], meta["last_modified"])
        return None

    def exists(self) -> bool:
        """Return whether there is a file, or at least one file below this directory."""
        return self.stat() is not None or bool(self._list(limit=1))

    def write_bytes(self, data: bytes) -> None:
        """Write a file atomically and durably; replaces one that exists."""
        if self.local is None:
            _call(self, lambda o: o.put(*self._object(), data))
            return
        with _partial_file(self.local, data) as partial:
            partial.replace(self.local)
        _sync_directory(self.local.parent)

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
        error: Exception | None = None
        for attempt in range(CREATE_ATTEMPTS):
            error = self._try_create(data)
            if error is None:
                return True
            with suppress(FileNotFoundError, StorageError):
                return self.read_bytes() == data
            _pause(attempt)
        raise StorageError(
            f"outcome of a conditional put is unknown after {CREATE_ATTEMPTS} attempts: {error}; "
            "run the command again when the store is reachable",
            file=self.url,
        )

    def _try_create(self, data: bytes) -> Exception | None:
        """Return None if the file was created, and the error if that is refused or unknown."""
        if self.local is not None:
            try:
                with _partial_file(self.local, data) as partial:
                    os.link(partial, self.local)
            except FileExistsError as error:
                return error
            except OSError as error:
                raise StorageError(
                    f"file cannot be created: {error.strerror}; commits need a filesystem with "
                    "hard links",
                    file=self.url,
                ) from error
            _sync_directory(self.local.parent)
            return None
        try:
            _call(
                self,
                lambda o: o.put(*self._object(), data, mode="create", use_multipart=False),
                conditional=True,
            )
        except _RefusedError:
            raise
        except FileNotFoundError as error:
            raise StorageError(
                "store refuses to write; check bucket and key", file=self.url
            ) from error
        except StorageError as error:
            return error
        return None

    @contextmanager
    def new_file(self) -> Generator[Path]:
        """Yield a local path to write to; after the body it is this file, complete.

        A task that runs twice, even concurrently, must write the same bytes: the last one wins.
        Local files are renamed and not flushed to disk.
        """
        if self.local is not None:
            partial = _partial_path(self.local)
            try:
                yield partial
                partial.replace(self.local)
            finally:
                partial.unlink(missing_ok=True)
            return
        with tempfile.TemporaryDirectory(prefix="presage-") as folder:
            path = Path(folder) / self.name
            yield path
            self.upload(path)

    def upload(self, path: Path) -> None:
        """Copy a local file here, in parts if it is large."""
        if self.local is None:
            _call(self, lambda o: o.put(*self._object(), path))
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
            _sync_directory(self.local.parent)
            return
        for entry in Location.parse(source).entries():
            (self / entry.path).upload(source / entry.path)

    def copy_from(self, source: Location) -> None:
        """Copy a file here; within one store without a transfer, on one local disk by a hard link.

        Raises:
            FileNotFoundError: it does not exist.
        """
        if self.local is not None and source.local is not None:
            partial = _partial_path(self.local)
            try:
                os.link(source.local, partial)
                partial.replace(self.local)
            except FileNotFoundError:
                raise
            except OSError:  # another filesystem, or one without hard links
                self.upload(source.local)
            finally:
                partial.unlink(missing_ok=True)
        elif self._bucket == source._bucket:
            store, target = self._object()
            _call(self, lambda o: o.copy(store, source._object()[1], target))
        else:
            self.write_bytes(source.read_bytes())

    @property
    def _bucket(self) -> str:
        return "" if self.local is not None else "/".join(self.url.split("/", 3)[:3])

    def entries(self, after: str | None = None) -> list[Entry]:
        """Return all files below this directory, sorted by path; none if it does not exist.

        Args:
            after: only files with greater paths, if not None.
        """
        return sorted(self._list(after), key=lambda entry: entry.path)

    def _list(self, after: str | None = None, limit: int | None = None) -> list[Entry]:
        if self.local is not None:
            found = (e for e in _local_entries(self.local, "") if after is None or e.path > after)
            return [entry for _, entry in zip(range(limit or 1 << 60), found, strict=False)]
        store, path = self._object()
        prefix = f"{path}/" if path else ""
        offset = None if after is None else f"{prefix}{after}"

        def collect(obstore: Any) -> list[Entry]:
            found: list[Entry] = []
            for page in obstore.list(store, path or None, offset=offset, chunk_size=1000):
                found += [
                    Entry(item["path"][len(prefix) :], item["size"], item["last_modified"])
                    for item in page
                ]
                if limit is not None and len(found) >= limit:
                    break
            return found

        return _call(self, collect)

    def children(self) -> tuple[list[str], list[str]]:
        """Return the names of the directories and of the files in this directory, each sorted."""
        if self.local is not None:
            found = [] if not self.local.is_dir() else list(self.local.iterdir())
            folders = [path.name for path in found if path.is_dir()]
            files = [p.name for p in found if p.is_file() and not p.name.endswith(PARTIAL)]
        else:
            store, path = self._object()
            level = _call(self, lambda o: o.list_with_delimiter(store, path or None))
            folders = [prefix.rpartition("/")[2] for prefix in level["common_prefixes"]]
            files = [item["path"].rpartition("/")[2] for item in level["objects"]]
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
                _call(self, lambda o, chunk=chunk: o.delete(store, chunk))
            except FileNotFoundError:
                for name in chunk:
                    with suppress(FileNotFoundError):
                        _call(self, lambda o, name=name: o.delete(store, name))

    def remove_all(self) -> int:
        """Delete every file below this directory; return their bytes."""
        entries = self.entries()
        self.remove([entry.path for entry in entries])
        if self.local is not None:
            shutil.rmtree(self.local, ignore_errors=True)  # incomplete files, directories
        return sum(entry.num_bytes for entry in entries)

    def _object(self) -> tuple[Any, str]:
        """Return the client of the bucket, and the key."""
        parts = self.url.split("/", 3)
        return _client("/".join(parts[:3]), os.getpid()), parts[3] if len(parts) > 3 else ""


class _RemoteFile(io.RawIOBase):
    """A file at a store, read by ranges."""

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
    """Let errors of files of a temporary copy name them at their source."""
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
    if isinstance(source, Path):
        yield source
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


class _RefusedError(StorageError):
    """Another attempt would be refused, too."""


class _ConflictError(StorageError):
    """A condition was not met, or the store says so of a request without a condition."""


def _call(location: Location, action: Callable[[Any], T], *, conditional: bool = False) -> T:
    """Call functions of obstore, which repeats failed requests; raise its errors as ours.

    Args:
        location: for errors.
        action: called with the module `obstore`.
        conditional: whether the request has a condition that may not be met.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store failed, or refuses the request.
    """
    import obstore
    from obstore import exceptions as e

    for attempt in range(CREATE_ATTEMPTS):
        try:
            return action(obstore)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise _RefusedError(
                    "bucket does not exist; create it", file=location.url
                ) from error
            raise FileNotFoundError(errno.ENOENT, "no such object", location.url) from None
        except (e.AlreadyExistsError, e.PreconditionError) as error:
            if conditional or attempt == CREATE_ATTEMPTS - 1:
                raise _ConflictError(_cause(error), file=location.url) from error
            _pause(attempt)
        except (e.PermissionDeniedError, e.UnauthenticatedError) as error:
            raise _RefusedError(
                f"store refuses access: {_cause(error)}; check the credentials", file=location.url
            ) from error
        except (e.InvalidPathError, e.NotSupportedError, ValueError) as error:
            raise _RefusedError(f"store refuses: {_cause(error)}", file=location.url) from error
        except e.BaseError as error:
            raise StorageError(
                f"store failed: {_cause(error)}; try again when it is reachable", file=location.url
            ) from error
    raise AssertionError("the last attempt returns or raises")


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0.5, 1.0) * min(8.0, 0.1 * 2**attempt))


def _cause(error: Exception) -> str:
    """Return code and message of a store's reply, or the first line of an error."""
    text = str(error)
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].strip()[:300] if lines else type(error).__name__


def _probe(directory: Location) -> Location:
    """Return the location of a new file, which is no manifest."""
    return directory / MANIFESTS / f"probe-{uuid.uuid4().hex}"


def check_conditional_put(directory: Location) -> None:
    """Refuse a store that ignores the condition of a conditional put.

    Raises:
        StorageError: two puts of one name, each on condition that it is absent, both succeeded.
    """
    probe = _probe(directory)
    try:
        first, second = probe.create(b"first"), probe.create(b"second")
    finally:
        probe.parent.remove([probe.name])
    if not first or second:
        raise StorageError(
            "store ignores the condition of a conditional put, so a concurrent commit could be "
            "lost; use a store that supports it, see docs/storage.md",
            file=directory.url,
        )


def store_time(directory: Location) -> datetime:
    """Return the time by the clock of the store, to the second, as `Entry.modified` has it."""
    probe = _probe(directory)
    try:
        probe.write_bytes(b"time")
        entry = probe.stat()
    finally:
        probe.parent.remove([probe.name])
    if entry is None:
        raise StorageError("store has lost a file just written; use another store", file=probe.url)
    return entry.modified


# Clients of object stores.

_MEMORY: dict[str, Any] = {}
_MEMORY_LOCK = threading.Lock()


@lru_cache(maxsize=64)
def _client(root: str, process_id: int) -> Any:
    """Return the client of a bucket; clients do not survive a fork, hence one per process."""
    from obstore.store import GCSStore, MemoryStore, from_url

    if root.startswith("memory://"):
        with _MEMORY_LOCK:
            return _MEMORY.setdefault(root, MemoryStore())
    client: dict[str, Any] = {"timeout": f"{TIMEOUT_SEC}s", "connect_timeout": f"{CONNECT_SEC}s"}
    endpoint = _endpoint(root.partition("://")[0])
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    settings: dict[str, Any] = {
        "client_options": client,
        "retry_config": {
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SEC),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        },
    }
    if root.startswith("gs://") and endpoint:
        key = {"gcs_base_url": endpoint, "disable_oauth": True}
        key |= {name: "" for name in ("client_email", "private_key", "private_key_id")}
        bucket = root.removeprefix("gs://")
        return GCSStore(bucket, config={"service_account_key": json.dumps(key)}, **settings)
    if root.startswith("s3://"):
        if endpoint:
            settings["endpoint"] = endpoint
        provider = _profile_credentials()
        if provider is not None:
            settings["credential_provider"] = provider
    return from_url(root, **settings)


def _endpoint(scheme: str) -> str:
    """Return the endpoint that the store's own tools read from the environment, or ''."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("STORAGE_EMULATOR_HOST",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    return next((os.environ[n] for n in names.get(scheme, ()) if os.environ.get(n)), "")


def _profile_credentials() -> Any:
    """Return a provider of the AWS profile, if keys are in none of the variables of AWS.

    Only boto3 reads profiles, SSO and assumed roles; without it the client asks the container or
    the instance for credentials.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except (ImportError, ValueError):
        return None


# Local files.


def _partial_path(target: Path) -> Path:
    """Return a path beside a file that no other process uses; create the directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name[:200]}.{uuid.uuid4().hex}{PARTIAL}")


@contextmanager
def _partial_file(target: Path, data: bytes) -> Generator[Path]:
    """Write and flush a file beside the target; remove it after the body."""
    partial = _partial_path(target)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _local_entry(path: Path, name: str) -> Entry:
    status = path.stat()
    return Entry(name, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def _local_entries(directory: Path, prefix: str) -> Iterator[Entry]:
    """Yield the complete files below a directory; files that vanish meanwhile are left out."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = directory / name
        if path.is_dir():
            yield from _local_entries(path, f"{prefix}{name}/")
        elif not name.endswith(PARTIAL):
            with suppress(FileNotFoundError):
                yield _local_entry(path, f"{prefix}{name}")
