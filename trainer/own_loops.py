"""Rows of training loops that Presage does not own: where they are, step by step, and checkpoints.

Collections with `source=EmbeddingRows(...)` keep their rows in any store, behind the planned cache.
The loop begins each step by `advance`, so nothing depends on which tensors a model passes to its
collections: rows are selected by their ids among those of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from presage.schemas.config.train import CacheConfig, StoresConfig, TrainConfig
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.errors import SchemaError
from presage.schemas.storage.locks import directory_lock
from presage.trainer.checkpoint.files import STATE_FILE, NewCheckpoint
from presage.trainer.checkpoint.fingerprint import check_collections
from presage.trainer.checkpoint.load import (
    CheckpointRows,
    CheckpointTable,
    NextUseOf,
    load_rows,
    newest_checkpoint,
    open_rows,
    step_of,
    verify_checkpoint,
)
from presage.trainer.checkpoint.save import write_checkpoint
from presage.trainer.components import plan_of_rows
from presage.trainer.embedding.cache import PlannedCache, RowsOfTables
from presage.trainer.embedding.ranks import world_size
from presage.trainer.stores.factory import FILE_STORES, open_store
from presage.trainer.stores.future_log import FutureLog, NextUseLookup
from presage.trainer.stores.local import LocalStore
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    Store,
    TableLayout,
    WriteBack,
    empty_records,
)


class StepBatch(Protocol):
    """A batch of `presage.DataLoader`."""

    @property
    def epoch(self) -> int:
        """Pass over the training split, from 0."""
        ...

    @property
    def step(self) -> int:
        """Step within the epoch, from 0."""
        ...


class EmbeddingRows:
    """Rows of collections in a store, behind the cache that the dataset's oracle plans.

    Training needs the rows of a batch's own look-ups; others may be looked up without gradients.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        dataset: OpenDataset,
        order: Order,
        *,
        store: Literal["memory", "mmap", "log"] | StoresConfig,
        directory: Path | None,
        cache: CacheConfig,
    ) -> None:
        """Keep the arguments; the store is opened when it is first used.

        Args:
            dataset: open dataset.
            order: of the loop's batches.
            store: `memory`; files in `directory`, `mmap` or `log`; or store processes.
            directory: of the run, for any store but memory.
            cache: policy and limits of the plan; `files` is ignored.

        Raises:
            ValueError: `directory` is missing, or there are several ranks.
        """
        if store != "memory" and directory is None:
            raise ValueError(f"directory is missing, which store={store!r} needs; name a folder")
        _check_ranks()
        self._dataset, self._order, self._kind = dataset, order, store
        self._directory = directory or Path()
        self._cache_config = cache
        self._layouts: dict[str, TableLayout] = {}
        self._job_tables: dict[str, str] = {}
        self._opened = ExitStack()
        self._store: Store | None = None
        self._cache: PlannedCache | None = None
        self._next = 0  # step of the next batch
        self._is_open = False  # whether the step before it is
        self._checkpoint: Path | None = None  # saved or loaded last
        self._saved: CheckpointRows | None = None  # rows before `_next`, if a checkpoint has them
        self.version = 0
        """Positions of rows that were selected under another version must not be used."""

    def __enter__(self) -> EmbeddingRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop background work and close the store; rows that were not saved are lost."""
        self._is_open = False
        self.version += 1
        self._opened.close()

    @property
    def train_step(self) -> int:
        """Steps that were begun since the start of the run."""
        return self._next

    @property
    def fetched_rows(self) -> int:
        """Rows that the cache has read from the store."""
        return 0 if self._cache is None else self._cache.fetched_rows

    @property
    def num_accesses(self) -> int:
        """Rows that the steps so far have used, a row once per step."""
        return 0 if self._cache is None else self._cache.num_accesses

    # ---- What collections call ----

    def add_tables(
        self, layouts: Mapping[str, TableLayout], features: Mapping[str, Sequence[str]]
    ) -> None:
        """Add the tables of a collection.

        Raises:
            ValueError: a table is there already, or the plan does not cover its features.
        """
        if self._store is not None:
            raise ValueError(
                f"collections were made after rows were read: {', '.join(layouts)}; make all "
                "collections of the source first"
            )
        for table, layout in layouts.items():
            if table in self._layouts:
                raise ValueError(
                    "table names must be unique among the collections of a source, got "
                    f"{table!r} twice; rename one"
                )
            if self._kind != "memory":
                self._job_tables[table] = self._job_table_of(table, features[table])
            self._layouts[table] = layout

    def select(self, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return rows of the open step in place.

        Raises:
            ValueError: no step is open.
            SchemaError: the plan of the step lacks a row.
        """
        if not self._is_open:
            raise ValueError(
                "rows are looked up for training before a step is begun; call rows.advance(batch) "
                "for each batch, or look up without gradients"
            )
        if self._cache is not None:
            return self._cache.select(rows)
        store = self._open()
        assert isinstance(store, LocalStore), "rows without a cache are in memory"
        return {table: store.gather(table, ids) for table, ids in rows.items()}

    def read(self, rows: RowsOfTables) -> dict[str, Records]:
        """Return copies of any rows with their newest values.

        Raises:
            ValueError: the log has a row that is not cached.
        """
        train_step = self._next - self._is_open
        self._open()
        if self._cache is None:
            return self._fetch(train_step, rows)
        return self._cache.read(train_step, rows, self._fetch)

    def write(self, table: str, rows: NDArray[np.int64], records: Records) -> None:
        """Overwrite distinct rows.

        Raises:
            ValueError: rows may be cached, or are in the log.
        """
        store = self._open()
        if self._cache is not None or isinstance(store, FutureLog):
            raise ValueError(
                f"rows of table {table!r} are set after the first step, or in the log; set them "
                "before it, in another store"
            )
        store.write(self._next - 1, {table: WriteBack(rows, records)})

    # ---- What the loop calls ----

    def advance(self, batch: StepBatch) -> None:
        """Begin the step of a batch, and end the one before; call it before the forward pass.

        Nothing happens if the step of the batch has begun already.

        Raises:
            ValueError: the batch does not follow the one before, or the checkpoint.
            SchemaError: the dataset has no index of this order; the message says how to build it.
            PlanError: the cache is too small; the message names the size that works.
        """
        train_step = batch.epoch * self._order.steps_per_epoch + batch.step
        if self._is_open and train_step == self._next - 1:
            return
        if train_step != self._next:
            raise ValueError(
                f"batch is of step {train_step}, but the rows are at step {self._next}; advance "
                "by each training batch once, and load loader and rows from the same checkpoint"
            )
        _check_ranks()
        self._end_step()
        store = self._open()
        if self._cache is None and self._kind != "memory":
            self._cache = self._plan(store)
        if self._cache is not None:
            self._cache.open(train_step)
        self._next, self._is_open, self._saved = train_step + 1, True, None

    def save(self, folder: Path | str, state: Mapping[str, Any], *, keep: int = 2) -> Path:
        """Write all rows and the rest of the loop's state as one checkpoint, after an update.

        The second checkpoint of a step is not written.

        Args:
            folder: of the run's checkpoints; a killed process leaves the newest complete one.
            state: such as `state_dict()` of model, optimizer and loader; `torch.load` must read it
                with `weights_only`.
            keep: newest checkpoints to keep.

        Returns:
            The folder of the checkpoint.

        Raises:
            SchemaError: the folder has a checkpoint of another run, or the disk is full.
        """
        folder, store = Path(folder).absolute(), self._open()
        newest, is_first = newest_checkpoint(folder), self._checkpoint is None
        if newest is not None and newest != self._checkpoint:
            raise SchemaError(
                "folder has checkpoints of another run; load them before the first step, or save "
                "to another folder",
                file=str(newest),
            )
        if newest is not None and step_of(newest) == self._next:
            return newest
        self._end_step()
        if self._cache is not None:
            self._cache.flush()

        def write_state(checkpoint: NewCheckpoint) -> None:
            with checkpoint.create(STATE_FILE) as file:
                torch.save(dict(state), file)

        folder.mkdir(parents=True, exist_ok=True)
        self._checkpoint = write_checkpoint(
            folder, self._next, store, write_state, keep=keep, fingerprint=self._fingerprint()
        )
        if is_first:
            _read_state(self._checkpoint)  # raises now what would keep a restart from it
        store.notify_checkpoint(self._next)
        self._saved = open_rows(self._checkpoint, self._layouts)
        return self._checkpoint

    def load(self, folder: Path | str) -> dict[str, Any] | None:
        """Load the newest checkpoint of a folder, before the first step.

        Returns:
            The state that was saved with the rows; None if there is no checkpoint.

        Raises:
            SchemaError: the checkpoint is damaged, or of other tables.
        """
        if self._next:
            raise ValueError(
                f"rows are loaded at step {self._next}; load them before the first step"
            )
        checkpoint = newest_checkpoint(Path(folder).absolute())
        if checkpoint is None:
            return None
        manifest = verify_checkpoint(checkpoint, with_rows=False)
        check_collections(manifest, self._fingerprint(), checkpoint)
        store = self._open()
        load_rows(checkpoint, manifest, store, self._next_uses(store))
        self._next, self._checkpoint = manifest.train_step, checkpoint
        self._saved = open_rows(checkpoint, self._layouts)
        self.version += 1
        return _read_state(checkpoint)

    # ---- Store and plan ----

    def _open(self) -> Store:
        if self._store is None:
            self._check_widths()
            files: Any = self._kind if str(self._kind) in FILE_STORES else "mmap"
            config = TrainConfig(
                cache=CacheConfig(files=files),
                stores=self._kind if isinstance(self._kind, StoresConfig) else StoresConfig(),
            )
            with ExitStack() as opened:
                if self._kind != "memory":
                    opened.enter_context(
                        directory_lock(
                            self._directory,
                            "directory of rows is in use",
                            "close those rows, or name another directory",
                        )
                    )
                self._store = opened.enter_context(
                    open_store(
                        self._directory,
                        self._layouts,
                        config,
                        job=Path.cwd() / "job.yaml",
                        embedding="plain" if self._kind == "memory" else "cached",
                        num_processes=None,
                    )
                )
                self._opened.enter_context(opened.pop_all())
            tables = {table: CheckpointTable(each, ()) for table, each in self._layouts.items()}
            self._saved = CheckpointRows(tables)  # initial values
        return self._store

    def _plan(self, store: Store) -> PlannedCache:
        order, config = self._order, self._cache_config
        plan = plan_of_rows(
            self._dataset, order, self._layouts, config, self._next, job_tables=self._job_tables
        )
        cache = PlannedCache(
            store,
            plan,
            first_step=self._next,
            last_step=order.num_steps,
            prefetch_steps=config.prefetch_steps,
        )
        self._opened.callback(cache.close)
        return cache

    def _next_uses(self, store: Store) -> NextUseOf | None:
        """Return the next use of rows, for stores that are ordered by it."""
        if not isinstance(store, FutureLog):
            return None
        lookup = NextUseLookup(self._dataset, self._order, allow_unknown=True)
        return lambda table, step, rows: lookup(self._job_tables[table], step, rows)

    def _end_step(self) -> None:
        """End the open step, after which the cache may evict its rows."""
        if not self._is_open:
            return
        self._is_open = False
        self.version += 1
        if self._cache is not None:
            self._cache.release(self._next - 1, {})

    def _fetch(self, train_step: int, rows: RowsOfTables) -> dict[str, Records]:
        """Return rows that are not cached."""
        store = self._open()
        if not isinstance(store, FutureLog):
            return store.fetch(train_step, rows)
        if self._saved is not None:
            return self._saved.fetch(train_step, rows)
        for table, ids in rows.items():
            if len(ids):
                raise ValueError(
                    f"rows of table {table!r} that are in the log can be read in training order "
                    "only; call rows.save(...) before the evaluation, or use store='mmap'"
                )
        return {table: empty_records(self._layouts[table], 0) for table in rows}

    def _fingerprint(self) -> dict[str, Any]:
        return {"tables": {table: asdict(layout) for table, layout in self._layouts.items()}}

    def _job_table_of(self, table: str, features: Sequence[str]) -> str:
        """Return the dataset's table of some features."""
        table_of = self._dataset.job.data.table_of_history_feature
        table_of |= self._dataset.job.data.table_of_feature
        unknown = [f for f in features if f not in table_of]
        if unknown:
            raise ValueError(
                f"features of table {table!r} must be in the tables of the dataset's job, got "
                f"{unknown[0]!r}; make its collection without source"
            )
        tables = sorted({table_of[f] for f in features})
        if len(tables) > 1:
            raise ValueError(
                f"features of table {table!r} must be of one table of the dataset's job, got "
                f"{', '.join(tables)}; make a table of each, since rows are planned by table"
            )
        return tables[0]

    def _check_widths(self) -> None:
        if not self._layouts:
            raise ValueError("source has no tables; pass it to the collections of a model first")
        shapes = {(x.dim, x.state_width, x.dtype): t for t, x in self._layouts.items()}
        if len(shapes) > 1 and self._kind not in ("memory", "mmap"):
            (first, a), (second, b), *_ = shapes.items()
            raise ValueError(
                f"rows of the log and of store processes must have one width and type, got "
                f"{first} of table {a!r} and {second} of {b!r}; make a source of each, in its own "
                "directory"
            )


def _read_state(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / STATE_FILE, weights_only=True)


def _check_ranks() -> None:
    """Raise ValueError if other ranks train rows of their own."""
    if world_size() > 1:
        raise ValueError(
            f"a source of rows belongs to one process, but there are {world_size()} ranks; leave "
            "`source` out, train with presage train --replicas, or shard as "
            "examples/torchrec_distributed.py does"
        )
