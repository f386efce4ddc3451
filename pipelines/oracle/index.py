"""Build an index of a dataset for one order, and commit it."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipelines.oracle.index_table import SCRATCH, TableTotals, index_table, totals_of
from pipelines.oracle.linking import LINKING, LinkingPlan
from pipelines.oracle.numbering import WORKER_ENTRIES
from pipelines.oracle.rounds import run_rounds
from pipelines.runners import in_process, runner_module
from pipelines.segments.commit import describe_tree, reference_of
from pipelines.segments.lock import locked, workplace
from pipelines.segments.partial import remove_partial
from schemas.checked import sha256_of, write_files
from schemas.dataset import Dataset
from schemas.layout import FILES, MANIFEST
from schemas.manifest import IndexManifest, Reference, hash_of, write_manifest
from schemas.order import Order

PIECE_BYTES = 4 << 20
"""Bytes of access lists, over all epochs, that are a worker's share; above, rounds spread."""


def index_id(dataset: Dataset, order: Order) -> str:
    """Return the name of an index: a hash of everything it is derived from."""
    source = [r.manifest_sha256 for r in dataset.manifest.segments]
    config = order.config
    key = [source, order.blocks_per_batch, order.epochs, config.shuffle, config.seed]
    return f"index-{hash_of(key)[:16]}"


def build_index(dataset: Dataset, order: Order, building: Path, beam_args: list[str]) -> Reference:
    """Build and commit an index; one that is already there is kept.

    Args:
        dataset: an open dataset.
        order: global order of the run.
        building: hidden directory to build in, on the dataset's filesystem.
        beam_args: Beam options.

    Returns:
        The name and hash for the root manifest.
    """
    name = index_id(dataset, order)
    final = dataset.directory / name
    if not (final / MANIFEST).exists():
        with workplace(building, ".index.*"):
            _write(dataset, order, building, beam_args, name)
            with locked(dataset.directory):
                if not (final / MANIFEST).exists():
                    shutil.rmtree(final, ignore_errors=True)
                    building.rename(final)
    return reference_of(final)


def _write(dataset: Dataset, order: Order, root: Path, beam_args: list[str], name: str) -> None:
    totals = index_tables(dataset, order, root, beam_args) if dataset.job.data.tables else []
    shutil.rmtree(root / SCRATCH, ignore_errors=True)
    remove_partial(root)
    entries = describe_tree(root)
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
    if in_process(beam_args, is_small=size < PIECE_BYTES):
        return [_index_table(dataset, order, root, t) for t in sorted(dataset.job.data.tables)]
    return runner_module("segment").run_index(dataset, order, root, beam_args, size // PIECE_BYTES)


def _index_table(dataset: Dataset, order: Order, root: Path, table: str) -> TableTotals:
    made = index_table(root, dataset, table, order, WORKER_ENTRIES)
    if isinstance(made, LinkingPlan):
        return totals_of(table, made, run_rounds(made, LINKING))
    return TableTotals(table, *made)
