"""`pipelines oracle`: what a plan will do with each table, and indexes for other settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.oracle.hints import hints_of
from pipelines.oracle.index import build_index
from pipelines.oracle.policies import policy_reports, table_report
from pipelines.segments.commit import commit_root
from pipelines.segments.lock import locked
from schemas.accesses import index_load
from schemas.chosen import choose
from schemas.dataset import Dataset, open_dataset, verified_version
from schemas.hints import write_hints
from schemas.job_train import CacheConfig
from schemas.layout import JOB, SCHEMA
from schemas.manifest import read_dataset
from schemas.order import Order


def oracle(arguments: argparse.Namespace, beam_args: list[str], attempt: str) -> dict[str, Any]:
    """Report, after building an index when asked to.

    Args:
        arguments: of the command.
        beam_args: Beam options.
        attempt: name of this attempt.
    """
    dataset = open_chosen(arguments.dataset, arguments.segments)
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
        write_hints(arguments.hints, hints_of(dataset, order))
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


def open_chosen(path: Path, segments: Sequence[str] | None) -> Dataset:
    """Open a dataset, of which only some segments may be wanted."""
    dataset = open_dataset(path)
    return dataset if segments is None else choose(dataset, segments)


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


def at_least_one(given: int | None, default: int, option: str) -> int:
    """Return what an option says, or the default when it is not given.

    Raises:
        ValueError: it is below one.
    """
    if given is not None and given < 1:
        raise ValueError(f"--{option} must be at least 1, got {given}; raise it or leave it out")
    return default if given is None else given


def add_index(dataset: Dataset, order: Order, beam_args: list[str], attempt: str) -> Dataset:
    """Build an index and name it in the root manifest, after the ones that are there.

    When a segment comes meanwhile, the index is built again, over it too.
    """
    root = dataset.directory
    ids = [s.manifest.id for s in dataset.segments] if dataset.others else None
    while True:
        reference = build_index(dataset, order, root / f".index.{attempt}", beam_args)
        with locked(root):
            manifest = read_dataset(root)
            same = set(dataset.manifest.segments) <= set(manifest.segments)
            whole = ids is not None or manifest.segments == dataset.manifest.segments
            if same and whole and (root / reference.id).is_dir():
                if reference not in manifest.indexes:
                    commit_root(
                        root,
                        manifest.name,
                        verified_version(root / JOB, manifest.job_sha256).read_bytes(),
                        verified_version(root / SCHEMA, manifest.schema_sha256).read_bytes(),
                        manifest.segments,
                        [*manifest.indexes, reference],
                        finished=manifest.finished,
                        lineage=manifest.lineage,
                        tombstones_sha256=manifest.tombstones_sha256,
                    )
                return open_chosen(root, ids)
        dataset = open_chosen(root, ids)
        order = dataset.order(
            order.blocks_per_batch * dataset.job.data.block_samples,
            order.epochs,
            order.config.shuffle,
            order.config.seed,
        )
