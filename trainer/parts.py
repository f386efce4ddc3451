"""The parts of a run, built from the job and the dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.job import Job
from schemas.job_train import TrainConfig
from schemas.order import Order
from trainer.collate import features_of_tables
from trainer.decode import BatchSpec
from trainer.device import device_of
from trainer.embedding import Embedding, TableSpec
from trainer.models.build import build_model
from trainer.optimizer import dense_optimizer, state_width
from trainer.sources import DirectSource
from trainer.stores.memory import memory_store
from trainer.stores.store import Store, TableLayout


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
