"""Indexes of a dataset: build, commit, report on cache policies: `pipelines oracle`."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.context import in_process, runner_module
from pipelines.oracle.files import run_stages
from pipelines.oracle.index import (
    LINKING_STAGES,
    SCRATCH,
    LinkingPlan,
    TableTotals,
    index_table,
    totals_of,
)
from pipelines.oracle.numbering import WORKER_ENTRIES
from pipelines.quality.segment_statistics import segment_statistics
from pipelines.scratch import locked_root, remove_partial, scratch_directory
from pipelines.table.segment import describe_files
from schemas.accesses import (
    NextUses,
    TableAccesses,
    TableHints,
    index_load,
    indexed_steps,
    num_unique_rows,
    write_hints,
)
from schemas.cache_plan import Plan, cache_too_small, required_rows, summarize
from schemas.config.job import DataConfig, OrderConfig
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset, Segment, open_dataset, select_segments
from schemas.files import sha256_of, write_files
from schemas.layout import FILES, TRAIN
from schemas.manifest import (
    DatasetManifest,
    IndexEntry,
    IndexManifest,
    Reference,
    new_index,
    shuffle_key_of,
    write_manifest,
)
from schemas.miss_ratio import lru_curve
from schemas.order import Order

WORKER_BYTES = 4 << 20
"""Bytes of access lists, over all epochs, per worker; parts with less are built in process."""


@dataclass(frozen=True, slots=True)
class IndexedSegment:
    """An open segment and its entry in the root manifest."""

    reference: Reference
    segment: Segment


@dataclass(frozen=True, slots=True)
class PartRequest:
    """A part of an index to build.

    Attributes:
        root: directory to build it in, with the name of the part.
        index: the index.
        indexed: the segment.
        order: order of the segment alone, over the distinct epochs.
    """

    root: Path
    index: IndexEntry
    indexed: IndexedSegment
    order: Order


def default_order(dataset: Dataset) -> Order:
    """Return the order of the job's `data.oracle`."""
    oracle = dataset.job.data.oracle
    return dataset.order(
        oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed
    )


def updated_indexes(
    dataset: Dataset | None,
    data: DataConfig,
    segments: Sequence[IndexedSegment],
    scratch: Path,
    beam_args: list[str],
) -> tuple[IndexEntry, ...]:
    """Return the indexes of a new root, after building the parts that they lack.

    The default index, and each index that has parts of all present segments, get parts of all new
    ones; the others keep the parts of the segments that stay.

    Args:
        dataset: as it is now, if it exists.
        data: data section of the new job.
        segments: of the new root.
        scratch: directory to build in; see `install_parts`.
        beam_args: Beam options.
    """
    oracle = data.oracle
    default = new_index(
        oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed
    )
    complete, indexes = {default.settings}, {default.settings: default}
    if dataset is not None:
        complete |= {index.settings for index in dataset.complete_indexes()}
        indexes |= {index.settings: index for index in dataset.manifest.indexes}
    ids = {indexed.reference.id for indexed in segments}
    for settings, index in indexes.items():
        parts = {name: part for name, part in index.parts.items() if name in ids}
        indexes[settings] = replace(index, parts=parts)
    to_extend = [index for settings, index in indexes.items() if settings in complete]
    extended = add_missing_parts(to_extend, segments, data, scratch, beam_args)
    indexes |= {index.settings: index for index in extended}
    return tuple(index for index in indexes.values() if index.parts)


