"""A run at a URL: numbered manifests that name the files of its state, and their verified fetch.

A run at a local path is a folder. At an object store it is `_manifests/<n>.json` and the objects
that these name below `files/`. The newest manifest is the state of the run: each file of the folder
as one or several objects, joined. A trainer commits the next state as the next version
(`presage.schemas.storage.versions`), so of two trainers of one run only one commits. Objects that
the newest one does not name are deleted, so a reader that misses one reads the newest manifest
again. All functions raise StorageError if the store fails.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from presage.schemas.dataset.manifest import decode_manifest, encode_manifest
from presage.schemas.errors import SchemaError
from presage.schemas.layout import BLOCKS, JOB, MANIFEST, SCHEMA
from presage.schemas.paths import is_below
from presage.schemas.run.records import (
    CHECKPOINT_LOG,
    CHECKPOINTS,
    LEDGER,
    METRICS,
    RUN_FILE,
    STORE_OWNER,
    SUMMARY,
)
from presage.schemas.storage.location import CHUNK_BYTES, MANIFESTS, Location, copy_errors_name
from presage.schemas.storage.versions import Version, Versions

T = TypeVar("T")
OBJECTS = "files"
"""Directory of the objects: `files/<number>-<writer>/<path in the run>`."""
LOGS = (METRICS, LEDGER, CHECKPOINT_LOG)
"""Files of a run to which lines are appended."""
SMALL_FILES = (RUN_FILE, BLOCKS, SCHEMA, JOB, STORE_OWNER, SUMMARY)
"""Other files of a run beside its checkpoints. `run.json` is replaced last when the dataset has
grown, and so is read first."""
RUN_MANIFEST_FORMAT = 1
_REMEDY = "use another copy of the run"
_FETCHES = 8
"""Files that are fetched at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObject:
    """An object: a file of the run, or a part of one."""

    name: str
    """Path below the run's URL."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """One state of a run."""

    writer: str
    """Id of the process that wrote it."""
    attempt: str = ""
    """Id of the attempt at training the run: the writer that began it. Processes of an earlier
    attempt commit nothing more; the replicas of one attempt commit one after the other."""
    parent_sha256: str | None = None
    """Hash of the version before it."""
    files: Mapping[str, tuple[RunObject, ...]]
    """Path in the run to the objects whose bytes, joined, are the file."""
    format: int = RUN_MANIFEST_FORMAT

    @property
    def objects(self) -> frozenset[str]:
        """Names of all objects."""
        return frozenset(each.name for objects in self.files.values() for each in objects)


@dataclass(frozen=True, slots=True)
class RunState:
    """A committed state of a run: a version, and the manifest in it."""

    version: Version
    manifest: RunManifest


def read_newest_state(run: Location) -> RunState | None:
    """Return the newest state of a run; None if there is none.

    Raises:
        SchemaError: its manifest is damaged, or has another format.
    """
    return _newest_state(Versions(run))


def _newest_state(versions: Versions) -> RunState | None:
    version = versions.newest()
    if version is None:
        return None
    location = versions.path(version.number)
    manifest = decode_manifest(RunManifest, version.data, location, _REMEDY)
    for path in (*manifest.files, *manifest.objects):
        if not is_below(path):
            raise SchemaError(f"path leads out of the run: {path!r}; {_REMEDY}", file=str(location))
    return RunState(version, manifest)


def commit_state(
    run: Location, previous: RunState | None, manifest: RunManifest
) -> RunState | None:
    """Commit the state that follows `previous`; return None if another process was faster."""
    parent = None if previous is None else previous.version.sha256
    manifest = replace(manifest, parent_sha256=parent)
    data = encode_manifest(manifest)
    version = Versions(run).commit(None if previous is None else previous.version, data)
    return None if version is None else RunState(version, manifest)


# Fetch files.

ALL = "all"
"""Every file of a run."""


def fetch_run(
    run: Location,
    folder: Path,
    files: Collection[str] | str,
    checkpoints: Iterable[int | None] = (),
) -> RunState:
    """Make a folder contain files of a run, verified; those that it has already stay.

    The manifests of all checkpoints are fetched, too. Files of the run's state that the newest
    manifest lacks are removed from the folder.

    Args:
        run: URL of the run.
        folder: local folder.
        files: paths in the run, or `ALL`; those that the run lacks are ignored.
        checkpoints: steps of checkpoints whose files are fetched; None for the newest.

    Returns:
        The state that was fetched.

    Raises:
        SchemaError: there is no run, or an object is missing or has changed.
    """

    def fetch(state: RunState | None) -> RunState:
        if state is None:
            raise SchemaError("found no run; train first", file=str(run))
        manifest = state.manifest
        _remove_others(folder, manifest)
        if files == ALL:
            _fetch_files(run, manifest, folder, manifest.files)
        else:
            wanted = [name for name in manifest.files if name in files or _is_manifest(name)]
            _fetch_files(run, manifest, folder, wanted)
            _fetch_files(run, manifest, folder, _files_of(folder, manifest, checkpoints))
        return state

    return _read_newest(Versions(run), fetch)


def _read_newest(versions: Versions, read: Callable[[RunState | None], T]) -> T:
    """Return what `read` makes of the newest state.

    It is called again if an object was deleted because a newer state was committed meanwhile.

    Raises:
        SchemaError: an object of the newest state is missing.
    """
    missing, last_number = None, -1
    while True:
        state = _newest_state(versions)
        number = 0 if state is None else state.version.number
        if missing is not None and number == last_number:
            raise SchemaError(
                f"object of the run is missing: {missing.filename}; {_REMEDY}",
                file=str(versions.directory),
            ) from missing
        try:
            return read(state)
        except FileNotFoundError as error:
            missing, last_number = error, number


def _is_manifest(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/") and name.endswith(f"/{MANIFEST}")


def _files_of(
    folder: Path, manifest: RunManifest, checkpoints: Iterable[int | None]
) -> Iterator[str]:
    steps = sorted(int(name.split("/")[1]) for name in manifest.files if _is_manifest(name))
    for step in checkpoints:
        chosen = steps[-1] if step is None and steps else step
        if chosen in steps:
            path = folder / CHECKPOINTS / f"{chosen:08d}" / MANIFEST
            body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            yield from (f"{CHECKPOINTS}/{name}" for name in body["files"])


def _remove_others(folder: Path, manifest: RunManifest) -> None:
    names = [*SMALL_FILES, *LOGS]
    below = Location.parse(folder / CHECKPOINTS)
    names += [f"{CHECKPOINTS}/{entry.path}" for entry in below.entries()]
    Location.parse(folder).remove(name for name in names if name not in manifest.files)


def _fetch_files(run: Location, manifest: RunManifest, folder: Path, names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch") as pool:
        for _ in pool.map(partial(_fetch_file, run, manifest, folder), dict.fromkeys(names)):
            pass


def _fetch_file(run: Location, manifest: RunManifest, folder: Path, name: str) -> None:
    objects = manifest.files.get(name)
    if objects is None:
        raise SchemaError(
            f"state of the run lacks a file of a checkpoint: {name}; {_REMEDY}", file=str(run)
        )
    path = folder / name
    if path.is_file() and path.stat().st_size == sum(each.num_bytes for each in objects):
        with path.open("rb") as file:
            if len(matching_objects(file, objects)) == len(objects):
                return
    with Location.parse(path).new_file() as new_path, new_path.open("wb") as target:
        for each in objects:
            _copy_object(run, each, target.write)


def matching_objects(file: BinaryIO, objects: Sequence[RunObject]) -> tuple[RunObject, ...]:
    """Return the first objects whose bytes an open file begins with."""
    file.seek(0)
    for count, each in enumerate(objects):
        digest, left = hashlib.sha256(), each.num_bytes
        while left and (data := file.read(min(left, CHUNK_BYTES))):
            digest.update(data)
            left -= len(data)
        if left or digest.hexdigest() != each.sha256:
            return tuple(objects[:count])
    return tuple(objects)


def _copy_object(run: Location, each: RunObject, write: Callable[[memoryview], object]) -> None:
    source, digest = run / each.name, hashlib.sha256()
    for data in source.chunks(each.num_bytes):
        digest.update(data)
        write(data)
    if digest.hexdigest() != each.sha256:
        raise SchemaError(
            f"object must have sha256 {each.sha256[:12]}, got {digest.hexdigest()[:12]}; {_REMEDY}",
            file=str(source),
        )


# Read runs wherever they are.


@contextmanager
def local_run(
    run: Path | Location,
    files: Collection[str] | str,
    checkpoints: Iterable[int | None] = (),
) -> Generator[Path]:
    """Yield a folder with files of a run: its own at a local path, otherwise a temporary one.

    `files` and `checkpoints` are those of `fetch_run`.

    Raises:
        SchemaError: as `fetch_run`; a local run is not checked.
    """
    run = Location.parse(run)
    if run.local is not None:
        yield run.local
        return
    with tempfile.TemporaryDirectory(prefix="presage-run-") as parent:
        folder = Path(parent) / run.name
        fetch_run(run, folder, files, tuple(checkpoints))
        with copy_errors_name(run, folder):
            yield folder


@contextmanager
def local_runs(
    directory: Path | Location, run_files: Collection[str], other_files: Collection[str]
) -> Generator[Path]:
    """Yield a folder with files of all runs in it: itself at a local path, or a temporary one.

    Runs are at any depth; `other_files` are names of files beside or above them.

    Raises:
        SchemaError: as `fetch_run`; a local directory is not checked.
    """
    directory = Location.parse(directory)
    if directory.local is not None:
        yield directory.local
        return
    if not directory.exists():
        raise SchemaError("directory of runs is empty; check the URL", file=str(directory))
    with tempfile.TemporaryDirectory(prefix="presage-runs-") as parent:
        folder = Path(parent) / directory.name
        folder.mkdir()
        _fetch_runs(directory, folder, run_files, other_files)
        with copy_errors_name(directory, folder):
            yield folder


def _fetch_runs(
    directory: Location, folder: Path, run_files: Collection[str], other_files: Collection[str]
) -> None:
    folders, names = directory.children()
    if MANIFESTS in folders:  # a run, or a dataset
        if _has_run_manifest(directory):
            fetch_run(directory, folder, run_files)
        return
    for name in (name for name in names if name in other_files):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((directory / name).read_bytes())
    for name in folders:
        _fetch_runs(directory / name, folder / name, run_files, other_files)


def _has_run_manifest(directory: Location) -> bool:
    newest = Versions(directory).newest()
    try:
        body = json.loads(b"null" if newest is None else newest.data)
    except ValueError:
        return False
    return isinstance(body, dict) and "files" in body


# Read single files of a run that is being trained.


def read_run_file(run: Location, name: str) -> bytes | None:
    """Return a file of a run at a path or URL; None if it does not exist.

    Raises:
        SchemaError: an object is missing or has changed.
    """
    if run.local is not None:
        try:
            return (run.local / name).read_bytes()
        except FileNotFoundError:
            return None

    def read(state: RunState | None) -> bytes | None:
        objects = None if state is None else state.manifest.files.get(name)
        if objects is None:
            return None
        data = io.BytesIO()
        for each in objects:
            _copy_object(run, each, data.write)
        return data.getvalue()

    return _read_newest(Versions(run), read)


class RunLogTail:
    """Reads the new lines of a log of a run at a path or URL.

    A run that is restored to an older checkpoint writes the lines of later steps again, in other
    bytes. Then the log is read again from its first line.
    """

    def __init__(self, run: Location, name: str) -> None:
        """Start before the first line; the run need not exist yet."""
        self._run, self._name = run, name
        self._versions = Versions(run)
        self.state: RunState | None = None
        """State that was read last, at a URL."""
        self._offset = 0
        self._last_line = b""

    def read(self) -> tuple[list[bytes], bool]:
        """Return complete lines, each with its newline, and whether they begin with the first one.

        Returns:
            The lines since the last call; all lines and True if others replaced those.

        Raises:
            SchemaError: the state of the run is damaged.
        """
        data = self._read_from(self._offset - len(self._last_line))
        if data is None:
            return [], False
        restarted = not data.startswith(self._last_line)
        if restarted:
            self._offset, self._last_line, self.state = 0, b"", None
            data = self._read_from(0) or b""
        new = data[len(self._last_line) : data.rfind(b"\n") + 1]
        lines = new.splitlines(keepends=True)
        self._offset += len(new)
        self._last_line = lines[-1] if lines else self._last_line
        return lines, restarted

    def _read_from(self, start: int) -> bytes | None:
        """Return the bytes of the log from an offset on; None if its state was read before."""
        if self._run.local is None:
            number = 0 if self.state is None else self.state.version.number
            if self._versions.newest_number() == number:
                return None
            return _read_newest(self._versions, partial(self._read_state, start))
        try:
            with (self._run.local / self._name).open("rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""

    def _read_state(self, start: int, state: RunState | None) -> bytes:
        if state is None:
            return b""
        parts: list[memoryview] = []
        end = 0
        for each in state.manifest.files.get(self._name, ()):
            first, end = max(0, start - end), end + each.num_bytes
            if first < each.num_bytes:
                parts += (self._run / each.name).read_ranges([(first, each.num_bytes)])
        self.state = state
        return b"".join(parts)
