"""Sections on deduplication and on the choice of groups."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.autogroup.search import expected_factor
from pipelines.report.charts import HALF, OTHER, Bar, bar_chart, columns
from pipelines.report.html import (
    Section,
    count,
    digits,
    figure,
    paragraph,
    percent,
    ratio,
    side_by_side,
    size,
    table,
)
from pipelines.report.storage import FlatRows, bytes_by_table, write_best
from pipelines.sources.rows import microseconds
from pipelines.table.rows import row_groups, session_lengths
from schemas.arrays import comparable, comparable_tuple, one_chunk, unique_tuples
from schemas.config.job import SessionConfig
from schemas.dataset import Dataset, Segment
from schemas.group_files import read_group
from schemas.layout import BLOCK, inverse_column, part_name
from schemas.manifest import GroupCounts


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


MOST_DOUBLINGS = 7
"""The last bar of the histogram holds all sessions of at least 2**7 samples."""


def group_totals(dataset: Dataset) -> Mapping[str, GroupCounts]:
    """Return the counts of each group over all segments."""
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    totals: dict[str, GroupCounts] = {}
    for group in dataset.job.data.groups:
        parts = [s.manifest.groups[group] for s in dataset.segments]
        num_unique = sum(p.num_unique for p in parts)
        totals[group] = GroupCounts(
            num_unique=num_unique,
            dedup_factor=num_samples / num_unique if num_unique else 0.0,
            num_values=sum(p.num_values for p in parts),
            num_values_dedup=sum(p.num_values_dedup for p in parts),
        )
    return totals


def unique_without_cuts(dataset: Dataset, group: str) -> int:
    """Return the unique tuples of a group if each part were one block, summed over parts."""
    total = 0
    for segment in dataset.segments:
        for file_index in np.unique(segment.column("file")).tolist():
            names = list(dataset.job.data.groups[group])
            parts = [
                read_group(segment.file, group, file, row_group, names)
                for file, row_group in row_groups(segment)
                if file == file_index
            ]
            tuples = pa.concat_tables(parts)
            total += len(unique_tuples(comparable_tuple(tuples, names))[0])
    return total


def dedup_section(dataset: Dataset) -> Section:
    """Return the section about deduplication."""
    totals = group_totals(dataset)
    uncut = {name: unique_without_cuts(dataset, name) for name in totals}
    lengths = session_lengths(dataset)
    return Section(
        "dedup",
        "Deduplication",
        _finding(totals, lengths),
        _table(totals, uncut)
        + paragraph(_cuts(totals, uncut, dataset.job.data.block_samples), "note")
        + beyond_blocks(dataset)
        + side_by_side(_factors(totals) + _values(totals), _histogram(lengths)),
    )


def _finding(totals: Mapping[str, GroupCounts], lengths: NDArray[np.int64]) -> str:
    session = f"A session has {digits(float(lengths.mean()))} samples on average"
    if not totals:
        return f"{session}; the job names no groups, so nothing is deduplicated."
    factors = ", ".join(f"{digits(g.dedup_factor)} in {name}" for name, g in totals.items())
    values = sum(g.num_values for g in totals.values())
    stored = sum(g.num_values_dedup for g in totals.values())
    lists = (
        f"; {count(stored)} list values are stored instead of {count(values)}: "
        f"{ratio(values, stored)} times fewer"
        if stored
        else ""
    )
    return f"{session}. Samples that share one stored tuple: {factors}{lists}."


def _table(totals: Mapping[str, GroupCounts], uncut: Mapping[str, int]) -> str:
    rows = [
        (
            name, count(g.num_unique), digits(g.dedup_factor), _lists(g.num_values),
            _lists(g.num_values_dedup), count(g.num_unique - uncut[name]),
            percent((g.num_unique - uncut[name]) / g.num_unique),
        )
        for name, g in totals.items()
    ]  # fmt: skip
    head = [
        "group", "unique tuples", "dedup factor", "list values, expanded", "list values, stored",
        "tuples added by block edges", "share of the unique tuples",
    ]  # fmt: skip
    return table("Dedup groups: columns that change together", head, rows)


def _lists(number: int) -> str | None:
    return count(number) if number else None


def _cuts(totals: Mapping[str, GroupCounts], uncut: Mapping[str, int], block_samples: int) -> str:
    extra = sum(g.num_unique - uncut[name] for name, g in totals.items())
    return (
        f"Tuples are unique within a block of {count(block_samples)} samples. A session that a "
        f"block edge or the split cuts is stored once on either side: {count(extra)} tuples more "
        "than if each part were one block, in all groups together. Only that many are paid for "
        "blocks that can be read, trained and summed up independently."
    )


def _factors(totals: Mapping[str, GroupCounts]) -> str:
    bars = [Bar(n, g.dedup_factor, digits(g.dedup_factor)) for n, g in totals.items()]
    if not bars:
        return ""
    label = "Samples per unique tuple: " + ", ".join(f"{b.name} {b.text}" for b in bars)
    return figure(
        bar_chart("dedup-factors", label, bars, HALF), "Dedup factor: samples per unique tuple."
    )


def _values(totals: Mapping[str, GroupCounts]) -> str:
    expanded = sum(g.num_values for g in totals.values())
    stored = sum(g.num_values_dedup for g in totals.values())
    if not stored:
        return ""
    bars = [
        Bar("expanded", expanded, count(expanded), OTHER),
        Bar("stored", stored, count(stored)),
    ]
    label = "List values: " + ", ".join(f"{b.name} {b.text}" for b in bars)
    return figure(
        bar_chart("list-values", label, bars, HALF),
        "List values of all groups, if every sample had its own and as stored.",
    )


def _histogram(lengths: NDArray[np.int64]) -> str:
    doubling = np.minimum(np.log2(lengths).astype(np.int64), MOST_DOUBLINGS)
    counts = np.bincount(doubling)
    bars = [Bar(_range_name(d), n, count(n)) for d, n in enumerate(counts.tolist())]
    label = "Sessions by length: " + ", ".join(f"{b.name} samples {b.text}" for b in bars)
    return figure(
        columns("sessions", label, bars, "samples in a session", HALF),
        f"Sessions by their number of samples; median {count(float(np.median(lengths)))}, "
        f"longest {count(int(lengths.max()))}.",
    )


def _range_name(doubling: int) -> str:
    low = 1 << doubling
    if doubling == MOST_DOUBLINGS:
        return f"{low}+"
    return str(low) if low == 1 else f"{low}-{2 * low - 1}"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of one group.

    Attributes:
        change_rate: share of samples with another tuple than the one before in the session.
        expected: samples per tuple that RecD expects of that rate.
        measured: samples per stored tuple.
        values_expected: list values that would be stored at the expected factor.
        values_stored: list values that are stored.
        bytes_alone: of its columns as one file of one row per sample, best encodings.
        bytes_here: of its files and its inverse indices, transforms included.
        lost_at_edges: tuples stored again because a block ended.
        lost_at_windows: tuples stored again because a window or the split did.
    """

    change_rate: float
    expected: float
    measured: float
    values_expected: float
    values_stored: int
    bytes_alone: float
    bytes_here: int
    lost_at_edges: int
    lost_at_windows: int


