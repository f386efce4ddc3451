"""Build an index of a dataset for one order, on Beam, and commit it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam

from pipelines.beam.memory import keep_freed_memory
from pipelines.beam.runner import run_pipeline
from pipelines.oracle.index_table import SCRATCH, index_table
from pipelines.oracle.linking import LINKING, LinkingPlan
from pipelines.oracle.numbering import WORKER_ENTRIES
from pipelines.oracle.rounds import InRounds
from pipelines.segments.commit import describe_tree, reference_of
from pipelines.segments.lock import locked, workplace
from pipelines.segments.partial import remove_partial
from schemas.checked import sha256_of, write_files
from schemas.chosen import choose
from schemas.dataset import Dataset, open_dataset
from schemas.layout import FILES, MANIFEST
from schemas.manifest import IndexManifest, Reference, hash_of, write_manifest
from schemas.order import Order

PIECE_BYTES = 4 << 20
"""Bytes of access lists, over all epochs, that are a worker's share; above, rounds spread."""

_DONE, _PLANS = "done", "plans"


@dataclass(frozen=True, slots=True)
class TableTotals:
    """What the manifest says of one table's part of the index."""

    table: str
    num_rows: int
    num_entries: int


class _IndexTable(beam.DoFn):
    """Links a small table; plans the rounds of a large one."""

    def __init__(self, root: Path, dataset: Dataset, order: Order, worker_entries: int) -> None:
        self.root, self.path, self.order = root, dataset.directory, order
        self.ids = [s.manifest.id for s in dataset.segments]
        self.worker_entries = worker_entries

    def setup(self) -> None:
        keep_freed_memory()
        self.dataset = choose(open_dataset(self.path), self.ids)

    def process(self, table: str) -> Iterator[Any]:
        made = index_table(self.root, self.dataset, table, self.order, self.worker_entries)
        if isinstance(made, LinkingPlan):
            yield table, made
        else:
            yield beam.pvalue.TaggedOutput(_DONE, TableTotals(table, *made))


def _totals(table: str, done: Iterable[tuple[LinkingPlan, int, int]]) -> TableTotals:
    found = list(done)
    return TableTotals(table, found[0][0].num_numbers, sum(entries for _, _, entries in found))


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
    size = order.epochs * sum(s.manifest.oracle_bytes for s in dataset.segments)
    pieces = size // PIECE_BYTES

    def make(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        made = (
            pipeline
            | "list tables" >> beam.Create(sorted(dataset.job.data.tables))
            | "spread tables" >> beam.Reshuffle()
            | "index tables"
            >> beam.ParDo(_IndexTable(root, dataset, order, WORKER_ENTRIES)).with_outputs(
                _DONE, main=_PLANS
            )
        )
        linked = made[_PLANS] | "large tables" >> InRounds(LINKING, spread=pieces > 0)
        totals = linked | "count entries" >> beam.MapTuple(_totals)
        return {"tables": (made[_DONE], totals) | "join tables" >> beam.Flatten()}

    totals: list[TableTotals] = []
    if dataset.job.data.tables:
        totals = run_pipeline(make, beam_args, root, 1 + pieces).values["tables"]
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
