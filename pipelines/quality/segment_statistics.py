"""Statistics as tensorflow-metadata protos, and their file in a segment.

A proto has a dataset `segment` over all samples, and `train` and `evaluation` if the segment has
both. A feature has one kind of statistics only: distinct and frequent values of texts are in
`string_stats`, those of integers and statistics of sessions in `custom_stats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import statistics_pb2

from presage.pipelines.quality.column_statistics import (
    FREQUENT,
    ColumnStatistics,
    Sketch,
    bucket_range,
    mean_and_deviation,
    sum_buckets,
    sum_tables,
)
from presage.schemas.dataset.files import read_verified
from presage.schemas.dataset.opened import Segment
from presage.schemas.errors import SchemaError
from presage.schemas.layout import EVALUATION, STATISTICS, TRAIN
from presage.schemas.storage.location import Location

SHOWN_VALUES = 20
"""Frequent values in `top_values`."""
RANKED_VALUES = 100
"""Frequent values in the rank histogram: a drift of more than 0.01 concerns one of them. With 1,000
the text was a sixth of a dataset (8.8 MB beside 52 MB of the demo's log)."""

_last_written: dict[str, statistics_pb2.DatasetFeatureStatisticsList] = {}
"""The last text and its proto: a build checks the statistics that it has just written, and parsing
them would take most of the time of a small build."""


def statistics_text(
    slices: Mapping[str, SliceStatistics], session_key: str, label_times: Iterable[str] = ()
) -> str:
    """Return the statistics of slices, by name, as the text of a DatasetFeatureStatisticsList.

    Features are in name order; that of the session key has the statistics of sessions.
    """
    proto = statistics_pb2.DatasetFeatureStatisticsList()
    for slice_name, each in slices.items():
        dataset = proto.datasets.add(name=slice_name, num_examples=each.num_samples)
        extra = _custom_statistics(each, session_key, label_times)
        for name in sorted(each.columns):
            feature = dataset.features.add()
            _fill(feature, name, each.columns[name])
            for key, value in sorted(extra.get(name, {}).items()):
                custom = feature.custom_stats.add(name=key)
                if isinstance(value, Mapping):
                    _fill_histogram(custom.histogram, value)
                else:
                    custom.num = value
    text = text_format.MessageToString(proto)
    _last_written.clear()
    _last_written[text] = proto
    return text


def _custom_statistics(
    statistics: SliceStatistics, session_key: str, label_times: Iterable[str]
) -> dict[str, dict[str, float | Mapping[int, int]]]:
    """Return custom statistics by column: numbers, or histograms (bucket to count)."""
    dedup_factors = {
        f"{DEDUP_FACTOR}{group}": statistics.num_samples / count
        for group, count in statistics.num_unique.items()
        if count
    }
    extra: dict[str, dict[str, float | Mapping[int, int]]] = {
        session_key: {SAMPLES_PER_SESSION: statistics.session_lengths, **dedup_factors}
    }
    for label_time in label_times:
        extra.setdefault(label_time, {})[LABEL_DELAY_SEC] = statistics.label_delays
    return extra


def _fill(
    feature: statistics_pb2.FeatureNameStatistics, name: str, column: ColumnStatistics
) -> None:
    kinds = statistics_pb2.FeatureNameStatistics
    feature.path.step.append(name)
    feature.type = getattr(kinds, column.kind)
    mean = deviation = 0.0
    if column.num_values:
        mean, deviation = mean_and_deviation(column.total, column.total_squares, column.num_values)
    if column.kind == "STRING":
        feature.string_stats.avg_length = mean
        common = feature.string_stats.common_stats
        _fill_words(feature.string_stats, column.sketch)
    else:
        numbers = feature.num_stats
        common = numbers.common_stats
        _fill_numbers(numbers, column, mean, deviation)
        if column.kind == "INT":
            feature.custom_stats.add(name="unique", num=column.sketch.num_unique)
            ranks = feature.custom_stats.add(name="rank_histogram").rank_histogram
            _fill_ranks(ranks, column.sketch)
    common.num_non_missing = column.num_present
    common.num_missing = column.num_missing
    common.min_num_values = column.min_values
    common.max_num_values = column.max_values
    common.tot_num_values = column.num_values + column.num_nan
    if column.num_present:
        common.avg_num_values = common.tot_num_values / column.num_present
    if column.lengths:
        _fill_histogram(common.num_values_histogram, column.lengths)


def _fill_numbers(
    numbers: statistics_pb2.NumericStatistics,
    column: ColumnStatistics,
    mean: float,
    deviation: float,
) -> None:
    numbers.mean = mean
    numbers.num_zeros = column.num_zeros
    if column.num_values:
        numbers.std_dev = deviation
        numbers.min, numbers.max = column.minimum, column.maximum
    if column.num_nan or column.sketch.buckets:
        histogram = numbers.histograms.add(num_nan=column.num_nan)
        _fill_histogram(histogram, column.sketch.buckets)


def _fill_histogram(histogram: statistics_pb2.Histogram, buckets: Mapping[int, int]) -> None:
    ranges = sorted((*bucket_range(b), count) for b, count in buckets.items())
    for low, high, count in ranges:
        histogram.buckets.add(low_value=low, high_value=high, sample_count=count)


def _fill_words(words: statistics_pb2.StringStatistics, sketch: Sketch) -> None:
    words.unique = sketch.num_unique
    _fill_ranks(words.rank_histogram, sketch)
    for bucket in words.rank_histogram.buckets[:SHOWN_VALUES]:
        words.top_values.add(value=bucket.label, frequency=bucket.sample_count)


def _fill_ranks(ranks: statistics_pb2.RankHistogram, sketch: Sketch) -> None:
    """Write frequent values; among many distinct ones those whose counts are exact."""
    least = sketch.num_values * FREQUENT if sketch.num_unique * FREQUENT > 1 else 0
    values = [] if sketch.values is None else sketch.values[:RANKED_VALUES].to_pylist()
    for rank, (value, count) in enumerate(zip(values, sketch.counts.tolist(), strict=False)):
        if count >= least:
            ranks.buckets.add(low_rank=rank, high_rank=rank, label=str(value), sample_count=count)


COMPRESSION_LEVEL = 9
"""Level of zstd. The text of 17 columns, 541 kB: 35 kB in 11 ms, 44 kB in 2 ms at level 3, 34 kB in
49 ms at 15 and 29 kB in 293 ms at 19 (benchmarks/storage.md, 2026-11-23)."""


def write_statistics(segment: Location | Path, text: str) -> None:
    """Write the text of a DatasetFeatureStatisticsList into a segment's directory."""
    codec = pa.Codec("zstd", compression_level=COMPRESSION_LEVEL)
    (Location.parse(segment) / STATISTICS).write_bytes(codec.compress(text.encode(), asbytes=True))


def read_statistics(segment: Location) -> statistics_pb2.DatasetFeatureStatisticsList:
    """Read the statistics of a complete segment, which is not committed yet.

    Raises:
        SchemaError: the file is missing or damaged.
    """
    path = segment / STATISTICS
    try:
        return parse_statistics(path, path.read_bytes())
    except FileNotFoundError as error:
        raise SchemaError(
            "statistics are missing; another process has removed the segment, build it again",
            file=str(path),
        ) from error


def parse_statistics(path: Location, data: bytes) -> statistics_pb2.DatasetFeatureStatisticsList:
    """Parse the content of a file of statistics; `path` is used in errors.

    Raises:
        SchemaError: it is damaged.
    """
    try:
        text = pa.CompressedInputStream(pa.py_buffer(data), "zstd").read().decode()
        if text in _last_written:
            return _last_written[text]
        return text_format.Parse(text, statistics_pb2.DatasetFeatureStatisticsList())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise SchemaError(
            f"statistics cannot be read: {error}; restore the file or rebuild the dataset",
            file=str(path),
        ) from error


def segment_statistics(segment: Segment) -> statistics_pb2.DatasetFeatureStatisticsList:
    """Return the statistics of an open segment.

    Raises:
        SchemaError: the file is missing or changed.
    """
    path = segment.directory / STATISTICS
    return parse_statistics(path, read_verified(path, segment.files[STATISTICS].sha256))


# Statistics of training and evaluation samples.

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


def sum_slices(slices: Sequence[SliceStatistics]) -> SliceStatistics:
    """Return the statistics of the union of several sets of samples."""
    return SliceStatistics(
        sum(s.num_samples for s in slices),
        sum_tables([s.columns for s in slices]),
        sum_buckets(s.session_lengths for s in slices),
        sum_buckets(s.label_delays for s in slices),
        sum_buckets(s.num_unique for s in slices),
    )


def sum_by_split(partitions: Sequence[Mapping[str, SliceStatistics]]) -> dict[str, SliceStatistics]:
    """Return the statistics of each split, training first; not every partition has both."""
    return {
        split: sum_slices([p[split] for p in partitions if split in p])
        for split in (TRAIN, EVALUATION)
        if any(split in p for p in partitions)
    }


def segment_slices(
    partitions: Sequence[Mapping[str, SliceStatistics]],
) -> dict[str, SliceStatistics]:
    """Return the slices of a segment's statistics: `segment`, and its splits if it has both."""
    splits = sum_by_split(partitions)
    return {"segment": sum_slices(list(splits.values())), **(splits if len(splits) > 1 else {})}