def add_missing_parts(
    indexes: Sequence[IndexEntry],
    segments: Sequence[IndexedSegment],
    data: DataConfig,
    scratch: Path,
    beam_args: list[str],
) -> list[IndexEntry]:
    """Build the parts that indexes lack, and return the indexes with them.

    Existing parts are neither read nor changed; arguments as for `updated_indexes`.
    """
    requests = [
        PartRequest(
            scratch / index.id / indexed.reference.id,
            index,
            indexed,
            order_of_part(index, indexed, data),
        )
        for index in indexes
        for indexed in segments
        if indexed.reference.id not in index.parts
    ]
    totals = index_tables(requests, beam_args)
    parts = {index.id: dict(index.parts) for index in indexes}
    for request in requests:
        part = _finish_part(request, [t for t in totals if t.root == request.root])
        parts[request.index.id][request.indexed.reference.id] = part
    return [replace(index, parts=parts[index.id]) for index in indexes]


def order_of_part(index: IndexEntry, indexed: IndexedSegment, data: DataConfig) -> Order:
    """Return the order of a segment alone under the settings of an index."""
    return Order(
        num_blocks=(len(indexed.segment.positions(TRAIN)),),
        blocks_per_batch=index.batch_samples // data.block_samples,
        epochs=index.epochs,
        config=_order_config(index),
        shuffle_keys=(shuffle_key_of(indexed.reference),),
    ).of_segment(0)


def _order_config(index: IndexEntry) -> OrderConfig:
    return OrderConfig(shuffle="none" if index.shuffle == "none" else "blocks", seed=index.seed)


def _finish_part(request: PartRequest, totals: Sequence[TableTotals]) -> Reference:
    """Write the manifest of a part whose tables are written."""
    root, index, order = request.root, request.index, request.order
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(root / SCRATCH, ignore_errors=True)
    remove_partial(root)
    entries = describe_files(root)
    write_files(root / FILES, entries)
    manifest = IndexManifest(
        segment_sha256=request.indexed.reference.manifest_sha256,
        shuffle_key=None if index.shuffle == "none" else order.shuffle_keys[0],
        batch_samples=index.batch_samples,
        epochs=index.epochs,
        shuffle=index.shuffle,
        seed=index.seed,
        num_steps=order.steps_per_epoch,
        num_accesses={t.table: t.num_entries for t in totals},
        oracle_bytes=sum(e.num_bytes for e in entries),
        files_sha256=sha256_of(root / FILES),
    )
    return Reference(id=root.name, manifest_sha256=write_manifest(root, manifest))


