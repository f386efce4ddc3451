"""The process that writes checkpoints to disk beside training; it does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import find_sorted
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.files import (
    DENSE_FILE,
    PLAN_FILE,
    CheckpointManifest,
    FileChecksum,
    NewCheckpoint,
    check_file,
    complete_checkpoints,
    folder_name,
    missing_base,
    read_checkpoint_manifest,
)
from presage.trainer.checkpoint.format import ROW_FILES, RowPart
from presage.trainer.checkpoint.snapshot import (
    COMMITTED,
    DENSE,
    FAILED,
    PLAN,
    WRITTEN,
    Snapshot,
    SnapshotMemory,
)
from presage.trainer.runtime import is_readable
from presage.trainer.stores.store import RowsAndRecords, chunks_of, merge_newest, select

# ---- Write a snapshot as a checkpoint ----
#
# A checkpoint writes changed rows as a new part of their table. If the newer parts of a table would
# have more than half of the rows of its oldest one, or if there are `MAX_PARTS`, all are merged. So
# a row is rewritten after its table grew or changed by half, not at every checkpoint. Parts whose
# rows have all changed are dropped first.

MAX_PARTS = 8
"""Parts of a table."""


def write_snapshot(checkpoints: Path, snapshot: Snapshot, *, keep: int) -> Path:
    """Write a snapshot as a checkpoint and remove stale ones; return its folder.

    If another process completes a later checkpoint meanwhile, that is returned instead.

    Raises:
        SchemaError: the disk is full, or a file that it builds on has changed; this checkpoint is
            removed, and earlier ones are complete.
    """
    header = snapshot.header
    parts: dict[str, tuple[str, ...]] = {}
    with NewCheckpoint(checkpoints, header.train_step) as checkpoint:
        base = None if header.since is None else _read_base(checkpoints, header.since)
        old_files = base.files if base else {}
        checkpoint.write_arrays(DENSE_FILE, snapshot.arrays(DENSE))
        plan = snapshot.arrays(PLAN)
        if plan:
            checkpoint.write_arrays(PLAN_FILE, plan)
        for table, layout in header.layouts.items():
            rows, records = snapshot.rows(table)
            order = np.argsort(rows)
            chunks = _chunks((rows, records), order)
            folder = checkpoints / folder_name(header.since or 0)
            old_parts = tuple(
                part
                for part in (base.parts.get(table, ()) if base else ())
                if not _has_all(rows, order, folder, part, old_files)
            )
            if _merges(checkpoints, old_parts, len(rows)):
                for name in _files_of(old_parts, old_files):
                    check_file(folder, name, old_files[name])
                old_chunks = [RowPart(checkpoints / part).chunks() for part in old_parts]
                chunks, old_parts = merge_newest([chunks, *old_chunks]), ()
            checkpoint.write_rows(table, layout, chunks)
            parts[table] = (f"{folder_name(header.train_step)}/{table}", *old_parts)
        used = {part for names in parts.values() for part in names}
        needed = {name: old_files[name] for name in _files_of(used, old_files)}
        checkpoint.finish(header.fingerprint, parts, needed, keep=keep)
    return checkpoint.folder


def _read_base(checkpoints: Path, train_step: int) -> CheckpointManifest:
    folder = checkpoints / folder_name(train_step)
    if not (folder / MANIFEST).is_file():
        raise missing_base(folder)
    return read_checkpoint_manifest(folder)


def _files_of(parts: Collection[str], files: Mapping[str, FileChecksum]) -> list[str]:
    """Return the names of the files that belong to some parts."""
    return [name for name in files if name.rpartition("/")[0] in parts]


def _merges(checkpoints: Path, old_parts: tuple[str, ...], num_new: int) -> bool:
    """Return whether a new part of `num_new` rows is merged with older ones, newest first."""
    if not old_parts:
        return False
    lengths = [len(RowPart(checkpoints / part).rows) for part in old_parts]
    return len(old_parts) >= MAX_PARTS or 2 * (sum(lengths[:-1]) + num_new) > lengths[-1]


def _has_all(
    rows: NDArray[np.int64],
    order: NDArray[np.int64],
    folder: Path,
    part: str,
    files: Mapping[str, FileChecksum],
) -> bool:
    """Return whether new rows replace all rows of an old part, so that it is not needed."""
    old_rows = RowPart(folder.parent / part).rows
    if len(rows) < len(old_rows):
        return False
    name = f"{part}/{ROW_FILES[0]}.npy"
    check_file(folder, name, files[name])
    return bool(find_sorted(rows[order], old_rows)[0].all())


def _chunks(unsorted: RowsAndRecords, order: NDArray[np.int64]) -> Iterator[RowsAndRecords]:
    for chunk in chunks_of(len(order), unsorted[1].block):
        yield select(unsorted, order[chunk])


# ---- The agent process ----
#
# It reads a line for each snapshot that was committed and answers with a line when the snapshot is
# on disk or cannot be written. When its input ends or its parent has exited, it writes the snapshot
# that is committed, removes the memory, and exits. It checks its parent twice a second.

POLL_SEC = 0.5
"""Interval of checks whether the parent still runs."""
_NICENESS = 10


def run_agent(
    run: Path,
    memory_path: Path,
    file: int,
    *,
    keep: int,
    parent: int,
    requests: BinaryIO,
    answer: Callable[[str], None],
) -> None:
    """Write committed snapshots of a run until the trainer exits."""
    os.nice(_NICENESS)
    memory = SnapshotMemory(memory_path)
    memory.inherit(file)
    if memory.state == COMMITTED:
        answer(_write(run, memory, keep))  # the previous agent died
    for _ in _read_requests(requests, parent):
        if memory.state == COMMITTED:  # otherwise the previous agent has written it
            memory.remap()
            answer(_write(run, memory, keep))
    if memory.state in (COMMITTED, FAILED):
        memory.remap()
        answer(_write(run, memory, keep))
    memory.remove()


def recover(run: Path, memory: SnapshotMemory, *, keep: int) -> None:
    """Write the committed snapshot of a trainer and agent that both died, and remove the memory.

    Raises:
        SchemaError: the disk is full; the memory is kept.
    """
    if memory.state in (COMMITTED, FAILED):
        snapshot = Snapshot(memory)
        train_step, since = snapshot.header.train_step, snapshot.header.since
        checkpoints = run / CHECKPOINTS
        steps = [int(folder.name) for folder in complete_checkpoints(checkpoints)]
        if train_step > max(steps, default=-1) and (since is None or since in steps):
            write_snapshot(checkpoints, snapshot, keep=keep)
    memory.remove()


def _write(run: Path, memory: SnapshotMemory, keep: int) -> str:
    """Write the snapshot in memory; return the answer to the trainer."""
    snapshot, problem = Snapshot(memory), None
    try:
        write_snapshot(run / CHECKPOINTS, snapshot, keep=keep)
        memory.state = WRITTEN
    except (SchemaError, OSError) as error:
        memory.state, problem = FAILED, str(error)
    return json.dumps({"train_step": snapshot.header.train_step, "error": problem})


def _read_requests(requests: BinaryIO, parent: int) -> Iterator[bytes]:
    """Yield lines until the end or until the parent exits: other processes may hold the pipe."""
    while os.getppid() == parent:
        if not is_readable(requests, POLL_SEC):
            continue
        line = requests.readline()
        if not line:
            return
        yield line


def send_answer(stream: BinaryIO, line: str) -> None:
    """Write a line to a trainer, which may have exited."""
    with suppress(BrokenPipeError, ValueError):
        stream.write(f"{line}\n".encode())
        stream.flush()
