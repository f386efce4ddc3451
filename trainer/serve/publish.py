"""Publish the rows that changed between two checkpoints, and apply them to an exported model.

Parts that both checkpoints have contain the same rows, so only the others are read. Of these, the
rows are published whose bits differ.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.schemas.dataset.files import sha256_of
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB, MANIFEST, SCHEMA
from presage.schemas.run.model_file import (
    ChangesManifest,
    changed_batch,
    changed_path,
    changed_schema,
    dropped_path,
    dropped_schema,
    open_changes,
    open_model,
    read_changed,
    read_dropped,
    rows_paths,
    write_changes_manifest,
    write_model,
)
from presage.schemas.run.records import RUN_FILE
from presage.schemas.run.run_manifest import local_run
from presage.schemas.storage.location import Location, local_copy, new_folder
from presage.trainer.checkpoint.format import RowPart
from presage.trainer.serve.export import (
    ExportedCheckpoint,
    dense_of,
    export_run,
    manifest_of,
    open_checkpoint,
    texts_of,
    write_rows,
)
from presage.trainer.stores.store import Records, RowsAndRecords, chunks_of, merge_newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Summary of published or applied changes."""

    output: str
    since_step: int
    train_step: int
    num_changed: Mapping[str, int]
    """Changed and new rows by table."""
    num_dropped: Mapping[str, int]
    """Rows by table that the newer checkpoint no longer has."""


def publish(
    run: Path | Location,
    output: Path | Location,
    since_step: int,
    train_step: int | None = None,
) -> Published:
    """Write the rows that changed between two checkpoints of a run, and the newer dense part.

    Without `train_step` the newer checkpoint is the newest.

    Raises:
        SchemaError: a checkpoint is missing or damaged, or the folder is not empty.
    """
    target = Location.parse(output)
    if target.exists():
        raise SchemaError(
            "output folder is not empty; name another",
            file=str(output),
        )
    files = (RUN_FILE, JOB, SCHEMA)
    with (
        local_run(run, files, (since_step, train_step)) as run_folder,
        new_folder(target) as folder,
    ):
        manifest = _publish(run_folder, folder, since_step, train_step)
    return _published(output, manifest)


def _publish(run: Path, output: Path, since_step: int, train_step: int | None) -> ChangesManifest:
    older, newer = open_checkpoint(run, since_step), open_checkpoint(run, train_step)
    if older.manifest.train_step > newer.manifest.train_step:
        raise SchemaError(
            f"--since is after the newer checkpoint: {since_step} > {newer.manifest.train_step}; "
            "give an older step",
            file=str(run),
        )
    for name in ("rows", "dropped"):
        (output / name).mkdir(parents=True)
    counts = {t: _write_changes(older, newer, t, output) for t in newer.inputs.features_of}
    for name, content in {**dense_of(newer), **texts_of(newer)}.items():
        (output / name).write_bytes(content)
    files = sorted(p for p in output.rglob("*") if p.is_file())
    manifest = ChangesManifest(
        since_step=older.manifest.train_step,
        since_sha256=sha256_of(older.checkpoint / MANIFEST),
        model=manifest_of(newer),
        files={p.relative_to(output).as_posix(): sha256_of(p) for p in files},
        num_changed={t: changed for t, (changed, _) in counts.items()},
        num_dropped={t: dropped for t, (_, dropped) in counts.items()},
    )
    write_changes_manifest(output, manifest)
    return manifest


def apply_changes(
    model: Path | Location, changes: Path | Location, output: Path | Location
) -> Published:
    """Write the newer model from an older one and published changes.

    Raises:
        SchemaError: a file is missing or damaged, or the changes are relative to another model.
    """
    target = Location.parse(output)
    if target.local is not None and target.local.is_dir():
        raise SchemaError(f"output is a folder: {output}; name a file in it")
    with local_copy(changes) as folder:
        manifest = _apply_changes(model, folder, target)
    return _published(output, manifest)


