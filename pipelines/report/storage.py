"""Section on storage: the bytes of the same samples as plain Parquet and here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.clustering.layout import (
    COMPRESSION,
    COMPRESSION_LEVEL,
    choose_encodings,
    open_writer,
)
from pipelines.report.charts import ACCENT, OTHER, OURS, Bar, bar_chart
from pipelines.report.html import Section, compared, figure, paragraph, percent, ratio, size, table
from pipelines.table.rows import column_names, read_live_row_group, row_groups
from schemas.dataset import Dataset, Segment, missing_column_defaults
from schemas.layout import DATA_DIRECTORIES, SEGMENTS, window_columns

# The same samples as plain Parquet, as they would lie without Presage: what its bytes are up to.
#
# All baselines hold the expanded rows with the columns that the job's SQL yields, one row per
# sample. They differ in the order of the rows, and the last one in encodings.

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
    data, columns = dataset.job.data, column_names(dataset, model_inputs)
    absent = {s.manifest.id: missing_column_defaults(dataset, s) for s in dataset.segments}
    places = [(s, f, g) for s in dataset.segments for f, g in row_groups(s)]

    def rows(segment: Segment, file_index: int, row_group: int) -> pa.Table:
        younger = absent[segment.manifest.id]
        return read_live_row_group(segment, file_index, row_group, data, younger).select(columns)

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
    with open_writer(str(path), table.schema, choose_encodings(table)) as writer:
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


PRESAGE = "Presage, the same columns"
MADE = "Presage, columns made by transforms"
REST = "Presage, statistics and manifests"
ORACLE = "Presage, oracle (apart)"


def dataset_bytes(dataset: Dataset) -> int:
    """Return the bytes of samples and groups of all segments."""
    return sum(s.manifest.dataset_bytes for s in dataset.segments)


def oracle_bytes(dataset: Dataset) -> int:
    """Return the bytes of access lists, edges and indexes."""
    segments = sum(s.manifest.oracle_bytes for s in dataset.segments)
    return segments + sum(i.manifest.oracle_bytes for i in dataset.indexes)


def made_bytes(dataset: Dataset) -> int:
    """Return the bytes of the column chunks that transforms made; their footers do not count."""
    made = set(dataset.job.data.derived_columns)
    made |= {w for c in made for w in window_columns(c)}
    total = 0
    for segment in dataset.segments:
        for path in segment.files:
            if path.startswith(DATA_DIRECTORIES):
                total += sum(chunk_bytes(pq.read_metadata(segment.directory / path), made))
    return total


def chunk_bytes(metadata: pq.FileMetaData, columns: set[str]) -> list[int]:
    """Return the compressed bytes of each column chunk of some columns.

    Args:
        metadata: of a Parquet file.
        columns: names of top-level columns.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return [c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns]


def folder_bytes(dataset: Dataset) -> int:
    """Return the bytes of every file of a dataset but the oracle's.

    Counted are manifests, job, schema and views, what transforms learned, and of the segments that
    the root names all but `access/` and `edges/`; `index-*` is left out.
    """
    own = [p for p in dataset.directory.iterdir() if p.name != SEGMENTS and _counts(p)]
    own += [p for s in dataset.segments for p in s.directory.iterdir() if _counts(p)]
    files = [f for p in own for f in (p.rglob("*") if p.is_dir() else [p])]
    return sum(f.stat().st_size for f in files if f.is_file())


def _counts(path: Path) -> bool:
    return path.name not in ("access", "edges") and not path.name.startswith((".", "index-"))


def bytes_by_table(dataset: Dataset) -> Mapping[str, int]:
    """Return the bytes of the samples and of each group, with what its tuples share."""
    places = {"samples": ("samples/",)} | places_of_groups(dataset)
    files = [f for segment in dataset.segments for f in segment.files.values()]
    return {
        name: sum(f.num_bytes for f in files if f.path.startswith(place))
        for name, place in places.items()
    }


def places_of_groups(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """Return the directories in which each group's files lie."""
    data = dataset.job.data
    places = {g: [f"groups/{g}/", f"tuples/{g}/"] for g in data.groups}
    for feature, group in data.group_of_column.items():
        places[group].append(f"buffers/{feature}/")
    return {group: tuple(found) for group, found in places.items()}


def storage_section(dataset: Dataset, flat: Mapping[str, float], rows: FlatRows) -> Section:
    """Return the section about bytes.

    Args:
        dataset: an open dataset.
        flat: baseline to bytes.
        rows: what the baselines were written from.
    """
    made, folder = made_bytes(dataset), folder_bytes(dataset)
    ours = dataset_bytes(dataset) - made
    rest = folder - ours - made
    own = {PRESAGE: ours, MADE: made, REST: rest, ORACLE: oracle_bytes(dataset)}
    values = {**flat, **{name: float(v) for name, v in own.items()}}
    colors = dict.fromkeys(flat, OTHER) | dict.fromkeys(own, ACCENT) | {PRESAGE: OURS}
    bars = [Bar(name, v, _text(name, v, ours), colors[name]) for name, v in values.items()]
    smallest = min(flat.values())
    return Section(
        "storage",
        "Storage",
        f"The columns of the log take {size(ours)} in samples and groups, "
        f"{compared(ours, flat[SHUFFLED])} shuffled Parquet ({size(flat[SHUFFLED])}) and "
        f"{compared(ours, smallest)} the smallest plain file ({size(smallest)}). The whole dataset "
        f"without its oracle takes {size(folder)}, {compared(folder, smallest)} that file: "
        f"{size(made)} are columns that transforms made, which it lacks, and {size(rest)} "
        "statistics, manifests and the like.",
        figure(
            bar_chart(
                "storage",
                "Bytes on disk: " + "; ".join(f"{n} {size(v)}" for n, v in values.items()),
                bars,
            ),
            f"Bytes on disk, all zstd level 3. {_how(rows)}",
        )
        + _parts(dataset)
        + paragraph(_fairness(dataset), "note"),
    )


def _text(name: str, value: float, ours: int) -> str:
    if name in (PRESAGE, MADE, REST, ORACLE):
        return size(value)
    return f"{size(value)}  ({ratio(value, ours)} x the same columns here)"


def _how(rows: FlatRows) -> str:
    if rows.share == 1:
        return "Every plain file holds every sample, one row each."
    return (
        f"Plain files were written from {percent(rows.share)} of the samples "
        f"({rows.table.num_rows:,} of {rows.num_samples:,}) and scaled up in proportion."
    )


def _parts(dataset: Dataset) -> str:
    inside, ours = bytes_by_table(dataset), dataset_bytes(dataset)
    return table(
        f"Where the {size(ours)} of samples and groups are, with what transforms made",
        ["", *inside],
        [
            ("bytes", *(size(b) for b in inside.values())),
            ("share", *(percent(b / ours) for b in inside.values())),
        ],
    )


def _fairness(dataset: Dataset) -> str:
    return (
        "Clustering by session alone lets the compressor find most repetitions, and the last plain "
        "file also has for every column the smallest encoding of a trial: its ratio is "
        "what deduplication still saves on disk. A reader of such a file goes on to decode, "
        "transform and look up every repetition. Our bytes include the inverse indices and the "
        "footers of all files; what transforms made and the oracle are counted apart because no "
        "plain file has them."
    )
