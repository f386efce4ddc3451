"""Checkpoints on disk: written file by file, complete with their manifest, removed when stale.

`checkpoints/<step>/` has the files that a checkpoint wrote. Its manifest also lists files of
earlier checkpoints, with the rows that did not change since. A file is removed when no kept
manifest lists it.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from presage.schemas.arrays import Array
from presage.schemas.dataset.files import replace_bytes, sha256_of, sync_file
from presage.schemas.dataset.manifest import decode_manifest, encode_manifest
from presage.schemas.errors import SchemaError, shown
from presage.schemas.layout import MANIFEST
from presage.schemas.paths import is_below
from presage.schemas.run.records import CHECKPOINTS, LEDGER, METRICS
from presage.schemas.storage.local_files import sync_directory
from presage.schemas.storage.location import Location
from presage.schemas.storage.locks import lock_file
from presage.trainer.checkpoint.format import ROW_FILES, record_type, to_buffers, write_part
from presage.trainer.stores.store import RowsAndRecords, TableLayout

DENSE_FILE, PLAN_FILE = "dense.safetensors", "plan.safetensors"
"""Files of a checkpoint: the dense state, and the state of the cache plan if there is one."""
PARTIAL = ".partial"
"""Suffix of the folder of a checkpoint that is being written."""
AHEAD = ".ahead"
"""Suffix of the folder of a checkpoint that is newer than the logs, whose last lines were lost."""
STATE_FILE = "state.pt"
"""File of a checkpoint with the state that a loop passed to `EmbeddingRows.save`."""
DISTRIBUTED = "distributed"
"""Folder of a checkpoint that `torch.distributed.checkpoint` writes."""
_STEP = "[0-9]{8,}"
_FOLDER = re.compile(
    rf"({_STEP})(?:(?:\.[0-9a-f]{{8}})?(?:{re.escape(PARTIAL)}|{re.escape(AHEAD)}))?"
)
_ROWS = rf"[^/]+/(?:{'|'.join(ROW_FILES)})\.npy"
_DISTRIBUTED = rf"{DISTRIBUTED}/(?:\.metadata|__[0-9]+_[0-9]+\.distcp)"
_FILE = re.compile(
    "|".join((*map(re.escape, (MANIFEST, DENSE_FILE, PLAN_FILE, STATE_FILE)), _ROWS, _DISTRIBUTED))
)
"""Names of folders and files of checkpoints; other files are the user's."""
_VERIFIED = 2
LOCK_SEC = 10.0
"""Longest wait for another process that completes or removes a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksum:
    """Size and hash of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """One complete checkpoint, the same for any number of processes."""

    train_step: int
    """The next step to train; the state is that after all earlier steps."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fingerprint of dataset, tables, model and optimizers (`load.fingerprint_of`)."""
    parts: Mapping[str, tuple[str, ...]]
    """By table, folders below `checkpoints/` with its rows, the newest first, which takes
    precedence."""
    files: Mapping[str, FileChecksum]
    """Every file of the checkpoint, by path below `checkpoints/`."""


