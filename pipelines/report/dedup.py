"""What deduplication found: unique tuples, list values, sessions, and what block edges cost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.expand import row_groups
from pipelines.parts.sessions import session_lengths
from pipelines.report.bars import Bar, bar_chart, columns
from pipelines.report.html import Section, figure, paragraph, side_by_side, table
from pipelines.report.numbers import count, digits, percent, ratio
from pipelines.report.shared import beyond_blocks
from pipelines.report.svg import HALF, OTHER
from schemas.columns import comparable_tuple
from schemas.dataset import Dataset
from schemas.jagged import unique_tuples
from schemas.manifest import GroupCounts
from schemas.stored import read_group

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
