"""Accesses of samples with windows of histories, for indexes.

Access lists and rows of the tables that histories look up are stored with an index: another length
is another index. A block accesses the rows of its samples, and of the events that they see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.pipelines.clustering.part import LOOKUPS, lookups_table, open_lookups
from presage.pipelines.oracle.numbering import number_table
from presage.schemas.arrays import Jagged, numpy_of, offsets_of, one_chunk
from presage.schemas.arrays import ranges as consecutive
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.checked_files import ListFiles
from presage.schemas.dataset.files import FileEntry
from presage.schemas.dataset.history_files import HistoryReader
from presage.schemas.dataset.history_windows import (
    HistoryRows,
    HistorySpec,
    find_runs,
    read_history,
    window_spec,
)
from presage.schemas.dataset.manifest import TableCounts
from presage.schemas.dataset.opened import Segment, StoredFiles, access_lists
from presage.schemas.dataset.samples import (
    blocks_of_row_group,
    read_joined_row_group,
    row_groups,
)
from presage.schemas.layout import FILE_SHIFT, TRAIN, count_column, part_path
from presage.schemas.oracle.next_uses import unique_per_block
from presage.schemas.storage.location import Location


def write_history_lists(
    root: Location,
    segment: Segment,
    every: Iterable[Segment],
    data: DataConfig,
    windows: Mapping[str, Sequence[int]],
) -> Segment:
    """Write the accesses of a segment's samples with windows of histories to a part of an index.

    Args:
        root: directory of the part.
        segment: whose samples see the windows.
        every: all segments of the dataset.
        data: of the job.
        windows: by history, length and step.

    Returns:
        The segment with these accesses and their counts instead of its own.
    """
    accesses = _Accesses(segment, list(every), data, windows)
    for file_index, of_file in groupby(row_groups(segment, TRAIN), itemgetter(0)):
        for table, lists in accesses.of_file(file_index, [group for _, group in of_file]).items():
            _write_lookups(root, table, file_index, lists)
    blocks = segment.block_ids[segment.positions(TRAIN)]
    files: list[FileEntry] = []
    counts = dict(accesses.counts)
    for table in counts:
        numbered = number_table(root, table, blocks)
        files += numbered.files
        counts[table] = replace(counts[table], num_unique_rows=numbered.num_rows)
    (root / LOOKUPS).remove_all()
    manifest = replace(segment.manifest, tables={**segment.manifest.tables, **counts})
    lists = StoredFiles(root, {entry.path: entry for entry in files})
    return replace(segment, manifest=manifest, lists=lists)


def _write_lookups(root: Location, table: str, file_index: int, lists: Jagged) -> None:
    rows, file = lookups_table(lists), pa.BufferOutputStream()
    with open_lookups(file, rows.schema) as writer:
        writer.write_table(rows)
    (root / LOOKUPS / table / part_path(file_index)).write_bytes(file.getvalue().to_pybytes())


class _Accesses:
    """The rows that the training blocks of a segment access.

    Attributes:
        counts: of the tables that histories look up.
    """

    def __init__(
        self,
        segment: Segment,
        every: Sequence[Segment],
        data: DataConfig,
        windows: Mapping[str, Sequence[int]],
    ) -> None:
        self._segment, self._data = segment, data
        self._specs = [window_spec(data, name, *window) for name, window in windows.items()]
        self._readers = [
            HistoryReader(every, s.name, s.columns, s.most_events) for s in self._specs
        ]
        tables = sorted({table for spec in self._specs for table in spec.tables.values()})
        stored = segment.manifest.tables
        nothing = TableCounts(num_lookups=0, num_lookups_dedup=0, num_unique_rows=0)
        self.counts = {table: stored.get(table, nothing) for table in tables}
        self._stored = {
            table: (ListFiles(segment.access_files(table), access_lists), segment.rows(table))
            for table in tables
            if table in stored
        }

    def of_file(self, file_index: int, groups: Sequence[int]) -> dict[str, Jagged]:
        """Return by table the ascending rows of each block of a file, by its number in it."""
        ids: list[NDArray[np.int64]] = []
        parts: dict[str, list[Jagged]] = {table: [] for table in self.counts}
        for row_group in sorted(groups):
            positions = np.flatnonzero(blocks_of_row_group(self._segment, file_index, row_group))
            ids.append(self._segment.block_ids[positions] - (file_index << FILE_SHIFT))
            for table, lists in self._of_row_group(file_index, row_group, positions).items():
                parts[table].append(lists)
        number = np.concatenate(ids)
        return {table: _by_number(lists, number) for table, lists in parts.items()}

    def _of_row_group(
        self, file_index: int, row_group: int, positions: NDArray[np.int64]
    ) -> dict[str, Jagged]:
        key, time = self._data.session.key, self._data.session.time
        columns = [key, time, *(count_column(spec.name) for spec in self._specs)]
        segment = self._segment
        samples = read_joined_row_group(segment, file_index, row_group, self._data, columns=columns)
        block = np.repeat(np.arange(len(positions)), segment.column("num_samples")[positions])
        accesses: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
        for spec, reader in zip(self._specs, self._readers, strict=True):
            of_samples = numpy_of(samples[count_column(spec.name)]).astype(np.int64)
            times = one_chunk(samples[time])
            tables = self._data.tables
            rows = read_history(
                spec, tables, "float32", reader, segment.id, samples[key], times, of_samples
            )
            for table, each in self._of_history(spec, rows, block).items():
                accesses.setdefault(table, []).extend(each)
        first = segment.positions(TRAIN)[0]
        for table, (lists, rows) in self._stored.items():
            own = [rows[lists[position]] for position in (positions - first).tolist()]
            blocks = np.repeat(np.arange(len(own)), list(map(len, own)))
            accesses[table].append((np.concatenate(own), blocks))
        return {
            table: unique_per_block(
                *map(np.concatenate, zip(*each, strict=True)), num_blocks=len(positions)
            )
            for table, each in accesses.items()
        }

    def _of_history(
        self, spec: HistorySpec, rows: HistoryRows, block: NDArray[np.int64]
    ) -> dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]]:
        """Return by table the rows of events that samples see, and the block of each; count them.

        Events that several samples of a key and block see are there once.
        """
        by_block = replace(rows, key=rows.key * (block[-1] + 1) + block)
        runs = find_runs(spec, by_block, slice(0, len(block)))
        events = consecutive(runs.low, runs.counts)
        first_samples = np.flatnonzero(np.diff(runs.inverse, prepend=-1))
        blocks = np.repeat(block[first_samples], runs.counts)
        accessed: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
        for column, table in spec.tables.items():
            counts = self.counts[table]
            self.counts[table] = replace(
                counts,
                num_lookups=counts.num_lookups + int((runs.ends - runs.starts).sum()),
                num_lookups_dedup=counts.num_lookups_dedup + len(events),
            )
            accessed.setdefault(table, []).append((rows.values[column][events], blocks))
        return accessed


def _by_number(lists: Sequence[Jagged], number: NDArray[np.int64]) -> Jagged:
    """Return lists, one after the other, in the order of their numbers; others are empty."""
    lengths = np.concatenate([each.lengths for each in lists])
    values = np.concatenate([each.values for each in lists])
    order = np.argsort(number)
    of_all = np.zeros(number.max() + 1, np.int64)
    of_all[number] = lengths
    taken = consecutive((np.cumsum(lengths) - lengths)[order], lengths[order])
    return Jagged(values[taken], offsets_of(of_all))