def index_tables(requests: Sequence[PartRequest], beam_args: list[str]) -> list[TableTotals]:
    """Write every table of the parts, on Beam or in this process."""
    size = sum(r.order.epochs * r.indexed.segment.manifest.oracle_bytes for r in requests)
    tables = [(r, t) for r in requests for t in sorted(r.indexed.segment.manifest.tables)]
    if not tables:
        return []
    if in_process(beam_args, is_small=size < WORKER_BYTES):
        return [_index_table(request, table) for request, table in tables]
    tasks = [(r.root, r.indexed.segment.directory, r.order, table) for r, table in tables]
    scratch = requests[0].root.parent.parent
    return runner_module("build").run_index(tasks, scratch, beam_args, size // WORKER_BYTES)


def _index_table(request: PartRequest, table: str) -> TableTotals:
    segment = request.indexed.segment
    totals_or_plan = index_table(request.root, segment, table, request.order, WORKER_ENTRIES)
    if isinstance(totals_or_plan, LinkingPlan):
        return totals_of(totals_or_plan, run_stages(totals_or_plan, LINKING_STAGES))
    return totals_or_plan


def install_parts(scratch: Path, dataset: Path, indexes: Iterable[IndexEntry]) -> None:
    """Rename the parts that were built in a scratch directory to their final paths.

    The root manifest must not name them yet, and the caller holds its lock.
    """
    for index in indexes:
        for part in index.parts.values():
            source, final = (place / index.id / part.id for place in (scratch, dataset))
            if source.exists():
                shutil.rmtree(final, ignore_errors=True)  # of a killed attempt
                final.parent.mkdir(exist_ok=True)
                source.rename(final)


def oracle(arguments: argparse.Namespace, beam_args: list[str], attempt: str) -> dict[str, Any]:
    """Run the command `oracle`: report, after building an index with `--reindex`.

    Args:
        arguments: parsed arguments.
        beam_args: Beam options.
        attempt: name of this attempt.
    """
    dataset = open_segments(arguments.dataset, arguments.segments)
    config = dataset.job.data.oracle
    cache = dataset.job.train.cache
    batch_samples = at_least_one(arguments.batch_samples, config.batch_samples, "batch-samples")
    lookahead = at_least_one(arguments.lookahead, cache.lookahead, "lookahead")
    at_least_one(arguments.cache_rows, 1, "cache-rows")
    order = dataset.order(
        batch_samples,
        at_least_one(arguments.epochs, config.epochs, "epochs"),
        arguments.shuffle or config.order.shuffle,
        config.order.seed if arguments.seed is None else arguments.seed,
    )
    if arguments.reindex:
        dataset = add_index(dataset, order, beam_args, attempt)
    if arguments.hints is not None:
        write_hints(arguments.hints, sharding_hints(dataset, order))
    cache = replace(
        cache,
        lookahead=lookahead,
        prefetch_steps=min(cache.prefetch_steps, lookahead),
        rows=cache.rows if arguments.cache_rows is None else arguments.cache_rows,
    )
    tables = {
        name: _report(dataset, name, order, cache) for name in sorted(dataset.job.data.tables)
    }
    return {"num_steps": order.num_steps, "lookahead": lookahead, "tables": tables}


def open_segments(path: Path, segments: Sequence[str] | None) -> Dataset:
    """Open a dataset, or some of its segments."""
    dataset = open_dataset(path)
    return dataset if segments is None else select_segments(dataset, segments)


def _report(dataset: Dataset, table: str, order: Order, cache: CacheConfig) -> dict[str, Any]:
    policies = policy_reports(dataset, table, order, cache)
    load = index_load(dataset, table, order)
    return asdict(table_report(dataset, table, order, cache, policies)) | {
        "policies": {name: asdict(report) for name, report in policies.items()},
        "load": {
            "most_rows_per_step": int(load.rows_per_step.max(initial=0)),
            "slots": load.slots.tolist(),
            "reuse": load.reuse[: int(np.flatnonzero(load.reuse).max(initial=-1)) + 1].tolist(),
            "never": load.never,
        },
    }


def at_least_one(value: int | None, default: int, option: str) -> int:
    """Return the value of an option, or its default; raise ValueError if it is below 1."""
    if value is not None and value < 1:
        raise ValueError(f"--{option} must be at least 1, got {value}; raise it or leave it out")
    return default if value is None else value


def add_index(dataset: Dataset, order: Order, beam_args: list[str], attempt: str) -> Dataset:
    """Build the parts of an index that segments lack; return the dataset with them.

    A segment that is committed in the meantime gets its part, too, unless segments are selected.
    """
    root = dataset.directory
    scratch = root / f".index.{attempt}"
    ids = [s.id for s in dataset.segments] if dataset.unselected else None
    index = dataset.index_entry(order)
    while True:
        with scratch_directory(scratch, ".index.*"):
            segments, data = indexed_segments(dataset), dataset.job.data
            (extended,) = add_missing_parts([index], segments, data, scratch, beam_args)
            with locked_root(root) as manifest:
                _add_parts(root, manifest, extended, segments, scratch)
        dataset = open_segments(root, ids)
        index = dataset.index_entry(order)
        if index in dataset.complete_indexes():
            return dataset


def indexed_segments(dataset: Dataset) -> list[IndexedSegment]:
    """Return the segments of a dataset with their entries in the root manifest."""
    return list(map(IndexedSegment, dataset.references, dataset.segments))


def _add_parts(
    root: Path,
    manifest: DatasetManifest,
    extended: IndexEntry,
    segments: Sequence[IndexedSegment],
    scratch: Path,
) -> None:
    """Add the parts that are still missing to the root manifest, whose lock the caller holds."""
    indexes = {index.settings: index for index in manifest.indexes}
    index = indexes.get(extended.settings, replace(extended, parts={}))
    built = {
        indexed.reference.id: extended.parts[indexed.reference.id]
        for indexed in segments
        if indexed.reference in manifest.segments and indexed.reference.id not in index.parts
    }
    if built:
        install_parts(scratch, root, [replace(extended, parts=built)])
        indexes[index.settings] = replace(index, parts={**index.parts, **built})
        write_manifest(root, replace(manifest, indexes=tuple(indexes.values())))


HOT_SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5)
"""Shares of the distinct rows for which `hot_rows` returns the share of accesses."""
MISS_POINTS = 64
"""Points of the miss curve."""


