"""Verify a dataset: recompute the counts, checksums, access lists and next uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.histories.causality import find_leaks, find_stale
from presage.pipelines.histories.stored_events import history_problems
from presage.pipelines.oracle.history_lists import write_history_lists
from presage.pipelines.sources.raw_rows import microseconds
from presage.pipelines.table.commit import anomalies_text_of, position_of_day
from presage.pipelines.table.segment import reads_day, rewritten_key, segment_key, sum_bytes
from presage.schemas.arrays import (
    Jagged,
    check_inverse,
    comparable_tuple,
    is_list,
    numpy_of,
    offsets_of,
    one_chunk,
    unique_tuples,
    values_of,
)
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.checked_files import ListFiles
from presage.schemas.dataset.defaults import constant_column, missing_column_defaults, type_name
from presage.schemas.dataset.files import find_damaged_files
from presage.schemas.dataset.fitted import load_fitted
from presage.schemas.dataset.group_files import read_group
from presage.schemas.dataset.manifest import GroupCounts, IndexEntry, TableCounts, previous_names
from presage.schemas.dataset.opened import (
    IndexPart,
    OpenDataset,
    Segment,
    access_lists,
    open_dataset,
    with_lists,
)
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.samples import (
    blocks_of_row_group,
    read_sample_column,
    row_groups,
    tuples_of_samples,
)
from presage.schemas.errors import SchemaError
from presage.schemas.layout import (
    BLOCK,
    DATA_DIRECTORIES,
    TRAIN,
    internal_columns,
    num_unique_column,
    part_path,
    reuse_schema,
)
from presage.schemas.oracle.next_uses import NextUseTracker, unique_per_block
from presage.schemas.oracle.reuse import ReuseCounts
from presage.schemas.rows import ids_of, rows_of_ids
from presage.schemas.storage.location import Location

SETTINGS = ("batch_samples", "epochs", "shuffle", "seed", "histories")
"""Settings of an index that each of its parts repeats."""


def verify(path: Path | Location) -> dict[str, Any]:
    """Verify a dataset.

    Returns:
        `num_samples, num_segments, num_blocks, problems`; without problems, all counts, checksums,
        tuples, access lists and next uses are correct.
    """
    problems: list[str] = []
    dataset = open_dataset(path)
    for segment in dataset.segments:
        problems.extend(f"{segment.id}/{p}" for p in segment_problems(segment, dataset))
    sound = not problems
    problems.extend(reference_problems(dataset))
    problems.extend(type_problems(dataset))
    named = [(s.id, s.manifest) for s in dataset.segments]
    problems.extend(find_leaks(named))
    problems.extend(line for _, line in find_stale(named))
    for index in dataset.manifest.indexes:
        for segment in dataset.segments:
            if segment.id in index.parts:
                others = tuple(s for s in dataset.segments if s is not segment)
                one = replace(dataset, segments=(segment,), unselected=others)
                problems_of_part = part_problems(one, index, sound)
                problems.extend(
                    f"{index.id}/{index.parts[segment.id].id}/{p}" for p in problems_of_part
                )
    return {
        "num_samples": sum(s.manifest.num_samples for s in dataset.segments),
        "num_segments": len(dataset.segments),
        "num_blocks": sum(s.manifest.num_blocks for s in dataset.segments),
        "problems": problems,
    }


def reference_problems(dataset: OpenDataset) -> Iterator[str]:
    """Yield a line for each segment whose id or day in the root is not that of its manifest."""
    for segment in dataset.segments:
        manifest, (_, _, key) = segment.manifest, segment.id.partition("-")
        label = segment.day if reads_day(dataset.job.data) else None
        hashes = manifest.job_sha256, manifest.schema_sha256
        built = segment_key(*hashes, manifest.listing, label)
        earlier = previous_names(dataset.manifest.lineage, segment.id)
        keys = {rewritten_key(name.partition("-")[2], manifest) for name in earlier}
        if key != built and key not in keys:
            yield f"{segment.id}: id must end with {built}, the hash of job, schema and input"
        day = segment.day and date.fromisoformat(segment.day)
        if day and position_of_day(day) != segment.reference.position:
            yield f"{segment.id}: position must be {position_of_day(day)}, that of {day}"


def segment_problems(segment: Segment, dataset: OpenDataset) -> Iterator[str]:
    """Yield the problems of a segment, one line each."""
    damaged = find_damaged_files(segment.directory, segment.files)
    yield from damaged
    if damaged:
        return
    try:
        load_fitted(dataset.directory, segment.manifest.fitted, dataset.job.data)
        counts, accesses = StoredCounts(segment, dataset), _Accesses(segment, dataset)
        for file_index, row_group in row_groups(segment):
            location = f"row group {row_group} of part {file_index}"
            blocks = blocks_of_row_group(segment, file_index, row_group)
            samples = segment.file(part_path(file_index, "samples")).read_row_group(row_group)
            expected = int(segment.column("num_samples")[blocks].sum())
            if samples.num_rows != expected:
                yield f"{location}: {samples.num_rows} samples instead of {expected}"
                continue
            stored = _read_groups(segment, dataset, file_index, row_group, samples)
            for group in stored.tuples:
                yield from _group_problems(segment, dataset, stored, group, location)
            yield from _block_problems(segment, dataset, stored, location)
            counts.add(stored)
            accesses.compare(stored)
        yield from count_problems(segment, dataset, counts)
        yield from history_problems(segment, dataset.job.data)
        yield from accesses.problems()
        anomalies_text_of(segment)  # raises if it is missing or changed
    except SchemaError as error:
        yield str(error)


@dataclass(frozen=True, slots=True)
class _StoredRowGroup:
    """A row group as it is stored: not one row per sample in the groups.

    Attributes:
        positions: (num_blocks,) of its blocks in the segment.
        samples: its samples.
        tuples: those of each group.
        uses: by group, (num_tuples,) the samples with each tuple.
    """

    positions: NDArray[np.int64]
    samples: pa.Table
    tuples: Mapping[str, pa.Table]
    uses: Mapping[str, NDArray[np.int64]]


def _read_groups(
    segment: Segment, dataset: OpenDataset, file_index: int, row_group: int, samples: pa.Table
) -> _StoredRowGroup:
    """Read the groups of a row group; raise SchemaError if an inverse index is out of range."""
    blocks = blocks_of_row_group(segment, file_index, row_group)
    tuples: dict[str, pa.Table] = {}
    uses: dict[str, NDArray[np.int64]] = {}
    for group in dataset.job.data.groups:
        tuples[group] = read_group(segment.file, group, file_index, row_group)
        rows = tuples_of_samples(segment, group, blocks, samples)
        check_inverse(rows, tuples[group].num_rows)
        uses[group] = np.bincount(rows, minlength=tuples[group].num_rows)
    return _StoredRowGroup(np.flatnonzero(blocks), samples, tuples, uses)


def count_problems(segment: Segment, dataset: OpenDataset, counts: StoredCounts) -> Iterator[str]:
    """Yield a line for each wrong field of a segment's manifest."""
    m = segment.manifest
    claims: dict[str, tuple[object, object]] = {
        "num_samples": (m.num_samples, int(segment.column("num_samples").sum())),
        "num_sessions": (m.num_sessions, num_sessions(segment, dataset.job.data)),
        "num_blocks": (m.num_blocks, segment.blocks.num_rows),
        "num_rejects": (m.num_rejects, num_rejects(segment)),
        "input_bytes": (m.input_bytes, sum(f.num_bytes for f in m.listing)),
        "dataset_bytes": (m.dataset_bytes, _bytes(segment, *DATA_DIRECTORIES)),
        "oracle_bytes": (m.oracle_bytes, _bytes(segment, "access/", "edges/")),
        "columns": (dict(m.columns), counts.types),
    }
    for group, group_counts in counts.groups().items():
        if group not in m.groups:
            yield f"MANIFEST.json: groups lacks {group}"
            continue
        unique = int(segment.num_unique(group).sum())
        claims[num_unique_column(group)] = m.groups[group].num_unique, unique
        claims[f"groups.{group}"] = asdict(m.groups[group]), asdict(group_counts)
    for table, table_counts in counts.tables().items():
        claims[f"tables.{table}"] = asdict(m.tables[table]), asdict(table_counts)
    yield from _differences(claims)


