"""Erase ids from a run.

The rows of some ids leave all its checkpoints, with their optimizer state.
"""

from __future__ import annotations

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

from schemas.config.job import TableConfig, load_job
from schemas.errors import SchemaError, suggest_name
from schemas.features import load_features
from schemas.layout import JOB, SCHEMA
from schemas.manifest import sync_directory
from schemas.rows import ids_of, rows_of_ids
from schemas.run_log import CHECKPOINTS
from trainer.checkpoint.format import RowPart, RowsAndRecords, from_bytes, write_part
from trainer.checkpoint.manager import claim_leftovers
from trainer.checkpoint.manifest import (
    PLAN,
    CheckpointManifest,
    FileSum,
    alone,
    check_file,
    complete,
    file_sum,
    read_checkpoint_manifest,
    sweep,
    write_checkpoint_manifest,
)
from trainer.run import read_identity
from trainer.setup import STORE
from trainer.stores.api import Records, TableLayout

# Rows of some ids leave all that a run keeps: values and optimizer state, in every checkpoint.
#
# Parts with such a row are written again beside the old ones; then each checkpoint's manifest is
# replaced, atomically, and what no manifest names any more goes. Whatever dies between leaves
# whole checkpoints, some of them with the rows; done again, the rest follows.

Rows = NDArray[np.int64]


def forget_ids(run: Path, path: Path, table: str) -> dict[str, Any]:
    """Drop the rows of the ids in a file; see `forget_rows`.

    Raises:
        SchemaError: as `forget_rows` and `read_ids`.
    """
    read_identity(run)  # refuses a folder that holds no run
    config = table_of(load_job(run / JOB, stored=True).data.tables, table, run)
    types = {f.name: f.type for f in load_features(run / SCHEMA).features}
    texts = any(types.get(name) == "BYTES" for name in config.features)
    return forget_rows(run, read_ids(path, texts), table)


