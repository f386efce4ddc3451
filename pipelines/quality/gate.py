"""Decide whether a segment may enter the dataset.

Its statistics against schema, job and earlier segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import TypeVar

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import anomalies_pb2, schema_pb2, statistics_pb2

from pipelines.quality.splits import DEDUP_FACTOR, LABEL_DELAY_SEC, SAMPLES_PER_SESSION
from pipelines.sources.rejects import SHOWN_CHARACTERS, SHOWN_ROWS, Reject, RejectCounts, sort_key
from schemas.config.job import GateConfig
from schemas.errors import SchemaError
from schemas.layout import EVALUATION, TRAIN

Key = TypeVar("Key")


def shares(counts: Mapping[Key, float]) -> dict[Key, float]:
    """Return counts as shares of their sum; nothing when they are all zero."""
    total = sum(counts.values())
    return {k: c / total for k, c in counts.items()} if total else {}


def infinity_norm(left: Mapping[Key, float], right: Mapping[Key, float]) -> float:
    """Return the largest difference of the shares of one value.

    Args:
        left: value to share.
        right: value to share; a value that lacks has none.

    Example:
        >>> infinity_norm({"a": 0.75, "b": 0.25}, {"a": 0.25, "c": 0.75})
        0.75
    """
    return max((abs(left.get(k, 0) - right.get(k, 0)) for k in {*left, *right}), default=0.0)


def jensen_shannon(left: Mapping[Key, float], right: Mapping[Key, float]) -> float:
    """Return the Jensen-Shannon divergence with logarithms of base 2, in [0, 1].

    Args:
        left: value, or bucket, to share.
        right: the same of the other side.

    Example:
        >>> jensen_shannon({1: 1.0}, {2: 1.0}), jensen_shannon({1: 1.0}, {1: 1.0})
        (1.0, 0.0)
    """
    total = 0.0
    for key in sorted({*left, *right}, key=str):
        p, q = left.get(key, 0.0), right.get(key, 0.0)
        middle = (p + q) / 2
        total += sum(x * log2(x / middle) for x in (p, q) if x > 0) / 2
    return min(1.0, max(0.0, total))


Kind = anomalies_pb2.AnomalyInfo


@dataclass(frozen=True, slots=True)
class Finding:
    """One limit that a segment breaks.

    Attributes:
        feature: column, or None for the segment as a whole.
        type: name of a type of `AnomalyInfo`.
        short: a few words.
        text: one line: what must hold, and what was found.
        rows: rejected rows that show it, one line each.
    """

    feature: str | None
    type: str
    short: str
    text: str
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the finding as lines."""
        where = "segment" if self.feature is None else f"feature {self.feature!r}"
        return "\n".join([f"{where}: {self.text}", *(f"  {row}" for row in self.rows)])


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one column is from the same column elsewhere.

    Attributes:
        feature: column.
        against: `drift`, from the segment before, or `skew`, training from evaluation.
        measure: `L_INFTY` or `JENSEN_SHANNON_DIVERGENCE`.
        value: distance, in [0, 1].
        threshold: largest allowed one.
    """

    feature: str
    against: str
    measure: str
    value: float
    threshold: float


def anomalies_proto(
    rejects: RejectCounts,
    findings: Sequence[Finding] = (),
    distances: Sequence[Distance] = (),
    severity: str = "ERROR",
) -> anomalies_pb2.Anomalies:
    """Return rejects by reason, findings by feature and measured distances as a proto.

    Args:
        rejects: of the segment, by kind of reason.
        findings: limits that are broken.
        distances: of every column that has a comparator.
        severity: of the findings.
    """
    proto = anomalies_pb2.Anomalies()
    for reason, counted in sorted(rejects.by_count(), key=lambda pair: pair[0]):
        info = proto.anomaly_info[reason]
        info.severity = Kind.ERROR
        info.short_description = reason
        shown = "; ".join(map(shown_row, counted.first))
        info.description = f"{counted.count} rows were rejected, such as {shown}"
    for finding in findings:
        is_whole = finding.feature is None
        info = proto.dataset_anomaly_info if is_whole else proto.anomaly_info[finding.feature or ""]
        _add(info, finding, severity)
    for distance in sorted(distances, key=lambda d: (d.feature, d.against, d.measure)):
        _measure(proto, distance)
    return proto


def anomalies_text(
    rejects: RejectCounts,
    findings: Sequence[Finding] = (),
    distances: Sequence[Distance] = (),
    severity: str = "ERROR",
) -> str:
    """Return `anomalies_proto` as text."""
    return text_format.MessageToString(anomalies_proto(rejects, findings, distances, severity))


def shown_row(reject: Reject) -> str:
    """Return a rejected row as one line: file, position, value."""
    place = reject.file if reject.position is None else f"{reject.file}:{reject.position}"
    return f"{place} {reject.value[:SHOWN_CHARACTERS]}".rstrip()


def _add(info: anomalies_pb2.AnomalyInfo, finding: Finding, severity: str) -> None:
    if finding.feature is not None and not info.path.step:
        info.path.step.append(finding.feature)
    info.severity = getattr(Kind, severity)
    info.reason.add(
        type=getattr(Kind, finding.type),
        short_description=finding.short,
        description=str(finding),
    )
    several = len(info.reason) > 1
    info.short_description = "Multiple errors" if several else finding.short
    info.description = " ".join(reason.description for reason in info.reason)


def _measure(proto: anomalies_pb2.Anomalies, distance: Distance) -> None:
    last = proto.drift_skew_info[-1] if proto.drift_skew_info else None
    if last is None or list(last.path.step) != [distance.feature]:
        last = proto.drift_skew_info.add()
        last.path.step.append(distance.feature)
    kinds = anomalies_pb2.DriftSkewInfo.Measurement
    side = last.drift_measurements if distance.against == "drift" else last.skew_measurements
    side.add(
        type=getattr(kinds, distance.measure), value=distance.value, threshold=distance.threshold
    )


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


# Whether a segment may enter the dataset: its statistics against schema, job and the past.
#
# What TFDV reads from a schema means the same here: presence, value counts, unique values,
# example counts, string domains, `drift_comparator` (against the segment before) and
# `skew_comparator` (training against evaluation). Limits on the segment as a whole stand in the
# job's `data.gate`.

MANY_REJECTS = "Many rejects"
Features = Mapping[str, Feature]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found.

    Attributes:
        findings: limits that are broken; empty when the segment may pass.
        distances: every one that was measured, broken or not.
    """

    findings: tuple[Finding, ...]
    distances: tuple[Distance, ...]


