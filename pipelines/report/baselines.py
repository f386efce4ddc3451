"""The same samples as plain Parquet, as they would lie without Presage: what its bytes are up to.

All baselines hold the expanded rows with the columns that the job's SQL yields, one
row per sample. They differ in the order of the rows, and the last one in encodings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.parts.encodings import COMPRESSION, COMPRESSION_LEVEL, choose, open_writer
from pipelines.parts.expand import remembered_row_group, row_groups, sample_columns
from schemas.absent import absent_columns
from schemas.dataset import Dataset, Segment

MAX_BYTES = 1 << 30
"""Bytes of expanded rows in memory that are written whole; beyond, a share of the row groups is."""
ROWS_PER_GROUP = 1 << 20
"""Rows of a row group: pyarrow's default."""
SEED = 0
"""Seed of the shuffled order."""

SHUFFLED = "plain, shuffled"
TIME_ORDERED = "plain, time-ordered"
CLUSTERED = "plain, clustered by session"
BEST_ENCODINGS = "plain, clustered, best encodings"


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Expanded rows of a dataset in the dataset's order: sessions side by side.

    Attributes:
        table: the rows, all or some.
        num_samples: rows that the whole dataset has.
    """

    table: pa.Table
    num_samples: int

    @property
    def share(self) -> float:
        """Share of the dataset's samples that `table` holds."""
        return self.table.num_rows / self.num_samples


def flat_rows(
    dataset: Dataset, max_bytes: int = MAX_BYTES, *, model_inputs: bool = False
) -> FlatRows:
    """Return the expanded rows, or of every n-th row group when all are too large.

    Args:
        dataset: an open dataset.
        max_bytes: bytes that the rows may take in memory, about.
        model_inputs: whether to add the columns that transforms and sampling made.
    """
    data, columns = dataset.job.data, sample_columns(dataset, model_inputs)
    absent = {s.manifest.id: absent_columns(dataset, s) for s in dataset.segments}
    places = [(s, f, g) for s in dataset.segments for f, g in row_groups(s)]

    def rows(segment: Segment, file_index: int, row_group: int) -> pa.Table:
        younger = absent[segment.manifest.id]
        return remembered_row_group(segment, file_index, row_group, data, younger).select(columns)

    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    taken = [rows(*places[0])]
    total_bytes = taken[0].nbytes / max(1, taken[0].num_rows) * num_samples
    stride = max(1, -(-int(total_bytes) // max_bytes))
    taken.extend(rows(*p) for p in places[stride::stride])
    return FlatRows(pa.concat_tables(taken).combine_chunks(), num_samples)


def shuffled(table: pa.Table, seed: int = SEED) -> pa.Table:
    """Return the rows in a random order."""
    return table.take(pa.array(np.random.default_rng(seed).permutation(table.num_rows)))


def time_ordered(table: pa.Table, time: str) -> pa.Table:
    """Return the rows by time; those of one moment keep their order.

    Args:
        table: rows.
        time: name of the column.
    """
    moments = pc.cast(table[time], pa.int64()).to_numpy()
    return table.take(pa.array(np.argsort(moments, kind="stable")))


def write_flat(table: pa.Table, path: Path) -> int:
    """Write rows with the defaults of pyarrow but for the compression, and return the bytes."""
    pq.write_table(
        table,
        path,
        row_group_size=ROWS_PER_GROUP,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
    )
    return path.stat().st_size


def write_best(table: pa.Table, path: Path) -> int:
    """Write rows with the settings of the dataset's own files, and return the bytes."""
    with open_writer(str(path), table.schema, choose(table)) as writer:
        writer.write_table(table, row_group_size=ROWS_PER_GROUP)
    return path.stat().st_size


def flat_bytes(rows: FlatRows, time: str) -> Mapping[str, float]:
    """Write every baseline to a temporary file.

    Args:
        rows: expanded rows in session order.
        time: the column that orders the log.

    Returns:
        Name to bytes; where only a share of the rows was written, in proportion for all.
    """
    table = rows.table
    written: Mapping[str, Callable[[Path], int]] = {
        SHUFFLED: lambda path: write_flat(shuffled(table), path),
        TIME_ORDERED: lambda path: write_flat(time_ordered(table, time), path),
        CLUSTERED: lambda path: write_flat(table, path),
        BEST_ENCODINGS: lambda path: write_best(table, path),
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "flat.parquet"
        return {name: write(path) / rows.share for name, write in written.items()}
