"""Statistics of the training and the evaluation samples of a part, sessions included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.parts.cluster import Clustered
from pipelines.parts.star import Star
from pipelines.statistics.columns import ColumnStatistics, sum_tables, table_statistics
from pipelines.statistics.sketch import count_buckets, sum_buckets
from pipelines.statistics.text import Slice
from schemas.columns import numpy_of, one_chunk
from schemas.features import FeatureSet
from schemas.job import DataConfig
from schemas.layout import BLOCK, EVALUATION, TRAIN, UNIQUE_INDEX, inverse_column

SAMPLES_PER_SESSION = "samples_per_session"
LABEL_DELAY_SEC = "label_delay_sec"
DEDUP_FACTOR = "dedup_factor/"


@dataclass(frozen=True, slots=True)
class SliceStatistics:
    """Sums over some samples.

    Attributes:
        num_samples: samples.
        columns: by name; a group's over its unique tuples.
        session_lengths: bucket of samples per session to sessions.
        label_delays: bucket of seconds from time to label time to samples.
        num_unique: group to unique tuples.
    """

    num_samples: int
    columns: Mapping[str, ColumnStatistics]
    session_lengths: Mapping[int, int]
    label_delays: Mapping[int, int]
    num_unique: Mapping[str, int]


def sum_slices(parts: Sequence[SliceStatistics]) -> SliceStatistics:
    """Return the statistics of several sets of samples together."""
    return SliceStatistics(
        sum(p.num_samples for p in parts),
        sum_tables([p.columns for p in parts]),
        sum_buckets(p.session_lengths for p in parts),
        sum_buckets(p.label_delays for p in parts),
        sum_buckets(p.num_unique for p in parts),
    )


def part_slices(
    star: Star, clustered: Clustered, data: DataConfig, features: FeatureSet
) -> dict[str, SliceStatistics]:
    """Return the statistics of a part's samples by split.

    Args:
        star: the part's tables, training samples first.
        clustered: its samples in the same order.
        data: the job's data section.
        features: declared columns.
    """
    num_samples = star.samples.num_rows
    num_train = int((~clustered.is_evaluation).sum())
    train_blocks = int((np.cumsum(star.samples_per_block) <= num_train).sum())
    cuts = {TRAIN: (0, num_train), EVALUATION: (num_train, num_samples)}
    found: dict[str, SliceStatistics] = {}
    for split, (start, end) in cuts.items():
        if start == end:
            continue
        columns = table_statistics(star.samples.slice(start, end - start), _keys(star))
        num_unique: dict[str, int] = {}
        for group, table in star.groups.items():
            middle = int(star.unique_per_block[group][:train_blocks].sum())
            low, high = (0, middle) if split == TRAIN else (middle, table.num_rows)
            columns.update(table_statistics(table.slice(low, high - low), _keys(star)))
            num_unique[group] = high - low
        lengths = clustered.session_samples[start:end]
        found[split] = SliceStatistics(
            end - start,
            columns,
            count_buckets(lengths[lengths > 0]),
            _label_delays(clustered, slice(start, end), data, features),
            num_unique,
        )
    return found


def _keys(star: Star) -> set[str]:
    return {BLOCK, UNIQUE_INDEX, *(inverse_column(g) for g in star.groups)}


def _label_delays(
    clustered: Clustered, rows: slice, data: DataConfig, features: FeatureSet
) -> dict[int, int]:
    names = features.with_role("label_time")
    if not names:
        return {}
    known, time = (
        one_chunk(clustered.samples.column(c)).slice(rows.start, rows.stop - rows.start)
        for c in (names[0], data.session.time)
    )
    valid = known.is_valid()
    seconds = (
        numpy_of(known.filter(valid).cast(pa.int64()))
        - numpy_of(time.filter(valid).cast(pa.int64()))
    ) / 1e6
    return count_buckets(seconds)


def sum_by_split(parts: Sequence[Mapping[str, SliceStatistics]]) -> dict[str, SliceStatistics]:
    """Add the statistics of several sets of samples, training first; a split may lack in some."""
    return {
        split: sum_slices([p[split] for p in parts if split in p])
        for split in (TRAIN, EVALUATION)
        if any(split in p for p in parts)
    }


def slices_of(
    parts: Sequence[Mapping[str, SliceStatistics]], data: DataConfig, features: FeatureSet
) -> list[Slice]:
    """Return the slices that the statistics of a segment show, from those of all parts in order.

    Args:
        parts: of each part, by split.
        data: the job's data section.
        features: declared columns.
    """
    splits = sum_by_split(parts)
    whole = sum_slices(list(splits.values()))
    shown = {"segment": whole, **(splits if len(splits) > 1 else {})}
    return [_slice(name, part, data, features) for name, part in shown.items()]


def _slice(name: str, part: SliceStatistics, data: DataConfig, features: FeatureSet) -> Slice:
    factors = {
        f"{DEDUP_FACTOR}{group}": part.num_samples / count
        for group, count in part.num_unique.items()
        if count
    }
    extra: dict[str, dict[str, float | Mapping[int, int]]] = {
        data.session.key: {SAMPLES_PER_SESSION: part.session_lengths, **factors}
    }
    for label_time in features.with_role("label_time"):
        extra.setdefault(label_time, {})[LABEL_DELAY_SEC] = part.label_delays
    return Slice(name, part.num_samples, part.columns, extra)
