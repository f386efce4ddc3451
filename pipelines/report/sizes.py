"""Bytes of a dataset, and of plain Parquet files with the same samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from presage.pipelines.clustering.storage_layout import (
    COMPRESSION,
    COMPRESSION_LEVEL,
    choose_encodings,
    open_writer,
)
from presage.pipelines.table.commit import anomalies_name
from presage.schemas.dataset.defaults import missing_column_defaults
from presage.schemas.dataset.opened import OpenDataset, Segment, version_name
from presage.schemas.dataset.samples import column_names, live_rows, read_live_row_group, row_groups
from presage.schemas.layout import (
    BLOCKS,
    DATA_DIRECTORIES,
    FILES,
    JOB,
    MANIFEST,
    SCHEMA,
    tombstones_path,
    window_columns,
)

MAX_BYTES = 1 << 30
"""Bytes of expanded rows that are written; of a larger dataset a share of the row groups is."""
READ_BYTES = 256 << 20
"""Bytes of columns that are read together: each row group is opened once for them."""
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
    """Expanded rows of a dataset, one per sample, in the dataset's order: sessions side by side.

    Attributes:
        row_groups: segment, file and row group of all rows, or of some.
        num_rows: their number.
        num_samples: samples of the whole dataset.
        column_bytes: column of the job's SQL to the estimated bytes of its rows in memory.
    """

    dataset: OpenDataset
    row_groups: Sequence[tuple[Segment, int, int]]
    num_rows: int
    num_samples: int
    column_bytes: Mapping[str, float]

    @property
    def share(self) -> float:
        """Share of the dataset's samples in the rows."""
        return self.num_rows / self.num_samples

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return some columns of the rows."""
        tables = [_read(self.dataset, place, columns) for place in self.row_groups]
        return pa.concat_tables(tables).combine_chunks()

    def columns(self) -> Iterator[pa.Table]:
        """Yield each column of the job's SQL as a table; a few are read together."""
        names: list[str] = []
        for name, num_bytes in self.column_bytes.items():
            if names and num_bytes + sum(map(self.column_bytes.__getitem__, names)) > READ_BYTES:
                table, names = self.read(names), []
                yield from (table.select([n]) for n in table.column_names)
            names.append(name)
        table = self.read(names)
        yield from (table.select([n]) for n in table.column_names)


