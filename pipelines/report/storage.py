"""How many bytes the same samples take: as plain Parquet in several orders, and here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from pipelines.report.bars import Bar, bar_chart
from pipelines.report.baselines import SHUFFLED, FlatRows
from pipelines.report.html import Section, figure, paragraph, table
from pipelines.report.numbers import compared, percent, ratio, size
from pipelines.report.svg import ACCENT, OTHER, OURS
from schemas.dataset import Dataset
from schemas.layout import DATA_DIRECTORIES, SEGMENTS, window_columns

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
    made = set(dataset.job.data.made_columns)
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
