"""Why the groups are as they are: how often features change, what RecD expects, what was lost."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.groups.search import expected_factor
from pipelines.parts.cluster import microseconds
from pipelines.parts.expand import row_groups
from pipelines.report.baselines import FlatRows, write_best
from pipelines.report.dedup import group_totals
from pipelines.report.html import Section, paragraph, table
from pipelines.report.numbers import count, digits, percent, size
from pipelines.report.storage import bytes_by_table
from schemas.columns import comparable, comparable_tuple, one_chunk
from schemas.dataset import Dataset, Segment
from schemas.jagged import unique_tuples
from schemas.job import SessionConfig
from schemas.layout import BLOCK, inverse_column
from schemas.stored import read_group


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
    order = np.argsort(segment.block_names)
    pairs = [segment.blocks["split"].combine_chunks(), segment.blocks["window"].combine_chunks()]
    _, window = unique_tuples([part for column in pairs for part in comparable(column)])
    place = order[np.searchsorted(segment.block_names[order], stored[BLOCK].to_numpy())]
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
        _table(facts)
        + _features(dataset, rates, alone)
        + paragraph(
            "RecD expects S / (1 + (S - 1) c) samples per tuple, where a session has S samples and "
            "each after the first changes the tuple with probability c; more is measured where "
            "sessions of one block share tuples, less where a session is cut. A list's expected "
            "length is that of all samples over the expected factor.",
            "note",
        ),
    )


def _table(facts: dict[str, GroupFacts]) -> str:
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
