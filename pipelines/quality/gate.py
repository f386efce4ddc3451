"""Check the statistics of a segment against the schema, the job and the previous segment.

Constraints of a schema have their meaning in TFDV: presence, value counts, unique values, example
counts, string domains, `drift_comparator` (against the previous segment), `skew_comparator`
(training against evaluation). Limits on the segment as a whole are in `data.gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import TypeVar

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import anomalies_pb2, schema_pb2, statistics_pb2

from presage.pipelines.quality.segment_statistics import (
    DEDUP_FACTOR,
    LABEL_DELAY_SEC,
    SAMPLES_PER_SESSION,
    read_statistics,
    segment_statistics,
)
from presage.pipelines.sources.rejects import (
    SHOWN_CHARACTERS,
    SHOWN_ROWS,
    Reject,
    RejectCounts,
    count_segment_rejects,
    reject_files,
    sort_key,
)
from presage.schemas.config.job import GateConfig
from presage.schemas.dataset.manifest import read_segment
from presage.schemas.dataset.opened import Segment
from presage.schemas.errors import SchemaError
from presage.schemas.layout import ANOMALIES, EVALUATION, STATISTICS, TRAIN
from presage.schemas.storage.location import Location

Key = TypeVar("Key")
Feature = statistics_pb2.FeatureNameStatistics
Features = Mapping[str, Feature]
Severity = anomalies_pb2.AnomalyInfo
MANY_REJECTS = "Many rejects"


# Findings and anomalies.


@dataclass(frozen=True, slots=True)
class Finding:
    """One limit that a segment exceeds.

    `feature` is None for the segment as a whole; `type` is the name of a type of `AnomalyInfo`;
    `rows` are examples of rejected rows, one line each.
    """

    feature: str | None
    type: str
    short: str
    text: str
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the finding as lines."""
        subject = "segment" if self.feature is None else f"feature {self.feature!r}"
        return "\n".join([f"{subject}: {self.text}", *(f"  {row}" for row in self.rows)])


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance between two distributions of a column.

    Attributes:
        feature: column.
        against: `drift`, from the previous segment, or `skew`, of training from evaluation.
        measure: `L_INFTY` or `JENSEN_SHANNON_DIVERGENCE`.
        value: distance, in [0, 1].
        threshold: maximum distance.
    """

    feature: str
    against: str
    measure: str
    value: float
    threshold: float


def anomalies_text(
    rejects: RejectCounts,
    findings: Sequence[Finding],
    distances: Sequence[Distance],
    severity: str,
) -> str:
    """Return rejects by reason, findings by feature and distances as the text of a proto."""
    proto = anomalies_pb2.Anomalies()
    for reason, kind in sorted(rejects.by_count(), key=lambda pair: pair[0]):
        info = proto.anomaly_info[reason]
        info.severity = Severity.ERROR
        info.short_description = reason
        examples = "; ".join(map(row_text, kind.first))
        info.description = f"{kind.count} rows were rejected, such as {examples}"
    for finding in findings:
        if finding.feature is None:
            _add_finding(proto.dataset_anomaly_info, finding, severity)
        else:
            _add_finding(proto.anomaly_info[finding.feature], finding, severity)
    for distance in sorted(distances, key=lambda d: (d.feature, d.against, d.measure)):
        _add_distance(proto, distance)
    return text_format.MessageToString(proto)


def row_text(reject: Reject) -> str:
    """Return a rejected row as one line: file, position, value."""
    return f"{reject.location} {reject.value[:SHOWN_CHARACTERS]}".rstrip()


def _add_finding(info: anomalies_pb2.AnomalyInfo, finding: Finding, severity: str) -> None:
    if finding.feature is not None and not info.path.step:
        info.path.step.append(finding.feature)
    info.severity = getattr(Severity, severity)
    info.reason.add(
        type=getattr(Severity, finding.type),
        short_description=finding.short,
        description=str(finding),
    )
    info.short_description = "Multiple errors" if len(info.reason) > 1 else finding.short
    info.description = " ".join(reason.description for reason in info.reason)


def _add_distance(proto: anomalies_pb2.Anomalies, distance: Distance) -> None:
    info = proto.drift_skew_info[-1] if proto.drift_skew_info else None
    if info is None or list(info.path.step) != [distance.feature]:
        info = proto.drift_skew_info.add()
        info.path.step.append(distance.feature)
    kinds = anomalies_pb2.DriftSkewInfo.Measurement
    is_drift = distance.against == "drift"
    measurements = info.drift_measurements if is_drift else info.skew_measurements
    measurements.add(
        type=getattr(kinds, distance.measure), value=distance.value, threshold=distance.threshold
    )


# Checks of a segment.


class GateError(SchemaError):
    """Raised when the gate refuses a segment that was built."""


def check_segment(
    schema: schema_pb2.Schema,
    gate: GateConfig | None,
    statistics: statistics_pb2.DatasetFeatureStatisticsList,
    previous: statistics_pb2.DatasetFeatureStatisticsList | None,
    rejects: RejectCounts,
    num_rows: int,
) -> tuple[list[Finding], list[Distance]]:
    """Return the limits that a segment exceeds, and all measured distances.

    `previous` is None for the first segment; `num_rows` raw rows yielded the samples.
    """
    slices = features_by_slice(statistics)
    previous_slices = features_by_slice(previous) if previous else {}
    whole = slices["segment"]
    findings: list[Finding] = []
    distances: list[Distance] = []
    for limit in schema.feature:
        feature = whole.get(limit.name)
        findings.extend(_with_examples(f, rejects) for f in _feature_findings(limit, feature))
        earlier = previous_slices.get("segment", {}).get(limit.name)
        train, evaluation = (slices.get(s, {}).get(limit.name) for s in (TRAIN, EVALUATION))
        distances.extend(
            measure_distances(limit, "drift", limit.drift_comparator, feature, earlier)
        )
        distances.extend(measure_distances(limit, "skew", limit.skew_comparator, train, evaluation))
    findings.extend(_distance_finding(d) for d in distances if d.value > d.threshold)
    count = statistics.datasets[0].num_examples
    previous_count = previous.datasets[0].num_examples if previous else None
    findings.extend(_example_findings(schema.dataset_constraints, count, previous_count))
    findings.extend(reject_findings(gate or GateConfig(), rejects, num_rows))
    if gate is not None and previous_slices:
        findings.extend(_session_findings(gate, schema, whole, previous_slices["segment"]))
    return findings, distances


def check_limits(schema: schema_pb2.Schema) -> None:
    """Check before a build that the limits of a schema can be measured.

    Raises:
        SchemaError: the type of a column does not have what its comparator or constraint compares.
    """
    for feature in schema.feature:
        is_float = feature.type == schema_pb2.FLOAT
        for name in ("drift_comparator", "skew_comparator"):
            comparator = getattr(feature, name)
            if comparator.HasField("normalized_abs_difference"):
                raise _unsupported(feature, name, "normalized_abs_difference")
            if is_float and comparator.HasField("infinity_norm"):
                raise _unsupported(feature, name, "infinity_norm of FLOAT")
        if is_float and feature.HasField("unique_constraints"):
            raise SchemaError(
                f"unique_constraints of feature {feature.name!r} must be on INT or BYTES, got "
                "FLOAT; remove it"
            )


def _unsupported(feature: schema_pb2.Feature, comparator: str, measure: str) -> SchemaError:
    return SchemaError(
        f"{comparator} of feature {feature.name!r} must be one that its type has, got {measure}; "
        "use jensen_shannon_divergence"
    )


def features_by_slice(
    statistics: statistics_pb2.DatasetFeatureStatisticsList,
) -> dict[str, Features]:
    """Return the features of each slice by name."""
    return {d.name: {f.path.step[0]: f for f in d.features} for d in statistics.datasets}


# Constraints on columns.


def _common_statistics(feature: Feature) -> statistics_pb2.CommonStatistics:
    kind = feature.string_stats if feature.HasField("string_stats") else feature.num_stats
    return kind.common_stats


def _feature_findings(limit: schema_pb2.Feature, feature: Feature | None) -> Iterator[Finding]:
    if feature is None:
        return
    common, name = _common_statistics(feature), limit.name
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
    yield from _unique_findings(limit, feature)
    yield from _domain_findings(limit, feature)


def _unique_findings(limit: schema_pb2.Feature, feature: Feature) -> Iterator[Finding]:
    if not limit.HasField("unique_constraints"):
        return
    if feature.HasField("string_stats"):
        number = feature.string_stats.unique
    else:
        number = next((c.num for c in feature.custom_stats if c.name == "unique"), 0)
    low, high = limit.unique_constraints.min, limit.unique_constraints.max
    for is_exceeded, level, bound in (
        (number < low, "low", f"at least {low}"),
        (high and number > high, "high", f"at most {high}"),
    ):
        if is_exceeded:
            yield Finding(
                limit.name, f"FEATURE_TYPE_{level.upper()}_UNIQUE",
                f"{level.title()} number of unique values",
                f"must have {bound} distinct values, got {number:g}",
            )  # fmt: skip


def _domain_findings(limit: schema_pb2.Feature, feature: Feature) -> Iterator[Finding]:
    domain = set(limit.string_domain.value)
    if not domain or not feature.HasField("string_stats"):
        return
    ranks = feature.string_stats.rank_histogram
    value_shares = to_shares({b.label: b.sample_count for b in ranks.buckets})
    outside = {value: share for value, share in value_shares.items() if value not in domain}
    least = limit.distribution_constraints.min_domain_mass  # 1 by default
    if outside and 1 - sum(outside.values()) < least:
        examples = ", ".join(f"{k!r} ({s:.2%})" for k, s in list(outside.items())[:SHOWN_ROWS])
        yield Finding(
            limit.name, "ENUM_TYPE_UNEXPECTED_STRING_VALUES", "Unexpected string values",
            f"must lie in its domain with a share of at least {least:g}, got values outside: "
            f"{examples}",
        )  # fmt: skip


def _with_examples(finding: Finding, rejects: RejectCounts) -> Finding:
    """Add the first rejected rows whose reason names the column."""
    kinds = rejects.kinds.values()
    examples = [r for k in kinds for r in k.first if f"{finding.feature!r}" in r.reason]
    rows = tuple(row_text(r) for r in sorted(examples, key=sort_key)[:SHOWN_ROWS])
    return Finding(finding.feature, finding.type, finding.short, finding.text, rows)


# Constraints on the number of samples and rejects.


def _example_findings(
    limits: schema_pb2.DatasetConstraints, count: int, previous: int | None
) -> Iterator[Finding]:
    low, high = limits.min_examples_count, limits.max_examples_count
    exceeded: list[tuple[str, str, str]] = []
    if count < low:
        exceeded.append(("DATASET", "low", f"at least {low} samples, got {count}"))
    if high and count > high:
        exceeded.append(("DATASET", "high", f"at most {high} samples, got {count}"))
    drift, ratio = limits.num_examples_drift_comparator, count / previous if previous else None
    if ratio is not None:
        low, high = drift.min_fraction_threshold, drift.max_fraction_threshold
        times = f"times the samples of the segment before, got {ratio:.4g} times"
        if drift.HasField("min_fraction_threshold") and ratio < low:
            exceeded.append(("COMPARATOR", "low", f"at least {low:g} {times}"))
        if drift.HasField("max_fraction_threshold") and ratio > high:
            exceeded.append(("COMPARATOR", "high", f"at most {high:g} {times}"))
    for prefix, level, text in exceeded:
        kind = f"{prefix}_{level.upper()}_NUM_EXAMPLES"
        yield Finding(None, kind, f"{level.title()} num examples", f"must have {text}")


def reject_findings(gate: GateConfig, rejects: RejectCounts, num_rows: int) -> Iterator[Finding]:
    """Yield a finding if too many rows were rejected; `num_rows` others yielded samples."""
    limit, share = gate.max_reject_fraction, rejects.share(num_rows)
    if limit is None or share <= limit:
        return
    yield Finding(
        None, "CUSTOM_VALIDATION", MANY_REJECTS,
        f"rejected rows must be at most {limit:g} of the rows that samples are made from, got "
        f"{share:.4g} ({rejects.num_rows} of {rejects.num_rows + num_rows})",
        tuple(f"{row_text(r)}: {r.reason}" for r in rejects.first),
    )  # fmt: skip


# Drift and skew.


def measure_distances(
    limit: schema_pb2.Feature,
    against: str,
    comparator: schema_pb2.FeatureComparator,
    left: Feature | None,
    right: Feature | None,
) -> Iterator[Distance]:
    """Yield the distances that a comparator limits, if both sides have values."""
    if left is None or right is None:
        return
    if not all(_common_statistics(feature).tot_num_values for feature in (left, right)):
        return
    if comparator.HasField("infinity_norm"):
        threshold = comparator.infinity_norm.threshold
        value = infinity_norm(_value_shares(left), _value_shares(right))
        yield Distance(limit.name, against, "L_INFTY", value, threshold)
    if comparator.HasField("jensen_shannon_divergence"):
        threshold = comparator.jensen_shannon_divergence.threshold
        shares_of: Callable[[Feature], Mapping[object, float]] = (
            _value_shares if left.HasField("string_stats") else _bucket_shares
        )
        value = jensen_shannon(shares_of(left), shares_of(right))
        yield Distance(limit.name, against, "JENSEN_SHANNON_DIVERGENCE", value, threshold)


def _value_shares(feature: Feature) -> dict[object, float]:
    """Return the share of each frequent value among all values."""
    if feature.HasField("string_stats"):
        histograms = [feature.string_stats.rank_histogram]
    else:
        custom = feature.custom_stats
        histograms = [c.rank_histogram for c in custom if c.name == "rank_histogram"][:1]
    total = _common_statistics(feature).tot_num_values
    return {b.label: b.sample_count / total for h in histograms for b in h.buckets}


def _bucket_shares(feature: Feature) -> dict[object, float]:
    histograms = feature.num_stats.histograms
    return to_shares({k: c for h in histograms for k, c in histogram_counts(h).items()})


def histogram_counts(histogram: statistics_pb2.Histogram) -> dict[float, float]:
    """Return the counts of a histogram by the lower ends of its buckets."""
    return {b.low_value: b.sample_count for b in histogram.buckets}


def _distance_finding(distance: Distance) -> Finding:
    name = "L-infinity" if distance.measure == "L_INFTY" else "Jensen-Shannon"
    other = "the segment before" if distance.against == "drift" else "evaluation"
    return Finding(
        distance.feature, f"COMPARATOR_{distance.measure}_HIGH", f"High {name} distance",
        f"must have a {name} distance of at most {distance.threshold:g} from {other}, "
        f"got {distance.value:.4g}",
    )  # fmt: skip


def _session_findings(
    gate: GateConfig, schema: schema_pb2.Schema, current: Features, previous: Features
) -> Iterator[Finding]:
    """Yield drifts of sessions, label delays, label rates and dedup factors."""
    for name, limit in ((SAMPLES_PER_SESSION, gate.session_drift),
                        (LABEL_DELAY_SEC, gate.delay_drift)):  # fmt: skip
        left, right = _custom_statistic(current, name), _custom_statistic(previous, name)
        if limit is None or left is None or right is None:
            continue
        value = jensen_shannon(
            to_shares(histogram_counts(left.histogram)),
            to_shares(histogram_counts(right.histogram)),
        )
        if value > limit:
            yield Finding(
                None, "CUSTOM_VALIDATION", f"Drift of {name}",
                f"{name} must have a Jensen-Shannon distance of at most {limit:g} from the "
                f"segment before, got {value:.4g}",
            )  # fmt: skip
    for name, limit, value, before in _ratios(gate, schema, current, previous):
        change = abs(value - before) / abs(before) if before else float(value != 0)
        if limit is not None and change > limit:
            yield Finding(
                None, "CUSTOM_VALIDATION", f"Drift of {name}",
                f"{name} must change by at most {limit:g} of the one before, got {value:.4g} "
                f"after {before:.4g}",
            )  # fmt: skip


def _ratios(
    gate: GateConfig, schema: schema_pb2.Schema, current: Features, previous: Features
) -> Iterator[tuple[str, float | None, float, float]]:
    """Yield (name, limit, value, previous value) of label rates and dedup factors."""
    for feature in schema.feature:
        name = feature.name
        if "label" in feature.annotation.tag and name in current and name in previous:
            left, right = (side[name].num_stats.mean for side in (current, previous))
            yield "label rate", gate.label_drift, left, right
    names = {c.name for f in current.values() for c in f.custom_stats}
    for name in sorted(n for n in names if n.startswith(DEDUP_FACTOR)):
        left, right = _custom_statistic(current, name), _custom_statistic(previous, name)
        if left is not None and right is not None:
            group = name.removeprefix(DEDUP_FACTOR)
            yield f"dedup factor of {group}", gate.dedup_drift, left.num, right.num


def _custom_statistic(features: Features, name: str) -> statistics_pb2.CustomStatistic | None:
    return next((c for f in features.values() for c in f.custom_stats if c.name == name), None)


# Distances.


def to_shares(counts: Mapping[Key, float]) -> dict[Key, float]:
    """Return counts as shares of their sum, an empty dict if the sum is zero."""
    total = sum(counts.values())
    return {k: c / total for k, c in counts.items()} if total else {}


def infinity_norm(left: Mapping[Key, float], right: Mapping[Key, float]) -> float:
    """Return the largest difference of the shares of one value; that of a missing value is 0.

    Example:
        >>> infinity_norm({"a": 0.75, "b": 0.25}, {"a": 0.25, "c": 0.75})
        0.75
    """
    return max((abs(left.get(k, 0) - right.get(k, 0)) for k in {*left, *right}), default=0.0)


def jensen_shannon(left: Mapping[Key, float], right: Mapping[Key, float]) -> float:
    """Return the Jensen-Shannon divergence with logarithms of base 2, in [0, 1].

    Example:
        >>> jensen_shannon({1: 1.0}, {2: 1.0}), jensen_shannon({1: 1.0}, {1: 1.0})
        (1.0, 0.0)
    """
    total = 0.0
    for key in sorted({*left, *right}, key=str):
        p, q = left.get(key, 0.0), right.get(key, 0.0)
        mean = (p + q) / 2
        total += sum(x * log2(x / mean) for x in (p, q) if x > 0) / 2
    return min(1.0, max(0.0, total))


# The gate of a segment being built.


def parse_schema(text: bytes) -> schema_pb2.Schema:
    """Parse a schema that `load_features` has accepted."""
    return text_format.Parse(text, schema_pb2.Schema())


def pass_gate(
    directory: Location,
    previous: Segment | None,
    schema: schema_pb2.Schema,
    gate: GateConfig | None,
    refused: Location,
    progress: Callable[[str], None],
) -> str:
    """Check a segment that has been built.

    `previous` is None for the first segment. Without `gate`, only too many rejects refuse the
    segment. `refused` is the directory for statistics, anomalies and rejects of a refused segment;
    the findings of another one are passed to `progress`.

    Returns:
        The text of its anomalies.

    Raises:
        GateError: the segment exceeds a limit, and the gate's action is `fail`.
    """
    rejects = count_segment_rejects(directory)
    findings, distances = check_segment(
        schema,
        gate,
        read_statistics(directory),
        segment_statistics(previous) if previous else None,
        rejects,
        read_segment(directory).num_rows,
    )
    if gate is None:
        fails = any(finding.short == MANY_REJECTS for finding in findings)
    else:
        fails = bool(findings) and gate.action == "fail"
    severity = "ERROR" if fails else "WARNING"
    text = anomalies_text(rejects, findings, distances, severity)
    if fails:
        keep_rejects(directory, refused)
        (refused / STATISTICS).copy_from(directory / STATISTICS)
        (refused / ANOMALIES).write_bytes(text.encode())
        limit = " (data.gate.max_reject_fraction)" if gate is None else ""
        lines = "\n".join(map(str, findings))
        raise GateError(
            f"segment is refused by the gate: {len(findings)} findings; correct the input or the "
            f"limits{limit}, see {refused}\n{lines}"
        )
    for finding in findings:
        progress(f"warning: {finding}")
    refused.remove_all()
    return text


def keep_rejects(directory: Location, refused: Location) -> None:
    """Copy the rejects of a segment that is not committed."""
    refused.remove_all()
    for entry in reject_files(directory):
        (refused / entry.path).copy_from(directory / entry.path)
