"""The planned cache inside TorchRec's sharded tables: batches of slots instead of rows."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.batch import Batch
from presage.loader import DataLoader
from presage.schemas.layout import TRAIN
from presage.schemas.rows import TORCHREC_SUFFIX
from presage.trainer.checkpoint.load import newest_checkpoint, open_rows, step_of
from presage.trainer.data.kjt_lookups import slots_of_lookups
from presage.trainer.embedding.cache import PlannedCache
from presage.trainer.slots import slot_checkpoints as saved
from presage.trainer.slots.other_rows import RowsInSlots, place_rows
from presage.trainer.slots.shards import (
    KeyLayout,
    Shard,
    ShardRecords,
    layout_of,
    open_cache,
    open_store,
    shards_of,
)
from presage.trainer.slots.slot_map import SlotMap
from presage.trainer.slots.slot_plan import SlotPlan, SlotSettings
from presage.trainer.slots.slot_runs import SlotRun, sparse_optimizer_of
from presage.trainer.stores.future_log import FutureLog, NextUseLookup
from presage.trainer.stores.store import RowsAndRecords, Store


class PlannedSlots:
    """Trains tables larger than memory in TorchRec's `DistributedModelParallel`, unmodified.

    The model has small tables of slots. The oracle says which row is in which slot at each step:
    batches name slots, and before each look-up the rank puts the rows of the step into its own
    shards, and writes those back that the plan evicts, each with its optimizer state. Losses and
    rows equal those of full tables, bit for bit, at equal shards.

    Example:
        >>> slots = presage.PlannedSlots(  # doctest: +SKIP
        ...     loader, cache_rows=100_000, sharding="table_wise", directory="rows", run="run"
        ... )
        >>> rows = EmbeddingBagCollection(tables=slots.embedding_bag_configs(16))  # doctest: +SKIP
        >>> model = DistributedModelParallel(Model(rows), plan=plan)  # doctest: +SKIP
        >>> slots.attach(model, optimizer)  # doctest: +SKIP
        >>> for batch in slots.batches():  # doctest: +SKIP
        ...     loss = train(model, optimizer, batch)
        >>> slots.save()  # doctest: +SKIP
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        cache_rows: int | Mapping[str, int],
        sharding: Literal["table_wise", "row_wise"] = "table_wise",
        directory: Path | str,
        run: Path | str | None = None,
        warm_start: Path | str | None = None,
        store: Literal["log", "mmap"] = "mmap",
        prefetch_steps: int = 2,
        seed: int = 0,
    ) -> None:
        """Wait until the sizes of the tables are planned.

        Args:
            loader: of the training split, for this rank.
            cache_rows: slots of each table, over all ranks, at most; or of some tables of the job,
                by name, and the others stay whole.
            sharding: of the tables of slots; `row_wise`: each rank has the slots of the rows that
                it would have of the full table.
            directory: on this machine, of the plan and the rows of its ranks; those of a run before
                are replaced.
            run: folder that all ranks share, for checkpoints. If it has a complete one, training
                continues after the newest.
            warm_start: folder of another run of `PlannedSlots`. A new run starts at step 0 from
                its newest checkpoint: all rows with their optimizer state, and the dense state.
            store: where rows are that have no slot. `mmap`: mapped files; `log`: files that are
                read and written sequentially.
            prefetch_steps: steps between the read of a row and its use.
            seed: of the initial values of rows, `presage.schemas.rows.initial_rows`, by the name of
                the table in TorchRec.

        Raises:
            ValueError: the loader is of another split, or follows a dataset; a table is unknown;
                `warm_start` is given without `run`.
            PlanError: `cache_rows` is too small; the message names the size that works.
            SchemaError: the dataset has no index of the loader's order; the message says how to
                build it.
        """
        if loader.split != TRAIN or loader.follow:
            raise ValueError(
                "slots are planned for a loader of the train split without follow, got "
                f"split={loader.split!r}, follow={loader.follow}"
            )
        if warm_start is not None and run is None:
            raise ValueError(f"warm_start={str(warm_start)!r} needs a run; pass run=... as well")
        self._loader, self._store_kind, self._seed = loader, store, seed
        self._warm_start = None if warm_start is None else Path(warm_start).absolute()
        self._directory = Path(directory).absolute()
        self._run = None if run is None else Path(run).absolute()
        self._configs = {
            config.name.removesuffix(TORCHREC_SUFFIX): config
            for config in loader.embedding_bag_configs(1)
        }
        self._checkpoint = None if self._run is None else newest_checkpoint(self._run)
        first_step = step_of(self._checkpoint)
        settings = SlotSettings(
            cache_rows=_sizes(cache_rows, self._configs),
            num_parts=loader.world_size if _is_row_wise(sharding) else 1,
            prefetch_steps=prefetch_steps,
            first_step=first_step,
        )
        self._plan = SlotPlan(self._directory, loader.opened, loader.order, settings)
        weakref.finalize(self, self._plan.close)
        self._header = self._plan.header
        self._tables = {table.name: i for i, table in enumerate(self._header.tables)}
        self._table_of_feature = {
            feature: table
            for table, config in self._configs.items()
            for feature in config.feature_names
        }
        self._opened = ExitStack()
        """Holds the lock of the run."""
        weakref.finalize(self, self._opened.close)
        self._attached: _Attached | None = None
        self._steps = _Turns(first_step)
        self._handed_out = first_step
        """One after the step of the last batch that was handed out."""
        self._updated = first_step - 1
        """The last step with gradients."""
        self._is_open = False
        """Whether rows of the last step are in slots that the plan frees after it."""
        self._evaluations: deque[RowsInSlots] = deque()
        self._evaluated = _Turns(0)

    # ---- The model ----

    @property
    def tables(self) -> tuple[str, ...]:
        """Tables of the job that have slots."""
        return tuple(self._tables)

    @property
    def train_step(self) -> int:
        """Steps that were looked up since the start of the run."""
        return self._steps.next

    @property
    def fetched_rows(self) -> int:
        """Rows that this rank has put into its slots, from its files or with initial values."""
        return 0 if self._attached is None else self._attached.cache.fetched_rows

    def embedding_bag_configs(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Return TorchRec's config of each table: of slots, or whole if it has none.

        Names are those of `DataLoader.embedding_bag_configs`.
        """
        return [
            EmbeddingBagConfig(
                name=config.name,
                num_embeddings=self._num_embeddings(table, config.num_embeddings),
                embedding_dim=embedding_dim,
                feature_names=config.feature_names,
            )
            for table, config in self._configs.items()
        ]

    def embedding_configs(self, embedding_dim: int) -> list[EmbeddingConfig]:
        """Return the same for an `EmbeddingCollection`, which returns the rows of sequences."""
        return [
            EmbeddingConfig(
                name=config.name,
                num_embeddings=config.num_embeddings,
                embedding_dim=embedding_dim,
                feature_names=config.feature_names,
            )
            for config in self.embedding_bag_configs(embedding_dim)
        ]

    def _num_embeddings(self, table: str, whole: int) -> int:
        if table not in self._tables:
            return whole
        return self._header.tables[self._tables[table]].part_slots * self._header.num_parts

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Swap rows in the shards of a model from now on, before its look-ups; load a checkpoint.

        Args:
            model: a `DistributedModelParallel` of the configs.
            optimizer: all optimizers of the model as one `CombinedOptimizer`, the model's
                `fused_optimizer` among them.

        Raises:
            ValueError: a table is missing, or sharded in a way that has no slots.
            SchemaError: the checkpoint is damaged, or of other tables or another model; the run is
                of another kind, or in use.
        """
        if self._attached is not None:
            raise ValueError("a model is attached already; make another PlannedSlots")
        fused: Any = model.fused_optimizer
        shards = shards_of(model, fused, self._header)
        layout = layout_of(self._plan, shards, self._seed)
        if self._loader.deduplicated:
            self._check_deduplicated(layout)
        folder = self._directory / f"rank-{self._loader.rank}"
        with ExitStack() as opened:
            if self._run is not None:
                self._slot_run(self._run, model, layout).open(opened)
                self._checkpoint = self._checkpoint or newest_checkpoint(self._run)
            store = open_store(self._store_kind, layout, folder)
            rows = saved.Rows(store, layout, self._header, shards, folder)
            dense = saved.DenseState(model, optimizer, self.tables)
            cache = open_cache(self._plan, shards, store)
            self._attached = _Attached(shards, layout, store, cache, rows, dense)
            if self._checkpoint is not None:
                saved.initialise_dense(optimizer)
                dataset, order = self._loader.opened, self._loader.order
                next_use = NextUseLookup(dataset, order) if isinstance(store, FutureLog) else None
                state = saved.load(self._checkpoint, rows, layout, dense, next_use)
                self._loader.load_state_dict(state["loader"])
            self._opened.enter_context(opened.pop_all())
        for module in model.modules():
            for lookup in getattr(module, "_lookups", ()):
                lookup.register_forward_pre_hook(self._before_lookup)
                lookup.register_forward_hook(self._after_lookup)

    def _slot_run(self, run: Path, model: nn.Module, layout: KeyLayout) -> SlotRun:
        loader = self._loader
        features = [f for table in self.tables for f in self._configs[table].feature_names]
        train = {
            "batch_samples": loader.batch_samples,
            "num_steps": loader.order.num_steps,
            "dense": loader.dense_features,
            "sparse": features,
            "sparse_optimizer": {"name": sparse_optimizer_of(model)},
        }
        return SlotRun(
            folder=run,
            dataset=loader.opened,
            layout=layout,
            train=train,
            loader=loader.state_at(0),
            warm_start=self._warm_start,
        )

    def _check_deduplicated(self, layout: KeyLayout) -> None:
        """Raise ValueError if TorchRec does not train such tables on deduplicated batches."""
        advice = "read them with deduplicated=False"
        if self._header.num_parts > 1 and torch.distributed.get_backend() == "gloo":
            raise ValueError(
                "TorchRec does not train deduplicated batches row_wise on gloo, whose allgather "
                f"needs equal sizes; {advice}, or shard table_wise"
            )
        if layout.state_width == layout.dim > 1:
            raise ValueError(f"FBGEMM has no Adagrad for deduplicated batches; {advice}")

    def close(self) -> None:
        """Stop background work; rows that were not saved are lost."""
        if self._attached is not None:
            self._attached.cache.close()
            self._attached.store.close()
        self._opened.close()
        self._plan.close()

    # ---- Batches and steps ----

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the loader with the slot of each row.

        Raises:
            SchemaError: a batch has a row that is not planned.
        """
        first = self._plan.first_step
        reader, slots = self._plan.reader(), SlotMap(self._header.slot_starts)
        for train_step, batch in enumerate(self._loader, first):
            if train_step > first:
                slots.remove(reader.step(train_step - 1).evicted)
            step = reader.step(train_step)
            if (
                found := batch.epoch * self._loader.order.steps_per_epoch + batch.step
            ) != train_step:
                raise ValueError(
                    f"batch is of step {found} instead of {train_step}; attach the model first, "
                    "and do not load another state into the loader"
                )
            slots.add(step.slots, self._plan.rows[step.fetched])
            self._handed_out = train_step + 1
            yield replace(batch, sparse_features=self._in_slots(batch, slots, train_step))

    def _in_slots(self, batch: Batch, slots: SlotMap, train_step: int) -> KeyedJaggedTensor:
        sparse = batch.sparse_features
        keys = sparse.keys()
        tables = [self._tables.get(self._table_of_feature[key], -1) for key in keys]
        slot_of_value, _ = slots_of_lookups(slots, sparse, tables, f"plan of step {train_step}")
        return _with_values(sparse, torch.from_numpy(slot_of_value))

    def _before_lookup(self, lookup: nn.Module, _: Any) -> None:
        attached = self._attached
        assert attached is not None, "hooks are registered when a model is attached"
        if not (lookup.training and torch.is_grad_enabled()):
            if self._evaluated.begins(lookup) is not None:
                self._put_evaluated(attached)
            return
        train_step = self._steps.begins(lookup)
        if train_step is None:
            return
        if train_step >= self._handed_out:
            raise ValueError(
                f"rows of step {train_step} are looked up, but "
                f"{self._handed_out} batches were taken from PlannedSlots.batches(); train on these"
            )
        if self._updated < train_step - 1 >= self._plan.first_step:
            raise ValueError(
                f"rows of step {train_step} are looked up before those of step {train_step - 1} "
                "are updated; use a pipeline that does not, such as TrainPipelineSparseDist"
            )
        self._end_step()
        attached.cache.open(train_step)
        self._is_open = True

    def _after_lookup(self, lookup: nn.Module, _: Any, output: Any) -> None:
        train_step = self._steps.of(lookup) - 1

        def note(_: torch.Tensor) -> None:
            self._updated = max(self._updated, train_step)

        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(note)

    def _end_step(self) -> None:
        """Evict what the plan evicts after the last step, once it is updated."""
        if self._is_open and self._attached is not None:
            self._is_open = False
            self._attached.cache.release(self.train_step - 1, {})

    # ---- Rows and checkpoints ----

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield the rows of a table of the job that this rank has trained, between two steps.

        Yields:
            rows, ascending, and for each its values and the state of the optimizer beside them.
        """
        yield from self._flushed().rows.contents(f"{table}{TORCHREC_SUFFIX}")

    def save(self, state: Mapping[str, Any] | None = None, *, keep: int = 2) -> Path:
        """Write a checkpoint after an update: rows, dense state and the position of the loader.

        All ranks call it at the same step. Training continues after it with any number of ranks.

        Args:
            state: further values; `torch.load` must read them with `weights_only`.
            keep: newest checkpoints to keep.

        Returns:
            The folder of the checkpoint.

        Raises:
            SchemaError: the disk is full.
        """
        if self._run is None:
            raise ValueError("checkpoints need a folder; pass run=... to PlannedSlots")
        attached = self._flushed()
        loader = self._loader.state_at(self.train_step)
        self._checkpoint = saved.save(
            self._run,
            self.train_step,
            attached.rows,
            attached.layout,
            attached.dense,
            {"loader": loader, "state": dict(state or {})},
            keep=keep,
        )
        attached.store.notify_checkpoint(self.train_step)
        return self._checkpoint

    def _flushed(self) -> _Attached:
        """End the open step and write all rows to the store; they stay in their slots."""
        if self._attached is None:
            raise ValueError("no model is attached; call PlannedSlots.attach first")
        self._end_step()
        self._attached.cache.flush()
        return self._attached

    # ---- Look-ups outside of the plan ----

    def evaluation(self, loader: DataLoader) -> Iterator[Batch]:
        """Yield the batches of another loader with slots, to look up in `eval` mode or `no_grad`.

        All ranks iterate equally many batches, between two training steps. Rows that were never
        trained have their initial values. Slots have what they had when the iteration ends.

        Raises:
            PlanError: a batch of all ranks has more rows of a table than there are slots.
            ValueError: rows are in the log, and no checkpoint has them.
        """
        attached = self._flushed()
        read = self._reader(attached)
        kept = attached.cache.cached_records()
        try:
            for batch in loader:
                sparse = batch.sparse_features
                values = {key: each.values().numpy() for key, each in sparse.to_dict().items()}
                of_table: dict[str, list[Any]] = defaultdict(list)
                for key, each in values.items():
                    of_table[self._table_of_feature[key]].append(each)
                rows = {t: np.unique(np.concatenate(of_table[t])) for t in self.tables}
                placed = place_rows(rows, self._header, attached.shards, read)
                for key in values:
                    table = self._table_of_feature[key]
                    if table in self._tables:
                        values[key] = placed.find(table, values[key])
                self._evaluations.append(placed)
                flat = torch.from_numpy(np.concatenate(list(values.values())))
                yield replace(batch, sparse_features=_with_values(sparse, flat))
        finally:
            self._evaluations.clear()
            attached.cache.put_cached(kept)

    def _put_evaluated(self, attached: _Attached) -> None:
        if not self._evaluations:
            raise ValueError(
                "rows are looked up without gradients, but not those of a batch of "
                "PlannedSlots.evaluation(loader); evaluate on these"
            )
        placed = self._evaluations.popleft()
        if placed.records is not None:
            ShardRecords(attached.shards, attached.layout).put(placed.own, placed.records)

    def _reader(self, attached: _Attached) -> Any:
        """Return a function that reads rows of this rank at any step."""
        if not isinstance(attached.store, FutureLog):
            return lambda table, rows: attached.rows.read(f"{table}{TORCHREC_SUFFIX}", rows)
        if self._checkpoint is None or step_of(self._checkpoint) != self.train_step:
            raise ValueError(
                "rows that are in the log can be read in training order only; call save() before "
                "the evaluation, or use store='mmap'"
            )
        layouts = {name: attached.layout.of_table(name) for name in attached.layout.tables}
        checkpoint = open_rows(self._checkpoint, layouts)
        return lambda table, rows: checkpoint.tables[f"{table}{TORCHREC_SUFFIX}"].fetch(rows)


@dataclass(frozen=True, slots=True)
class _Attached:
    """What belongs to the model."""

    shards: list[Shard]
    layout: KeyLayout
    store: Store
    cache: PlannedCache
    rows: saved.Rows
    dense: saved.DenseState


class _Turns:
    """Counts the steps of look-up modules, each of which looks up once in a step."""

    def __init__(self, first: int) -> None:
        self._first, self._of = first, dict[int, int]()
        self.next = first
        """The step that no module has looked up yet."""

    def begins(self, lookup: nn.Module) -> int | None:
        """Return the step of a look-up if it is the first of that step."""
        step = self.of(lookup)
        self._of[id(lookup)] = step + 1
        if step < self.next:
            return None
        self.next = step + 1
        return step

    def of(self, lookup: nn.Module) -> int:
        """Return the step that a module looks up next."""
        return self._of.get(id(lookup), self._first)


def _sizes(cache_rows: int | Mapping[str, int], tables: Mapping[str, Any]) -> dict[str, int]:
    sizes = dict.fromkeys(tables, cache_rows) if isinstance(cache_rows, int) else dict(cache_rows)
    unknown = [table for table in sizes if table not in tables]
    if unknown or not sizes:
        raise ValueError(
            f"cache_rows must name tables of the batch, {', '.join(tables)}, got "
            f"{', '.join(unknown) or 'none'}"
        )
    if min(sizes.values()) < 1:
        raise ValueError(f"cache_rows must be at least 1, got {min(sizes.values())}")
    return sizes


def _is_row_wise(sharding: str) -> bool:
    if sharding not in ("table_wise", "row_wise"):
        raise ValueError(f"sharding must be 'table_wise' or 'row_wise', got {sharding!r}")
    return sharding == "row_wise"


def _with_values(sparse: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor with other values in the same bags."""
    strides = sparse.stride_per_key_per_rank() if sparse.variable_stride_per_key() else None
    return KeyedJaggedTensor(
        sparse.keys(),
        values,
        weights=sparse.weights_or_none(),
        lengths=sparse.lengths(),
        stride_per_key_per_rank=strides,
        inverse_indices=sparse.inverse_indices_or_none(),
    )
