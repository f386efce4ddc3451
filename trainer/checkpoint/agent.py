"""The process that writes checkpoints to disk beside training."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.files import sync_directory
from schemas.layout import MANIFEST
from schemas.run_log import CHECKPOINTS, LEDGER, METRICS
from trainer.checkpoint.format import RowPart, RowsAndRecords, newest, to_parts, write_part
from trainer.checkpoint.manifest import DENSE as DENSE_FILE
from trainer.checkpoint.manifest import (
    PARTIAL,
    CheckpointManifest,
    FileSum,
    alone,
    check_file,
    complete,
    file_sum,
    folder_of,
    newer_than,
    read_checkpoint_manifest,
    sweep,
    write_checkpoint_manifest,
)
from trainer.checkpoint.manifest import PLAN as PLAN_FILE
from trainer.checkpoint.snapshot import (
    COMMITTED,
    DENSE,
    FAILED,
    PLAN,
    WRITTEN,
    CopyMemory,
    Snapshot,
)
from trainer.runtime import is_readable
from trainer.stores.api import ROWS_PER_CHUNK, Records, TableLayout

# From a copy in memory, or from whole tables, to a complete checkpoint on disk.
#
# A checkpoint writes the rows that changed as a part of their table. Where that would leave the
# parts of a table longer than half its oldest one, or more than `MOST_PARTS`, all are merged into
# one: each row is rewritten after its table grew or changed by half, not at every checkpoint.

MOST_PARTS = 8
"""Parts of a table that are read together."""


def persist(checkpoints: Path, snapshot: Snapshot, *, keep: int) -> Path:
    """Write a copy as a checkpoint and return its folder; others that are not kept go.

    Where another process completes a later one meanwhile, that stands, and is returned.

    Args:
        checkpoints: folder of the run.
        snapshot: committed.
        keep: newest checkpoints that remain.

    Raises:
        SchemaError: the disk is full, or a file that it builds on has changed; nothing is left of
            this checkpoint, and those before are whole.
    """
    about = snapshot.about
    parts: dict[str, tuple[str, ...]] = {}
    with NewCheckpoint(checkpoints, about.train_step) as writing:
        before, older = _before(checkpoints, about.since)
        writing.arrays(DENSE_FILE, snapshot.arrays(DENSE))
        plan = snapshot.arrays(PLAN)
        if plan:
            writing.arrays(PLAN_FILE, plan)
        for table, layout in about.layouts.items():
            rows, records = snapshot.rows(table)
            stream = _ascending(rows, records)
            old = before.parts.get(table, ()) if before else ()
            if _merges(checkpoints, old, len(rows)):
                for name in (f for f in older if f.rpartition("/")[0] in old):
                    check_file(checkpoints / folder_of(about.since or 0), name, older[name])
                stream = newest([stream, *(RowPart(checkpoints / p).pieces() for p in old)])
                old = ()
            writing.rows(table, layout, stream)
            parts[table] = (f"{folder_of(about.train_step)}/{table}", *old)
        used = {part for names in parts.values() for part in names}
        writing.finish(
            about.made_of,
            parts,
            {name: each for name, each in older.items() if name.rpartition("/")[0] in used},
            keep=keep,
        )
    return writing.folder


class NewCheckpoint:
    """Writes a checkpoint under another name, and gives it its own when it is complete.

    Several processes may do so for a run: an agent outlives its trainer. The newest complete
    checkpoint stands; what another one supersedes is dropped, whatever became of its files.
    """

    def __init__(self, checkpoints: Path, train_step: int) -> None:
        """Remember the place; entering the context makes the folder.

        Args:
            checkpoints: folder of the run.
            train_step: the next step to train.
        """
        self._train_step = train_step
        self._folder = checkpoints / folder_of(train_step)
        own = f"{folder_of(train_step)}.{secrets.token_hex(4)}{PARTIAL}"
        self._partial = checkpoints / own  # another process may write the same step

    @property
    def folder(self) -> Path:
        """The complete checkpoint: this one, or that by which it is superseded."""
        return newer_than(self._folder.parent, self._train_step) or self._folder

    def __enter__(self) -> NewCheckpoint:
        """Make the folder."""
        self._partial.mkdir(parents=True)
        return self

    def arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write named arrays as one file."""
        with (self._partial / name).open("wb") as file:
            for part in to_parts(arrays):
                file.write(part)

    def rows(self, table: str, layout: TableLayout, pieces: Iterable[RowsAndRecords]) -> None:
        """Write ascending rows as a part of their table."""
        write_part(self._partial / table, layout, pieces)

    def finish(
        self,
        made_of: Mapping[str, Any],
        parts: Mapping[str, tuple[str, ...]],
        older: Mapping[str, FileSum],
        *,
        keep: int,
    ) -> None:
        """Write the manifest when all else is on the disk; the checkpoint is complete then.

        The lines of the steps that it has are brought to the device, too: a checkpoint that
        outlives a power cut has its lines.

        Args:
            made_of: of the manifest.
            parts: of the manifest.
            older: files of earlier checkpoints that it needs.
            keep: newest checkpoints that remain.

        Raises:
            SchemaError: a file that it builds on is gone.
        """
        files = dict(older)
        for path in sorted(p for p in self._partial.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            name = path.relative_to(self._partial).as_posix()
            files[f"{self._folder.name}/{name}"] = file_sum(path)
        manifest = CheckpointManifest(
            train_step=self._train_step, made_of=made_of, parts=parts, files=files
        )
        _sync_lines(self._folder.parent.parent)
        write_checkpoint_manifest(self._partial, manifest)
        self._complete(older, keep)

    def _complete(self, older: Iterable[str], keep: int) -> None:
        checkpoints = self._folder.parent
        with alone(checkpoints) as held:
            if newer_than(checkpoints, self._train_step) is not None:
                shutil.rmtree(self._partial, ignore_errors=True)
                return
            for path in map(checkpoints.joinpath, older):
                if not held or not path.is_file():  # or it may go at any moment
                    raise _gone(path)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._partial.rename(self._folder)
            sync_directory(checkpoints)
            if held:  # otherwise the next one does
                sweep(checkpoints, keep)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Leave nothing of a checkpoint that is not complete."""
        if error is None:
            return False
        shutil.rmtree(self._partial, ignore_errors=True)
        superseded = newer_than(self._folder.parent, self._train_step) is not None
        if superseded and isinstance(error, (OSError, SchemaError)):
            return True  # its files went with those that are not kept
        if isinstance(error, OSError):
            raise SchemaError(
                f"disk must have room for a checkpoint, got {error.strerror}; free some and train "
                "on with --resume, the checkpoints before are whole",
                file=str(self._folder),
            ) from error
        return False


def _sync_lines(run: Path) -> None:
    """Bring the lines of steps to the device, whichever process wrote them."""
    for path in (run / METRICS, run / LEDGER):
        if path.is_file():  # a run that begins with another one's checkpoint has none yet
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(run)


def _gone(path: Path) -> SchemaError:
    return SchemaError(
        "checkpoint must stay while the run adds to it, got none; start the run again with "
        "--resume",
        file=str(path),
    )


def _before(
    checkpoints: Path, since: int | None
) -> tuple[CheckpointManifest | None, Mapping[str, FileSum]]:
    if since is None:
        return None, {}
    folder = checkpoints / folder_of(since)
    if not (folder / MANIFEST).is_file():
        raise _gone(folder)
    manifest = read_checkpoint_manifest(folder)
    return manifest, manifest.files


def _merges(checkpoints: Path, old: tuple[str, ...], num_new: int) -> bool:
    """Say whether a part of so many rows is merged with those before."""
    if not old:
        return False
    lengths = [_num_rows(checkpoints / part) for part in old]
    return len(old) >= MOST_PARTS or 2 * (sum(lengths[:-1]) + num_new) > lengths[-1]


def _num_rows(folder: Path) -> int:
    return len(np.load(folder / "rows.npy", mmap_mode="r", allow_pickle=False))


def _ascending(rows: NDArray[np.int64], records: Records) -> Iterator[RowsAndRecords]:
    order = np.argsort(rows)
    for start in range(0, len(order), ROWS_PER_CHUNK):
        chosen = order[start : start + ROWS_PER_CHUNK]
        yield rows[chosen], Records(records.values[chosen], records.state[chosen])


# The process that writes checkpoints beside training, and lives on when the trainer dies.
#
# It reads a line for each copy that was committed, and answers with a line when it is on disk or
# could not be written. When its input ends or its parent is gone it writes what is committed and
# not on disk yet, gives the memory back and ends: it looks twice a second, so it outlives its
# work by less than a second. Torch is not imported here.

LOOK_SEC = 0.5
"""How often the agent looks whether its parent lives."""
_NICENESS = 10


def run_agent(
    run: Path,
    path: Path,
    file: int,
    *,
    keep: int,
    parent: int,
    lines: BinaryIO,
    answer: Callable[[str], None],
) -> None:
    """Write what is committed in a run's memory until the trainer ends.

    Args:
        run: run folder.
        path: the memory, which the trainer has made.
        file: number of its open file.
        keep: newest checkpoints that remain.
        parent: process id of the trainer.
        lines: a line for each copy.
        answer: takes a line of JSON for each.
    """
    os.nice(_NICENESS)
    memory = CopyMemory(path)
    memory.inherit(file)
    if memory.state == COMMITTED:
        answer(_write(run, memory, keep))  # of an agent that died before
    for _ in _ordered(lines, parent):
        if memory.state == COMMITTED:  # or an agent that died wrote it
            memory.remap()
            answer(_write(run, memory, keep))
    if memory.state in (COMMITTED, FAILED):
        memory.remap()
        answer(_write(run, memory, keep))
    memory.remove()


def recover(run: Path, memory: CopyMemory, *, keep: int) -> None:
    """Write what is committed in memory that a trainer and its agent left, and give it back.

    Raises:
        SchemaError: the disk is full; the memory stays.
    """
    if memory.state in (COMMITTED, FAILED):
        about = Snapshot(memory).about
        checkpoints = run / CHECKPOINTS
        found = [int(folder.name) for folder in complete(checkpoints)]
        newer = about.train_step > max(found, default=-1)
        if newer and (about.since is None or about.since in found):
            persist(checkpoints, Snapshot(memory), keep=keep)
    memory.remove()


def _write(run: Path, memory: CopyMemory, keep: int) -> str:
    """Write a copy; return the line that says how it went."""
    start = time.monotonic()
    snapshot = Snapshot(memory)
    step = snapshot.about.train_step
    try:
        folder = persist(run / CHECKPOINTS, snapshot, keep=keep)
    except (SchemaError, OSError) as error:
        memory.state = FAILED
        return json.dumps({"train_step": step, "error": str(error)})
    memory.state = WRITTEN
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    seconds = time.monotonic() - start
    return json.dumps({"train_step": step, "error": None, "seconds": seconds, "num_bytes": written})


def _ordered(lines: BinaryIO, parent: int) -> Iterator[bytes]:
    """Yield lines until there are no more, or the parent is gone: others may hold the pipe open."""
    while os.getppid() == parent:
        if not is_readable(lines, LOOK_SEC):
            continue
        line = lines.readline()
        if not line:
            return
        yield line


def tell(stream: BinaryIO, line: str) -> None:
    """Write a line to a trainer that may be gone."""
    with suppress(BrokenPipeError, ValueError):
        stream.write(f"{line}\n".encode())
        stream.flush()
