"""Checkpoints of tables of slots: rows by row id, each rank its own, and one manifest.

Beside the rows are the dense state, by `torch.distributed.checkpoint`, and the position of the
loader. None of it depends on the number of ranks, on slots, or on the plan.
"""

# torch documents `load` and `save` of distributed checkpoints, but does not export them for types.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.files import (
    DISTRIBUTED,
    STATE_FILE,
    CheckpointManifest,
    NewCheckpoint,
)
from presage.trainer.checkpoint.fingerprint import check_collections
from presage.trainer.checkpoint.format import RowPart, record_type, write_part
from presage.trainer.checkpoint.load import CheckpointTable, verify_checkpoint
from presage.trainer.checkpoint.read_rows import verified_chunks
from presage.trainer.embedding.ranks import gather, has_ranks
from presage.trainer.slots.shards import ALL, KeyLayout, Shard, table_of
from presage.trainer.slots.slot_plan import PlanHeader
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    Store,
    WriteBack,
    merge_newest,
    select,
)

_OTHER = "other-rows"
"""Folder of a rank with the rows of a checkpoint that the run does not use."""


class DenseState(Stateful):
    """What `torch.distributed.checkpoint` saves of a model: all but its tables of slots."""

    def __init__(self, model: nn.Module, optimizer: Any, tables: Sequence[str]) -> None:
        self._model, self._optimizer, self._tables = model, optimizer, tables

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model and optimizer, by parameter."""
        return {
            "model": self._without_slots(self._model.state_dict()),
            "optimizer": self._without_slots(self._optimizer.state_dict()["state"]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._model.load_state_dict({**self._model.state_dict(), **state_dict["model"]})
        own = self._optimizer.state_dict()
        state = {**own["state"], **state_dict["optimizer"]}
        self._optimizer.load_state_dict({**own, "state": state})

    def _without_slots(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: each for name, each in state.items() if table_of(name) not in self._tables}


def initialise_dense(optimizer: Any) -> None:
    """Create the state of optimizers that have none before their first step, such as Adam's."""
    for _, each in getattr(optimizer, "optimizers", [("", optimizer)]):
        if any(parameter not in each.state for parameter in each.params.values()):
            each.init_state()
            each.zero_grad()


class Rows:
    """The rows of a rank for checkpoints: those of its store, and others that the run does not use.

    Args:
        store: of the rank, all of whose rows are written.
        layout: of its rows.
        header: of the plan.
        shards: of the rank.
        directory: of the rank, for rows of a checkpoint that the run does not use.
    """

    def __init__(
        self,
        store: Store,
        layout: KeyLayout,
        header: PlanHeader,
        shards: Sequence[Shard],
        directory: Path,
    ) -> None:
        self._store, self._layout, self._directory = store, layout, directory
        self._parts = {
            layout.tables[shard.table]: (header.tables[shard.table], shard.part) for shard in shards
        }
        self._other: dict[str, Path] = {}

    @property
    def tables(self) -> list[str]:
        """Tables of which this rank has rows."""
        return list(self._parts)

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield the rows of a table that were trained, ascending, and their records."""
        own = self._layout.rows_of_table(table, self._store.contents(ALL))
        other = [RowPart(self._other[table]).chunks()] if table in self._other else []
        return merge_newest([own, *other])

    def read(self, table: str, rows: NDArray[np.int64]) -> Records:
        """Return copies of ascending rows of this rank, in a store that can be read at any step."""
        layout = self._layout.of_table(table)
        folders = [self._other[table]] if table in self._other else []
        records = CheckpointTable(layout, folders).fetch(rows)  # or initial values
        is_used, keys = self._layout.keys_of(table, rows)
        records.put(is_used, self._store.fetch(0, {ALL: keys})[ALL])
        return records

    def load(
        self,
        checkpoint: Path,
        manifest: CheckpointManifest,
        next_use: Callable[[str, int, Any], Any] | None,
    ) -> None:
        """Write the rows of a checkpoint that belong to this rank to the empty store.

        Raises:
            SchemaError: a file is missing or has changed, or the tables have another width.
        """
        for table in self._parts:
            layout = self._layout.of_table(table)
            parts = [
                verified_chunks(checkpoint, manifest, name, layout)
                for name in manifest.parts.get(table, ())
            ]
            folder = self._directory / _OTHER / table
            count = write_part(
                folder,
                record_type(layout),
                self._store_used(table, merge_newest(parts), manifest.train_step, next_use),
            )
            if count:
                self._other[table] = folder

    def _store_used(
        self,
        table: str,
        chunks: Iterator[RowsAndRecords],
        train_step: int,
        next_use: Callable[[str, int, Any], Any] | None,
    ) -> Iterator[RowsAndRecords]:
        """Store the rows of a part that the run uses, and yield its others."""
        planned, part = self._parts[table]
        for chunk in chunks:
            rows, records = select(chunk, planned.part_of(chunk[0]) == part)
            is_used, keys = self._layout.keys_of(table, rows)
            if len(keys):
                steps = (
                    None if next_use is None else next_use(planned.name, train_step, rows[is_used])
                )
                back = WriteBack(keys, records.take(is_used), steps)
                self._store.write(train_step - 1, {ALL: back})
            if not is_used.all():
                yield select((rows, records), ~is_used)


def save(
    run: Path,
    train_step: int,
    rows: Rows,
    layout: KeyLayout,
    dense: DenseState,
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write a checkpoint of all ranks, which call it at the same step; return its folder.

    Raises:
        SchemaError: the disk of a rank is full; the checkpoint is removed.
    """
    checkpoint, is_first = NewCheckpoint(run / CHECKPOINTS, train_step), own_rank() == 0
    with checkpoint if is_first else nullcontext():
        partial, *_ = agree(lambda: str(checkpoint.partial))
        own = NewCheckpoint(run / CHECKPOINTS, train_step, Path(partial))
        parts = _write(own, rows, layout, dense, state)
        of_ranks = agree(lambda: own.sync(_own_files(own.partial)))
        files = {name: checksum for of_rank in of_ranks for name, checksum in of_rank.items()}
        fingerprint = fingerprint_of(layout)
        agree(lambda: is_first and own.finish(fingerprint, parts, {}, keep=keep, files=files))
    return checkpoint.folder