class GateError(SchemaError):
    """Say that a segment was built, but must not enter the dataset."""


def judge(
    schema: schema_pb2.Schema,
    gate: GateConfig | None,
    statistics: statistics_pb2.DatasetFeatureStatisticsList,
    before: statistics_pb2.DatasetFeatureStatisticsList | None,
    rejects: RejectCounts,
    num_rows: int,
) -> Verdict:
    """Compare a segment with its limits.

    Args:
        schema: declared columns with their constraints.
        gate: limits on the segment as a whole, or None.
        statistics: of the segment.
        before: of the segment before it, None for the first.
        rejects: rows of the segment that could not be used.
        num_rows: rows of the log that gave its samples.
    """
    here, past = slices_of(statistics), slices_of(before) if before else {}
    whole = here["segment"]
    findings: list[Finding] = []
    distances: list[Distance] = []
    for feature in schema.feature:
        found = whole.get(feature.name)
        findings.extend(_with_rows(f, rejects) for f in feature_findings(feature, found))
        pairs = (
            ("drift", feature.drift_comparator, found, past.get("segment", {}).get(feature.name)),
            ("skew", feature.skew_comparator,
             *(here.get(split, {}).get(feature.name) for split in (TRAIN, EVALUATION))),
        )  # fmt: skip
        for against, comparator, one, other in pairs:
            distances.extend(distances_of(feature, against, comparator, one, other))
    findings.extend(far_finding(d) for d in distances if d.value > d.threshold)
    count = statistics.datasets[0].num_examples
    earlier = before.datasets[0].num_examples if before else None
    findings.extend(example_findings(schema.dataset_constraints, count, earlier))
    findings.extend(reject_findings(gate or GateConfig(), rejects, num_rows))
    if gate is not None and past:
        findings.extend(session_findings(gate, schema, whole, past["segment"]))
    return Verdict(tuple(findings), tuple(distances))


