"""Write a checkpoint in the foreground."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.dense_state import state_of
from presage.trainer.checkpoint.files import DENSE_FILE, PLAN_FILE, NewCheckpoint
from presage.trainer.components import Components
from presage.trainer.embedding.cache import CachedRows, arrays_of_cached
from presage.trainer.stores.store import Store


def save_checkpoint(
    run: Path,
    train_step: int,
    components: Components,
    *,
    keep: int,
    cached: Mapping[str, CachedRows] | None = None,
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Write all state before a step; the row source must be flushed.

    If another process has saved this step or a later one, that checkpoint is returned.

    Raises:
        SchemaError: the disk is full; this checkpoint is removed.
    """

    def write_dense(checkpoint: NewCheckpoint) -> None:
        state = state_of(components.model, components.optimizer)
        checkpoint.write_arrays(DENSE_FILE, state)
        if cached:
            checkpoint.write_arrays(PLAN_FILE, arrays_of_cached(cached))

    return write_checkpoint(
        run, train_step, components.store, write_dense, keep=keep, fingerprint=fingerprint
    )


def write_checkpoint(
    run: Path,
    train_step: int,
    store: Store,
    write_dense: Callable[[NewCheckpoint], None],
    *,
    keep: int,
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Write all rows of a store and other files as a checkpoint; see `save_checkpoint`."""
    with NewCheckpoint(run / CHECKPOINTS, train_step) as checkpoint:
        write_dense(checkpoint)
        parts = {
            table: (checkpoint.write_rows(table, layout, store.contents(table)),)
            for table, layout in store.layouts.items()
        }
        checkpoint.finish(fingerprint or {}, parts, {}, keep=keep)
    return checkpoint.folder
