"""The folder of a run of slots: what other commands read of it, and its warm start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn

from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.errors import SchemaError
from presage.schemas.rows import TORCHREC_SUFFIX
from presage.schemas.run.records import RUN_FILE
from presage.trainer.checkpoint.files import DISTRIBUTED, STATE_FILE, NewCheckpoint
from presage.trainer.checkpoint.fingerprint import check_collections
from presage.trainer.checkpoint.load import newest_checkpoint
from presage.trainer.embedding.ranks import gather
from presage.trainer.run.folder import (
    RunOrigin,
    check_schema,
    has_run,
    read_identity,
    run_lock,
    write_slots_run,
)
from presage.trainer.run.warm_start import (
    FirstState,
    WarmStart,
    open_warm_start,
    write_initial_checkpoint,
)
from presage.trainer.slots.shards import KeyLayout
from presage.trainer.slots.slot_checkpoints import agree, dense_folder, fingerprint_of, own_rank

_OPTIMIZERS = {
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_SGD: "sgd",
}
"""FBGEMM's optimizers whose state of a row is that of one of ours, by its name in a job."""


def sparse_optimizer_of(model: nn.Module) -> str:
    """Return the optimizer of a sharded model's rows, as a job or else FBGEMM names it.

    All ranks call it.
    """
    own = {
        _OPTIMIZERS.get(kind, kind.name)
        for module in model.modules()
        for lookup in getattr(module, "_lookups", ())
        for kernel in lookup.modules()
        if isinstance(kind := getattr(kernel, "optimizer", None), EmbOptimType)
    }
    return ", ".join(sorted(set[str]().union(*gather(own))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRun:
    """A run of all ranks.

    Attributes:
        folder: of the run.
        dataset: whose segments it trains.
        layout: of its rows.
        train: what is known of its training, beside the model.
        loader: state of its loader before the first step.
        warm_start: folder of the run whose newest checkpoint it starts from, None for none.
    """

    folder: Path
    dataset: OpenDataset
    layout: KeyLayout
    train: Mapping[str, Any]
    loader: Mapping[str, Any]
    warm_start: Path | None

    def open(self, opened: ExitStack) -> None:
        """Start the run or continue it, and lock its folder; all ranks call it.

        Raises:
            SchemaError: another process has the lock, the folder or `warm_start` has another kind
                of run, or `warm_start` has other tables.
        """

        def open_first() -> None:
            opened.enter_context(run_lock(self.folder))
            origin = self._start()
            write_slots_run(self.folder, self.dataset, self.train, origin)

        agree(lambda: open_first() if own_rank() == 0 else None, "cannot open its run")

    def _start(self) -> RunOrigin | None:
        """Return the warm start of the run, after writing its state if it begins now."""
        identity = read_identity(self.folder) if has_run(self.folder) else None
        origin = None if identity is None else identity.origin
        if identity is not None and not identity.is_of_slots:
            raise self._refused("is of a job")
        if origin is not None or self.warm_start is None:
            return origin
        if identity is not None and newest_checkpoint(self.folder) is not None:
            raise self._refused("has no warm start")
        with open_warm_start(self.warm_start) as start:
            name = Path(os.path.relpath(self.warm_start, self.folder)).as_posix()
            first = self._first_state(start)
            return write_initial_checkpoint(start, self.folder, self.dataset, first, None, name)

    def _refused(self, problem: str) -> SchemaError:
        return SchemaError(
            f"run to continue {problem}; use another folder", file=str(self.folder / RUN_FILE)
        )

    def _first_state(self, start: WarmStart) -> FirstState:
        file = start.run / RUN_FILE
        if not start.identity.is_of_slots:
            raise SchemaError(
                "expected a run of PlannedSlots to start from, got one of a job; name another",
                file=str(file),
            )
        check_schema(file, start.identity, self.dataset)
        fingerprint, dense = fingerprint_of(self.layout), dense_folder(start.checkpoint)
        check_collections(start.manifest, fingerprint, start.checkpoint)

        def write_dense(checkpoint: NewCheckpoint) -> None:
            shutil.copytree(dense, checkpoint.partial / DISTRIBUTED)
            with checkpoint.create(STATE_FILE) as state:
                torch.save({"loader": dict(self.loader), "state": {}}, state)

        names = {name.removesuffix(TORCHREC_SUFFIX): name for name in self.layout.tables}
        return FirstState(
            layouts={table: self.layout.of_table(name) for table, name in names.items()},
            sparse_optimizer=self.train["sparse_optimizer"]["name"],
            fingerprint=fingerprint,
            write_dense=write_dense,
        )