def check_limits(schema: schema_pb2.Schema) -> None:
    """Refuse limits that cannot be measured, before the work.

    Raises:
        SchemaError: a column's type does not have what its comparator or constraint compares.
    """
    for feature in schema.feature:
        is_float = feature.type == schema_pb2.FLOAT
        sides = ("drift_comparator", feature.drift_comparator), (
            "skew_comparator", feature.skew_comparator,
        )  # fmt: skip
        for name, side in sides:
            if side.HasField("normalized_abs_difference"):
                _refuse(feature, name, "normalized_abs_difference")
            if is_float and side.HasField("infinity_norm"):
                _refuse(feature, name, "infinity_norm of FLOAT")
        if is_float and feature.HasField("unique_constraints"):
            raise SchemaError(
                f"unique_constraints of feature {feature.name!r} must be on INT or BYTES, got "
                "FLOAT; remove it"
            )


def _refuse(feature: schema_pb2.Feature, side: str, found: str) -> None:
    raise SchemaError(
        f"{side} of feature {feature.name!r} must be one that its type has, got {found}; "
        "use jensen_shannon_divergence"
    )


def slices_of(
    statistics: statistics_pb2.DatasetFeatureStatisticsList,
) -> dict[str, Features]:
    """Return the features of each slice by name."""
    return {d.name: {f.path.step[0]: f for f in d.features} for d in statistics.datasets}


def words_of(feature: Feature) -> dict[str, float] | None:
    """Return frequent values with their counts, None where they are not counted."""
    if feature.HasField("string_stats"):
        ranks = feature.string_stats.rank_histogram
    else:
        found = [c.rank_histogram for c in feature.custom_stats if c.name == "rank_histogram"]
        if not found:
            return None
        ranks = found[0]
    return {b.label: b.sample_count for b in ranks.buckets}


def buckets_of(histogram: statistics_pb2.Histogram) -> dict[float, float]:
    """Return the counts of a histogram by the lower end of their buckets."""
    return {b.low_value: b.sample_count for b in histogram.buckets}


def distances_of(
    limit: schema_pb2.Feature,
    against: str,
    comparator: schema_pb2.FeatureComparator,
    one: Feature | None,
    other: Feature | None,
) -> Iterator[Distance]:
    """Measure what a comparator asks for; nothing when one side has no values."""
    norms = comparator.HasField("infinity_norm"), comparator.HasField("jensen_shannon_divergence")
    if one is None or other is None:
        return
    if not (common_of(one).tot_num_values and common_of(other).tot_num_values):
        return
    if norms[0]:
        threshold = comparator.infinity_norm.threshold
        words = [_known_shares(feature) for feature in (one, other)]
        yield Distance(limit.name, against, "L_INFTY", infinity_norm(*words), threshold)
    if norms[1]:
        threshold = comparator.jensen_shannon_divergence.threshold
        shape: Callable[[Feature], Mapping[object, float]] = (
            _known_shares if one.HasField("string_stats") else _number_shares
        )
        value = jensen_shannon(shape(one), shape(other))
        yield Distance(limit.name, against, "JENSEN_SHANNON_DIVERGENCE", value, threshold)


def _known_shares(feature: Feature) -> dict[object, float]:
    """Return the share of each frequent value among all values."""
    words = words_of(feature) or {}
    total = common_of(feature).tot_num_values
    return {word: count / total for word, count in words.items()}


def _number_shares(feature: Feature) -> dict[object, float]:
    return shares({k: c for h in feature.num_stats.histograms for k, c in buckets_of(h).items()})


