"""Checkpoints: dense parameters, both optimizers, and the rows that were ever trained.

A checkpoint is a folder named by its step, written under another name and
renamed when its manifest, which holds the hash of every file, is complete.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from schemas.checked import sha256_of
from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from schemas.manifest import canonical_json, replace_bytes
from trainer.keyframes import CachedRows, save_cached
from trainer.npy import NpyFile
from trainer.stores.store import ROWS_AT_ONCE, Records, Store, WriteBack
from trainer.stores.together import write_rows

CHECKPOINTS = "checkpoints"
DENSE = "dense.pt"
ROW_FILES = "rows", "values", "state"
"""Arrays of a table, row by row."""
_PARTIAL = ".partial"
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
) -> Path:
    """Save the state before a step; flush the row source first.

    Args:
        run: run folder.
        train_step: the next step to train.
        model: dense parameters.
        optimizer: of the dense parameters.
        stores: rows by table.
        keep: newest checkpoints that remain.
        cached: where the plan stands, of a planned cache.

    Raises:
        SchemaError: the disk is full; nothing is left of this checkpoint.
    """
    folder = run / CHECKPOINTS / f"{train_step:08d}"
    partial = folder.with_name(folder.name + _PARTIAL)
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    dense = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        partial.mkdir(parents=True)
        _save(partial, train_step, dense, stores, cached)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SchemaError(
            f"disk must have room for a checkpoint, got {error.strerror}; free some and train on "
            "with --resume, the checkpoints before are whole",
            file=str(folder),
        ) from error
    partial.rename(folder)
    for old in _complete(run)[: -max(1, keep)]:
        shutil.rmtree(old)
    return folder


def _save(
    folder: Path,
    train_step: int,
    dense: Mapping[str, object],
    stores: Mapping[str, Store],
    cached: Mapping[str, CachedRows] | None,
) -> None:
    """Write all files of a checkpoint, its manifest last."""
    whole = io.BytesIO()  # torch's own writer does not say that the disk is full
    torch.save(dense, whole)
    (folder / DENSE).write_bytes(whole.getbuffer())
    for table, store in stores.items():
        _save_table(folder / table, store)
        if cached:
            save_cached(folder / table, cached[table])
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    hashes = {path: sha256_of(folder / path) for path in files}
    body = canonical_json({"train_step": train_step, "files": hashes})
    replace_bytes(folder / MANIFEST, body.encode())


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint, None when there is none."""
    found = _complete(run)
    return found[-1] if found else None


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stores: Mapping[str, Store],
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
) -> int:
    """Load a checkpoint into fresh parts.

    Args:
        checkpoint: folder of the checkpoint.
        model: dense parameters.
        optimizer: of the dense parameters, None to leave it out.
        stores: rows by table.
        next_use: when rows are used next, for stores that are ordered by it.
        cached: rows that the cache holds; stores that are ordered by next use do without them.

    Returns:
        The next step to train.

    Raises:
        SchemaError: a file is missing or has changed.
    """
    train_step, hashes = _read_manifest(checkpoint / MANIFEST)
    for path, wanted in hashes.items():
        file = checkpoint / path
        if not file.is_file() or sha256_of(file) != wanted:
            raise SchemaError(
                f"file must have sha256 {wanted[:12]}, got other content or none; "
                "remove this checkpoint to use the one before it",
                file=str(file),
            )
    dense = torch.load(checkpoint / DENSE, map_location="cpu", weights_only=True)
    model.load_state_dict(dense["model"])
    if optimizer is not None:
        optimizer.load_state_dict(dense["optimizer"])
    held = {table: rows.rows[rows.held] for table, rows in (cached or {}).items()}
    for table, store in stores.items():
        rows, values, state = (
            np.load(checkpoint / table / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ROW_FILES
        )
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            found = np.array(rows[part])
            records = Records(np.array(values[part]), np.array(state[part]))
            steps = None
            if next_use is not None:
                apart = np.isin(found, held.get(table, _NO_ROWS), invert=True)
                found = found[apart]
                records = Records(records.values[apart], records.state[apart])
                steps = next_use(table, train_step, found)
            write_rows({table: store}, train_step - 1, {table: WriteBack(found, records, steps)})
    return train_step


def _save_table(folder: Path, store: Store) -> None:
    """Write the rows of a table as they come, some at a time."""
    folder.mkdir()
    layout = store.layout
    with (
        NpyFile(folder / "rows.npy", (), np.int64) as rows,
        NpyFile(folder / "values.npy", (layout.dim,), layout.dtype) as values,
        NpyFile(folder / "state.npy", (layout.state_width,), layout.dtype) as state,
    ):
        for some_rows, records in store.contents():
            rows.append(some_rows)
            values.append(records.values)
            state.append(records.state)


def _read_manifest(path: Path) -> tuple[int, dict[str, str]]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return int(body["train_step"]), dict(body["files"])
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(
            "manifest must be JSON with train_step and files, got other content; "
            "remove this checkpoint to use the one before it",
            file=str(path),
        ) from error


def _complete(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.isdigit() and (p / MANIFEST).is_file())
