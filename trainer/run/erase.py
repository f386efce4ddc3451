"""Erase ids from a run: their rows are removed from all its checkpoints, with optimizer state.

Parts with such a row are rewritten under new names. Then the manifest of each checkpoint is
replaced atomically, and parts without a manifest are removed. After a crash all checkpoints are
complete, some of them with the rows; running the command again removes the rest.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.schemas.config.job import Job, TableConfig, load_job
from presage.schemas.config.train import CheckpointConfig
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.features import load_features
from presage.schemas.layout import JOB, SCHEMA
from presage.schemas.rows import ids_of, rows_of_ids
from presage.schemas.run.records import CHECKPOINTS, RUN_FILE
from presage.schemas.storage.local_files import sync_directory
from presage.schemas.storage.location import Location, copy_errors_name
from presage.trainer.checkpoint.files import (
    PLAN_FILE,
    CheckpointManifest,
    FileChecksum,
    check_file,
    checksum_of,
    complete_checkpoints,
    lock_checkpoints,
    read_checkpoint_manifest,
    remove_stale,
    write_checkpoint_manifest,
)
from presage.trainer.checkpoint.format import RowPart, from_bytes, write_part
from presage.trainer.checkpoint.manager import claim_leftovers
from presage.trainer.run.folder import RunIdentity, read_identity, run_lock
from presage.trainer.run.upload import RunUploader, work_folder
from presage.trainer.stores.bucket_files import clear_directory
from presage.trainer.stores.factory import STORE
from presage.trainer.stores.store import RowsAndRecords, select

Rows = NDArray[np.int64]
logger = logging.getLogger(__name__)


def erase_ids(source: Path | Location, path: Path, table: str, work: Path) -> dict[str, Any]:
    """Erase the rows of the ids in a file; see `erase_rows`.

    At a URL the state without them is committed, and files with them are deleted; a process that
    trains the run ends.

    Raises:
        SchemaError: as `erase_rows` and `read_ids`.
        StorageError: the store failed; running the command again erases the rest.
    """
    if isinstance(source, Path):
        return _erase_ids(source, path, table)
    with (
        work_folder(source, work, CheckpointConfig(), resume=True) as (run, newest),
        copy_errors_name(source, run),
    ):
        summary = _erase_ids(run, path, table)
        RunUploader(run, source, newest).commit()
        shutil.rmtree(run)
    return summary


def _erase_ids(run: Path, path: Path, table: str) -> dict[str, Any]:
    read_identity(run)  # raises SchemaError if the folder holds no run
    config = table_of(load_job(run / JOB).data.tables, table, run)
    types = {f.name: f.type for f in load_features(run / SCHEMA).features}
    is_text = any(types.get(name) == "BYTES" for name in config.features)
    return erase_rows(run, read_ids(path, is_text=is_text), table)


def read_ids(path: Path, *, is_text: bool = False) -> NDArray[np.int64]:
    """Read ids from a text file, one per line.

    Raises:
        SchemaError: the file cannot be read, or a line is no 64-bit integer.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line]
        if is_text:
            return ids_of(pa.array(lines, pa.string()))
        return np.array([int(line) for line in lines], np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise SchemaError(
            f"ids must be 64-bit integers, one per line: {error}", file=str(path)
        ) from error


def erase_rows(run: Path, ids: NDArray[np.int64], table: str) -> dict[str, Any]:
    """Erase the rows of some ids, with their optimizer state, from all checkpoints of a run.

    An erased row has its initial values when it is looked up again. In a hashed table this affects
    all ids of the row. Files of stores are removed altogether, since they are not read again; the
    state of a cache plan that lists such a row is removed and computed again.

    Returns:
        `table`, `num_ids`, `num_rows`; `checkpoints`: by step the number of erased rows, without
        zeros; `store`: whether files of stores were removed.

    Raises:
        SchemaError: there is no run or table, a process uses the run, or a checkpoint is damaged.
    """
    identity, job = read_identity(run), load_job(run / JOB)
    config = table_of(job.data.tables, table, run)
    rows = np.unique(rows_of_ids(ids, table, config))
    if identity.is_of_slots:
        _check_has_slots(run, identity, table, config)
    check_unused(run)
    with run_lock(run):
        saved = identity.saved_name(table)
        return _erase_locked(run, job, rows, saved) | {"table": table, "num_ids": len(ids)}


def _check_has_slots(run: Path, identity: RunIdentity, table: str, config: TableConfig) -> None:
    """Raise SchemaError if rows of a table are not erased; warn that others may be left."""
    if not {*config.features} & {*identity.train["sparse"]}:
        raise SchemaError(
            f"--table has no slots in the run: {table!r}; its rows, if any, are in the dense "
            "state, from which no row is erased: train a new run",
            file=str(run / RUN_FILE),
        )
    logger.warning(
        "rows may be left in the directory of PlannedSlots on each machine; remove it, the next "
        "process makes it again"
    )


def _erase_locked(run: Path, job: Job, rows: Rows, table: str) -> dict[str, Any]:
    claim_leftovers(run, job.train.checkpoint, resume=True)
    checkpoints = run / CHECKPOINTS
    num_erased: dict[str, int] = {}
    if complete_checkpoints(checkpoints):
        with lock_checkpoints(checkpoints) as is_locked:
            if not is_locked:
                raise _in_use(run, "a process that writes a checkpoint")
            num_erased = _erase_from_checkpoints(checkpoints, rows, table)
    has_store = (run / STORE).is_dir()
    clear_directory(run / STORE)
    return {
        "num_rows": len(rows),
        "checkpoints": num_erased,
        "store": has_store,
    }


def table_of(tables: Mapping[str, TableConfig], table: str, run: Path) -> TableConfig:
    """Return the config of a table.

    Raises:
        SchemaError: the run has no such table.
    """
    if table not in tables:
        raise SchemaError(
            f"--table is no table of the run: {table!r}; {suggest_name(table, tables)}",
            file=str(run / JOB),
        )
    return tables[table]


def check_unused(run: Path) -> None:
    """Check that no trainer process of this machine uses a run.

    Raises:
        SchemaError: a process uses it.
    """
    for pid in trainers_of(run):
        raise _in_use(run, f"process {pid}")


def trainers_of(run: Path) -> Iterator[int]:
    """Yield other processes of this machine whose command line has the trainer and the run."""
    run_path = run.resolve()
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        with suppress(OSError):  # it has ended, or belongs to another user
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if int(folder.name) == os.getpid() or not {"trainer", "presage.trainer"} & {*words}:
                continue
            cwd = (folder / "cwd").readlink()
            if any(word and (cwd / word).resolve() == run_path for word in words):
                yield int(folder.name)


def _in_use(run: Path, user: str) -> SchemaError:
    return SchemaError(
        f"run is in use by {user}; stop it before erasing rows",
        file=str(run),
    )


def _erase_from_checkpoints(checkpoints: Path, rows: Rows, table: str) -> dict[str, int]:
    """Replace the manifests of all checkpoints; return the number of erased rows by step."""
    num_erased: dict[str, int] = {}
    parts: dict[str, tuple[str, int]] = {}
    for folder in complete_checkpoints(checkpoints):
        manifest = read_checkpoint_manifest(folder)
        count = 0
        for part in manifest.parts.get(table, ()):
            if part not in parts:
                for name in (f for f in manifest.files if f.rpartition("/")[0] == part):
                    check_file(folder, name, manifest.files[name])
                parts[part] = rewrite_part(checkpoints, part, rows)
            count += parts[part][1]
        renamed = {old: new for old, (new, _) in parts.items()}
        new_manifest = _with_parts(checkpoints, manifest, table, renamed)
        new_manifest = _without_plan(checkpoints, new_manifest, rows, table)
        if new_manifest != manifest:
            write_checkpoint_manifest(folder, new_manifest)
            sync_directory(folder)
            num_erased[folder.name] = count
    remove_stale(checkpoints, keep=len(complete_checkpoints(checkpoints)))
    return num_erased


def rewrite_part(checkpoints: Path, part: str, rows: Rows) -> tuple[str, int]:
    """Write a new part without some rows.

    Returns:
        The new part, or the same one if it has none of the rows; and how many it had.
    """
    old_part = RowPart(checkpoints / part)
    count = int(np.isin(rows, old_part.rows).sum())
    if not count:
        return part, 0
    new = f"{part.partition('.')[0]}.{secrets.token_hex(4)}"
    write_part(checkpoints / new, old_part.dtype, _other_rows(old_part, rows))
    for path in sorted((checkpoints / new).iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(checkpoints / new)
    return new, count


def _other_rows(part: RowPart, rows: Rows) -> Iterator[RowsAndRecords]:
    for chunk in part.chunks():
        yield select(chunk, np.isin(chunk[0], rows, invert=True))


def _with_parts(
    checkpoints: Path, manifest: CheckpointManifest, table: str, renamed: Mapping[str, str]
) -> CheckpointManifest:
    before = manifest.parts.get(table, ())
    after = tuple(renamed[part] for part in before)
    if after == tuple(before):
        return manifest
    files = {n: s for n, s in manifest.files.items() if n.rpartition("/")[0] not in before}
    for old, new in zip(before, after, strict=True):
        files |= _files_of(checkpoints, manifest, old, new)
    return replace(manifest, parts={**manifest.parts, table: after}, files=files)


def _files_of(
    checkpoints: Path, manifest: CheckpointManifest, old: str, new: str
) -> dict[str, FileChecksum]:
    if old == new:
        return {n: s for n, s in manifest.files.items() if n.rpartition("/")[0] == old}
    paths = sorted((checkpoints / new).iterdir())
    return {f"{new}/{path.name}": checksum_of(path) for path in paths}


def _without_plan(
    checkpoints: Path, manifest: CheckpointManifest, rows: Rows, table: str
) -> CheckpointManifest:
    """Return the manifest without the state of the cache plan if that lists one of the rows."""
    name = f"{manifest.train_step:08d}/{PLAN_FILE}"
    if name not in manifest.files:
        return manifest
    path = checkpoints / name
    check_file(path.parent, name, manifest.files[name])
    cached = from_bytes(path.read_bytes(), file=str(path)).get(f"{table}/rows")
    if cached is None or not np.isin(rows, cached).any():
        return manifest
    files = {other: file for other, file in manifest.files.items() if other != name}
    return replace(manifest, files=files)
