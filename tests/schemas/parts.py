"""Indexes, written step by step as in `schemas/formats/oracle.md`, and datasets of access lists."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.schemas import layout
from presage.schemas.arrays import Jagged, is_list, large_list, offsets_of
from presage.schemas.config.job import parse_job
from presage.schemas.dataset.checked_files import ListFiles
from presage.schemas.dataset.files import FileEntry, describe_file, sha256_of, write_files
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    IndexEntry,
    IndexManifest,
    Reference,
    SegmentManifest,
    TableCounts,
    new_index,
    shuffle_key_of,
    write_manifest,
)
from presage.schemas.dataset.opened import OpenDataset, Segment, access_lists
from presage.schemas.dataset.order import Order
from presage.schemas.features import FeatureSet
from presage.schemas.kernels.oracle import FirstUseNumbering
from presage.schemas.oracle.next_uses import from_gaps, sorted_gaps
from presage.schemas.oracle.reuse import reuse_bounds
from presage.schemas.storage.location import Location
from tests.schemas.reference import next_use


def numbered(accesses: Jagged) -> tuple[Jagged, np.ndarray, np.ndarray]:
    """Return the ascending numbers of each block, and by number its row and first block."""
    numbering = FirstUseNumbering()
    codes, *flat = numbering.number(accesses.values, accesses.offsets)
    new = Jagged(*flat)
    first = np.repeat(np.arange(new.num_rows, dtype=np.int32), new.lengths)
    gaps = sorted_gaps(Jagged(codes, accesses.offsets), max(1, numbering.count))
    return from_gaps(Jagged(gaps, accesses.offsets)), new.values, first


def num_entries(table: pa.Table, columns: Iterable[str]) -> int:
    """Return the entries of some columns; a value that is no list is one."""
    flat = [table[name].combine_chunks() for name in columns if name in table.column_names]
    return sum(len(each.flatten() if is_list(each.type) else each) for each in flat)


def gaps_of(numbers: Jagged) -> np.ndarray:
    """Return the gaps of lists of numbers below 2**31."""
    size = int(numbers.values.max(initial=0)) + 1
    return sorted_gaps(Jagged(numbers.values.astype(np.int32), numbers.offsets), size)


def write_index(dataset: OpenDataset, entry: IndexEntry) -> IndexEntry:
    """Write a part of an index for each segment; returns the index with them."""
    parts = {segment.id: write_part(dataset, entry, segment) for segment in dataset.segments}
    return replace(entry, parts={**entry.parts, **parts})


def write_part(dataset: OpenDataset, entry: IndexEntry, segment: Segment) -> Reference:
    """Write the part of one segment, the next uses in two files."""
    root = Path(dataset.directory / entry.id / segment.id)
    reference = segment.reference
    is_shuffled = entry.shuffle != "none"
    alone = replace(dataset, segments=(segment,))
    epochs = entry.epochs if is_shuffled else 1
    order = alone.order(entry.batch_samples, epochs, entry.shuffle, entry.seed)
    num_accesses: dict[str, tuple[int, ...]] = {}
    names: list[str] = []
    for table in segment.manifest.tables:
        lists = ListFiles(segment.access_files(table), access_lists)
        distances, uses = uses_of(lists, order)
        per_epoch = np.array([len(step) for step in distances], int).reshape(epochs, -1).sum(axis=1)
        num_accesses[table] = tuple(per_epoch.tolist())
        half = (len(distances) + 1) // 2
        for file, (start, end) in enumerate([(0, half), (half, len(distances))]):
            steps = distances[start:end]
            flat = np.array([d for step in steps for d in step], np.int32)
            lists = large_list(flat, offsets_of(np.array(list(map(len, steps)), np.int64)))
            columns = [pa.array(np.arange(start, end)), lists]
            names.append(layout.part_path(file, table))
            write(root / names[-1], pa.table(columns, layout.index_schema()))
        names += write_reuse(root, table, distances, order.steps_per_epoch)
        for epoch, (first, last) in enumerate(uses):
            half = len(first) // 2
            for file, rows in enumerate((slice(0, half), slice(half, None))):
                names.append(layout.part_path(file, table, f"uses-{epoch:05d}"))
                write(root / names[-1], pa.table([first[rows], last[rows]], layout.USES_SCHEMA))
    root.mkdir(parents=True, exist_ok=True)
    entries = [describe_file(root / name, name) for name in sorted(names)]
    manifest = IndexManifest(
        segment_sha256=reference.manifest_sha256,
        shuffle_key=shuffle_key_of(reference) if is_shuffled else None,
        batch_samples=entry.batch_samples,
        epochs=entry.epochs,
        shuffle=entry.shuffle,
        seed=entry.seed,
        num_steps=order.steps_per_epoch,
        num_accesses=num_accesses,
        oracle_bytes=0,
        files_sha256=write_files(root / layout.FILES, entries),
    )
    return Reference(id=root.name, manifest_sha256=write_manifest(root, manifest))


def write_reuse(
    root: Path, table: str, distances: list[list[int]], steps_per_epoch: int
) -> list[str]:
    """Write the reuse of a table in two files; return their names."""
    bounds = reuse_bounds(steps_per_epoch)
    rows: list[list[int]] = []
    for step, following in enumerate(distances):
        preceding = [step - s for s in range(step) for d in distances[s] if d == step - s]
        ranges = list(zip([0, *bounds], bounds, strict=False))
        both = ((of, *each) for of in (following, preceding) for each in ranges)
        counts = (sum(low < d <= high for d in of) for of, low, high in both)
        rows.append([len(following), *counts])
    schema, half = layout.reuse_schema(bounds), len(rows) // 2
    names: list[str] = []
    for file, part in enumerate((rows[:half], rows[half:])):
        names.append(layout.part_path(file, table, "reuse"))
        columns = [pa.array([row[i] for row in part], pa.int32()) for i in range(len(schema))]
        write(root / names[-1], pa.table(columns, schema))
    return names


def uses_of(
    lists: ListFiles, order: Order
) -> tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]]:
    """The distances of each step within its epoch; first and last step of each number."""
    distances: list[list[int]] = []
    uses: list[tuple[np.ndarray, np.ndarray]] = []
    for epoch in range(order.epochs):
        first, last = {}, {}
        steps: list[list[int]] = []
        for step in range(order.steps_per_epoch):
            positions = order.step(epoch * order.steps_per_epoch + step).positions
            steps.append(np.unique(np.concatenate([lists[p] for p in positions])).tolist())
            for number in steps[-1]:
                first.setdefault(number, step)
                last[number] = step
        distances += next_use(steps)
        count = len(first)
        steps_of = (np.array([of[n] for n in range(count)], np.int32) for of in (first, last))
        first_steps, last_steps = steps_of
        uses.append((first_steps, last_steps))
    return distances, uses


def write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


JOB = """\
name: lists
data:
  sources: {log: {files: "*.parquet", format: parquet}}
  samples: {map: SELECT * FROM log}
  session: {key: session_id, time: time}
  tables:
    items: {features: [item_id], num_rows: 50, rows: identity}
  block_samples: 16
