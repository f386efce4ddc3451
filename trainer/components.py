"""The components of a run, built from the job and the dataset.

Order, model, stores, cache plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from schemas.accesses import TableAccesses, decoded_cache_for
from schemas.cache_plan import Keyframe, Plan, check_cache_size
from schemas.config.job import Job
from schemas.config.train import CacheConfig, TrainConfig
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.oracle import clip_to_horizon
from schemas.order import Order
from trainer.data.collate import features_of_tables
from trainer.data.decode import BatchSpec
from trainer.device import device_of
from trainer.embedding.cache import DirectSource, TablePlan
from trainer.embedding.module import Embedding, TableSpec
from trainer.embedding.optimizer import dense_optimizer, state_width
from trainer.models.build import build_model
from trainer.stores.api import Store, TableLayout
from trainer.stores.local import memory_store


@dataclass(frozen=True, slots=True)
class Parts:
    """What is trained: rows, the embedding over them, the dense model and its optimizer."""

    stores: dict[str, Store]
    embedding: Embedding
    model: nn.Module
    optimizer: torch.optim.Optimizer


def order_of(job: Job, dataset: Dataset) -> Order:
    """Return the global order of a run.

    Raises:
        SchemaError: the job's tables are not those the dataset was built with, or there is
            nothing to train on.
    """
    if job.data.tables != dataset.job.data.tables:
        raise SchemaError(
            "tables must be those the dataset was built with, got others; rebuild the dataset",
            file=str(dataset.directory),
        )
    shuffle = dataset.job.data.oracle.order
    order = dataset.order(job.train.batch_samples, job.train.epochs, shuffle.shuffle, shuffle.seed)
    if order.num_steps == 0:
        raise SchemaError(
            "dataset must have training samples, got none; move data.split.evaluation_from",
            file=str(dataset.directory),
        )
    return order


def layouts_of(spec: BatchSpec, config: TrainConfig) -> dict[str, TableLayout]:
    """Return what the rows of each table look like."""
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


def memory_stores(spec: BatchSpec, config: TrainConfig) -> dict[str, Store]:
    """Return an empty store in memory for each table."""
    return {table: memory_store(layout) for table, layout in layouts_of(spec, config).items()}


def build_parts(
    spec: BatchSpec, config: TrainConfig, stores: dict[str, Store], *, steps_before: int = 0
) -> Parts:
    """Build the embedding, the model and its optimizer; equal seeds give equal parts.

    Args:
        spec: what a batch is made of.
        config: train section of the job.
        stores: by table; the embedding reads them until it is given another source.
        steps_before: steps that the rows were trained before the run's first: Adam counts them.
    """
    device = device_of(config.device)
    if device.type != "cpu":
        config = replace(config, kernels="torch")  # compiled ones are the processor's
    tables = tuple(
        TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
        for name, features in features_of_tables(spec).items()
    )
    embedding = Embedding(tables, config, DirectSource(stores), steps_before=steps_before)
    model = build_model(config, spec, embedding).to(device)
    return Parts(
        stores, embedding, model, dense_optimizer(config.dense_optimizer, list(model.parameters()))
    )


KEPT_BYTES = 256 << 20
"""Decoded access lists of all tables together, of a shuffled run; others are decoded again."""


def plans_of(
    dataset: Dataset,
    order: Order,
    tables: Iterable[str],
    config: CacheConfig,
    first_step: int,
    flush_every: int | None = None,
    starts: Mapping[str, Keyframe] | None = None,
    until: int | None = None,
) -> dict[str, TablePlan]:
    """Return the plan of each table from a step on.

    Plans stream. For a whole table they hold 8 bytes of each row that the dataset uses and 4 more
    that the plan has seen, and of several segments 4 for each row of a segment; besides, for each
    table a file of lists and one of next uses, and `KEPT_BYTES` of lists of all tables together.

    A run that goes on with keyframes has the rest of the plan that it was stopped in. Without, it
    starts with an empty cache: its plan is that of a run whose first step is that one. Neither goes
    through the steps before.

    Args:
        dataset: open dataset.
        order: global order of the run.
        tables: table names.
        config: policy and limits; the limit holds for each table.
        first_step: first step to be trained.
        flush_every: steps between checkpoints, which write all cached rows.
        starts: state of each table's plan before the first step, empty for none.
        until: one after the last step that is known: the plan ends there, and knows no use beyond;
            the whole run when None.

    Raises:
        SchemaError: the dataset has no index for this order; the message says how to build it.
        PlanError: `config.rows` is too small for a table; the message names the size that works.
    """
    index, end = dataset.index_for(order), order.num_steps if until is None else until
    to_train = range(first_step, end)
    files = {table: index.steps(table) for table in tables}

    def distances(table: str) -> Iterator[NDArray[np.int32]]:
        found = files[table]
        return (
            clip_to_horizon(found[step].astype(np.int32, copy=False), step, end)
            for step in to_train
        )

    check_cache_size({table: distances(table) for table in files}, config)
    kept = decoded_cache_for(order, KEPT_BYTES)
    plans: dict[str, TablePlan] = {}
    for table in files:
        accesses = TableAccesses(dataset, table, order, kept)
        steps = zip(map(accesses.numbers, to_train), distances(table), strict=True)
        planned = Plan(
            steps,
            config,
            first_step=first_step,
            flush_every=flush_every,
            start=(starts or {}).get(table),
        )
        plans[table] = TablePlan(planned, accesses.rows, planned.keyframe)
    return plans
