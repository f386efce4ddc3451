"""One part of a segment: everything that happens to the samples of one range of session hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.cluster import cluster
from pipelines.lookups import lookups_of, lookups_table
from pipelines.pins import Pins
from pipelines.slices import SliceStatistics, part_slices
from pipelines.star import Star, to_star
from pipelines.tuples import Tuples, join
from pipelines.write import write_part
from schemas.columns import is_list, jagged_of, numpy_of
from schemas.features import FeatureSet
from schemas.jagged import offsets_of
from schemas.job import DataConfig
from schemas.layout import TRAIN, inverse_column, part_name

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


@dataclass(frozen=True, slots=True)
class PartResult:
    """What the commit must know of a written part.

    Attributes:
        file_index: number of the part.
        num_samples: samples.
        num_sessions: sessions.
        blocks: rows of `blocks.parquet`.
        groups: sums by group.
        lookups: table to (num_lookups, num_lookups_dedup) in training blocks.
        slices: statistics by split.
    """

    file_index: int
    num_samples: int
    num_sessions: int
    blocks: pa.Table
    groups: Mapping[str, GroupTotals]
    lookups: Mapping[str, tuple[int, int]]
    slices: Mapping[str, SliceStatistics]


def build_part(
    root: Path,
    file_index: int,
    samples: Sequence[Tuples],
    data: DataConfig,
    pins: Pins,
    features: FeatureSet,
) -> PartResult:
    """Cluster, cut, deduplicate and write the samples of one part.

    Args:
        root: directory of the segment being built.
        file_index: number of the part.
        samples: all samples of the part's sessions, in any order; at least one row.
        data: the job's data section.
        pins: what all parts have in common.
        features: declared columns.
    """
    clustered = cluster(join(samples), data)
    star = to_star(clustered, file_index, data)
    blocks = write_part(root, star, clustered, file_index, pins)
    return PartResult(
        file_index,
        clustered.samples.num_samples,
        clustered.num_sessions,
        blocks,
        {name: group_totals(star, name) for name in star.groups},
        write_lookups(root, file_index, star, blocks, data),
        part_slices(star, clustered, data, features),
    )


def group_totals(star: Star, group: str) -> GroupTotals:
    """Return the sums over one group: what is stored, and what every sample would need."""
    table = star.groups[group]
    starts = offsets_of(star.unique_per_block[group])[:-1]
    block = np.repeat(np.arange(len(starts)), star.samples_per_block)
    tuples = numpy_of(star.samples[inverse_column(group)]) + starts[block]
    stored = expanded = 0
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = jagged_of(table[name]).lengths
            stored += int(lengths.sum())
            expanded += int(lengths[tuples].sum())
    return GroupTotals(table.num_rows, expanded, stored)


def write_lookups(
    root: Path, file_index: int, star: Star, blocks: pa.Table, data: DataConfig
) -> dict[str, tuple[int, int]]:
    """Write which rows each block of the part looks up, for the oracle."""
    is_training = pa.compute.equal(blocks["split"], TRAIN).to_numpy()
    counts: dict[str, tuple[int, int]] = {}
    for table, lookups in lookups_of(star, is_training, data):
        path = root / LOOKUPS / table / part_name(file_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        pq.write_table(lookups_table(lookups.accesses), partial, compression="lz4")
        partial.replace(path)
        counts[table] = (lookups.num_lookups, lookups.num_lookups_dedup)
    return counts
