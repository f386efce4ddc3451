"""What the schema's constraints on columns and on the number of samples find fault with."""

from __future__ import annotations

from collections.abc import Iterator

from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2

from pipelines.gate.anomalies import Finding
from pipelines.gate.distance import shares
from pipelines.sources.reject_files import SHOWN_ROWS

Feature = statistics_pb2.FeatureNameStatistics


def common_of(feature: Feature) -> statistics_pb2.CommonStatistics:
    """Return what all kinds of statistics have."""
    kind = feature.string_stats if feature.HasField("string_stats") else feature.num_stats
    return kind.common_stats


def feature_findings(limit: schema_pb2.Feature, found: Feature | None) -> Iterator[Finding]:
    """Yield what the schema's constraints on one column find fault with."""
    if found is None:
        return
    common, name = common_of(found), limit.name
    total = common.num_non_missing + common.num_missing
    fraction = common.num_non_missing / total if total else 0.0
    if limit.presence.min_fraction > fraction:
        yield Finding(
            name, "FEATURE_TYPE_LOW_FRACTION_PRESENT", "Column dropped",
            f"must be present in at least {limit.presence.min_fraction:g} of its rows, "
            f"got {fraction:.4g} ({common.num_missing} of {total} missing)",
        )  # fmt: skip
    if limit.presence.min_count > common.num_non_missing:
        yield Finding(
            name, "FEATURE_TYPE_LOW_NUMBER_PRESENT", "Column dropped",
            f"must be present in at least {limit.presence.min_count} rows, "
            f"got {common.num_non_missing}",
        )  # fmt: skip
    counts = limit.value_count
    if counts.min and common.num_non_missing and common.min_num_values < counts.min:
        yield Finding(
            name, "FEATURE_TYPE_LOW_NUMBER_VALUES", "Missing values",
            f"must have at least {counts.min} values in every row, got {common.min_num_values}",
        )  # fmt: skip
    if counts.max and common.max_num_values > counts.max:
        yield Finding(
            name, "FEATURE_TYPE_HIGH_NUMBER_VALUES", "Superfluous values",
            f"must have at most {counts.max} values in every row, got {common.max_num_values}",
        )  # fmt: skip
    yield from _unique_findings(limit, found)
    yield from _domain_findings(limit, found)


def _unique_findings(limit: schema_pb2.Feature, found: Feature) -> Iterator[Finding]:
    if not limit.HasField("unique_constraints"):
        return
    number = unique_of(found) or 0
    low, high = limit.unique_constraints.min, limit.unique_constraints.max
    if number < low:
        text = f"must have at least {low} distinct values, got {number:g}"
        yield Finding(limit.name, "FEATURE_TYPE_LOW_UNIQUE", "Low number of unique values", text)
    if high and number > high:
        text = f"must have at most {high} distinct values, got {number:g}"
        yield Finding(limit.name, "FEATURE_TYPE_HIGH_UNIQUE", "High number of unique values", text)


def _domain_findings(limit: schema_pb2.Feature, found: Feature) -> Iterator[Finding]:
    known = set(limit.string_domain.value)
    if not known or not found.HasField("string_stats"):
        return
    ranks = found.string_stats.rank_histogram
    outside = shares({b.label: b.sample_count for b in ranks.buckets})
    outside = {k: s for k, s in outside.items() if k not in known}
    least = limit.distribution_constraints.min_domain_mass  # 1 when it is not given
    if outside and 1 - sum(outside.values()) < least:
        shown = ", ".join(f"{k!r} ({s:.2%})" for k, s in list(outside.items())[:SHOWN_ROWS])
        yield Finding(
            limit.name, "ENUM_TYPE_UNEXPECTED_STRING_VALUES", "Unexpected string values",
            f"must lie in its domain with a share of at least {least:g}, got values outside: "
            f"{shown}",
        )  # fmt: skip


def unique_of(feature: Feature) -> float | None:
    """Return the number of distinct values, None where they are not counted."""
    if feature.HasField("string_stats"):
        return feature.string_stats.unique
    return next((c.num for c in feature.custom_stats if c.name == "unique"), None)


def example_findings(
    limits: schema_pb2.DatasetConstraints, count: int, before: int | None
) -> Iterator[Finding]:
    """Yield what the number of samples breaks."""
    if limits.min_examples_count > count:
        text = f"must have at least {limits.min_examples_count} samples, got {count}"
        yield Finding(None, "DATASET_LOW_NUM_EXAMPLES", "Low num examples", text)
    if limits.max_examples_count and limits.max_examples_count < count:
        text = f"must have at most {limits.max_examples_count} samples, got {count}"
        yield Finding(None, "DATASET_HIGH_NUM_EXAMPLES", "High num examples", text)
    drift = limits.num_examples_drift_comparator
    if not before:
        return
    ratio = count / before
    if drift.HasField("min_fraction_threshold") and ratio < drift.min_fraction_threshold:
        text = (
            f"must have at least {drift.min_fraction_threshold:g} times the samples of the "
            f"segment before, got {ratio:.4g} times"
        )
        yield Finding(None, "COMPARATOR_LOW_NUM_EXAMPLES", "Low num examples", text)
    if drift.HasField("max_fraction_threshold") and ratio > drift.max_fraction_threshold:
        text = (
            f"must have at most {drift.max_fraction_threshold:g} times the samples of the "
            f"segment before, got {ratio:.4g} times"
        )
        yield Finding(None, "COMPARATOR_HIGH_NUM_EXAMPLES", "High num examples", text)