def folder_name(train_step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"{train_step:08d}"


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return [folder for folder in _step_folders(checkpoints) if (folder / MANIFEST).is_file()]


def _step_folders(checkpoints: Path) -> list[Path]:
    return sorted(p for p in checkpoints.iterdir() if re.fullmatch(_STEP, p.name))


def step_of_newest(run: Path) -> int:
    """Return the step of the newest complete checkpoint of a run, -1 if there is none."""
    checkpoints = run / CHECKPOINTS
    if not checkpoints.is_dir():
        return -1
    folders = reversed(_step_folders(checkpoints))
    return next((int(p.name) for p in folders if (p / MANIFEST).is_file()), -1)


def newest_from(checkpoints: Path, train_step: int) -> Path | None:
    """Return the newest complete checkpoint if it is of a step or a later one."""
    complete = complete_checkpoints(checkpoints)
    return complete[-1] if complete and int(complete[-1].name) >= train_step else None


def write_checkpoint_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write a manifest with its own checksum, atomically; this completes the checkpoint."""
    replace_bytes(folder / MANIFEST, encode_manifest(manifest))


def read_checkpoint_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        SchemaError: it is missing, damaged, or has another format.
    """
    path = folder / MANIFEST
    data = path.read_bytes() if path.is_file() else b""
    manifest = decode_manifest(CheckpointManifest, data, path, _alternative_to(folder, None))
    parts = [part for table in manifest.parts.values() for part in table]
    needed = [f"{part}/{name}.npy" for part in parts for name in ROW_FILES]
    for name in (*manifest.files, *needed):
        if name not in manifest.files or not is_below(name):
            raise SchemaError(
                f"manifest must list each file of a table, below the checkpoints, got "
                f"{shown(name)}; {_alternative_to(folder, None)}",
                file=str(path),
            )
    return manifest


def checksum_of(path: Path) -> FileChecksum:
    """Return size and hash of a finished file."""
    return FileChecksum(num_bytes=path.stat().st_size, sha256=sha256_of(path))


def verify_files(folder: Path, files: Mapping[str, FileChecksum]) -> None:
    """Compare every byte of files of a checkpoint with its manifest.

    Raises:
        SchemaError: a file is missing, truncated or changed; names the checkpoint to use instead.
    """
    with ThreadPoolExecutor(_VERIFIED, thread_name_prefix="verify") as pool:
        checks = [pool.submit(check_file, folder, *each) for each in files.items()]
        for check in checks:
            check.result()


def check_file(folder: Path, name: str, expected: FileChecksum) -> None:
    """Compare a file with the manifest of a checkpoint.

    Raises:
        SchemaError: as `verify_files`.
    """
    check_size(folder, name, expected)
    check_hash(folder, name, expected, sha256_of(folder.parent / name))


def check_size(folder: Path, name: str, expected: FileChecksum) -> None:
    """Compare the size of a file with the manifest; raises as `verify_files`."""
    path = folder.parent / name
    size = path.stat().st_size if path.is_file() else None
    if size != expected.num_bytes:
        raise SchemaError(
            f"file must have {expected.num_bytes} bytes, got "
            f"{'none' if size is None else size}; {_alternative_to(folder, name)}",
            file=str(path),
        )


def check_hash(folder: Path, name: str, expected: FileChecksum, sha256: str) -> None:
    """Compare the hash of a file's bytes with the manifest; raises as `verify_files`."""
    if sha256 != expected.sha256:
        raise SchemaError(
            f"file must have sha256 {expected.sha256[:12]}, got {sha256[:12]}; "
            f"{_alternative_to(folder, name)}",
            file=str(folder.parent / name),
        )


def has_files(folder: Path) -> bool:
    """Return whether a checkpoint's files exist here; those of a run may be at its URL only."""
    try:
        files = read_checkpoint_manifest(folder).files
    except SchemaError:
        return False
    return all((folder.parent / name).is_file() for name in files)


def _alternative_to(folder: Path, name: str | None) -> str:
    """Return how to use the newest earlier checkpoint that does not need a damaged file."""
    earlier = [other for other in complete_checkpoints(folder.parent) if other.name < folder.name]
    for nth, other in enumerate(reversed(earlier)):
        try:
            needs = name is not None and name in read_checkpoint_manifest(other).files
        except SchemaError:
            continue
        if not needs:
            if nth == 0:
                return "remove this checkpoint to use the one before it"
            return f"remove the checkpoints after {other.name} to use that one"
    return "train again, as no checkpoint before it is complete"


# ---- Write a checkpoint ----


class NewCheckpoint:
    """Writes a checkpoint under a temporary name and renames it when it is complete.

    Several processes may do so for one run, since an agent outlives its trainer. The newest
    complete checkpoint takes precedence; one that it supersedes is dropped without an error.
    """

    def __init__(self, checkpoints: Path, train_step: int, partial: Path | None = None) -> None:
        """Write nothing yet.

        Args:
            checkpoints: folder of the run's checkpoints.
            train_step: the next step to train.
            partial: temporary folder, if several processes write one checkpoint.
        """
        self._train_step = train_step
        self._folder = checkpoints / folder_name(train_step)
        unique = f"{folder_name(train_step)}.{secrets.token_hex(4)}{PARTIAL}"
        self._partial = partial or checkpoints / unique  # another process may write the same step

    @property
    def partial(self) -> Path:
        """The temporary folder."""
        return self._partial

    @property
    def folder(self) -> Path:
        """The complete checkpoint: this one, or the one that supersedes it."""
        return newest_from(self._folder.parent, self._train_step) or self._folder

    def __enter__(self) -> NewCheckpoint:
        self._partial.mkdir(parents=True)
        return self

    def write_arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write named arrays as one file."""
        with self.create(name) as file:
            for buffer in to_buffers(arrays):
                file.write(buffer)

    def create(self, name: str) -> BinaryIO:
        """Create one file."""
        return (self._partial / name).open("wb")

    def write_rows(self, part: str, layout: TableLayout, chunks: Iterable[RowsAndRecords]) -> str:
        """Write ascending rows as a part of their table; return its path below `checkpoints/`."""
        write_part(self._partial / part, record_type(layout), chunks)
        return f"{self._folder.name}/{part}"

    def sync(self, paths: Iterable[Path]) -> dict[str, FileChecksum]:
        """Force files to disk; return their checksums by path below `checkpoints/`."""
        files: dict[str, FileChecksum] = {}
        for path in sorted(paths):
            sync_file(path)
            name = path.relative_to(self._partial).as_posix()
            files[f"{self._folder.name}/{name}"] = checksum_of(path)
        return files

    def finish(
        self,
        fingerprint: Mapping[str, Any],
        parts: Mapping[str, tuple[str, ...]],
        older_files: Mapping[str, FileChecksum],
        *,
        keep: int,
        files: Mapping[str, FileChecksum] | None = None,
    ) -> None:
        """Write the manifest after all files are on disk, which completes the checkpoint.

        The logs of the run are synced first, so that a checkpoint that survives a power failure has
        the lines of its steps.

        Args:
            fingerprint: of the run.
            parts: by table, folders with its rows.
            older_files: files of earlier checkpoints.
            keep: newest checkpoints to keep.
            files: all that were written, from `sync` of the processes that wrote them; None: this
                process has written them, and syncs them now.

        Raises:
            SchemaError: a file of an earlier checkpoint is missing.
        """
        if files is None:
            files = self.sync(path for path in self._partial.rglob("*") if path.is_file())
        manifest = CheckpointManifest(
            train_step=self._train_step,
            fingerprint=fingerprint,
            parts=parts,
            files={**older_files, **files},
        )
        _sync_logs(self._folder.parent.parent)
        write_checkpoint_manifest(self._partial, manifest)
        self._complete(older_files, keep)

    def _complete(self, older_files: Iterable[str], keep: int) -> None:
        checkpoints = self._folder.parent
        with lock_checkpoints(checkpoints) as is_locked:
            if newest_from(checkpoints, self._train_step) is not None:
                shutil.rmtree(self._partial, ignore_errors=True)
                return
            for path in map(checkpoints.joinpath, older_files):
                if not is_locked or not path.is_file():  # without the lock it may be removed now
                    raise missing_base(path)
            remove_checkpoint(self._folder)
            _move_into(self._partial, self._folder)
            sync_directory(checkpoints)
            if is_locked:  # otherwise the next checkpoint does
                remove_stale(checkpoints, keep)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        shutil.rmtree(self._partial, ignore_errors=True)
        is_superseded = newest_from(self._folder.parent, self._train_step) is not None
        if is_superseded and isinstance(error, (OSError, SchemaError)):
            return True  # its files were removed as stale
        if isinstance(error, OSError):
            raise SchemaError(
                f"no room on disk for a checkpoint: {error.strerror}; free some and continue with "
                "--resume, earlier checkpoints are complete",
                file=str(self._folder),
            ) from error
        return False


def _move_into(partial: Path, folder: Path) -> None:
    """Move a checkpoint to its place, where files of others may be; its manifest last."""
    if not folder.exists():
        partial.rename(folder)
        return
    files = [path for path in partial.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == MANIFEST):
        target = folder / path.relative_to(partial)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
    shutil.rmtree(partial)


def _sync_logs(run: Path) -> None:
    """Flush the log lines of a run to disk, whichever process wrote them."""
    for path in (run / METRICS, run / LEDGER):
        if path.is_file():  # the initial checkpoint of a warm start comes before them
            sync_file(path)
    sync_directory(run)


def missing_base(path: Path) -> SchemaError:
    """Return the error for a missing file or folder of an earlier checkpoint."""
    return SchemaError(
        "checkpoint that the new one builds on is missing; continue the run with --resume",
        file=str(path),
    )


# ---- Remove checkpoints ----


@contextmanager
def lock_checkpoints(checkpoints: Path) -> Iterator[bool]:
    """Lock a folder of checkpoints; yield False if another process holds the lock too long."""
    with checkpoints.with_suffix(".lock").open("a") as file:
        yield lock_file(file, LOCK_SEC)


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint so that it is not used; it is removed when its step is saved again."""
    aside = checkpoint.with_name(f"{checkpoint.name}{AHEAD}")
    with lock_checkpoints(checkpoint.parent):
        remove_checkpoint(aside)
        if aside.exists():  # with files of others
            aside = checkpoint.with_name(f"{checkpoint.name}.{secrets.token_hex(4)}{AHEAD}")
        checkpoint.rename(aside)
        sync_directory(checkpoint.parent)


def remove_stale(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and every file that these do not need.

    Files of later steps are kept: another process may be writing them. So are those with names that
    no checkpoint has: they are not ours.
    """
    complete = complete_checkpoints(checkpoints)
    kept = complete[-max(1, keep) :]
    newest = int(kept[-1].name)
    try:
        needed = set(_needed_files(kept))
    except SchemaError:
        return  # a damaged checkpoint may need any file
    for old in complete[: len(complete) - len(kept)]:
        (old / MANIFEST).unlink()  # first, so that it is never complete without its files
    for folder in checkpoints.iterdir():
        match = _FOLDER.fullmatch(folder.name)
        if match and folder.is_dir() and int(match[1]) <= newest:
            remove_checkpoint(folder, needed)


def remove_checkpoint(folder: Path, needed: Collection[str] = ()) -> None:
    """Remove the files of a checkpoint that are not needed, by path below `checkpoints/`."""

    def is_stale(name: str) -> bool:
        return _FILE.fullmatch(name) is not None and f"{folder.name}/{name}" not in needed

    Location.parse(folder).remove_all(is_stale)


def _needed_files(kept: Iterable[Path]) -> Iterable[str]:
    for folder in kept:
        yield f"{folder.name}/{MANIFEST}"
        yield from read_checkpoint_manifest(folder).files
