"""One part of a segment: everything that happens to the samples of one range of session hashes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.parts.lookups import lookups_of, lookups_table
from pipelines.parts.pieces import pieces
from pipelines.parts.pins import Pins
from pipelines.parts.slices import SliceStatistics, part_slices, sum_by_split
from pipelines.parts.star import Star, to_star
from pipelines.parts.write import PartWriter
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from pipelines.segments.partial import partial_of
from schemas.columns import flat_list, is_list, numpy_of
from schemas.features import FeatureSet
from schemas.jagged import offsets_of
from schemas.job import DataConfig
from schemas.layout import TRAIN, inverse_column, part_name
from schemas.learned import Learned

LOOKUPS = "lookups"
"""Directory of the oracle's input inside a segment being built; gone before the commit."""


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """Sums over one group of a part.

    Attributes:
        num_unique: unique tuples.
        num_values: list values if every sample had its own.
        num_values_dedup: list values that are stored.
    """

    num_unique: int
    num_values: int
    num_values_dedup: int

    def __add__(self, other: GroupTotals) -> GroupTotals:
        """Add the sums over two pieces."""
        return GroupTotals(
            self.num_unique + other.num_unique,
            self.num_values + other.num_values,
            self.num_values_dedup + other.num_values_dedup,
        )


@dataclass(frozen=True, slots=True)
class PartResult:
    """What the commit must know of a written part.

    Attributes:
        file_index: number of the part.
        num_samples: samples.
        num_rows: rows of the log that they were made from.
        num_sessions: sessions.
        blocks: rows of `blocks.parquet`.
        groups: sums by group.
        lookups: table to (num_lookups, num_lookups_dedup) in training blocks.
        slices: statistics by split.
    """

    file_index: int
    num_samples: int
    num_rows: int
    num_sessions: int
    blocks: pa.Table
    groups: Mapping[str, GroupTotals]
    lookups: Mapping[str, tuple[int, int]]
    slices: Mapping[str, SliceStatistics]


def packed(result: PartResult) -> bytes:
    """Return a result as bytes, which a runner passes on without looking into it.

    Beam walks through everything in an element to learn its size: seventy results
    with their statistics took it 13 s.
    """
    return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


def unpacked(results: Iterable[bytes]) -> list[PartResult]:
    """Undo `packed` for results in any order; return them in the order of parts."""
    return sorted((pickle.loads(r) for r in results), key=lambda r: r.file_index)


def build_part(
    root: Path,
    file_index: int,
    samples: Iterable[Tuples],
    data: DataConfig,
    pins: Pins,
    features: FeatureSet,
    learned: Learned | None = None,
) -> PartResult:
    """Cluster, cut, deduplicate and write the samples of one part, piece by piece.

    Args:
        root: directory of the segment being built.
        file_index: number of the part.
        samples: all samples of the part's sessions, in any order; at least one row. Gone through
            several times where they are many.
        data: the job's data section.
        pins: what all parts have in common.
        features: declared columns.
        learned: what transforms learned.
    """
    writer = PartWriter(root, file_index, pins)
    lookups = LookupsWriter(root, file_index)
    results: list[PartResult] = []
    for clustered in pieces(samples, data):
        star = to_star(clustered, file_index, data, learned)
        blocks = writer.add(star, clustered)
        results.append(
            PartResult(
                file_index,
                clustered.samples.num_samples,
                num_rows(clustered.samples),
                clustered.num_sessions,
                blocks,
                {name: group_totals(star, name) for name in star.groups},
                lookups.add(star, blocks, data),
                part_slices(star, clustered, data, features),
            )
        )
    writer.close()
    lookups.close()
    return reduce(_joined, results)


def _joined(left: PartResult, right: PartResult) -> PartResult:
    """Add the results of two pieces of a part."""
    lookups = {
        table: (known[0] + more[0], known[1] + more[1])
        for (table, known), more in zip(left.lookups.items(), right.lookups.values(), strict=True)
    }
    return PartResult(
        left.file_index,
        left.num_samples + right.num_samples,
        left.num_rows + right.num_rows,
        left.num_sessions + right.num_sessions,
        pa.concat_tables([left.blocks, right.blocks]),
        {g: left.groups[g] + right.groups[g] for g in left.groups},
        lookups,
        sum_by_split([left.slices, right.slices]),
    )


def num_rows(samples: Tuples) -> int:
    """Return how many rows of the log gave samples: a row's first sample has list index 0."""
    return int(np.count_nonzero(samples.column(LIST_INDEX).to_numpy() == 0))


def group_totals(star: Star, group: str) -> GroupTotals:
    """Return the sums over one group: what is stored, and what every sample would need."""
    table = star.groups[group]
    starts = offsets_of(star.unique_per_block[group])[:-1]
    block = np.repeat(np.arange(len(starts)), star.samples_per_block)
    tuples = numpy_of(star.samples[inverse_column(group)]) + starts[block]
    stored = expanded = 0
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = np.diff(flat_list(table[name])[1])
            stored += int(lengths.sum())
            expanded += int(lengths[tuples].sum())
    return GroupTotals(table.num_rows, expanded, stored)


class LookupsWriter:
    """Writes which rows each block of a part looks up, for the oracle."""

    def __init__(self, root: Path, file_index: int) -> None:
        """Write nothing yet.

        Args:
            root: directory of the segment being built.
            file_index: number of the part.
        """
        self._root = root
        self._file_index = file_index
        self._writers: dict[Path, tuple[Path, pq.ParquetWriter]] = {}

    def add(self, star: Star, blocks: pa.Table, data: DataConfig) -> dict[str, tuple[int, int]]:
        """Write the next blocks; return (num_lookups, num_lookups_dedup) by table."""
        is_training = pa.compute.equal(blocks["split"], TRAIN).to_numpy()
        counts: dict[str, tuple[int, int]] = {}
        for table, lookups in lookups_of(star, is_training, data):
            path = self._root / LOOKUPS / table / part_name(self._file_index)
            rows = lookups_table(lookups.accesses)
            if path not in self._writers:
                partial = partial_of(path)
                writer = pq.ParquetWriter(partial, rows.schema, compression="lz4")
                self._writers[path] = partial, writer
            self._writers[path][1].write_table(rows)
            counts[table] = (lookups.num_lookups, lookups.num_lookups_dedup)
        return counts

    def close(self) -> None:
        """Finish the files and give them their names."""
        for path, (partial, writer) in self._writers.items():
            writer.close()
            partial.replace(path)
