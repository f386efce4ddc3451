"""A run whose output is a URL: trained in a local work folder, uploaded beside training.

A thread of the trainer commits the work folder's state whenever a checkpoint has become complete:
the files that the newest manifest of the URL lacks are uploaded, then the next manifest is created
(`schemas/run_manifest.py`). Checkpoints that become complete during an upload are part of the next
one, so training never waits, and at most one upload is behind.

The lines of logs in a manifest are those of the steps before its newest checkpoint. No trainer
changes these again, so each upload adds lines only.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from schemas.config.train import CheckpointConfig
from schemas.errors import SchemaError
from schemas.files import sha256_of
from schemas.layout import MANIFEST
from schemas.run_log import CHECKPOINT_LOG, CHECKPOINTS
from schemas.run_manifest import (
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
from schemas.storage import Location, StorageError
from schemas.versions import Versions, writer_id
from trainer.checkpoint.manager import claim_leftovers
from trainer.checkpoint.manifest import (
    complete_checkpoints,
    lock_checkpoints,
    read_checkpoint_manifest,
)
from trainer.recovery import Drain, DrainInterrupt
from trainer.run import check_no_run, has_run, step_of_line

logger = logging.getLogger(__name__)

POLL_SEC = 0.5
"""Interval of looking for a new complete checkpoint."""
MERGED_BYTES = 4 << 20
"""Smaller objects of a log are joined with new lines when these have more than half of their bytes.
So each object has at least twice the bytes of the next one, or this size: there are few of them,
and a byte is uploaded some ten times at most."""
_UPLOADS = 4
"""Files that are uploaded at once."""
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
    its work folder is removed.

    Args:
        output: path or URL of the run.
        work: directory of work folders; not used for a path.
        config: of the job.
        resume: whether the run may exist.
        drain: is asked to end the run if an upload fails.

    Raises:
        SchemaError: the run exists or is missing, or another process trains it.
        StorageError: the store failed; the work folder has the run.
    """
    if isinstance(output, Path):
        yield output
        return
    with work_folder(output, work, config, resume=resume) as (folder, newest):
        try:
            with RunUploader(folder, output, newest, lambda: _end_run(drain)):
                yield folder
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

    A folder that has continued from that state stays as it is.

    Yields:
        The folder, and the newest state of the URL, None for a new run.

    Raises:
        SchemaError: as `open_output`.
    """
    key = hashlib.sha256(output.url.encode()).hexdigest()[:16]
    folder = work / f"{output.name}-{key}"
    work.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SchemaError(
                "work folder of the run is used by another process of this machine; end it, or "
                "wait for it",
                file=str(folder),
            ) from None
        yield folder, _prepare(folder, output, config, resume=resume)


def _prepare(
    folder: Path, output: Location, config: CheckpointConfig, *, resume: bool
) -> RunState | None:
    folder.mkdir(exist_ok=True)
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
    if newest == continued:
        return newest
    if newest is None:
        raise SchemaError(
            f"run is missing, and the work folder {folder} has continued it; restore the run, or "
            "remove the folder",
            file=str(output),
        )
    claim_leftovers(folder, config, resume=False)
    newest = fetch_run(output, folder, ALL)
    _record(folder, newest)
    return newest


def _record(folder: Path, state: RunState) -> None:
    """Keep in a work folder the state that it continues from."""
    path = Versions(Location.parse(folder)).path(state.version.number)
    path.write_bytes(state.version.data)
    path.parent.remove(e.path for e in path.parent.entries() if e.path != path.name)


# ---- Upload and commit ----


class RunUploader:
    """Commits the state of a run's folder to a URL, in a thread while the context is open.

    The first commit is made at once: it claims the run, so that another trainer of it ends. At the
    end of the context the last state is committed.
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
        self._run, self._output, self._newest = run, output, newest
        self._on_error = on_error
        self._writer = writer_id()
        self._inodes: dict[str, int] = {}  # of the logs whose committed lines were compared
        self._committed: str | None = None  # newest checkpoint of this process's last commit
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._commit_checkpoints, name="upload", daemon=True)

    def __enter__(self) -> RunUploader:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is None and (error is None or isinstance(error, Exception | DrainInterrupt)):
            try:
                self.commit()
            except (SchemaError, OSError) as failure:
                self._error = failure
        if self._error is None:
            return
        if error is None or isinstance(error, DrainInterrupt):
            raise self._error from None
        logger.warning("the last state of the run is not uploaded: %s", self._error)

    def _commit_checkpoints(self) -> None:
        while True:
            newest = complete_checkpoints(self._run / CHECKPOINTS)[-1:]
            name = newest[0].name if newest else ""
            if name != self._committed and has_run(self._run):
                try:
                    self.commit()
                except FileNotFoundError:
                    pass  # the run is being changed: look again
                except Exception as error:
                    self._error = error
                    self._on_error()
                    return
            if self._stop.wait(POLL_SEC):
                return

    def commit(self) -> None:
        """Upload the new files of the run and commit its state, unless nothing is new.

        Raises:
            SchemaError: another process has committed a state, and this one is not.
            StorageError: the store failed.
        """
        if not has_run(self._run):
            return
        stage = self._run / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        number = 1 if self._newest is None else self._newest.version.number + 1
        files = {} if self._newest is None else self._newest.manifest.files
        state = _NewState(stage, files, f"{OBJECTS}/{number:08d}-{self._writer}")
        is_first = self._committed is None
        with lock_checkpoints(self._run / CHECKPOINTS) as is_locked:
            if not is_locked:
                raise FileNotFoundError("checkpoints are being written")
            checkpoint = self._collect(state)
        if is_first or state.files != files:
            self._upload(state)
            self._commit(state)
            if is_first:
                self._remove_leftovers()
        self._committed = checkpoint
        shutil.rmtree(stage)

    def _collect(self, state: _NewState) -> str:
        """Add the files of the run to a state; return the name of the newest checkpoint or ''."""
        run = self._run
        for name in SMALL_FILES:
            if (run / name).is_file():
                state.add(name, run / name)
        folders = complete_checkpoints(run / CHECKPOINTS)
        for folder in folders:
            name = f"{CHECKPOINTS}/{folder.name}/{MANIFEST}"
            state.add(name, run / name)
            for name, file in read_checkpoint_manifest(folder).files.items():
                state.add(f"{CHECKPOINTS}/{name}", run / CHECKPOINTS / name, file.sha256)
        step = int(folders[-1].name) if folders else 0
        for name in LOGS:
            if (run / name).is_file():
                self._collect_log(state, name, step)
        return folders[-1].name if folders else ""

    def _collect_log(self, state: _NewState, name: str, train_step: int) -> None:
        """Add the lines of a log that were committed, and the later ones of steps before one."""
        is_final = name == CHECKPOINT_LOG  # its lines are never replaced
        kept = state.old_files.get(name, ())
        with (self._run / name).open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._inodes.get(name) != inode:  # the file was replaced
                kept = matching_objects(file, kept)
                self._inodes[name] = inode
            start = end = sum(each.num_bytes for each in kept)
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n") or not (is_final or step_of_line(line) < train_step):
                    break
                end += len(line)
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
            (self._output / name).upload(path)

        with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="upload") as pool:
            for _ in pool.map(upload, state.uploads):
                pass

    def _commit(self, state: _NewState) -> None:
        """Commit an uploaded state, and delete what it replaces."""
        old = self._newest
        manifest = RunManifest(writer=self._writer, files=state.files)
        new = commit_state(self._output, old, manifest)
        if new is None:
            self._output.remove([name for _, name in state.uploads])
            raise SchemaError(
                "another process trains this run, and has committed a state since; this one ends",
                file=str(self._output),
            )
        _record(self._run, new)
        self._newest = new
        if old is not None:
            with _log_errors():
                self._output.remove(sorted(old.manifest.objects - manifest.objects))
                Versions(self._output).retire([old.version.number])

    def _remove_leftovers(self) -> None:
        """Delete objects that others left at numbers that are taken: nobody can commit them."""
        assert self._newest is not None, "a state was committed"
        after = f"{self._newest.version.number + 1:08d}"
        with _log_errors():
            entries = (self._output / OBJECTS).entries()
            names = {f"{OBJECTS}/{entry.path}" for entry in entries if entry.path < after}
            self._output.remove(sorted(names - self._newest.manifest.objects))


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
        """Start empty.

        Args:
            stage: empty directory for links, on the filesystem of the run.
            old_files: of the state before, whose objects are used again.
            prefix: of the names of new objects.
        """
        self.files: dict[str, tuple[RunObject, ...]] = {}
        self.uploads: list[tuple[Path, str]] = []  # local path, name of the object
        self.old_files = old_files
        self._stage, self._prefix = stage, prefix

    def add(self, name: str, path: Path, sha256: str | None = None) -> None:
        """Add a file that is replaced as a whole; `sha256` is computed if it is None."""
        if name in self.files:
            return
        link = self._stage / f"{len(self.uploads):06d}"
        link.hardlink_to(path)
        new = RunObject(
            name=f"{self._prefix}/{name}",
            num_bytes=link.stat().st_size,
            sha256=sha256_of(link) if sha256 is None else sha256,
        )
        old = self.old_files.get(name, ())
        if [(each.num_bytes, each.sha256) for each in old] == [(new.num_bytes, new.sha256)]:
            link.unlink()
            self.files[name] = old
        else:
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
