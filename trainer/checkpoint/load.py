"""Save and load the state of training, and check that a checkpoint belongs to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array, find_sorted
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.dense_state import load_state
from presage.trainer.checkpoint.files import (
    DENSE_FILE,
    CheckpointManifest,
    complete_checkpoints,
    read_checkpoint_manifest,
    verify_files,
)
from presage.trainer.checkpoint.fingerprint import check_model, check_position
from presage.trainer.checkpoint.format import RowPart, from_bytes, read_parts
from presage.trainer.checkpoint.read_rows import fill_store, verified_chunks
from presage.trainer.components import Components
from presage.trainer.embedding.cache import CachedRows, cached_of
from presage.trainer.stores.local import LocalStore
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    Store,
    TableLayout,
    WriteBack,
    empty_records,
    initial_records,
    merge_newest,
)

# ---- The rows of a checkpoint ----


class CheckpointTable:
    """The rows of one table of a checkpoint."""

    def __init__(self, layout: TableLayout, folders: Sequence[Path]) -> None:
        """Map the table's files.

        Args:
            layout: of the run.
            folders: parts of the table in a complete checkpoint, the newest first.
        """
        self.layout = layout
        self._folders = folders
        self._parts = [RowPart(folder, random=True) for folder in folders]

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row that was never trained has its initial values."""
        return self.find(rows)[1]

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], Records]:
        """Return which rows were ever trained, and copies of all; see `fetch`."""
        records, is_trained = empty_records(self.layout, len(rows)), np.zeros(len(rows), bool)
        for part in self._parts:
            missing = np.flatnonzero(~is_trained)
            is_in, positions = find_sorted(part.rows, rows[missing])
            records.put(missing[is_in], part.records.take(positions[is_in]))
            is_trained[missing[is_in]] = True
        records.put(~is_trained, initial_records(self.layout, rows[~is_trained]))
        return is_trained, records

    def contents(self) -> Iterator[RowsAndRecords]:
        """Yield all rows, ascending, and their records, in chunks."""
        return read_parts(self._folders)


class CheckpointRows:
    """The rows of all tables of a checkpoint, a `RowReader`."""

    def __init__(self, tables: Mapping[str, CheckpointTable]) -> None:
        self.tables = tables

    @property
    def layouts(self) -> dict[str, TableLayout]:
        """Layouts of the rows, by table."""
        return {name: table.layout for name, table in self.tables.items()}

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of rows; `train_step` is ignored."""
        return {table: self.tables[table].fetch(ids) for table, ids in rows.items()}

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table, ascending, and their records, in chunks."""
        return self.tables[table].contents()


def table_rows(
    checkpoint: Path, manifest: CheckpointManifest, layout: TableLayout
) -> CheckpointTable:
    """Return the rows of one table of a checkpoint."""
    parts = manifest.parts.get(layout.table, ())
    return CheckpointTable(layout, [checkpoint.parent / part for part in parts])


def open_rows(checkpoint: Path, layouts: Mapping[str, TableLayout]) -> CheckpointRows:
    """Return the rows of all tables of a checkpoint."""
    manifest = read_checkpoint_manifest(checkpoint)
    return CheckpointRows(
        {table: table_rows(checkpoint, manifest, layout) for table, layout in layouts.items()}
    )


# ---- Save and load checkpoints ----

_NO_ROWS = np.empty(0, np.int64)


