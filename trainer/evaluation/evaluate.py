"""Metrics on the evaluation split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import EVALUATE
from presage.schemas.dataset.opened import (
    OpenDataset,
    open_dataset,
    select_segments,
    select_segments_by_hash,
)
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import RUN_FILE
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.fingerprint import check_model, fingerprint_of
from presage.trainer.checkpoint.load import (
    load_checkpoint,
    open_rows,
    require_checkpoint,
    verify_checkpoint,
)
from presage.trainer.components import Components, build_components, order_of, uses_shared_features
from presage.trainer.data.collate import CollatedBatch, move_batch
from presage.trainer.data.decode import training_spec
from presage.trainer.data.reader import Reader
from presage.trainer.data.transfer import device_of
from presage.trainer.evaluation.metrics import Evaluation, MetricColumns, Metrics, columns_of
from presage.trainer.recovery import Watchdog
from presage.trainer.run.folder import check_run, check_schema, read_identity_of_job
from presage.trainer.stores.store import RowReader


def evaluate_run(
    job_path: Path | Location,
    dataset_path: Location,
    run: Path,
    segments: Sequence[str] | None = None,
) -> Evaluation:
    """Evaluate the newest checkpoint of a run.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: run folder.
        segments: ids or days of the segments to evaluate, trained or not; None: those that the
            run trained.

    Raises:
        SchemaError: job, dataset or run are invalid, or the run has no checkpoint.
    """
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    device_of(job.train.device)
    identity = read_identity_of_job(run)
    if segments is not None:
        dataset = select_segments(dataset, segments)
        check_schema(run / RUN_FILE, identity, dataset)
    else:
        if identity.selected is not None:
            dataset = select_segments_by_hash(dataset, identity.selected)
        check_run(run, dataset, job.train)
    spec = training_spec(dataset, job.train)
    components = build_components(spec, job.train)
    checkpoint = require_checkpoint(run)
    fingerprint = fingerprint_of(job, dataset)
    manifest = verify_checkpoint(checkpoint, fingerprint if segments is None else None)
    check_model(manifest, fingerprint, str(checkpoint / MANIFEST))
    load_checkpoint(checkpoint, manifest, components, with_optimizer=False, with_rows=False)
    rows = open_rows(checkpoint, components.store.layouts)
    return evaluate_components(job, dataset, components, rows=rows)


def evaluate_components(
    job: Job,
    dataset: OpenDataset,
    components: Components,
    watchdog: Watchdog | None = None,
    rows: RowReader | None = None,
) -> Evaluation:
    """Evaluate the current model and rows of a run."""
    columns = columns_of(dataset, job.train)
    spec = training_spec(dataset, job.train, columns.kept)
    reader = Reader(
        dataset,
        order_of(job, dataset, trains=False),
        spec,
        find_shared=uses_shared_features(job.train),
    )
    model, device = job.train.model, components.embedding.device
    batches = (move_batch(batch, model, device) for batch in reader.evaluation_batches())
    if watchdog is not None:
        batches = watchdog.each(EVALUATE, batches)
    return evaluate(components, batches, columns, rows)


def evaluate(
    components: Components,
    batches: Iterable[CollatedBatch],
    columns: MetricColumns,
    rows: RowReader | None = None,
) -> Evaluation:
    """Score batches without training; no row is created."""
    metrics, model = Metrics(columns), components.model
    model.eval()
    with torch.no_grad():
        for batch in batches:
            components.embedding.open_copies(batch, rows or components.store)
            metrics.add(batch, model(batch))
    model.train()
    return metrics.finish()