def sharding_hints(dataset: Dataset, order: Order) -> dict[str, TableHints]:
    """Return the hints of every table.

    Raises:
        SchemaError: the dataset has no index for this order; the message gives the command.
    """
    index = dataset.index_for(order)
    values, bags, samples = _bags(dataset)
    hints: dict[str, TableHints] = {}
    for name, table in dataset.job.data.tables.items():
        accesses = TableAccesses(dataset, name, order)
        num_accesses, num_unique = index.num_accesses(name), len(accesses.rows)
        hints[name] = TableHints(
            feature_names=tuple(table.features),
            pooling_factors=tuple(
                values.get(f, 0) / max(1, bags.get(f, 0)) for f in table.features
            ),
            num_poolings=tuple(bags.get(f, 0) / max(1, samples) for f in table.features),
            batch_sizes=(order.blocks_per_batch * dataset.job.data.block_samples,)
            * len(table.features),
            num_rows=table.num_rows,
            num_unique_rows=num_unique,
            unique_rows_per_step=num_accesses / max(1, order.num_steps),
            hot_rows=hot_rows(accesses.steps(), num_unique),
            lru_misses=lru_misses(accesses.steps(), num_accesses, num_unique, table.num_rows),
        )
    return hints


def hot_rows(
    steps: Iterator[NDArray[np.int64]], num_unique: int
) -> tuple[tuple[float, float], ...]:
    """Return (share of rows, share of accesses) for the hottest rows; a row counts once per step.

    Example:
        >>> hot_rows(iter([np.array([0, 1]), np.array([0])]), 2)[-1]
        (0.5, 0.6666666666666666)
    """
    counts = np.zeros(num_unique, np.int64)
    for numbers in steps:
        counts[numbers] += 1
    hottest = np.cumsum(np.sort(counts)[::-1])
    if not num_unique:
        return ()
    sizes = [max(1, round(share * num_unique)) for share in HOT_SHARES]
    return tuple(
        (share, float(hottest[size - 1] / hottest[-1]))
        for share, size in zip(HOT_SHARES, sizes, strict=True)
    )


def lru_misses(
    steps: Iterator[NDArray[np.int64]], num_accesses: int, num_unique: int, num_rows: int
) -> tuple[tuple[float, float], ...]:
    """Return (cache size as a share of the table, misses as a share of repeated accesses)."""
    repeated = num_accesses - num_unique
    if repeated <= 0:
        return ((0.0, 1.0),)
    curve = lru_curve(steps, num_accesses, num_unique)
    indices = np.unique(np.geomspace(1, len(curve.capacities), MISS_POINTS).astype(np.int64)) - 1
    misses = 1 - curve.hit_rates[indices] * num_accesses / repeated
    shares = np.minimum(1.0, curve.capacities[indices] / num_rows)
    points = zip(shares.tolist(), np.clip(misses, 0.0, 1.0).tolist(), strict=True)
    return ((0.0, 1.0), *points)


