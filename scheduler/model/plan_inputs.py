"""The inputs of a plan: job file, sizes of the data, and history.

Sizes of the data come from the manifests and the index of a dataset; without one, from the job file
and from bounds that no dataset can exceed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from presage.scheduler.model.past_runs import History, read_history, read_history_beside
from presage.scheduler.model.throughput import Ints
from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.accesses import num_unique_rows
from presage.schemas.dataset.opened import (
    Index,
    OpenDataset,
    Segment,
    open_dataset,
    reading_histories,
)
from presage.schemas.dataset.run_next_uses import NextUses
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.features import FeatureSet, load_features
from presage.schemas.oracle.cache_plan import reuse_distance
from presage.schemas.oracle.reuse import StepReuse, peak_cache_rows, sum_reuse
from presage.schemas.paths import schema_path
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Rows of all tables.

    Attributes:
        window_rows: rows of the smallest cache with which the plan works.
        fetched_rows: rows that a time-to-live cache fetches, summed over steps.
        touched_rows: (num_steps,) distinct rows up to the end of each step.
    """

    window_rows: int
    fetched_rows: int
    touched_rows: Ints


def compute_lookahead(tables: Iterable[NextUses], cache: CacheConfig) -> Lookahead:
    """Return the rows that a run needs, over all its tables, from counts of reuse in its index.

    A lookahead or prefetch that is no bound of these counts is that of the next one.

    Raises:
        ValueError: there is no table.
    """
    windows, kept, touched = list[StepReuse](), list[StepReuse](), list[StepReuse]()
    for next_uses in tables:
        windows.append(next_uses.reuse(reuse_distance(cache)))
        kept.append(next_uses.reuse(cache.lookahead))
        touched.append(next_uses.reuse(len(next_uses)))
    if not windows:
        raise ValueError("lookahead covers no table; name one")
    window, near, whole = map(sum_reuse, (windows, kept, touched))
    return Lookahead(
        peak_cache_rows(window, cache.prefetch_steps),
        int((near.num_rows - near.kept).sum()),
        np.cumsum(whole.num_rows - whole.returning),
    )


ASSUMED_SAMPLES = 1_000_000
"""Samples of a job that has neither a dataset nor `data.generate`."""
ASSUMED_LIST_VALUES = 50
"""Values of a list of unknown length; `train.model.max_history` has the same default."""
VALUE_BYTES = 8
"""Bytes of one value of an Arrow column in a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Sizes of the data."""

    num_samples: int
    """Samples to prepare."""
    num_train_samples: int
    """Samples of one epoch."""
    table_rows: dict[str, int]
    """Touched rows of each table, or an upper bound."""
    rows_per_step: float
    """Distinct rows of a global batch, summed over tables."""
    lookups_per_sample: float
    """Rows that one sample looks up; with a dataset, after deduplication."""
    row_bytes: float
    """Bytes of one sample in the memory of a worker, before deduplication."""
    window_rows: int | None = None
    """Rows of the smallest cache for the job's plan; None without an index of its batch size."""
    fetched_rows_per_step: float | None = None
    """Rows that a step fetches from the stores through that cache; None without an index."""
    session_rows: int = 1
    """Upper bound on the samples of the largest session, which one worker must hold."""
    part_rows: float | None
    """Samples of one part of a segment, which one worker writes; None without a dataset."""
    num_dense: int
    num_sparse: int
    measured: bool
    """Whether the numbers come from a dataset; otherwise they are bounds and assumptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The inputs of `policy.plan`."""

    job: Job
    facts: DataFacts
    history: History = field(default_factory=History)


def take_snapshot(
    job: Path | Location,
    dataset: Path | Location | None,
    history: Path | Location | None,
    *,
    allow_outside: bool = False,
) -> PlanInputs:
    """Read the inputs of a plan.

    Args:
        job: the job file.
        dataset: its dataset; None if there is none yet.
        history: folder of earlier builds and runs; None for those beside the dataset.
        allow_outside: whether its schema may be outside the folder of the job file.

    Raises:
        SchemaError: a file is missing, damaged, or does not belong to the job.
    """
    read = load_job(job)
    if dataset is None:
        schema = schema_path(job, read.data.schema, allow_outside=allow_outside)
        facts = facts_of_job(read, load_features(schema))
    else:
        opened = reading_histories(open_dataset(dataset), read.train.windows)
        facts = facts_of_dataset(read, opened)
        if history is None:
            return PlanInputs(job=read, facts=facts, history=read_history_beside(opened))
    past = History() if history is None else read_history(history)
    return PlanInputs(job=read, facts=facts, history=past)


def facts_of_job(job: Job, features: FeatureSet) -> DataFacts:
    """Return the sizes according to the job file; rows are upper bounds."""
    generate = job.data.generate
    num_samples = ASSUMED_SAMPLES if generate is None else generate.num_samples
    lengths = {f.name: ASSUMED_LIST_VALUES if f.is_list else 1 for f in features.features}
    lookups = {
        name: sum(lengths.get(feature, 1) for feature in table.features)
        for name, table in job.data.tables.items()
    }
    batch = job.train.batch_samples
    return DataFacts(
        num_samples=num_samples,
        num_train_samples=num_samples,
        table_rows={
            name: min(table.num_rows, num_samples * lookups[name])
            for name, table in job.data.tables.items()
        },
        rows_per_step=sum(
            min(table.num_rows, batch * lookups[name]) for name, table in job.data.tables.items()
        ),
        lookups_per_sample=sum(lookups.values()),
        row_bytes=VALUE_BYTES * sum(lengths.values()),
        part_rows=None,
        num_dense=len(features.with_role("dense")),
        num_sparse=len(features.with_role("sparse")),
        measured=False,
    )