def _write(
    checkpoint: NewCheckpoint,
    rows: Rows,
    layout: KeyLayout,
    dense: DenseState,
    state: Mapping[str, Any],
) -> dict[str, tuple[str, ...]]:
    """Write the files of one rank; return the parts of all tables of all ranks."""
    rank = own_rank()

    def write_own() -> dict[str, str]:
        if rank == 0:
            with checkpoint.create(STATE_FILE) as file:
                torch.save(dict(state), file)
        return {
            table: checkpoint.write_rows(
                f"{table}.{rank}", layout.of_table(table), rows.contents(table)
            )
            for table in rows.tables
        }

    of_ranks = agree(write_own)
    dcp.save({"dense": dense}, checkpoint_id=checkpoint.partial / DISTRIBUTED)
    parts: dict[str, tuple[str, ...]] = {}
    for own in of_ranks:
        for table, part in own.items():
            parts[table] = (*parts.get(table, ()), part)
    return parts


def _own_files(partial: Path) -> list[Path]:
    """Return the files of a checkpoint that this rank has written."""
    own = [*partial.glob(f"*.{own_rank()}/*.npy"), *partial.glob(f"{DISTRIBUTED}/__{own_rank()}_*")]
    if own_rank() == 0:
        own += [partial / STATE_FILE, partial / DISTRIBUTED / ".metadata"]
    return own


def load(
    checkpoint: Path,
    rows: Rows,
    layout: KeyLayout,
    dense: DenseState,
    next_use: Callable[[str, int, Any], Any] | None,
) -> dict[str, Any]:
    """Load a checkpoint of any number of ranks; return the state that was saved with it.

    Raises:
        SchemaError: a file is missing or has changed; the message names the checkpoint to use. Or
            tables, model or optimizers are others.
    """
    manifest = verify_checkpoint(checkpoint, with_rows=False)
    check_collections(manifest, fingerprint_of(layout), checkpoint)
    saved, own = _saved_model(checkpoint), dense.state_dict()["model"]
    problem = next((f"{name} is not in the model" for name in saved if name not in own), None)
    if problem is None:
        rows.load(checkpoint, manifest, next_use)
        try:
            dcp.load({"dense": dense}, checkpoint_id=checkpoint / DISTRIBUTED)
        except CheckpointException as error:
            [(first, _), *_] = error.failures.values()
            if not isinstance(first, RuntimeError | ValueError):
                raise
            problem = str(first).partition("\n")[0]
    if problem is not None:
        raise SchemaError(
            f"dense state of the checkpoint is of another model or optimizer: {problem}; use "
            "those that were trained",
            file=str(checkpoint / DISTRIBUTED),
        )
    return torch.load(checkpoint / STATE_FILE, weights_only=True)


def dense_folder(checkpoint: Path) -> Path:
    """Return the folder with the dense state of a checkpoint.

    Raises:
        SchemaError: the checkpoint is not of `PlannedSlots`.
    """
    folder = checkpoint / DISTRIBUTED
    if not folder.is_dir():
        raise SchemaError(
            f"checkpoint has no {DISTRIBUTED}/, as a loop of presage.open_rows saved it; use one "
            "of PlannedSlots",
            file=str(checkpoint),
        )
    return folder


_MODEL = "dense.model."


def _saved_model(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a checkpoint's model, by name."""
    saved = dcp.FileSystemReader(dense_folder(checkpoint)).read_metadata().state_dict_metadata
    return {
        name.removeprefix(_MODEL): entry
        for name, entry in saved.items()
        if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    }


def read_model(checkpoint: Path) -> dict[str, Array]:
    """Return parameters and buffers of a checkpoint's model, by name, without tables of slots.

    Raises:
        SchemaError: the checkpoint is not of `PlannedSlots`, or NumPy lacks the type of a tensor.
    """
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(_saved_model(checkpoint).items())
    }
    state = {f"{_MODEL}{name}": tensor for name, tensor in tensors.items()}
    dcp.load(state, checkpoint_id=dense_folder(checkpoint), no_dist=True)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise SchemaError(
                f"parameter {name!r} is bfloat16, which NumPy lacks; train it as float32",
                file=str(checkpoint),
            )
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def fingerprint_of(layout: KeyLayout) -> dict[str, Any]:
    """Return what a checkpoint must have in common with a run: that of `EmbeddingRows`."""
    return {"tables": {table: asdict(layout.of_table(table)) for table in layout.tables}}


def agree(call: Callable[[], Any], problem: str = "cannot write its rows") -> list[Any]:
    """Call a function in each rank, and return the results of all, by rank.

    Raises:
        SchemaError: it raised in some rank.
    """
    result, error = None, ""
    try:
        result = call()
    except (OSError, SchemaError) as raised:
        error = str(raised) or type(raised).__name__
    results = gather((result, error))
    for rank, (_, message) in enumerate(results):
        if message:
            raise SchemaError(f"rank {rank} {problem}: {message}")
    return [each for each, _ in results]


def own_rank() -> int:
    """Return the rank of this process, 0 where there are no ranks."""
    return dist.get_rank() if has_ranks() else 0
