"""What groups keep once beyond single blocks: shared tuples, and lists as windows."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.parquet as pq

from pipelines.report.html import paragraph, table
from pipelines.report.numbers import count, ratio
from schemas.dataset import Dataset
from schemas.layout import part_name


@dataclass(frozen=True, slots=True)
class Shared:
    """One kind of rows that are kept once.

    Attributes:
        name: the group, or the list feature.
        what: `tuples` or `list values`.
        by_block: how many there are when each block has its own.
        stored: how many are stored.
    """

    name: str
    what: str
    by_block: int
    stored: int


def shared_of(dataset: Dataset) -> list[Shared]:
    """Return what the dataset shares beyond blocks, groups first, over all segments."""
    data = dataset.job.data
    found = [
        Shared(
            group,
            "tuples",
            sum(s.manifest.groups[group].num_unique for s in dataset.segments),
            sum(rows_below(dataset, f"tuples/{group}")),
        )
        for group in data.groups
        if any(rows_below(dataset, f"tuples/{group}"))
    ]
    return found + [
        Shared(
            ", ".join(features),
            "list values",
            sum(s.manifest.groups[group].num_values_dedup for s in dataset.segments),
            sum(sum(values_below(dataset, f"buffers/{f}")) for f in features),
        )
        for group, features in windowed_features(dataset).items()
    ]


def windowed_features(dataset: Dataset) -> dict[str, list[str]]:
    """Return the groups all of whose lists are windows in every segment, with these lists."""
    lists = {f.name for f in dataset.features.features if f.is_list}
    found: dict[str, list[str]] = {}
    for feature, group in dataset.job.data.group_of_column.items():
        if feature in lists:
            found.setdefault(group, []).append(feature)
    return {
        group: features
        for group, features in found.items()
        if all(f"buffers/{f}/{part_name(0)}" in s.files for f in features for s in dataset.segments)
    }


def rows_below(dataset: Dataset, directory: str) -> list[int]:
    """Return the rows of each Parquet file below a directory of the segments."""
    return [m.num_rows for m in _metadata(dataset, directory)]


def values_below(dataset: Dataset, directory: str) -> list[int]:
    """Return the list values of each file of buffers; one empty list counts as a value."""
    return [
        m.row_group(i).column(1).num_values
        for m in _metadata(dataset, directory)
        for i in range(m.num_row_groups)
    ]


def _metadata(dataset: Dataset, directory: str) -> list[pq.FileMetaData]:
    return [
        pq.read_metadata(segment.directory / path)
        for segment in dataset.segments
        for path in segment.files
        if path.startswith(f"{directory}/")
    ]


def beyond_blocks(dataset: Dataset) -> str:
    """Return a table of what is shared, or a sentence that nothing is."""
    found = shared_of(dataset)
    if not found:
        return paragraph(
            "No group shares tuples or list values beyond its blocks: none would be smaller.",
            "note",
        )
    rows = [
        (s.name, s.what, count(s.by_block), count(s.stored), ratio(s.by_block, max(1, s.stored)))
        for s in found
    ]
    head = ["group or list", "", "once per block", "stored", "times fewer"]
    return table("Partial duplication: what blocks and lists share, kept once", head, rows)