def flat_rows(dataset: OpenDataset, max_bytes: int = MAX_BYTES) -> FlatRows:
    """Return the expanded rows, or those of every n-th row group if all are too large."""
    places = [(s, f, g) for s in dataset.segments for f, g in row_groups(s)]
    first = _read(dataset, places[0], column_names(dataset, model_inputs=False))
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    row_bytes = {name: first[name].nbytes / max(1, first.num_rows) for name in first.column_names}
    total_bytes = sum(row_bytes.values()) * num_samples
    chosen = places[:: max(1, -(-int(total_bytes) // max_bytes))]
    num_rows = sum(int(live_rows(*place).sum()) for place in chosen)
    column_bytes = {name: size * num_rows for name, size in row_bytes.items()}
    return FlatRows(dataset, chosen, num_rows, num_samples, column_bytes)


def _read(
    dataset: OpenDataset, place: tuple[Segment, int, int], columns: Sequence[str]
) -> pa.Table:
    defaults = missing_column_defaults(dataset, place[0])
    return read_live_row_group(*place, dataset.job.data, defaults, columns)


def shuffled(table: pa.Table, seed: int = SEED) -> pa.Table:
    """Return the rows in a random order."""
    return table.take(pa.array(np.random.default_rng(seed).permutation(table.num_rows)))


def time_ordered(table: pa.Table, time: str) -> pa.Table:
    """Return the rows in the order of a time column; the sort is stable."""
    times = pc.cast(table[time], pa.int64()).to_numpy()
    return table.take(pa.array(np.argsort(times, kind="stable")))


def write_flat(table: pa.Table, path: Path) -> int:
    """Write rows with pyarrow's defaults, except for the compression, and return the bytes."""
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
    with open_writer(str(path), table.schema, choose_encodings(table)) as writer:
        writer.write_table(table, row_group_size=ROWS_PER_GROUP)
    return path.stat().st_size


def flat_bytes(rows: FlatRows, time: str) -> dict[str, float]:
    """Write the rows as plain Parquet in every order; return the bytes without footers.

    Columns are written one after the other. `rows` are in session order.

    Returns:
        Order to bytes, extrapolated to the whole dataset if only a share of the rows was read.
    """
    by_time = np.argsort(pc.cast(rows.read([time])[time], pa.int64()).to_numpy(), kind="stable")
    at_random = np.random.default_rng(SEED).permutation(rows.num_rows)
    writers: Mapping[str, Callable[[pa.Table, Path], int]] = {
        SHUFFLED: lambda column, path: write_flat(column.take(pa.array(at_random)), path),
        TIME_ORDERED: lambda column, path: write_flat(column.take(pa.array(by_time)), path),
        CLUSTERED: write_flat,
        BEST_ENCODINGS: write_best,
    }
    totals = dict.fromkeys(writers, 0.0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "flat.parquet"
        for column in rows.columns():
            for order, write in writers.items():
                num_bytes = write(column, path) - pq.read_metadata(path).serialized_size
                totals[order] += num_bytes / rows.share
    return totals


def dataset_bytes(dataset: OpenDataset) -> int:
    """Return the bytes of samples and groups of all segments."""
    return sum(s.manifest.dataset_bytes for s in dataset.segments)


def oracle_bytes(dataset: OpenDataset) -> int:
    """Return the bytes of access lists, edges and indexes."""
    segments = sum(s.manifest.oracle_bytes for s in dataset.segments)
    indexes = map(dataset.open_index, dataset.all_complete_indexes())
    return segments + sum(index.oracle_bytes for index in indexes)


def derived_bytes(dataset: OpenDataset) -> int:
    """Return the bytes of the column chunks that transforms added, without footers."""
    derived = set(dataset.job.data.derived_columns)
    derived |= {w for column in derived for w in window_columns(column)}
    return column_bytes(dataset, DATA_DIRECTORIES, derived)


def column_bytes(
    dataset: OpenDataset, directories: str | tuple[str, ...], columns: Iterable[str]
) -> int:
    """Return the compressed bytes of some columns in the files below directories of segments."""
    return sum(chunk_bytes(m, columns) for m in file_metadata(dataset, directories))


def chunk_bytes(metadata: pq.FileMetaData, columns: Iterable[str]) -> int:
    """Return the compressed bytes of all chunks of some top-level columns."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)


def file_metadata(
    dataset: OpenDataset, directories: str | tuple[str, ...]
) -> Iterator[pq.FileMetaData]:
    """Yield the metadata of each Parquet file below directories of the segments."""
    for segment in dataset.segments:
        for path in segment.files:
            if path.startswith(directories):
                yield segment.file(path).metadata


def folder_bytes(dataset: OpenDataset) -> int:
    """Return the bytes of every file of a dataset except the oracle's.

    These are the root manifest, job, schema, the fitted values of transforms, deleted samples, and
    everything but `access/` and `edges/` of the segments that the root names.
    """
    root, manifest = dataset.directory, dataset.manifest
    named = {
        version_name(JOB, manifest.job_sha256),
        version_name(SCHEMA, manifest.schema_sha256),
        *(path for segment in dataset.segments for path in segment.manifest.fitted),
    }
    if manifest.tombstones_sha256:
        named.add(tombstones_path(manifest.tombstones_sha256))
    files = [entry for segment in dataset.segments for entry in segment.files.values()]
    total = sum(e.num_bytes for e in files if not e.path.startswith(("access/", "edges/")))
    total += sum((root / path).num_bytes() or 0 for path in named)
    return total + sum(
        (segment.directory / name).num_bytes() or 0
        for segment in dataset.segments
        for name in (MANIFEST, FILES, BLOCKS, anomalies_name(segment.reference))
    )


def bytes_by_table(dataset: OpenDataset) -> dict[str, int]:
    """Return the bytes of the samples and of each group, including shared tuples and buffers."""
    data = dataset.job.data
    directories = {"samples": ["samples/"]}
    directories |= {group: [f"groups/{group}/", f"tuples/{group}/"] for group in data.groups}
    for feature, group in data.group_of_column.items():
        directories[group].append(f"buffers/{feature}/")
    files = [f for segment in dataset.segments for f in segment.files.values()]
    return {
        name: sum(f.num_bytes for f in files if f.path.startswith(tuple(below)))
        for name, below in directories.items()
    }