"""


def write_lists(
    root: Path,
    segments: Sequence[Sequence[np.ndarray] | None],
    settings: tuple[int, int, str, int],
    keys: Mapping[int, int] = {},
) -> OpenDataset:
    """Write access lists, edges and an index of one table, without samples.

    Args:
        root: a new directory.
        segments: for each segment the distinct ascending rows of its blocks; None if it was built
            before the table was declared.
        settings: samples of a batch, epochs, shuffle and seed.
        keys: shuffle keys of segments.
    """
    opened = tuple(
        _write_segment(root, number, lists, keys.get(number))
        for number, lists in enumerate(segments)
    )
    manifest = DatasetManifest(
        writer="test",
        name="lists",
        job_sha256="",
        schema_sha256="",
        segments=tuple(segment.reference for segment in opened),
    )
    job = parse_job(JOB, "job.yaml")
    dataset = OpenDataset(Location.parse(root), manifest, job, FeatureSet(()), opened)
    index = write_index(dataset, new_index(*settings))
    return replace(dataset, manifest=replace(manifest, indexes=(index,)))


def _write_segment(
    root: Path, number: int, lists: Sequence[np.ndarray] | None, shuffle_key: int | None
) -> Segment:
    directory = root / layout.SEGMENTS / f"{number:05d}-lists"
    directory.mkdir(parents=True)
    files: dict[str, FileEntry] = {}
    tables: dict[str, TableCounts] = {}
    blocks = [] if lists is None else lists
    if lists is not None:
        offsets = offsets_of(np.array(list(map(len, lists)), np.int64))
        values = np.concatenate([np.empty(0, np.int64), *lists])
        numbers, rows, _ = numbered(Jagged(values, offsets))
        gaps = large_list(gaps_of(numbers), numbers.offsets)
        path = layout.part_path(0, "access", "items")
        write(directory / path, pa.table([np.arange(len(lists)), gaps], layout.access_schema()))
        files[path] = describe_file(directory / path, path)
        path = layout.part_path(0, "edges", "items")
        write(directory / path, pa.table([rows], layout.EDGES_SCHEMA))
        files[path] = describe_file(directory / path, path)
        counts = {"num_lookups": 0, "num_lookups_dedup": 0, "num_unique_rows": len(rows)}
        tables["items"] = TableCounts(**counts)
    numbers = np.arange(len(blocks))
    columns = {
        "block": numbers,
        "split": ["train"] * len(blocks),
        "window": 0 * numbers,
        "file": 0 * numbers,
        "row_group": numbers // 2,
        "num_samples": 0 * numbers + 16,
        "num_sessions": 0 * numbers,
        "weight": 0 * numbers + 16.0,
        "num_lookups": 0 * numbers,
        "num_lookups_dedup": 0 * numbers,
    }
    write(directory / layout.BLOCKS, pa.table(columns).cast(layout.blocks_schema([])))
    manifest = SegmentManifest(
        num_samples=0,
        num_sessions=0,
        num_rejects=0,
        input_bytes=0,
        dataset_bytes=0,
        oracle_bytes=0,
        splits={"train": (0, len(blocks))},
        groups={},
        tables=tables,
        listing=(),
        job_sha256=str([len(rows) for rows in blocks]),
        schema_sha256="",
        blocks_sha256=sha256_of(directory / layout.BLOCKS),
        files_sha256=write_files(directory / layout.FILES, list(files.values())),
        directories=tuple(sorted({path.rpartition("/")[0] for path in files})),
        partition_key="session_id",
        num_parts=1,
        columns={} if lists is None else {"item_id": "int64"},
    )
    sha256 = write_manifest(directory, manifest)
    reference = Reference(id=directory.name, manifest_sha256=sha256, shuffle_key=shuffle_key)
    return Segment(Location.parse(directory), reference, manifest)
