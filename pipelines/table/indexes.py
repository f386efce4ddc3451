"""Indexes of a dataset: build, commit, report on cache policies: `pipelines oracle`."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
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
from pipelines.scratch import locked, locked_root, remove_partial, scratch_directory
from pipelines.table.segment import describe_files, directory_reference
from schemas.accesses import TableAccesses, TableHints, index_load, indexed_steps, write_hints
from schemas.cache_plan import Plan, cache_too_small, required_rows, summarize
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset, open_dataset, select_segments
from schemas.files import sha256_of, write_files
from schemas.layout import FILES, MANIFEST
from schemas.manifest import IndexManifest, Reference, hash_of, write_manifest
from schemas.miss_ratio import lru_curve
from schemas.order import Order

WORKER_BYTES = 4 << 20
"""Bytes of access lists, over all epochs, per worker; an index with less is built in process."""


def index_id(dataset: Dataset, order: Order) -> str:
    """Return the name of an index, a hash of its inputs."""
    source = [r.manifest_sha256 for r in dataset.manifest.segments]
    config = order.config
    key = [source, order.blocks_per_batch, order.epochs, config.shuffle, config.seed]
    return f"index-{hash_of(key)[:16]}"


def build_index(dataset: Dataset, order: Order, building: Path, beam_args: list[str]) -> Reference:
    """Build an index, unless it exists; return its reference for the root manifest.

    Args:
        dataset: an open dataset.
        order: global order of the run.
        building: hidden directory to build in, on the dataset's filesystem.
        beam_args: Beam options.
    """
    name = index_id(dataset, order)
    final = dataset.directory / name
    if not (final / MANIFEST).exists():
        with scratch_directory(building, ".index.*"):
            _write(dataset, order, building, beam_args, name)
            with locked(dataset.directory):
                if not (final / MANIFEST).exists():
                    shutil.rmtree(final, ignore_errors=True)
                    building.rename(final)
    return directory_reference(final)


def _write(dataset: Dataset, order: Order, root: Path, beam_args: list[str], name: str) -> None:
    totals = index_tables(dataset, order, root, beam_args) if dataset.job.data.tables else []
    shutil.rmtree(root / SCRATCH, ignore_errors=True)
    remove_partial(root)
    entries = describe_files(root)
    write_files(root / FILES, entries)
    manifest = IndexManifest(
        id=name,
        segments=tuple(s.id for s in dataset.segments),
        batch_samples=order.blocks_per_batch * dataset.job.data.block_samples,
        epochs=order.epochs,
        shuffle=order.config.shuffle,
        seed=order.config.seed,
        num_steps=order.num_steps,
        num_rows={t.table: t.num_rows for t in totals},
        num_accesses={t.table: t.num_entries for t in totals},
        oracle_bytes=sum(e.num_bytes for e in entries),
        files_sha256=sha256_of(root / FILES),
    )
    write_manifest(root, manifest)


def index_tables(
    dataset: Dataset, order: Order, root: Path, beam_args: list[str]
) -> list[TableTotals]:
    """Write every table's part of an index, on Beam or in this process."""
    size = order.epochs * sum(s.manifest.oracle_bytes for s in dataset.segments)
    if in_process(beam_args, is_small=size < WORKER_BYTES):
        return [_index_table(dataset, order, root, t) for t in sorted(dataset.job.data.tables)]
    return runner_module("build").run_index(dataset, order, root, beam_args, size // WORKER_BYTES)


def _index_table(dataset: Dataset, order: Order, root: Path, table: str) -> TableTotals:
    totals_or_plan = index_table(root, dataset, table, order, WORKER_ENTRIES)
    if isinstance(totals_or_plan, LinkingPlan):
        return totals_of(totals_or_plan, run_stages(totals_or_plan, LINKING_STAGES))
    return totals_or_plan


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
    """Build an index and add it to the root manifest; return the dataset with it.

    If a segment is committed in the meantime, an index of the whole dataset is built again.
    """
    root = dataset.directory
    ids = [s.id for s in dataset.segments] if dataset.unselected else None
    while True:
        reference = build_index(dataset, order, root / f".index.{attempt}", beam_args)
        with locked_root(root) as manifest:
            has_segments = set(dataset.manifest.segments) <= set(manifest.segments)
            is_current = ids is not None or manifest.segments == dataset.manifest.segments
            if has_segments and is_current and (root / reference.id).is_dir():
                if reference not in manifest.indexes:
                    write_manifest(root, replace(manifest, indexes=(*manifest.indexes, reference)))
                return open_segments(root, ids)
        dataset = open_segments(root, ids)
        order = dataset.order(
            order.blocks_per_batch * dataset.job.data.block_samples,
            order.epochs,
            order.config.shuffle,
            order.config.seed,
        )


HOT_SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5)
"""Shares of the distinct rows for which `hot_rows` returns the share of accesses."""
MISS_POINTS = 64
"""Points of the miss curve."""


def sharding_hints(dataset: Dataset, order: Order) -> dict[str, TableHints]:
    """Return the hints of every table.

    Raises:
        SchemaError: the dataset has no index for this order; the message gives the command.
    """
    index = dataset.index_for(order).manifest
    values, bags, samples = _bags(dataset)
    hints: dict[str, TableHints] = {}
    for name, table in dataset.job.data.tables.items():
        accesses = TableAccesses(dataset, name, order)
        num_accesses, num_unique = index.num_accesses[name], index.num_rows[name]
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
    ttl = policy_report(dataset, table, order, replace(cache, policy="ttl"))
    rows = cache.rows or max(1, ttl.peak_cache_rows or 0)
    best = policy_report(dataset, table, order, replace(cache, policy="belady", rows=rows))
    return {"ttl": ttl, "belady": best}


def policy_report(dataset: Dataset, table: str, order: Order, cache: CacheConfig) -> PolicyReport:
    """Run one policy over one table."""
    index = dataset.index_for(order)
    distances = map(index.steps(table).__getitem__, range(order.num_steps))
    required = required_rows(distances, cache)
    if cache.rows is not None and required > cache.rows:
        return PolicyReport(required, cache.rows, None, None, None, None)
    summary = summarize(Plan(indexed_steps(dataset, index, table, order), cache))
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
    index = dataset.index_for(order).manifest
    manifests = [s.manifest for s in dataset.segments]  # older ones may lack a table
    counts = [m.tables[table] for m in manifests if table in m.tables]
    return TableReport(
        num_lookups=order.epochs * sum(c.num_lookups for c in counts),
        num_lookups_dedup=order.epochs * sum(c.num_lookups_dedup for c in counts),
        num_accesses=index.num_accesses[table],
        num_unique_rows=index.num_rows[table],
        fetched_rows=chosen.fetched_rows,
        hit_rate=chosen.hit_rate,
        peak_cache_rows=chosen.peak_cache_rows,
    )
