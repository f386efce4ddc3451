"""Manifests of checkpoints: their files and checksums."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import SchemaError
from schemas.files import replace_bytes, sha256_of, sync_directory
from schemas.layout import MANIFEST
from schemas.manifest import decode_manifest, encode_manifest

# Which files make up a checkpoint, and which files of a run no kept checkpoint needs.
#
# `checkpoints/<step>/` holds what a checkpoint wrote; its manifest also lists files of earlier
# ones: rows that did not change since are where they were. A file goes when no kept manifest
# lists it.

DENSE, PLAN = "dense.safetensors", "plan.safetensors"
"""Named arrays of a checkpoint: the dense state, and where the plan of a planned cache stands."""
ROW_FILES = "rows", "values", "state"
"""Arrays of a part, row by row, rows ascending."""
PARTIAL, AHEAD = ".partial", ".ahead"
"""What the names of folders end with that are no complete checkpoints: being written, and newer
than the lines of steps, which were lost."""
LOCK_SEC = 10.0
"""How long a process that completes a checkpoint waits for another that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """What a file must be."""

    num_bytes: int
    """Its size."""
    sha256: str
    """Of its bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """One complete checkpoint. The state is the same for any number of processes."""

    train_step: int
    """The next step to train; all steps before are in it."""
    made_of: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Dataset, index, tables, model and optimizers that it belongs to."""
    parts: Mapping[str, tuple[str, ...]]
    """By table, folders below `checkpoints/` with its rows; of a row in several the first holds."""
    files: Mapping[str, FileSum]
    """Every file that it needs, by path below `checkpoints/`."""


def folder_of(train_step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"{train_step:08d}"


def complete(checkpoints: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = (p for p in checkpoints.iterdir() if p.name.isdigit() and (p / MANIFEST).is_file())
    return sorted(found)


def write_checkpoint_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write a manifest atomically, with a checksum of itself; the checkpoint is complete then."""
    replace_bytes(folder / MANIFEST, encode_manifest(manifest))


def read_checkpoint_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        SchemaError: it is missing, changed, or of another release.
    """
    path = folder / MANIFEST
    data = path.read_bytes() if path.is_file() else b""
    return decode_manifest(CheckpointManifest, data, path, _without(folder, None))


def file_sum(path: Path) -> FileSum:
    """Return size and hash of a finished file."""
    return FileSum(num_bytes=path.stat().st_size, sha256=sha256_of(path))


def verify_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Compare every byte of a checkpoint with its manifest.

    Raises:
        SchemaError: a file is missing, cut or changed; names it, and the checkpoint to use instead.
    """
    for name, wanted in manifest.files.items():
        check_file(folder, name, wanted)


def check_file(folder: Path, name: str, wanted: FileSum) -> None:
    """Compare a file with what a checkpoint's manifest says of it.

    Raises:
        SchemaError: as `verify_files`.
    """
    path = folder.parent / name
    size = path.stat().st_size if path.is_file() else None
    if size != wanted.num_bytes:
        got = "none" if size is None else str(size)
        raise SchemaError(
            f"file must have {wanted.num_bytes} bytes, got {got}; {_without(folder, name)}",
            file=str(path),
        )
    sha256 = sha256_of(path)
    if sha256 != wanted.sha256:
        raise SchemaError(
            f"file must have sha256 {wanted.sha256[:12]}, got {sha256[:12]}; "
            f"{_without(folder, name)}",
            file=str(path),
        )


def _without(folder: Path, name: str | None) -> str:
    """Return the advice that leads to the newest other checkpoint that does not need a file."""
    before = [other for other in complete(folder.parent) if other.name < folder.name]
    for nth, other in enumerate(reversed(before)):
        try:
            needs = name is not None and name in read_checkpoint_manifest(other).files
        except SchemaError:
            continue
        if not needs:
            if nth == 0:
                return "remove this checkpoint to use the one before it"
            return f"remove the checkpoints after {other.name} to use that one"
    return "train again, as no checkpoint before it is complete"


@contextmanager
def alone(checkpoints: Path) -> Iterator[bool]:
    """Keep others from completing or removing checkpoints; yield False where one holds them."""
    with checkpoints.with_suffix(".lock").open("a") as file:
        deadline = time.monotonic() + LOCK_SEC
        while not (held := _locked(file.fileno())) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield held


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def newer_than(checkpoints: Path, train_step: int) -> Path | None:
    """Return the newest complete checkpoint where it has all steps before one."""
    found = complete(checkpoints)
    return found[-1] if found and int(found[-1].name) >= train_step else None


def set_aside(checkpoint: Path) -> None:
    """Let a checkpoint count no more; `sweep` removes it when one of its step is complete again."""
    aside = checkpoint.with_name(f"{checkpoint.name}{AHEAD}")
    with alone(checkpoint.parent):
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        sync_directory(checkpoint.parent)


def sweep(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and every file that these do not need.

    What is of later steps remains: another process may be writing it.

    Args:
        checkpoints: folder of a run with a complete checkpoint.
        keep: newest checkpoints that remain, at least one.
    """
    found = complete(checkpoints)
    kept = found[-max(1, keep) :]
    newest = int(kept[-1].name)
    try:
        needed = set(_needed(kept))
    except SchemaError:
        return  # what a damaged one needs is not known: all files stay
    for old in found[: len(found) - len(kept)]:
        (old / MANIFEST).unlink()  # first: what follows makes it incomplete
    for folder in checkpoints.iterdir():
        step = folder.name.partition(".")[0]
        if not folder.is_dir() or (step.isdigit() and int(step) > newest):
            continue
        if folder.name.endswith(PARTIAL):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for path in folder.rglob("*"):
            if path.is_file() and path.relative_to(checkpoints).as_posix() not in needed:
                path.unlink()
        _remove_empty(folder)


def _needed(kept: Iterable[Path]) -> Iterable[str]:
    for folder in kept:
        yield f"{folder.name}/{MANIFEST}"
        yield from read_checkpoint_manifest(folder).files


def _remove_empty(folder: Path) -> None:
    if not any(path.is_file() for path in folder.rglob("*")):
        shutil.rmtree(folder)
        return
    for inner in folder.iterdir():
        if inner.is_dir() and not any(inner.iterdir()):
            inner.rmdir()