def _bags(dataset: Dataset) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the values and bags of each feature over all segments, and the number of samples."""
    values: dict[str, float] = {}
    bags: dict[str, float] = {}
    num_samples = 0
    for segment in dataset.segments:
        statistics = segment_statistics(segment).datasets[0]
        num_samples += statistics.num_examples
        for feature in statistics.features:
            stats = getattr(feature, feature.WhichOneof("stats") or "num_stats")
            common, name = stats.common_stats, feature.path.step[0]
            values[name] = values.get(name, 0) + common.tot_num_values
            bags[name] = bags.get(name, 0) + common.num_non_missing + common.num_missing
    return values, bags, num_samples


@dataclass(frozen=True, slots=True)
class TableReport:
    """Fields of `oracle --json` for one table under the job's plan."""

    num_lookups: int
    num_lookups_dedup: int
    num_accesses: int
    num_unique_rows: int
    fetched_rows: int
    hit_rate: float
    peak_cache_rows: int


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Results of one policy with one cache size.

    Attributes:
        required_rows: smallest cache size that the plan fits.
        cache_rows: cache size; None for no limit.
        fetched_rows: rows read, first uses included; None, like the next three, if the plan does
            not fit the cache.
        written_rows: rows written back on eviction.
        hit_rate: share of accesses that need no read.
        peak_cache_rows: maximum number of rows in the cache, including those in flight.
    """

    required_rows: int
    cache_rows: int | None
    fetched_rows: int | None
    written_rows: int | None
    hit_rate: float | None
    peak_cache_rows: int | None


def policy_reports(
    dataset: Dataset, table: str, order: Order, cache: CacheConfig
) -> dict[str, PolicyReport]:
    """Run both policies over one table with `cache.rows`, or the peak of `ttl` if that is unset.

    Raises:
        SchemaError: the dataset has no index for this order; the message gives the command.
    """
    index, accesses = dataset.index_for(order), TableAccesses(dataset, table, order)
    next_uses = NextUses(dataset, index, table, accesses.numbering)
    ttl = policy_report(accesses, next_uses, replace(cache, policy="ttl"))
    rows = cache.rows or max(1, ttl.peak_cache_rows or 0)
    best = policy_report(accesses, next_uses, replace(cache, policy="belady", rows=rows))
    return {"ttl": ttl, "belady": best}


def policy_report(accesses: TableAccesses, next_uses: NextUses, cache: CacheConfig) -> PolicyReport:
    """Run one policy over one table."""
    required = required_rows(next_uses, cache)
    if cache.rows is not None and required > cache.rows:
        return PolicyReport(required, cache.rows, None, None, None, None)
    summary = summarize(Plan(indexed_steps(accesses, next_uses), cache))
    return PolicyReport(
        required_rows=required,
        cache_rows=cache.rows,
        fetched_rows=summary.fetched_rows,
        written_rows=summary.written_rows,
        hit_rate=summary.hit_rate,
        peak_cache_rows=summary.peak_cache_rows,
    )


def table_report(
    dataset: Dataset,
    table: str,
    order: Order,
    cache: CacheConfig,
    policies: Mapping[str, PolicyReport],
) -> TableReport:
    """Return the report of one table under the job's policy.

    Raises:
        PlanError: the cache is too small.
    """
    chosen = policies[cache.policy]
    if chosen.fetched_rows is None or chosen.hit_rate is None or chosen.peak_cache_rows is None:
        raise cache_too_small(cache, chosen.required_rows, table=table)
    manifests = [s.manifest for s in dataset.segments]  # older ones may lack a table
    counts = [m.tables[table] for m in manifests if table in m.tables]
    return TableReport(
        num_lookups=order.epochs * sum(c.num_lookups for c in counts),
        num_lookups_dedup=order.epochs * sum(c.num_lookups_dedup for c in counts),
        num_accesses=dataset.index_for(order).num_accesses(table),
        num_unique_rows=num_unique_rows(dataset, table),
        fetched_rows=chosen.fetched_rows,
        hit_rate=chosen.hit_rate,
        peak_cache_rows=chosen.peak_cache_rows,
    )
