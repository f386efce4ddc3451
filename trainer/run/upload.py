"""A run whose output is a URL: trained in a local work folder, uploaded beside training.

A thread of the trainer commits the work folder's state whenever a checkpoint has become complete,
and the new lines of logs every few seconds: the files that the newest manifest of the URL lacks are
uploaded, then the next manifest is created (`schemas/run/run_manifest.py`). Checkpoints that become
complete during an upload are part of the next one, so training never waits, and at most one upload
is behind.

A trainer that resumes a run first commits the newest state again, as a new attempt: from then on
the trainers of earlier attempts commit nothing. The replicas of one attempt have a work folder
each, and the one that is the writer commits (`output.py`). It may lack files of checkpoints
that others have committed; these stay in the state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from presage.schemas.config.train import CheckpointConfig
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import CHECKPOINTS, METRICS
from presage.schemas.run.run_manifest import (
    ALL,
    LOGS,
    OBJECTS,
    SMALL_FILES,
    RunManifest,
    RunObject,
    RunState,
    commit_state,
    fetch_run,
    matching_objects,
    read_newest_state,
)
from presage.schemas.storage.location import Location, StorageError
from presage.schemas.storage.locks import lock_file
from presage.schemas.storage.versions import Versions, backoff, writer_id
from presage.trainer.checkpoint.files import (
    FileChecksum,
    checksum_of,
    complete_checkpoints,
    lock_checkpoints,
    read_checkpoint_manifest,
    step_of_newest,
)
from presage.trainer.checkpoint.manager import claim_leftovers
from presage.trainer.recovery import Drain, DrainInterrupt
from presage.trainer.run.folder import check_no_run, has_run

logger = logging.getLogger(__name__)

POLL_SEC = 0.5
"""Interval of looking for a new complete checkpoint."""
LOG_SEC, MAX_LOG_SEC = 5.0, 60.0
"""Shortest and longest interval of commits of new log lines alone, by which others see the steps of
a run. It grows with the run, because the name of each version stays at the URL."""
_COMMITS = 200
"""The interval is the time since the start divided by this number."""
MERGED_BYTES = 4 << 20
"""Smaller objects of a log are joined with new lines when these have more than half of their bytes.
So each object has at least twice the bytes of the next one, or this size: there are few of them,
and a byte is uploaded some ten times at most."""
NEWEST = (None,)
"""Checkpoints of `fetch_run`: the newest one."""
_LINE_BYTES = 1 << 16
"""Longest line of the metrics."""
_UPLOADS = 4
_STAGE = ".upload"
"""Directory of the work folder with links to the files of an upload: training may remove them."""


# ---- The work folder ----


@contextmanager
def open_output(
    output: Path | Location,
    work: Path,
    config: CheckpointConfig,
    *,
    resume: bool,
    drain: Drain,
) -> Generator[Path]:
    """Yield the local folder of a run, and keep its URL up to date, if it has one.

    The body trains in the folder. After it everything is committed. If the run is then complete,
    its work folder is removed. An upload that fails asks `drain` to end the run.

    Raises:
        SchemaError: the run exists or is missing, or another process trains it.
        StorageError: the store failed; the work folder has the run.
    """
    if isinstance(output, Path):
        yield output
        return
    with (
        training_folder(output, work, config, resume=resume) as (folder, newest),
        RunUploader(folder, output, newest, lambda: _end_run(drain)),
    ):
        yield folder


@contextmanager
def training_folder(
    output: Location, work: Path, config: CheckpointConfig, *, resume: bool
) -> Generator[tuple[Path, RunState | None]]:
    """Yield what `work_folder` does; after the body the run is complete, and the folder removed."""
    with work_folder(output, work, config, resume=resume) as (folder, newest):
        try:
            yield folder, newest
        except DrainInterrupt as interrupt:
            interrupt.message = interrupt.message.replace(str(folder), str(output))
            raise
        shutil.rmtree(folder)


def _end_run(drain: Drain) -> None:
    with suppress(DrainInterrupt):  # of the main thread
        drain.ask("upload failed")


@contextmanager
def work_folder(
    output: Location, work: Path, config: CheckpointConfig, *, resume: bool
) -> Generator[tuple[Path, RunState | None]]:
    """Lock the work folder of a URL and make it contain the newest state of the run.

    That state is first committed as a new attempt. A folder that has continued from it stays as it
    is.

    Yields:
        The folder, and the newest state of the URL, None for a new run.

    Raises:
        SchemaError: as `open_output`.
    """
    with locked_folder(output, work) as folder:
        yield folder, _prepare(folder, output, config, resume=resume)


@contextmanager
def locked_folder(output: Location, work: Path, suffix: str = "") -> Generator[Path]:
    """Yield the work folder of a URL, which no other process uses.

    Raises:
        SchemaError: another process uses it.
    """
    key = hashlib.sha256(output.url.encode()).hexdigest()[:16]
    folder = work / f"{output.name}-{key}{suffix}"
    work.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        if not lock_file(lock):
            raise SchemaError(
                "work folder of the run is used by another process of this machine; end it, or "
                "wait for it",
                file=str(folder),
            )
        folder.mkdir(exist_ok=True)
        yield folder


def _prepare(
    folder: Path, output: Location, config: CheckpointConfig, *, resume: bool
) -> RunState | None:
    newest = read_newest_state(output)
    continued = read_newest_state(Location.parse(folder))
    if not resume:
        check_no_run(output)
        if has_run(folder):
            raise SchemaError(
                "work folder has a run whose upload did not begin; use --resume, or remove the "
                "folder",
                file=str(folder),
            )
        return None
    if newest is None:
        if continued is None:
            return None
        raise SchemaError(
            f"run is missing, and the work folder {folder} has continued it; restore the run, or "
            "remove the folder",
            file=str(output),
        )
    claimed = _claim_run(output)
    if claimed.manifest.files == (continued and continued.manifest.files):
        _record(folder, claimed)
        return claimed
    claim_leftovers(folder, config, resume=False)
    return _fetch_claimed(output, folder, claimed, ALL)


def begin_attempt(output: Location, folder: Path) -> RunState:
    """Begin a new attempt from the newest state of a run, and return that state.

    The folder gets its logs, small files and newest checkpoint.

    Raises:
        SchemaError: the run is damaged.
        SupersededError: another process has begun an attempt after this one.
        StorageError: the store failed.
    """
    claimed = _claim_run(output)
    return _fetch_claimed(output, folder, claimed, (*SMALL_FILES, *LOGS), NEWEST)


def _fetch_claimed(
    output: Location,
    folder: Path,
    claimed: RunState,
    files: Collection[str] | str,
    checkpoints: Iterable[int | None] = (),
) -> RunState:
    fetched = fetch_run(output, folder, files, checkpoints)
    if fetched.manifest.attempt != claimed.manifest.attempt:
        raise SupersededError(output)
    _record(folder, fetched)
    return fetched


def _claim_run(output: Location) -> RunState:
    """Commit the newest state of a run again, as a new attempt, and return it.

    Raises:
        StorageError: the store failed.
    """
    for _ in backoff():
        newest = read_newest_state(output)
        assert newest is not None, "the run exists"
        writer = writer_id()
        manifest = replace(newest.manifest, writer=writer, attempt=writer)
        claimed = commit_state(output, newest, manifest)
        if claimed is not None:
            with _log_errors():
                Versions(output).retire([newest.version.number])
            return claimed
    raise AssertionError("the last attempt returns")


def _record(folder: Path, state: RunState) -> None:
    """Keep in a work folder the state that it continues from."""
    path = Versions(Location.parse(folder)).path(state.version.number)
    path.write_bytes(state.version.data)
    path.parent.remove(e.path for e in path.parent.entries() if e.path != path.name)


# ---- Upload and commit ----


class SupersededError(SchemaError):
    """Another process has committed a state of the run, and this one's is not committed."""

    def __init__(self, output: Location) -> None:
        super().__init__(
            "another process trains this run, and has committed a state since; this one ends",
            file=str(output),
        )


