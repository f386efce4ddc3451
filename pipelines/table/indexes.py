"""Build indexes of a dataset, commit them and report on them: `pipelines oracle`."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.atomic_files import remove_partial
from pipelines.oracle.files import run_stages
from pipelines.oracle.index import SCRATCH, TableTotals, index_table, totals_of
from pipelines.oracle.linking import LINKING_STAGES, LinkingPlan
from pipelines.oracle.numbering import WORKER_ENTRIES
from pipelines.oracle.policies import policy_reports, sharding_hints, table_report
from pipelines.runners import in_process, runner_module
from pipelines.table.commit import describe_files, directory_reference
from pipelines.table.locks import locked, scratch_directory
from schemas.accesses import index_load
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset, open_dataset, select_segments
from schemas.files import sha256_of, write_files
from schemas.layout import FILES, MANIFEST
from schemas.manifest import IndexManifest, Reference, hash_of, read_dataset, write_manifest
from schemas.order import Order
from schemas.sharding_hints import write_hints

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
        segments=tuple(s.manifest.id for s in dataset.segments),
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
    counts_or_plan = index_table(root, dataset, table, order, WORKER_ENTRIES)
    if isinstance(counts_or_plan, LinkingPlan):
        return totals_of(table, counts_or_plan, run_stages(counts_or_plan, LINKING_STAGES))
    return TableTotals(table, *counts_or_plan)


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
    ids = [s.manifest.id for s in dataset.segments] if dataset.unselected else None
    while True:
        reference = build_index(dataset, order, root / f".index.{attempt}", beam_args)
        with locked(root):
            manifest = read_dataset(root)
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
