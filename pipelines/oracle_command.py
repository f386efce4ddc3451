"""`pipelines oracle`: what a plan will do with each table, and indexes for other settings."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from pipelines.commit import commit_root
from pipelines.index import build_index
from pipelines.lock import locked
from pipelines.oracle import report_table
from schemas.dataset import Dataset, open_dataset
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
    dataset = open_dataset(arguments.dataset)
    config = dataset.job.data.oracle
    order = dataset.order(
        arguments.batch_samples or config.batch_samples,
        arguments.epochs or config.epochs,
        config.order.shuffle,
        config.order.seed,
    )
    if arguments.reindex:
        dataset = add_index(dataset, order, beam_args, attempt)
    cache = dataset.job.train.cache
    lookahead = arguments.lookahead or cache.lookahead
    prefetch = min(cache.prefetch_steps, lookahead)
    tables = {
        name: asdict(report_table(dataset, name, order, lookahead, prefetch, arguments.cache_rows))
        for name in sorted(dataset.job.data.tables)
    }
    return {"num_steps": order.num_steps, "lookahead": lookahead, "tables": tables}


def add_index(dataset: Dataset, order: Order, beam_args: list[str], attempt: str) -> Dataset:
    """Build an index and name it in the root manifest, after the ones that are there."""
    root = dataset.directory
    reference = build_index(dataset, order, root / f".index.{attempt}", beam_args)
    with locked(root):
        manifest = read_dataset(root)  # another index may have come meanwhile
        if reference not in manifest.indexes:
            commit_root(
                root,
                manifest.name,
                (root / JOB).read_bytes(),
                (root / SCHEMA).read_bytes(),
                manifest.segments,
                [*manifest.indexes, reference],
            )
    return open_dataset(dataset.directory)
