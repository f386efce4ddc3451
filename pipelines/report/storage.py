"""How many bytes the same samples take: as plain Parquet in several orders, and here."""

from __future__ import annotations

from collections.abc import Mapping

from pipelines.report.bars import Bar, bar_chart
from pipelines.report.baselines import BEST_ENCODINGS, SHUFFLED, FlatRows
from pipelines.report.html import Section, figure, paragraph, table
from pipelines.report.numbers import percent, ratio, size
from pipelines.report.svg import ACCENT, OTHER, OURS
from schemas.dataset import Dataset

PRESAGE = "Presage, samples and groups"
ORACLE = "Presage, oracle (apart)"


def dataset_bytes(dataset: Dataset) -> int:
    """Return the bytes of samples and groups of all segments."""
    return sum(s.manifest.dataset_bytes for s in dataset.segments)


def oracle_bytes(dataset: Dataset) -> int:
    """Return the bytes of access lists, edges and indexes."""
    segments = sum(s.manifest.oracle_bytes for s in dataset.segments)
    return segments + sum(i.manifest.oracle_bytes for i in dataset.indexes)


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
    ours = dataset_bytes(dataset)
    values = {**flat, PRESAGE: float(ours), ORACLE: float(oracle_bytes(dataset))}
    colors = dict.fromkeys(flat, OTHER) | {PRESAGE: OURS, ORACLE: ACCENT}
    bars = [Bar(name, v, _text(name, v, ours), colors[name]) for name, v in values.items()]
    return Section(
        "storage",
        "Storage",
        f"Clustering and deduplication store {size(ours)} instead of {size(flat[SHUFFLED])} for "
        f"the same samples: {ratio(flat[SHUFFLED], ours)} times less than shuffled Parquet, and "
        f"{ratio(flat[BEST_ENCODINGS], ours)} times less than the smallest plain file.",
        figure(
            bar_chart(
                "storage",
                "Bytes on disk: " + "; ".join(f"{n} {size(v)}" for n, v in values.items()),
                bars,
            ),
            f"Bytes on disk, all zstd level 3. {_how(rows)}",
        )
        + _parts(dataset, ours)
        + paragraph(_fairness(dataset), "note"),
    )


def _text(name: str, value: float, ours: int) -> str:
    if name in (PRESAGE, ORACLE):
        return size(value)
    return f"{size(value)}  ({ratio(value, ours)} x ours)"


def _how(rows: FlatRows) -> str:
    if rows.share == 1:
        return "Every plain file holds every sample, one row each."
    return (
        f"Plain files were written from {percent(rows.share)} of the samples "
        f"({rows.table.num_rows:,} of {rows.num_samples:,}) and scaled up in proportion."
    )


def _parts(dataset: Dataset, ours: int) -> str:
    inside = bytes_by_table(dataset)
    return table(
        "Where the bytes of samples and groups are",
        ["", *inside],
        [
            ("bytes", *(size(b) for b in inside.values())),
            ("share", *(percent(b / ours) for b in inside.values())),
        ],
    )


def _fairness(dataset: Dataset) -> str:
    made = sum(len(c) for c in dataset.job.data.transforms.values())
    derived = f" and {made} derived model inputs that no plain file has" if made else ""
    return (
        "Clustering by session alone lets the compressor find most repetitions, and the last plain "
        "file also has for every column the smallest encoding of a trial: its ratio is "
        "what deduplication still saves on disk. A reader of such a file goes on to decode, "
        "transform and look up every repetition. Our bytes include the inverse "
        f"indices{derived}; the oracle is counted apart because no plain file has one."
    )