NextUseOf = Callable[[str, int, NDArray[np.int64]], NDArray[np.int64]]
"""(table, train_step, rows) to the first step from that one on that uses each row."""


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint, None if there is none."""
    complete = complete_checkpoints(run / CHECKPOINTS)
    return complete[-1] if complete else None


def require_checkpoint(run: Path, train_step: int | None = None) -> Path:
    """Return the complete checkpoint of a step, or the newest one.

    Raises:
        SchemaError: the run does not have it.
    """
    by_step = {int(each.name): each for each in complete_checkpoints(run / CHECKPOINTS)}
    if not by_step:
        raise SchemaError("run has no checkpoint; train it to its end", file=str(run))
    chosen = max(by_step) if train_step is None else train_step
    if chosen not in by_step:
        raise SchemaError(
            f"run has no checkpoint of step {chosen}: it has {list(by_step)}; use one of these",
            file=str(run),
        )
    return by_step[chosen]


def step_of(checkpoint: Path | None) -> int:
    """Return the first step to train after a checkpoint, 0 without one."""
    return 0 if checkpoint is None else int(checkpoint.name)


def verify_checkpoint(
    checkpoint: Path, fingerprint: Mapping[str, Any] | None = None, *, with_rows: bool = True
) -> CheckpointManifest:
    """Verify every byte of a checkpoint and return its manifest.

    Args:
        checkpoint: folder of the checkpoint.
        fingerprint: of the run that it must belong to; None for any run.
        with_rows: also verify rows, which `load_rows` does as it reads them.

    Raises:
        SchemaError: a file is missing or has changed, or it does not belong to the run.
    """
    manifest = read_checkpoint_manifest(checkpoint)
    if fingerprint is not None:
        file = str(checkpoint / MANIFEST)
        check_model(manifest, fingerprint, file)
        check_position(manifest, fingerprint, file)
    parts = {part for parts in manifest.parts.values() for part in parts}
    names = [n for n in manifest.files if with_rows or n.rpartition("/")[0] not in parts]
    verify_files(checkpoint, {name: manifest.files[name] for name in names})
    return manifest


def load_checkpoint(
    checkpoint: Path,
    manifest: CheckpointManifest,
    components: Components,
    *,
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
    with_optimizer: bool = True,
    with_rows: bool = True,
) -> int:
    """Load a checkpoint into new components.

    Args:
        checkpoint: folder of the checkpoint.
        manifest: of the checkpoint, from `verify_checkpoint`.
        components: of the run.
        next_use: next use of rows, for stores that are ordered by it.
        cached: rows that the cache holds, which stores that are ordered by next use do not get.
        with_optimizer: load the state of the dense optimizer.
        with_rows: load the rows into the store.

    Returns:
        The next step to train.

    Raises:
        SchemaError: the state is of another model, or a file of rows has changed.
    """
    optimizer = components.optimizer if with_optimizer else None
    dense = read_dense(checkpoint)
    load_state(dense, components.model, optimizer, file=str(checkpoint / DENSE_FILE))
    if with_rows:
        load_rows(checkpoint, manifest, components.store, next_use, cached)
    return manifest.train_step


def load_rows(
    checkpoint: Path,
    manifest: CheckpointManifest,
    store: Store,
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
) -> None:
    """Write the rows of a checkpoint to an empty store; arguments as in `load_checkpoint`.

    Raises:
        SchemaError: a file of rows is missing or has changed; the store must not be used then.
    """
    if isinstance(store, LocalStore):
        _load_local(checkpoint, manifest, store)
        return
    cached_rows = {table: state.rows[state.is_cached] for table, state in (cached or {}).items()}
    for table, layout in store.layouts.items():
        parts = manifest.parts.get(table, ())
        chunks = [verified_chunks(checkpoint, manifest, part, layout) for part in parts]
        for rows, records in merge_newest(chunks):
            steps = None
            if next_use is not None:
                chosen = np.isin(rows, cached_rows.get(table, _NO_ROWS), invert=True)
                rows, records = rows[chosen], records.take(chosen)
                steps = next_use(table, manifest.train_step, rows)
            store.write(manifest.train_step - 1, {table: WriteBack(rows, records, steps)})


def _load_local(checkpoint: Path, manifest: CheckpointManifest, store: LocalStore) -> None:
    """Read the oldest parts into the arrays of the store, and overwrite rows of newer ones."""
    fill_store(checkpoint, manifest, store)
    for table, layout in store.layouts.items():
        for part in reversed(manifest.parts.get(table, ())[:-1]):
            for rows, records in verified_chunks(checkpoint, manifest, part, layout):
                store.tables[table].write(rows, records)


def read_dense(checkpoint: Path) -> dict[str, Array]:
    """Return the dense state of a checkpoint, by name."""
    path = checkpoint / DENSE_FILE
    return from_bytes(path.read_bytes(), file=str(path))


def read_cached(path: Path, tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the state of the plan of each table; empty if the run had no planned cache.

    Raises:
        SchemaError: the file has other content.
    """
    if not path.is_file():
        return {}
    arrays = from_bytes(path.read_bytes(), file=str(path))
    try:
        return cached_of(arrays, tables)
    except (KeyError, TypeError) as error:
        raise SchemaError(
            "file with the cache plan's state has other content; remove this checkpoint to use "
            "the one before it",
            file=str(path),
        ) from error
