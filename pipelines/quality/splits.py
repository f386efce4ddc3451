"""Statistics of a segment's training and evaluation samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.quality.statistics import ColumnStatistics, sum_buckets, sum_tables
from pipelines.quality.statistics_files import Slice
from schemas.config.job import DataConfig
from schemas.features import FeatureSet
from schemas.layout import EVALUATION, TRAIN

SAMPLES_PER_SESSION = "samples_per_session"
LABEL_DELAY_SEC = "label_delay_sec"
DEDUP_FACTOR = "dedup_factor/"


@dataclass(frozen=True, slots=True)
class SliceStatistics:
    """Statistics of some samples.

    Attributes:
        num_samples: number of samples.
        columns: by name; those of a group are over its unique tuples.
        session_lengths: bucket of samples per session to number of sessions.
        label_delays: bucket of seconds from time to label time to number of samples.
        num_unique: group to number of unique tuples.
    """

    num_samples: int
    columns: Mapping[str, ColumnStatistics]
    session_lengths: Mapping[int, int]
    label_delays: Mapping[int, int]
    num_unique: Mapping[str, int]


def sum_slices(parts: Sequence[SliceStatistics]) -> SliceStatistics:
    """Return the statistics of the union of several sets of samples."""
    return SliceStatistics(
        sum(p.num_samples for p in parts),
        sum_tables([p.columns for p in parts]),
        sum_buckets(p.session_lengths for p in parts),
        sum_buckets(p.label_delays for p in parts),
        sum_buckets(p.num_unique for p in parts),
    )


def sum_by_split(parts: Sequence[Mapping[str, SliceStatistics]]) -> dict[str, SliceStatistics]:
    """Return the statistics of each split, training first; not every part has both."""
    return {
        split: sum_slices([p[split] for p in parts if split in p])
        for split in (TRAIN, EVALUATION)
        if any(split in p for p in parts)
    }


def segment_slices(
    parts: Sequence[Mapping[str, SliceStatistics]], data: DataConfig, features: FeatureSet
) -> list[Slice]:
    """Return the slices of a segment's statistics: `segment`, and its splits if it has both."""
    splits = sum_by_split(parts)
    slices = {"segment": sum_slices(list(splits.values())), **(splits if len(splits) > 1 else {})}
    return [_slice(name, part, data, features) for name, part in slices.items()]


def _slice(name: str, part: SliceStatistics, data: DataConfig, features: FeatureSet) -> Slice:
    dedup_factors = {
        f"{DEDUP_FACTOR}{group}": part.num_samples / count
        for group, count in part.num_unique.items()
        if count
    }
    extra: dict[str, dict[str, float | Mapping[int, int]]] = {
        data.session.key: {SAMPLES_PER_SESSION: part.session_lengths, **dedup_factors}
    }
    for label_time in features.with_role("label_time"):
        extra.setdefault(label_time, {})[LABEL_DELAY_SEC] = part.label_delays
    return Slice(name, part.num_samples, part.columns, extra)