def _apply_changes(model: Path | Location, changes: Path, output: Location) -> ChangesManifest:
    older, manifest = open_model(model), open_changes(changes)
    lineage = older.manifest.lineage
    if lineage.checkpoint_sha256 != manifest.since_sha256:
        raise SchemaError(
            f"changes are relative to another model: to step {manifest.since_step}, checkpoint "
            f"{manifest.since_sha256[:12]}, and the model is of step {lineage.train_step}, "
            f"checkpoint {lineage.checkpoint_sha256[:12]}; use that one, or publish since this",
            file=str(model),
        )
    newer = manifest.model
    with tempfile.TemporaryDirectory(dir=output.local and output.local.parent) as folder:
        members: dict[str, Path | bytes] = {n: changes / n for n in manifest.files if "/" not in n}
        for table in newer.inputs.features_of:
            merged = _merge_rows(older.stored_rows(table), changes, table)
            paths = [Path(folder) / f"{table}.{n}.npy" for n in ("rows", "values")]
            write_rows(merged, paths, newer.dim, newer.inputs.dtype)
            members |= dict(zip(rows_paths(table), paths, strict=True))
        write_model(output, newer, members)
    return manifest


def _published(output: Path | Location, manifest: ChangesManifest) -> Published:
    return Published(
        output=str(output),
        since_step=manifest.since_step,
        train_step=manifest.model.lineage.train_step,
        num_changed=manifest.num_changed,
        num_dropped=manifest.num_dropped,
    )


def _write_changes(
    older: ExportedCheckpoint, newer: ExportedCheckpoint, table: str, output: Path
) -> tuple[int, int]:
    """Write the changed and the dropped rows of a table; return their numbers."""
    schema = changed_schema(newer.dim, newer.spec.dtype)
    paths = output / changed_path(table), output / dropped_path(table)
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}  # few values recur
    num_changed, num_dropped = 0, 0
    with (
        pq.ParquetWriter(paths[0], schema, **options) as changed_file,
        pq.ParquetWriter(paths[1], dropped_schema(), **options) as dropped_file,
    ):
        for rows, values, dropped in _changes(older, newer, table):
            num_changed, num_dropped = num_changed + len(rows), num_dropped + len(dropped)
            if len(rows):
                changed_file.write_batch(changed_batch(rows, values, schema))
            if len(dropped):
                dropped_file.write_batch(pa.record_batch([pa.array(dropped)], dropped_schema()))
    return num_changed, num_dropped


def _changes(
    older: ExportedCheckpoint, newer: ExportedCheckpoint, table: str
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.floating], NDArray[np.int64]]]:
    """Yield chunks of changed rows, their new values, and dropped rows, all ascending."""
    old_rows, new_rows = older.rows(table), newer.rows(table)
    parts = [s.parts(table) for s in (older, newer)]
    folders = [newer.checkpoint.parent / part for part in sorted(parts[0] ^ parts[1])]
    for rows, _ in merge_newest([_rows_only(RowPart(folder)) for folder in folders]):
        (in_old, old), (in_new, new) = old_rows.find(rows), new_rows.find(rows)
        old, new = old.values, new.values
        bits = f"u{new.itemsize}"
        is_same = in_old & np.all(old.view(bits) == new.view(bits), axis=1)
        is_changed = in_new & ~is_same
        yield rows[is_changed], new[is_changed], rows[in_old & ~in_new]


def _rows_only(part: RowPart) -> Iterator[RowsAndRecords]:
    """Yield the rows of a part, ascending, in chunks, with records of no width."""
    block = part.records.block
    for chunk in chunks_of(len(part.rows), block):
        yield np.array(part.rows[chunk]), Records(block[chunk, :0], 0)


def _merge_rows(
    stored: tuple[NDArray[np.int64], NDArray[np.floating]], changes: Path, table: str
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.floating]]]:
    """Yield the rows of the newer model, ascending, and their values."""
    dropped = read_dropped(changes / dropped_path(table))

    def old() -> Iterator[RowsAndRecords]:
        rows, values = stored
        for part in chunks_of(len(rows), values):
            keep = np.isin(rows[part], dropped, invert=True, assume_unique=True)
            yield rows[part][keep], _records(values[part][keep])

    def new() -> Iterator[RowsAndRecords]:
        for rows, values in read_changed(changes / changed_path(table)):
            yield rows, _records(values)

    for rows, records in merge_newest([new(), old()]):
        yield rows, records.values


def _records(values: NDArray[np.floating]) -> Records:
    return Records(values, values.shape[1])


COMMANDS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "export": lambda a: export_run(a.run, a.output, a.checkpoint),
    "publish": lambda a: publish(a.run, a.output, a.since, a.checkpoint),
    "apply": lambda a: apply_changes(a.model, a.changes, a.output),
}
"""By command: from its arguments to the summary that is printed."""
