"""The components of a run, built from the job and the dataset.

Order, stores, cache plans, the model, and the optimizer of its dense parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from presage.schemas.config.job import Job
from presage.schemas.config.train import CacheConfig, DenseOptimizerConfig, TrainConfig
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.checked_files import DecodedListCache
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import SharedNextUses, most_cached_rows
from presage.schemas.errors import SchemaError
from presage.schemas.oracle.cache_plan import CachePlan, Keyframe, check_cache_size
from presage.trainer.data.collate import features_of_tables
from presage.trainer.data.decode import BatchSpec
from presage.trainer.data.transfer import device_of
from presage.trainer.embedding.cache import DirectSource, RowsPlan
from presage.trainer.embedding.device_embedding import DeviceEmbedding
from presage.trainer.embedding.kernels.interface import state_width
from presage.trainer.embedding.module import Embedding, TableSpec
from presage.trainer.models import attention, hstu, torchrec_models
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.store import Store, TableLayout


@dataclass(frozen=True, slots=True)
class Components:
    """What is trained: rows, the embedding over them, the dense model and its optimizer."""

    store: Store
    embedding: Embedding
    model: nn.Module
    optimizer: torch.optim.Optimizer


def order_of(job: Job, dataset: OpenDataset, *, trains: bool = True) -> Order:
    """Return the global order of a run, or of one that does not train the dataset.

    Raises:
        SchemaError: the dataset was built with other tables, or has no samples to train.
    """
    if job.data.tables != dataset.job.data.tables:
        raise SchemaError(
            "dataset was built with other tables than those of the job; rebuild it",
            file=str(dataset.directory),
        )
    shuffle = dataset.job.data.oracle.order
    order = dataset.order(job.train.batch_samples, job.train.epochs, shuffle.shuffle, shuffle.seed)
    if trains and order.num_steps == 0:
        raise SchemaError(
            "dataset has no training samples; move data.split.evaluation_from",
            file=str(dataset.directory),
        )
    return order


def layouts_of(spec: BatchSpec, config: TrainConfig) -> dict[str, TableLayout]:
    """Return the layout of the rows of each table."""
    width = state_width(config.sparse_optimizer, config.embedding_dim)
    return {
        table: TableLayout(
            table=table,
            dim=config.embedding_dim,
            state_width=width,
            dtype=config.dtype,
            seed=config.seed,
        )
        for table in features_of_tables(spec)
    }


def build_components(
    spec: BatchSpec, config: TrainConfig, store: Store | None = None, *, steps_before: int = 0
) -> Components:
    """Build the embedding, the model and its optimizer; equal seeds give equal parameters.

    Args:
        spec: columns of a batch.
        config: train section of the job.
        store: of the rows, which the embedding reads until it is given another source; None: an
            empty one in memory.
        steps_before: steps that preceding runs trained the rows, which Adam counts.
    """
    store = store or memory_store(layouts_of(spec, config))
    device, tables, source = device_of(config.device), table_specs(spec), DirectSource(store)
    if device.type == "cpu":
        embedding = Embedding(tables, config, source, steps_before=steps_before)
    else:
        embedding = DeviceEmbedding(tables, config, source, device, steps_before=steps_before)
    model = build_model(config, spec, embedding).to(device)
    optimizer = dense_optimizer(config.dense_optimizer, list(model.parameters()))
    return Components(store, embedding, model, optimizer)


def table_specs(spec: BatchSpec) -> tuple[TableSpec, ...]:
    """Return the tables of an embedding module."""
    return tuple(
        TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
        for name, features in features_of_tables(spec).items()
    )


def dense_optimizer(
    config: DenseOptimizerConfig, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer of the dense parameters.

    Checkpoints contain its state but not its options, and replicas update independently: a schedule
    of the learning rate must be a function of the step alone.
    """
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.SGD
    return kind(parameters, lr=config.learning_rate, fused=True)


def uses_shared_features(config: TrainConfig) -> bool:
    """Return whether the model reads `Batch.shared`."""
    model = config.model
    return model.name == "dlrm" and model.dedup_compute


def build_model(config: TrainConfig, spec: BatchSpec, embedding: nn.Module) -> nn.Module:
    """Build `train.model` over an embedding module; it maps a batch to (B,) logits."""
    num_dense = len(spec.dense)
    match config.model.name:
        case "attention":
            return attention.build(config, spec.sparse, num_dense, embedding)
        case "hstu":
            return hstu.build(config, spec, embedding)
        case "dcn":
            return torchrec_models.build_dcn(config, num_dense, embedding)
        case "deepfm":
            return torchrec_models.build_deepfm(config, num_dense, embedding)
        case "wide_deep":
            return torchrec_models.build_wide_deep(config, spec.sparse, num_dense, embedding)
        case "dlrm":
            return torchrec_models.build_dlrm(config, num_dense, embedding)


DECODED_BYTES = 256 << 20
"""Bytes of decoded access lists that a shuffled run keeps; others are decoded again."""


def plan_of_rows(
    dataset: OpenDataset,
    order: Order,
    tables: Iterable[str],
    config: CacheConfig,
    first_step: int,
    *,
    starts: Mapping[str, Keyframe] | None = None,
    end_step: int | None = None,
    job_tables: Mapping[str, str] | None = None,
    shared: SharedNextUses | None = None,
) -> RowsPlan:
    """Return the cache plan of some tables from a step on.

    Plans stream: in memory are, for a whole table, 8 bytes per row of the dataset and 4 more per
    row of the plan so far, with several segments also 4 per row of a segment, and again 4 in a
    temporary file; per table a file of access lists and one of next uses; and `DECODED_BYTES` of
    access lists of all tables together.

    A plan continues from its keyframe. Without one it starts with an empty cache, as that of a run
    whose first step this is. Neither reads the steps before.

    Args:
        dataset: open dataset.
        order: global order of the run.
        tables: table names.
        config: policy and limits.
        first_step: first step to train.
        starts: state of each table's plan before the first step; none to start empty.
        end_step: one after the last known step, where plans end and beyond which no use is known;
            None: the end of the run.
        job_tables: the dataset's table of each table; None: that of the same name.
        shared: next uses of the run; None: no one else needs them.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
        PlanError: `config.rows` is too small; the message names the size that works.
    """
    shared = shared or SharedNextUses(dataset, order)
    end = order.num_steps if end_step is None else end_step
    to_train, decoded = range(first_step, end), DecodedListCache(DECODED_BYTES)
    job_tables = job_tables or {table: table for table in tables}
    next_uses = {table: shared.of(table) for table in dict.fromkeys(job_tables.values())}
    accesses = {
        table: TableAccesses(dataset, table, order, decoded, uses.numbering)
        for table, uses in next_uses.items()
    }
    to_plan = [(table, job_tables[table]) for table in tables]
    limited = [next_uses[name] for _, name in to_plan]
    limit = config.rows
    if limit is not None and most_cached_rows(limited, config, first_step, end) > limit:
        check_cache_size([uses.within(to_train) for uses in limited], config)
    steps = {
        table: map(accesses[name].entries, to_train, next_uses[name].within(to_train))
        for table, name in to_plan
    }
    plan = CachePlan(steps, config, first_step=first_step, starts=starts)
    rows = {table: accesses[name].rows for table, name in to_plan}
    return RowsPlan(plan, rows, plan.keyframes)