def read_ids(path: Path, texts: bool = False) -> NDArray[np.int64]:
    """Read ids from a text file, one a line.

    Args:
        path: the file.
        texts: whether features of the table are texts; then each line is one.

    Raises:
        SchemaError: it cannot be read, or a line is no whole number of 64 bits.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line]
        return (
            ids_of(pa.array(lines, pa.string()))
            if texts
            else np.array([int(line) for line in lines], np.int64)
        )
    except (OSError, ValueError, OverflowError) as error:
        raise SchemaError(
            f"ids must be whole numbers of 64 bits, one a line, got {error}", file=str(path)
        ) from error


def forget_rows(run: Path, ids: NDArray[np.int64], table: str) -> dict[str, Any]:
    """Drop the rows of some ids, and their optimizer state, from all kept checkpoints of a run.

    Dropped rows begin anew with their first values where they are looked up again. Ids that share
    a row of a hashed table share this, too. The files of stores go as a whole: no run reads them
    again; the plan of a cache goes where it names such a row, and is made anew.

    Args:
        run: run folder, of which no process trains.
        ids: as features of the table have them.
        table: name of the embedding table.

    Returns:
        `table`, `num_ids`, `num_rows`; `checkpoints`, by step how many rows were dropped, where any
        was; `store`, whether files of stores went.

    Raises:
        SchemaError: there is no run or table, a process trains the run, or a checkpoint is damaged.
    """
    read_identity(run)  # refuses a folder that holds no run
    job = load_job(run / JOB, stored=True)
    rows = np.unique(rows_of_ids(ids, table, table_of(job.data.tables, table, run)))
    refuse_used(run)
    claim_leftovers(run, job.train.checkpoint, resume=True)
    checkpoints = run / CHECKPOINTS
    dropped: dict[str, int] = {}
    if complete(checkpoints):
        with alone(checkpoints) as held:
            if not held:
                raise _in_use(run, "a process that writes a checkpoint")
            dropped = _without_rows(checkpoints, rows, table)
    has_store = (run / STORE).is_dir()
    shutil.rmtree(run / STORE, ignore_errors=True)
    return {
        "table": table,
        "num_ids": len(ids),
        "num_rows": len(rows),
        "checkpoints": dropped,
        "store": has_store,
    }


def table_of(tables: Mapping[str, TableConfig], table: str, run: Path) -> TableConfig:
    """Return what makes ids to rows of a table.

    Raises:
        SchemaError: the run has no such table.
    """
    if table not in tables:
        raise SchemaError(
            f"--table must be one of the run, got {table!r}; {suggest_name(table, tables)}",
            file=str(run / JOB),
        )
    return tables[table]


def refuse_used(run: Path) -> None:
    """Refuse a run that a command of the trainer on this machine works on.

    Raises:
        SchemaError: naming the process.
    """
    for pid in trainers_of(run):
        raise _in_use(run, f"process {pid}")


def trainers_of(run: Path) -> Iterator[int]:
    """Yield the other processes of this machine whose command names the trainer and the run."""
    wanted = run.resolve()
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        with suppress(OSError):  # it has ended, or is somebody else's
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if int(folder.name) == os.getpid() or "trainer" not in words:
                continue
            place = (folder / "cwd").readlink()
            if any(word and (place / word).resolve() == wanted for word in words):
                yield int(folder.name)


def _in_use(run: Path, who: str) -> SchemaError:
    return SchemaError(
        f"run must not be trained while rows are forgotten, got {who}; end it, or wait for it",
        file=str(run),
    )


def _without_rows(checkpoints: Path, rows: Rows, table: str) -> dict[str, int]:
    """Replace the manifests of all checkpoints; return by step how many rows were dropped."""
    dropped: dict[str, int] = {}
    parts: dict[str, tuple[str, int]] = {}
    for folder in complete(checkpoints):
        manifest = read_checkpoint_manifest(folder)
        count = 0
        for part in manifest.parts.get(table, ()):
            if part not in parts:
                for name in (f for f in manifest.files if f.rpartition("/")[0] == part):
                    check_file(folder, name, manifest.files[name])
                parts[part] = write_without(checkpoints, part, table, rows)
            count += parts[part][1]
        renamed = {old: new for old, (new, _) in parts.items()}
        after = _with_parts(checkpoints, manifest, table, renamed)
        after = _without_plan(checkpoints, after, rows, table)
        if after != manifest:
            write_checkpoint_manifest(folder, after)
            sync_directory(folder)
            dropped[folder.name] = count
    sweep(checkpoints, keep=len(complete(checkpoints)))
    return dropped


def write_without(checkpoints: Path, part: str, table: str, rows: Rows) -> tuple[str, int]:
    """Write a part again without some rows.

    Returns:
        The new part, or the same where it has none of them; and how many it had.
    """
    found = RowPart(checkpoints / part)
    count = int(np.isin(rows, found.rows).sum())
    if not count:
        return part, 0
    values, state = found.records.values, found.records.state
    layout = TableLayout(
        table=table,
        dim=values.shape[1],
        state_width=state.shape[1],
        dtype=str(values.dtype),
        seed=0,  # of first values; none is made here
    )
    new = f"{part.partition('.')[0]}.{secrets.token_hex(4)}"
    write_part(checkpoints / new, layout, _kept(found, rows))
    for path in sorted((checkpoints / new).iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(checkpoints / new)
    return new, count


def _kept(part: RowPart, rows: Rows) -> Iterator[RowsAndRecords]:
    for some, records in part.pieces():
        kept = np.isin(some, rows, invert=True)
        yield some[kept], Records(records.values[kept], records.state[kept])


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
) -> dict[str, FileSum]:
    if old == new:
        return {n: s for n, s in manifest.files.items() if n.rpartition("/")[0] == old}
    paths = sorted((checkpoints / new).iterdir())
    return {f"{new}/{path.name}": file_sum(path) for path in paths}


def _without_plan(
    checkpoints: Path, manifest: CheckpointManifest, rows: Rows, table: str
) -> CheckpointManifest:
    """Leave out where the plan of a cache stands, if it names one of some rows."""
    name = f"{manifest.train_step:08d}/{PLAN}"
    if name not in manifest.files:
        return manifest
    path = checkpoints / name
    check_file(path.parent, name, manifest.files[name])
    cached = from_bytes(path.read_bytes(), file=str(path)).get(f"{table}/rows")
    if cached is None or not np.isin(rows, cached).any():
        return manifest
    files = {other: found for other, found in manifest.files.items() if other != name}
    return replace(manifest, files=files)