def far_finding(distance: Distance) -> Finding:
    """Return the finding that a distance is above its threshold."""
    short = distance.measure == "L_INFTY"
    words = "L-infinity" if short else "Jensen-Shannon"
    sides = "the segment before" if distance.against == "drift" else "evaluation"
    kind = "L_INFTY" if short else "JENSEN_SHANNON_DIVERGENCE"
    return Finding(
        distance.feature, f"COMPARATOR_{kind}_HIGH", f"High {words} distance",
        f"must have a {words} distance of at most {distance.threshold:g} from {sides}, "
        f"got {distance.value:.4g}",
    )  # fmt: skip


def reject_findings(gate: GateConfig, rejects: RejectCounts, num_rows: int) -> Iterator[Finding]:
    """Yield that too many rows could not be used, with the first ones.

    Args:
        gate: with the limit.
        rejects: rows that could not be used.
        num_rows: rows that gave samples.
    """
    limit, share = gate.max_reject_fraction, rejects.share(num_rows)
    if limit is None or share <= limit:
        return
    yield Finding(
        None, "CUSTOM_VALIDATION", MANY_REJECTS,
        f"rejected rows must be at most {limit:g} of those that samples are made from, got "
        f"{share:.4g} ({rejects.num_rows} of {rejects.num_rows + num_rows})",
        tuple(f"{shown_row(r)}: {r.reason}" for r in rejects.first),
    )  # fmt: skip


def session_findings(
    gate: GateConfig, schema: schema_pb2.Schema, here: Features, past: Features
) -> Iterator[Finding]:
    """Yield what differs from the segment before in sessions, labels and deduplication."""
    for name, limit in ((SAMPLES_PER_SESSION, gate.session_drift),
                        (LABEL_DELAY_SEC, gate.delay_drift)):  # fmt: skip
        one, other = _custom(here, name), _custom(past, name)
        if limit is None or one is None or other is None:
            continue
        value = jensen_shannon(
            shares(buckets_of(one.histogram)), shares(buckets_of(other.histogram))
        )
        if value > limit:
            yield Finding(
                None, "CUSTOM_VALIDATION", f"Drift of {name}",
                f"{name} must have a Jensen-Shannon distance of at most {limit:g} from the "
                f"segment before, got {value:.4g}",
            )  # fmt: skip
    for name, limit, value, before in _ratios(gate, schema, here, past):
        change = abs(value - before) / abs(before) if before else float(value != 0)
        if limit is not None and change > limit:
            yield Finding(
                None, "CUSTOM_VALIDATION", f"Drift of {name}",
                f"{name} must change by at most {limit:g} of the one before, got {value:.4g} "
                f"after {before:.4g}",
            )  # fmt: skip


def _ratios(
    gate: GateConfig, schema: schema_pb2.Schema, here: Features, past: Features
) -> Iterator[tuple[str, float | None, float, float]]:
    """Yield (what, limit, here, before) of the figures that are compared as numbers."""
    for feature in schema.feature:
        if "label" in feature.annotation.tag and feature.name in here and feature.name in past:
            one, other = (side[feature.name].num_stats.mean for side in (here, past))
            yield "label rate", gate.label_drift, one, other
    names = {c.name for f in here.values() for c in f.custom_stats}
    for name in sorted(n for n in names if n.startswith(DEDUP_FACTOR)):
        one, other = _custom(here, name), _custom(past, name)
        if one is not None and other is not None:
            what = f"dedup factor of {name.removeprefix(DEDUP_FACTOR)}"
            yield what, gate.dedup_drift, one.num, other.num


def _custom(features: Features, name: str) -> statistics_pb2.CustomStatistic | None:
    found = (c for f in features.values() for c in f.custom_stats if c.name == name)
    return next(found, None)


def _with_rows(finding: Finding, rejects: RejectCounts) -> Finding:
    """Add the first rejected rows whose reason names the column."""
    counts = rejects.kinds.values()
    mine = [r for c in counts for r in c.first if f"{finding.feature!r}" in r.reason]
    rows = tuple(shown_row(r) for r in sorted(mine, key=sort_key)[:SHOWN_ROWS])
    return Finding(finding.feature, finding.type, finding.short, finding.text, rows)