def _differences(claims: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """Yield a line for each field whose value in the manifest differs from the stored value."""
    for name, (claimed, stored) in claims.items():
        if claimed != stored:
            yield f"MANIFEST.json: {name} is {claimed}, stored are {stored}"


def _bytes(segment: Segment, *directories: str) -> int:
    return sum_bytes(list(segment.files.values()), *directories)


def num_rejects(segment: Segment) -> int:
    """Return the number of stored rejects."""
    paths = [path for path in segment.files if path.startswith("rejects/")]
    return sum(segment.file(path).num_rows for path in paths)


def num_sessions(segment: Segment, data: DataConfig) -> int:
    """Return the number of sessions of a segment; each is in one part."""
    session, total = data.session, 0
    parts = row_groups(segment)
    for number in dict.fromkeys(file_index for file_index, _ in parts):
        key, time = (
            one_chunk(
                pa.chunked_array(
                    [read_sample_column(segment, f, g, data, name) for f, g in parts if f == number]
                )
            )
            for name in (session.key, session.time)
        )
        codes = pc.rank(key, tiebreaker="dense").to_numpy()
        times = pc.cast(time, pa.int64()).to_numpy()
        order = np.lexsort((times, codes))
        starts = np.diff(codes[order], prepend=0) != 0  # ranks begin with 1
        if session.gap is not None:
            starts[1:] |= np.diff(times[order]) > microseconds(session.gap)
        total += int(starts.sum())
    return total


class StoredCounts:
    """Counts of list values of groups and look-ups of tables, with and without deduplication.

    Attributes:
        types: of all columns.
    """

    def __init__(self, segment: Segment, dataset: OpenDataset) -> None:
        self._segment, self._dataset = segment, dataset
        self._missing = missing_column_defaults(dataset, segment)
        self._values, self._stored_values = Counter[str](), Counter[str]()
        self._unique = Counter[str]()
        self._lookups, self._stored_lookups = Counter[str](), Counter[str]()
        self.types: dict[str, str] = {}

    def add(self, stored: _StoredRowGroup) -> None:
        """Count a row group."""
        data = self._dataset.job.data
        hidden = internal_columns(data.groups, data.histories)
        for table in (stored.samples, *stored.tuples.values()):
            self.types |= {f.name: type_name(f.type) for f in table.schema if f.name not in hidden}
        for group, table in stored.tuples.items():
            self._unique[group] += table.num_rows
            for name in table.column_names:
                if name not in hidden and is_list(table.schema.field(name).type):
                    lengths = np.diff(values_of(table[name])[1])
                    self._values[group] += int(lengths @ stored.uses[group])
                    self._stored_values[group] += int(lengths.sum())
        if stored.positions[0] not in self._segment.positions(TRAIN):
            return
        for feature, name in data.table_of_feature.items():
            if feature not in self._missing:
                group = data.group_of_column.get(feature)
                owner = stored.samples if group is None else stored.tuples[group]
                lengths = np.diff(values_of(owner[feature])[1])
                self._stored_lookups[name] += int(lengths.sum())
                self._lookups[name] += int(
                    lengths.sum() if group is None else lengths @ stored.uses[group]
                )

    def groups(self) -> dict[str, GroupCounts]:
        """Return the counts of each group."""
        num_samples = int(self._segment.column("num_samples").sum())
        return {
            g: GroupCounts(
                num_unique=self._unique[g],
                dedup_factor=round(num_samples / self._unique[g], 6),
                num_values=self._values[g],
                num_values_dedup=self._stored_values[g],
            )
            for g in self._dataset.job.data.groups
        }

    def tables(self) -> dict[str, TableCounts]:
        """Return the counts of each table of the segment."""
        return {
            t: TableCounts(
                num_lookups=self._lookups[t],
                num_lookups_dedup=self._stored_lookups[t],
                num_unique_rows=sum(f.num_rows for f in self._segment.edge_files(t)),
            )
            for t in self._dataset.job.data.tables
            if t in self._segment.manifest.tables
        }


def _group_problems(
    segment: Segment, dataset: OpenDataset, stored: _StoredRowGroup, group: str, location: str
) -> Iterator[str]:
    table, location = stored.tuples[group], f"group {group} in {location}"
    blocks, chosen = numpy_of(table[BLOCK]), stored.positions
    expected = np.repeat(segment.block_ids[chosen], segment.num_unique(group)[chosen])
    if not np.array_equal(blocks, expected):
        yield f"{location}: tuples per block differ from blocks.parquet"
    if num_unused := int((stored.uses[group] == 0).sum()):
        yield f"{location}: {num_unused} tuples belong to no sample"
    if np.array_equal(segment.num_unique(group), segment.column("num_samples")):
        return  # stored per sample
    columns = dataset.job.data.groups[group]
    first, _ = unique_tuples([blocks, *comparable_tuple(table, columns)])
    if len(first) != table.num_rows:
        yield f"{location}: {table.num_rows - len(first)} tuples are not unique in their block"


def _block_problems(
    segment: Segment, dataset: OpenDataset, stored: _StoredRowGroup, location: str
) -> Iterator[str]:
    """Yield a line for each sum over blocks that differs from blocks.parquet."""
    data, missing = dataset.job.data, missing_column_defaults(dataset, segment)

    def per_block(name: str, of_rows: NDArray[Any], *, uses: bool = True) -> NDArray[Any]:
        group, rows = data.group_of_column.get(name), segment.column("num_samples")
        if group is not None:
            rows = segment.num_unique(group)
            of_rows = of_rows * stored.uses[group] if uses else of_rows
        return np.add.reduceat(of_rows, offsets_of(rows[stored.positions])[:-1])

    def column(name: str) -> pa.Array:
        group = data.group_of_column.get(name)
        return one_chunk((stored.samples if group is None else stored.tuples[group])[name])

    weight, names = dataset.features.weight, set(data.table_of_feature) - set(missing)
    lengths = {name: np.diff(values_of(column(name))[1]) for name in names}
    expected: dict[str, Any] = {
        "num_lookups": sum(per_block(name, each) for name, each in lengths.items()),
        "num_lookups_dedup": sum(per_block(n, each, uses=False) for n, each in lengths.items()),
    }
    if weight is None:
        expected["weight"] = segment.column("num_samples")[stored.positions]
    elif weight not in missing:
        expected["weight"] = per_block(weight, numpy_of(column(weight)).astype(np.float64))
    for name, sums in expected.items():
        if not np.allclose(segment.blocks[name].to_numpy()[stored.positions], sums, rtol=1e-12):
            yield f"{location}: {name} of its blocks differs from blocks.parquet"


class _Accesses:
    """Compares the access lists with the samples, one row group after the other."""

    def __init__(self, segment: Segment, dataset: OpenDataset) -> None:
        self._segment, self._dataset = segment, dataset
        self._defaults = missing_column_defaults(dataset, segment)
        self._training = segment.positions(TRAIN)
        self._stored = {t: _StoredAccesses(dataset, segment, t) for t in dataset.job.data.tables}
        self._different = {t for t, a in self._stored.items() if len(a) != len(self._training)}

    def compare(self, stored: _StoredRowGroup) -> None:
        """Compare the lists of the training blocks of a row group."""
        if stored.positions[0] not in self._training:
            return
        positions = stored.positions - self._training[0]
        for name, table in self._dataset.job.data.tables.items():
            if name not in self._different:
                ids, blocks = self._lookups(stored, table.features)
                expected = unique_per_block(rows_of_ids(ids, name, table), blocks, len(positions))
                if not self._stored[name].equal(positions, expected):
                    self._different.add(name)

    def _lookups(
        self, stored: _StoredRowGroup, features: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids that the tuples of each block look up, and the index of the block."""
        groups, numbers = self._dataset.job.data.group_of_column, np.arange(len(stored.positions))
        ids, blocks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for feature in features:
            group = None if feature in self._defaults else groups.get(feature)
            rows = stored.samples if group is None else stored.tuples[group]
            if feature in self._defaults:
                column = constant_column(self._defaults[feature], rows.num_rows)
            else:
                column = rows[feature]
            name = "num_samples" if group is None else num_unique_column(group)
            values, offsets = values_of(column)
            ids.append(ids_of(values))
            rows_per_block = self._segment.column(name)[stored.positions]
            blocks.append(np.repeat(np.repeat(numbers, rows_per_block), np.diff(offsets)))
        return np.concatenate(ids), np.concatenate(blocks)

    def problems(self) -> Iterator[str]:
        """Yield a line for each table with a difference."""
        for name in self._dataset.job.data.tables:
            if name in self._different:
                yield f"access/{name}: rows differ from those that the samples look up"


class _StoredAccesses:
    """The stored access lists of a table as rows; decoded file by file."""

    def __init__(self, dataset: OpenDataset, segment: Segment, table: str) -> None:
        self._num_blocks = len(segment.positions(TRAIN))
        self._lists: ListFiles | None = None
        if table in segment.manifest.tables:
            self._lists = ListFiles(segment.access_files(table), access_lists)
            self._rows = segment.rows(table)

    def __len__(self) -> int:
        return self._num_blocks if self._lists is None else len(self._lists)

    def equal(self, positions: np.ndarray, expected: Jagged) -> bool:
        """Return whether the rows of blocks are the expected ones, which ascend in each block."""
        if self._lists is None:
            return not len(expected.values)
        bounds = expected.offsets.tolist()
        for index, position in enumerate(positions.tolist()):
            rows = np.sort(self._rows[self._lists[position]])
            if not np.array_equal(rows, expected.values[bounds[index] : bounds[index + 1]]):
                return False
        return True


def type_problems(dataset: OpenDataset) -> Iterator[str]:
    """Yield a line for each column that two segments store as different types."""
    types = dataset.column_types
    for segment in dataset.segments:
        for name, kind in segment.manifest.columns.items():
            if kind != types[name]:
                yield f"{segment.id}: column {name} is {kind}, elsewhere {types[name]}"


def part_problems(dataset: OpenDataset, entry: IndexEntry, sound: bool) -> Iterator[str]:
    """Yield the problems of the part of an index for one segment, one line each.

    `dataset` has this segment alone. Next uses are recomputed if the segments are `sound`.
    """
    try:
        index = dataset.open_index(entry)
    except SchemaError as error:
        yield str(error)
        return
    (part,), (segment,) = index.parts, dataset.segments
    damaged = find_damaged_files(part.directory, part.files)
    yield from damaged
    if damaged or not sound:
        return
    if entry.histories:
        yield from _list_problems(dataset, part, entry)
        dataset = replace(dataset, segments=(with_lists(segment, part),))
        (segment,) = dataset.segments
    order = index.order.of_segment(0)
    manifest, num_accesses = part.manifest, dict[str, tuple[int, ...]]()
    for table in sorted(segment.manifest.tables):
        accesses = TableAccesses(dataset, table, order)
        entries, is_equal, reuse = compare_uses(part, table, accesses, order)
        num_accesses[table] = entries
        if not is_equal:
            yield f"{table}: next uses differ from the access lists"
        if not is_same_reuse(part, table, reuse):
            yield f"{table}: counts of reuse differ from the access lists"
    yield from _differences(
        {
            **{n: (getattr(manifest, n), getattr(entry, n)) for n in SETTINGS},
            "num_steps": (manifest.num_steps, order.steps_per_epoch),
            "num_accesses": (dict(manifest.num_accesses), num_accesses),
        }
    )


def _list_problems(dataset: OpenDataset, part: IndexPart, entry: IndexEntry) -> Iterator[str]:
    """Yield a line for each file of accesses that is not what samples and histories give."""
    (segment,), data = dataset.segments, dataset.job.data
    with TemporaryDirectory(prefix="presage-verify-") as folder:
        root, every = Location.parse(folder), dataset.every_segment
        lists = write_history_lists(root, segment, every, data, entry.histories).lists
        assert lists is not None, "the index has histories"
        for path, expected in lists.files.items():
            if part.files.get(path) != expected:
                yield f"{path}: rows differ from those that samples and their histories look up"


def compare_uses(
    part: IndexPart, table: str, accesses: TableAccesses, order: Order
) -> tuple[tuple[int, ...], bool, ReuseCounts]:
    """Compare the stored uses of a table with its access lists.

    `part`, `accesses` and `order` are of one segment alone.

    Returns:
        The entries of each epoch, whether all uses are equal, and the reuse of the access lists.
    """
    reuse = ReuseCounts(order.num_steps, order.steps_per_epoch)
    stored, num_entries = part.steps(table), list[int]()
    is_equal = len(stored) == order.num_steps
    for epoch in range(order.epochs if is_equal else 0):
        tracker = NextUseTracker(len(accesses.rows))
        first, last = (np.full(len(accesses.rows), -1, np.int32) for _ in range(2))
        num_entries.append(0)
        for step in reversed(range(order.steps_per_epoch)):
            train_step = epoch * order.steps_per_epoch + step
            numbers = accesses.numbers(train_step)
            num_entries[-1] += len(numbers)
            expected = tracker.link(numbers, step)
            reuse.add(train_step, Jagged(expected, np.array([0, len(expected)])))
            is_equal = is_equal and np.array_equal(stored[train_step], expected)
            first[numbers] = step
            last[numbers[last[numbers] < 0]] = step
        uses = part.uses(table, epoch)
        is_equal = is_equal and all(map(np.array_equal, uses, (first, last)))
    return tuple(num_entries), is_equal, reuse


def is_same_reuse(part: IndexPart, table: str, reuse: ReuseCounts) -> bool:
    """Return whether the counts of reuse of a table that a part has are equal to others."""
    names = reuse_schema(reuse.bounds).names
    columns = [reuse.num_rows, *reuse.following.T, *reuse.preceding.T]
    return all(map(np.array_equal, part.reuse(table, names).values(), columns))
