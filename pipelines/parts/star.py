"""From clustered samples to the star schema: unique tuples per block, and who points at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.learned.apply import with_transforms
from pipelines.parts.cluster import Clustered
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import first_appearances
from pipelines.sources.read import ORIGIN
from schemas.errors import SchemaError
from schemas.jagged import offsets_of
from schemas.job import SAMPLES, DataConfig
from schemas.layout import BLOCK, FILE_SHIFT, UNIQUE_INDEX, inverse_column
from schemas.learned import Learned


@dataclass(frozen=True, slots=True)
class Star:
    """The tables of one part.

    Attributes:
        samples: one row per sample: block, columns of no group, inverse indices.
        groups: one row per unique tuple of a block.
        samples_per_block: (num_blocks,) int64.
        unique_per_block: group to (num_blocks,) int64.
        tuples: group to (num_unique,) int64, equal where two of its rows are, whatever the block.
    """

    samples: pa.Table
    groups: Mapping[str, pa.Table]
    samples_per_block: NDArray[np.int64]
    unique_per_block: Mapping[str, NDArray[np.int64]]
    tuples: Mapping[str, NDArray[np.int64]]


def to_star(
    clustered: Clustered, file_index: int, data: DataConfig, learned: Learned | None = None
) -> Star:
    """Deduplicate each group within each block, exactly, and apply the transforms.

    Args:
        clustered: samples of one part in order.
        file_index: number of the part, the upper bits of its block ids.
        data: groups and transforms.
        learned: what transforms learned, None where none does.
    """
    learned = learned or Learned()
    num_blocks = int(clustered.block[-1]) + 1 if len(clustered.block) else 0
    check_blocks(clustered.first_block + num_blocks, data.block_samples)
    prefix = (np.int64(file_index) << np.int64(FILE_SHIFT)) + clustered.first_block
    tuples = clustered.samples
    columns = {
        c: tuples.samples[c] for c in tuples.samples.column_names if c not in (ORIGIN, LIST_INDEX)
    }
    samples = pa.table({BLOCK: pa.array(prefix + clustered.block), **columns})
    samples = with_transforms(samples, SAMPLES, data.transforms.get(SAMPLES, {}), learned)
    groups: dict[str, pa.Table] = {}
    unique_per_block: dict[str, NDArray[np.int64]] = {}
    stored_tuples: dict[str, NDArray[np.int64]] = {}
    for group, names in data.groups.items():
        stored, inverse = unique_in_blocks(clustered.block, tuples.references[group])
        counts = np.bincount(clustered.block[stored], minlength=num_blocks).astype(np.int64)
        starts = offsets_of(counts)[:-1]
        unique_index = np.arange(len(stored)) - np.repeat(starts, counts)
        stored_tuples[group] = tuples.references[group][stored]
        taken = tuples.uniques[group].take(pa.array(stored_tuples[group]))
        table = pa.table(
            {
                BLOCK: pa.array(prefix + clustered.block[stored]),
                UNIQUE_INDEX: pa.array(unique_index.astype(np.int32)),
                **{c: taken[c] for c in names},
            }
        )
        groups[group] = with_transforms(table, group, data.transforms.get(group, {}), learned)
        local = (inverse - starts[clustered.block]).astype(np.int32)
        samples = samples.append_column(inverse_column(group), pa.array(local))
        unique_per_block[group] = counts
    per_block = np.bincount(clustered.block, minlength=num_blocks).astype(np.int64)
    return Star(samples, groups, per_block, unique_per_block, stored_tuples)


def check_blocks(num_blocks: int, block_samples: int) -> None:
    """Refuse a part with more blocks than its block ids have room for.

    Raises:
        SchemaError: it has more than 2**20.
    """
    if num_blocks > 1 << FILE_SHIFT:
        raise SchemaError(
            f"part must have at most {1 << FILE_SHIFT} blocks, got {num_blocks} of "
            f"{block_samples} samples; raise data.block_samples"
        )


def unique_in_blocks(
    block: NDArray[np.int64], references: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first sample of each distinct (block, tuple), in order.

    Args:
        block: (num_samples,) ascending.
        references: (num_samples,) the tuple of each sample.

    Returns:
        first: (num_stored,) ascending positions of samples.
        inverse: (num_samples,) the position in `first` of each sample's tuple.

    Example:
        >>> first, inverse = unique_in_blocks(np.array([0, 0, 0, 1]), np.array([5, 2, 5, 5]))
        >>> first.tolist(), inverse.tolist()
        ([0, 1, 3], [0, 1, 0, 2])
    """
    size = int(references.max()) + 1 if len(references) else 1
    inverse, first = first_appearances(block * size + references)
    return first, inverse
