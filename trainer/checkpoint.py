"""Checkpoints: dense parameters, both optimizers, and the rows that were ever trained.

Here whole tables are written while training waits, at the end of a run that saves nowhere else, and
checkpoints of any kind are read; `flash/` writes them beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from schemas.events import CHECKPOINTS
from schemas.layout import MANIFEST
from trainer.arrays import from_bytes
from trainer.flash.fits import check_fits
from trainer.flash.manifest import (
    DENSE,
    PLAN,
    CheckpointManifest,
    complete,
    folder_of,
    read_checkpoint_manifest,
    verify_files,
)
from trainer.flash.persist import NewCheckpoint
from trainer.keyframes import CachedRows, arrays_of_cached
from trainer.state import load_state, state_of
from trainer.stores.checkpoint_store import CheckpointStore
from trainer.stores.store import Records, Store, WriteBack
from trainer.stores.together import write_rows

_NO_ROWS = np.empty(0, np.int64)
NextUseOf = Callable[[str, int, NDArray[np.int64]], NDArray[np.int64]]
"""(table, train_step, rows) to the first step from that one on that uses each row."""


def save_checkpoint(
    run: Path,
    train_step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stores: Mapping[str, Store],
    *,
    keep: int,
    cached: Mapping[str, CachedRows] | None = None,
    made_of: Mapping[str, Any] | None = None,
) -> Path:
    """Save the state before a step, all rows of it; flush the row source first.

    Where another process has saved it, or a later one, that stands, and is returned.

    Args:
        run: run folder.
        train_step: the next step to train.
        model: dense parameters.
        optimizer: of the dense parameters.
        stores: rows by table.
        keep: newest checkpoints that remain.
        cached: where the plan stands, of a planned cache.
        made_of: what the run is, from `flash.fits`.

    Raises:
        SchemaError: the disk is full; nothing is left of this checkpoint.
    """
    with NewCheckpoint(run / CHECKPOINTS, train_step) as writing:
        writing.arrays(DENSE, state_of(model, optimizer))
        if cached:
            writing.arrays(PLAN, arrays_of_cached(cached))
        for table, store in stores.items():
            writing.rows(table, store.layout, store.contents())
        parts = {table: (f"{folder_of(train_step)}/{table}",) for table in stores}
        writing.finish(made_of or {}, parts, {}, keep=keep)
    return writing.folder


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint, None when there is none."""
    found = complete(run / CHECKPOINTS)
    return found[-1] if found else None


def step_of(checkpoint: Path | None) -> int:
    """Return the step that training goes on at: 0 without a checkpoint."""
    return 0 if checkpoint is None else int(checkpoint.name)


def load_checkpoint(
    checkpoint: Path,
    manifest: CheckpointManifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stores: Mapping[str, Store],
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
) -> int:
    """Load a checkpoint into fresh parts.

    Args:
        checkpoint: folder of the checkpoint.
        manifest: of it, from `verified`.
        model: dense parameters.
        optimizer: of the dense parameters, None to leave it out.
        stores: rows by table.
        next_use: when rows are used next, for stores that are ordered by it.
        cached: rows that the cache holds; stores that are ordered by next use do without them.

    Returns:
        The next step to train.

    Raises:
        SchemaError: the state is of another model.
    """
    load_state(dense_of(checkpoint), model, optimizer, file=str(checkpoint / DENSE))
    load_rows(checkpoint, manifest, stores, next_use, cached)
    return manifest.train_step


def load_rows(
    checkpoint: Path,
    manifest: CheckpointManifest,
    stores: Mapping[str, Store],
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
) -> None:
    """Write the rows of a checkpoint into stores; arguments are those of `load_checkpoint`."""
    train_step = manifest.train_step
    held = {table: rows.rows[rows.held] for table, rows in (cached or {}).items()}
    for table, store in stores.items():
        apart_from = held.get(table, _NO_ROWS) if next_use is not None else _NO_ROWS
        for all_rows, all_records in store_of(checkpoint, manifest, store).contents():
            rows, records, steps = all_rows, all_records, None
            if next_use is not None:
                apart = np.isin(rows, apart_from, invert=True)
                rows = rows[apart]
                records = Records(records.values[apart], records.state[apart])
                steps = next_use(table, train_step, rows)
            write_rows({table: store}, train_step - 1, {table: WriteBack(rows, records, steps)})


def verified(checkpoint: Path, wanted: Mapping[str, Any] | None) -> CheckpointManifest:
    """Return the manifest of a checkpoint of which every byte is as it was written.

    Args:
        checkpoint: folder of the checkpoint.
        wanted: what the run is, from `flash.fits`; None to take any.

    Raises:
        SchemaError: a file is missing or has changed, or it is the checkpoint of something else.
    """
    manifest = read_checkpoint_manifest(checkpoint)
    if wanted is not None:
        file = str(checkpoint / MANIFEST)
        check_fits(manifest.made_of, wanted, manifest.train_step, file)
    verify_files(checkpoint, manifest)
    return manifest


def dense_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return the dense state of a checkpoint, by name."""
    path = checkpoint / DENSE
    return from_bytes(path.read_bytes(), file=str(path))


def store_of(checkpoint: Path, manifest: CheckpointManifest, store: Store) -> CheckpointStore:
    """Return a store of the rows of a checkpoint, of the layout of another."""
    parts = manifest.parts.get(store.layout.table, ())
    return CheckpointStore(store.layout, [checkpoint.parent / part for part in parts])


def stores_of(checkpoint: Path, stores: Mapping[str, Store]) -> dict[str, Store]:
    """Return stores of all rows of a checkpoint, of the layouts of others."""
    manifest = read_checkpoint_manifest(checkpoint)
    return {table: store_of(checkpoint, manifest, store) for table, store in stores.items()}