def facts_of_dataset(job: Job, dataset: OpenDataset) -> DataFacts:
    """Return the sizes according to the manifests and the index of a dataset.

    Raises:
        SchemaError: the dataset lacks a table of the job, or has no training sample.
    """
    manifests = [segment.manifest for segment in dataset.segments]
    tables = {name for manifest in manifests for name in manifest.tables}
    for name in job.data.tables:
        if name not in tables:
            raise SchemaError(
                f"dataset lacks a table of the job: {name!r}; "
                f"{suggest_name(name, tables) if tables else 'rebuild it'}",
                file=str(dataset.directory),
            )
    num_samples = sum(manifest.num_samples for manifest in manifests)
    num_train = sum(
        int(segment.column("num_samples")[segment.positions("train")].sum())
        for segment in dataset.segments
    )
    if num_train == 0:
        raise SchemaError(
            "dataset has no training sample; check data.split",
            file=str(dataset.directory),
        )
    index = _index(job, dataset)
    table_rows, ahead = _ahead(job, dataset, index)
    lookups = sum(
        manifest.tables[name].num_lookups_dedup
        for manifest in manifests
        for name in job.data.tables
        if name in manifest.tables
    )
    return DataFacts(
        num_samples=num_samples,
        num_train_samples=num_train,
        table_rows=table_rows,
        rows_per_step=_rows_per_step(job, index, table_rows, lookups / num_train),
        lookups_per_sample=lookups / num_train,
        row_bytes=_row_bytes(dataset, num_samples),
        part_rows=num_samples / sum(_num_parts(segment) for segment in dataset.segments),
        window_rows=None if ahead is None else ahead.window_rows,
        fetched_rows_per_step=None
        if ahead is None
        else ahead.fetched_rows / max(1, len(ahead.touched_rows)),
        session_rows=max(_largest_session(segment) for segment in dataset.segments),
        num_dense=len(dataset.features.with_role("dense")),
        num_sparse=len(dataset.features.with_role("sparse")),
        measured=True,
    )


def _num_parts(segment: Segment) -> int:
    return len(np.unique(segment.column("file")))


def _largest_session(segment: Segment) -> int:
    """Return an upper bound on the samples of the largest session, exact to two blocks.

    A block in which no session starts is inside one.
    """
    samples, started = segment.column("num_samples"), segment.column("num_sessions")
    starts = np.flatnonzero(np.concatenate([[True], started[1:] > 0]))
    # A session ends at the latest in the block where the next one starts.
    ends = np.minimum(np.append(starts[1:], len(samples) - 1), len(samples) - 1)
    sums = np.concatenate([[0], np.cumsum(samples)])
    return int((sums[ends + 1] - sums[starts]).max())


def _ahead(
    job: Job, dataset: OpenDataset, index: Index | None
) -> tuple[dict[str, int], Lookahead | None]:
    """Return the rows of each table, and the lookahead of a run.

    The lookahead is None without an index of the job's batch size.
    """
    names, table_rows = job.data.tables, dict[str, int]()
    if index is None or index.entry.batch_samples != job.train.batch_samples:
        return {name: num_unique_rows(dataset, name) for name in names}, None

    def tables() -> Iterator[NextUses]:  # one table after the other
        for name in names:
            next_uses = NextUses(dataset, index, name)
            table_rows[name] = next_uses.num_rows
            yield next_uses

    return table_rows, compute_lookahead(tables(), job.train.cache)


def _index(job: Job, dataset: OpenDataset) -> Index | None:
    whole = dataset.complete_indexes()
    same = [index for index in whole if index.batch_samples == job.train.batch_samples]
    return dataset.open_index((same or whole)[0]) if whole else None


def _rows_per_step(
    job: Job, index: Index | None, table_rows: dict[str, int], lookups_per_sample: float
) -> float:
    """Return the distinct rows of a batch, scaled in proportion from the index's batch size."""
    batch = job.train.batch_samples
    if index is None or index.order.num_steps == 0:
        return min(float(sum(table_rows.values())), lookups_per_sample * batch)
    per_step = sum(map(index.num_accesses, table_rows)) / index.order.num_steps
    return per_step * max(1.0, batch / index.entry.batch_samples)


def _row_bytes(dataset: OpenDataset, num_samples: int) -> float:
    grouped = dataset.job.data.group_of_column
    scalars = [f for f in dataset.features.features if not f.is_list]
    loose = [f for f in dataset.features.features if f.is_list and f.name not in grouped]
    values = sum(
        group.num_values
        for segment in dataset.segments
        for group in segment.manifest.groups.values()
    )
    per_sample = values / max(num_samples, 1) + len(scalars) + ASSUMED_LIST_VALUES * len(loose)
    return VALUE_BYTES * per_sample