class RunUploader:
    """Commits the state of a run's folder to a URL, in a thread while the context is open.

    At the end of the context the last state is committed.
    """

    def __init__(
        self,
        run: Path,
        output: Location,
        newest: RunState | None,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the arguments; the context starts the thread.

        Args:
            run: folder of the run.
            output: URL of the run.
            newest: state that the folder continues from; None for a new run.
            on_error: called in the thread if a commit fails; the context raises the error.
        """
        self.saved = -1
        """Step of the newest checkpoint in the state that was committed last; -1: none."""
        self.logged = -1
        """Last step whose log lines are in that state."""
        self.error: Exception | None = None
        """Error because of which nothing more is committed."""
        self.output = output
        self._run, self._newest = run, newest
        self._on_error = on_error
        self._writer = writer_id()
        self.attempt = self._writer if newest is None else newest.manifest.attempt
        """Id of the attempt that this process takes part in."""
        self._inodes: dict[str, int] = {}  # of the logs whose committed lines were compared
        self._is_first = True
        self._start = time.monotonic()
        self._due = self._start  # time of the next commit of log lines
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._commit_states, name="upload", daemon=True)

    def __enter__(self) -> RunUploader:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()
        if self.error is None and (error is None or isinstance(error, Exception | DrainInterrupt)):
            try:
                self.commit()
            except (SchemaError, OSError) as failure:
                self.error = failure
        if self.error is None:
            return
        if error is None or isinstance(error, DrainInterrupt):
            raise self.error from None
        logger.warning("the last state of the run is not uploaded: %s", self.error)

    def stop(self) -> None:
        """Let the thread end after the commit in progress."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _commit_states(self) -> None:
        while not self._stop.is_set():
            newest = step_of_newest(self._run)
            if has_run(self._run) and (newest != self.saved or time.monotonic() >= self._due):
                try:
                    self.commit()
                except FileNotFoundError:
                    pass  # the run is being changed: read it again
                except Exception:
                    self._on_error()
                    return
            self._stop.wait(POLL_SEC)

    def commit(self) -> None:
        """Upload the new files of the run and commit its state, unless nothing is new.

        Raises:
            SupersededError: another process has committed a state, and this one is not.
            StorageError: the store failed.
            FileNotFoundError: the run is being changed.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            try:
                self._try_commit()
            except FileNotFoundError:
                raise
            except Exception as error:
                self.error = error
                raise
            now = time.monotonic()
            self._due = now + log_interval(now - self._start)

    def _try_commit(self) -> None:
        if not has_run(self._run):
            return
        stage = self._run / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        number = 1 if self._newest is None else self._newest.version.number + 1
        files = {} if self._newest is None else self._newest.manifest.files
        state = _NewState(stage, files, f"{OBJECTS}/{number:08d}-{self._writer}")
        with lock_checkpoints(self._run / CHECKPOINTS) as is_locked:
            if not is_locked:
                raise FileNotFoundError("checkpoints are being written")
            saved = self._collect(state)
        if state.files != files:
            self._upload(state)
            self._commit(state)
        if self._is_first:
            self._remove_leftovers()
            self._is_first = False
        self.saved, self.logged = saved, state.logged
        shutil.rmtree(stage)

    def _collect(self, state: _NewState) -> int:
        """Add the files of the run to a state; return the step of the newest checkpoint or -1."""
        run = self._run
        for name in SMALL_FILES:
            if (run / name).is_file():
                state.add(name, run / name)
        folders = complete_checkpoints(run / CHECKPOINTS)
        for folder in folders:
            name = f"{CHECKPOINTS}/{folder.name}/{MANIFEST}"
            state.add(name, run / name)
            for name, file in read_checkpoint_manifest(folder).files.items():
                state.add(f"{CHECKPOINTS}/{name}", run / CHECKPOINTS / name, file)
        for name in LOGS:  # metrics first: a step that has one has its other lines, too
            if (run / name).is_file():
                self._collect_log(state, name)
        return int(folders[-1].name) if folders else -1

    def _collect_log(self, state: _NewState, name: str) -> None:
        """Add the complete lines of a log."""
        kept = state.old_files.get(name, ())
        with (self._run / name).open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._inodes.get(name) != inode:  # the file was replaced
                kept = matching_objects(file, kept)
                self._inodes[name] = inode
            start = end = sum(each.num_bytes for each in kept)
            file.seek(start)
            end += file.read().rfind(b"\n") + 1
            if name == METRICS:
                state.logged = _last_step(file, end)
            while (
                kept and end > start and kept[-1].num_bytes < min(2 * (end - start), MERGED_BYTES)
            ):
                start -= kept[-1].num_bytes
                kept = kept[:-1]
            file.seek(start)
            state.add_part(name, kept, file.read(end - start))

    def _upload(self, state: _NewState) -> None:
        def upload(pair: tuple[Path, str]) -> None:
            path, name = pair
            (self.output / name).upload(path)

        with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="upload") as pool:
            for _ in pool.map(upload, state.uploads):
                pass

    def _commit(self, state: _NewState) -> None:
        """Commit an uploaded state, and delete what it replaces."""
        old = self._newest
        manifest = RunManifest(writer=self._writer, attempt=self.attempt, files=state.files)
        new = commit_state(self.output, old, manifest)
        if new is None:
            self._remove_leftovers()
            raise SupersededError(self.output)
        _record(self._run, new)
        self._newest = new
        if old is not None:
            with _log_errors():
                self.output.remove(sorted(old.manifest.objects - manifest.objects))
                Versions(self.output).retire([old.version.number])

    def _remove_leftovers(self) -> None:
        """Delete objects that the newest state does not name, at numbers that are taken.

        Nobody can commit them. A state that was committed without a reply names those of this
        process, as does one that continues it.
        """
        with _log_errors():
            newest = read_newest_state(self.output)
            assert newest is not None, "a state was committed"
            after = f"{newest.version.number + 1:08d}"
            entries = (self.output / OBJECTS).entries()
            ours = re.compile("[0-9]{8,}-[0-9a-f]+/.+")  # others are not of an upload
            names = {
                f"{OBJECTS}/{entry.path}"
                for entry in entries
                if entry.path < after and ours.fullmatch(entry.path)
            }
            self.output.remove(sorted(names - newest.manifest.objects))


def log_interval(elapsed: float) -> float:
    """Return the seconds between commits of log lines, from the seconds since the start."""
    return max(LOG_SEC, min(MAX_LOG_SEC, elapsed / _COMMITS))


def _last_step(file: BinaryIO, end: int) -> int:
    """Return the step of the last line of a log that ends at an offset; -1 without a line."""
    file.seek(max(0, end - _LINE_BYTES))
    lines = file.read(min(end, _LINE_BYTES)).splitlines(keepends=True)
    return int(json.loads(lines[-1])["step"]) if lines else -1


@contextmanager
def _log_errors() -> Generator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("replaced files are not deleted; the next start does: %s", error)


class _NewState:
    """The files of a run at one moment, and those to upload, pinned by links."""

    def __init__(
        self, stage: Path, old_files: Mapping[str, tuple[RunObject, ...]], prefix: str
    ) -> None:
        self.logged = -1  # last step in the metrics
        self.files: dict[str, tuple[RunObject, ...]] = {}
        self.uploads: list[tuple[Path, str]] = []  # local path, name of the object
        self.old_files = old_files
        self._stage, self._prefix = stage, prefix

    def add(self, name: str, path: Path, checksum: FileChecksum | None = None) -> None:
        """Add a file that is replaced as a whole.

        Args:
            name: of the file in the run.
            path: of the file, which need not exist if the state before has it.
            checksum: of its content; None: computed.
        """
        if name in self.files:
            return
        link = self._stage / f"{len(self.uploads):06d}"
        if checksum is None:
            link.hardlink_to(path)
            checksum = checksum_of(link)
        old = self.old_files.get(name, ())
        if [(o.num_bytes, o.sha256) for o in old] == [(checksum.num_bytes, checksum.sha256)]:
            link.unlink(missing_ok=True)
            self.files[name] = old
            return
        if not link.exists():
            link.hardlink_to(path)
        new = RunObject(
            name=f"{self._prefix}/{name}", num_bytes=checksum.num_bytes, sha256=checksum.sha256
        )
        self.files[name] = (new,)
        self.uploads.append((link, new.name))

    def add_part(self, name: str, committed: tuple[RunObject, ...], data: bytes) -> None:
        """Add a file to which bytes were appended."""
        self.files[name] = committed
        if data:
            new = RunObject(
                name=f"{self._prefix}/{name}",
                num_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
            path = self._stage / name
            path.write_bytes(data)
            self.files[name] += (new,)
            self.uploads.append((path, new.name))