def starts_of_sessions(rows: pa.Table, session: SessionConfig) -> NDArray[np.bool_]:
    """Return which rows, in the dataset's order, are the first of their session."""
    key, time = one_chunk(rows[session.key]), pc.cast(one_chunk(rows[session.time]), pa.int64())
    starts = changes(key)
    if session.gap is not None:
        starts[1:] |= np.diff(time.to_numpy()) > microseconds(session.gap)
    return starts


def changes(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return which rows differ from the row before; the first one does."""
    _, inverse = unique_tuples(comparable(column))
    return np.diff(inverse, prepend=-1) != 0


def change_rates(rows: pa.Table, columns: Sequence[str], starts: NDArray[np.bool_]) -> list[float]:
    """Return how often each column changes, then how often any of them does.

    Args:
        rows: in the dataset's order.
        columns: names.
        starts: (num_rows,) bool, first row of a session.
    """
    follows = ~starts
    changed = [changes(rows[c])[follows] for c in columns]
    changed.append(np.logical_or.reduce(changed))
    return [float(c.mean()) if len(c) else 1.0 for c in changed]


def group_facts(
    dataset: Dataset, rows: FlatRows, group: str, starts: NDArray[np.bool_], change_rate: float
) -> GroupFacts:
    """Return what is known of a group.

    Args:
        dataset: an open dataset.
        rows: its expanded rows, all or some.
        group: name of the group.
        starts: (num_rows,) bool, first row of a session.
        change_rate: of its tuple.
    """
    totals = group_totals(dataset)[group]
    expected = expected_factor(change_rate, len(starts) / int(starts.sum()))
    whole, per_window = unique_counts(dataset, group)
    with tempfile.TemporaryDirectory() as directory:
        names = list(dataset.job.data.groups[group])
        alone = write_best(rows.table.select(names), Path(directory) / "alone.parquet")
    return GroupFacts(
        change_rate=change_rate,
        expected=expected,
        measured=totals.dedup_factor,
        values_expected=totals.num_values / expected,
        values_stored=totals.num_values_dedup,
        bytes_alone=alone / rows.share,
        bytes_here=bytes_by_table(dataset)[group] + inverse_bytes(dataset, group),
        lost_at_edges=totals.num_unique - per_window,
        lost_at_windows=per_window - whole,
    )


def inverse_bytes(dataset: Dataset, group: str) -> int:
    """Return the compressed bytes of a group's inverse indices in the samples."""
    total = 0
    for segment in dataset.segments:
        for path in (p for p in segment.files if p.startswith("samples/")):
            metadata = pq.read_metadata(segment.directory / path)
            for index in range(metadata.num_row_groups):
                columns = metadata.row_group(index)
                total += sum(
                    columns.column(c).total_compressed_size
                    for c in range(columns.num_columns)
                    if columns.column(c).path_in_schema == inverse_column(group)
                )
    return total


def unique_counts(dataset: Dataset, group: str) -> tuple[int, int]:
    """Return the unique tuples if each part were one block, and if each window of a part were."""
    whole = per_window = 0
    for segment in dataset.segments:
        for file_index in np.unique(segment.column("file")).tolist():
            codes, windows = _tuples_of_part(segment, file_index, group, dataset)
            whole += len(np.unique(codes))
            per_window += len(np.unique(codes * (int(windows.max()) + 1) + windows))
    return whole, per_window


def _tuples_of_part(
    segment: Segment, file_index: int, group: str, dataset: Dataset
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tuple of each stored row of a part, numbered, and its (split, window)."""
    names = list(dataset.job.data.groups[group])
    stored = pa.concat_tables(
        [
            read_group(segment.file, group, file, row_group, [BLOCK, *names])
            for file, row_group in row_groups(segment)
            if file == file_index
        ]
    )
    order = np.argsort(segment.block_ids)
    pairs = [segment.blocks["split"].combine_chunks(), segment.blocks["window"].combine_chunks()]
    _, window = unique_tuples([part for column in pairs for part in comparable(column)])
    place = order[np.searchsorted(segment.block_ids[order], stored[BLOCK].to_numpy())]
    _, codes = unique_tuples(comparable_tuple(stored, names))
    return codes.astype(np.int64), window[place].astype(np.int64)


def groups_section(dataset: Dataset, rows: FlatRows) -> Section | None:
    """Return the section about the choice of groups; None for a dataset without any."""
    data = dataset.job.data
    if not data.groups:
        return None
    starts = starts_of_sessions(rows.table, data.session)
    rates: dict[str, float] = {}
    facts: dict[str, GroupFacts] = {}
    for group, names in data.groups.items():
        *each, together = change_rates(rows.table, names, starts)
        rates.update(zip(names, each, strict=True))
        facts[group] = group_facts(dataset, rows, group, starts, together)
    alone = [c for c in rows.table.column_names if c not in rates]
    if alone:
        rates.update(zip(alone, change_rates(rows.table, alone, starts)[:-1], strict=True))
    saved = sum(f.bytes_alone - f.bytes_here for f in facts.values())
    return Section(
        "groups",
        "Why these groups",
        f"Features that change together share a tuple. Against the same columns in one row per "
        f"sample, clustered and with the best encodings, the groups save {size(saved)}."
        if saved >= 0
        else f"The groups take {size(-saved)} more than the same columns in one row per sample, "
        "clustered and with the best encodings; what they save is decoding and look-ups.",
        _group_table(facts)
        + _features(dataset, rates, alone)
        + paragraph(
            "RecD expects S / (1 + (S - 1) c) samples per tuple, where a session has S samples and "
            "each after the first changes the tuple with probability c; more is measured where "
            "sessions of one block share tuples, less where a session is cut. A list's expected "
            "length is that of all samples over the expected factor.",
            "note",
        ),
    )


def _group_table(facts: dict[str, GroupFacts]) -> str:
    head = [
        "group", "changes", "samples per tuple, expected", "measured", "list values, expected",
        "stored", "bytes, one row per sample", "bytes, here", "tuples lost at block edges",
        "at windows and the split",
    ]  # fmt: skip
    body = [
        (
            name, percent(f.change_rate), digits(f.expected), digits(f.measured),
            count(f.values_expected) if f.values_stored else None,
            count(f.values_stored) if f.values_stored else None,
            size(f.bytes_alone), size(f.bytes_here), count(f.lost_at_edges),
            count(f.lost_at_windows),
        )
        for name, f in facts.items()
    ]  # fmt: skip
    return table("Groups: how often each changes within a session, and what that gives", head, body)


def _features(dataset: Dataset, rates: dict[str, float], alone: Sequence[str]) -> str:
    places = [*dataset.job.data.groups.items(), ("samples", tuple(alone))]
    body = [(name, place, percent(rates[name])) for place, names in places for name in names]
    return table(
        "Features: how often each changes within a session", ["", "stored in", "changes"], body
    )
