"""Whether a segment may enter the dataset: its statistics against schema, job and the past.

What TFDV reads from a schema means the same here: presence, value counts,
unique values, example counts, string domains, `drift_comparator` (against the
segment before) and `skew_comparator` (training against evaluation). Limits on
the segment as a whole stand in the job's `data.gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2

from pipelines.gate.anomalies import Distance, Finding, shown_row
from pipelines.gate.constraints import common_of, example_findings, feature_findings
from pipelines.gate.distance import infinity_norm, jensen_shannon, shares
from pipelines.parts.slices import DEDUP_FACTOR, LABEL_DELAY_SEC, SAMPLES_PER_SESSION
from pipelines.sources.reject_files import SHOWN_ROWS, RejectCounts
from pipelines.sources.rejects import sort_key
from schemas.errors import SchemaError
from schemas.job_gate import GateConfig
from schemas.layout import EVALUATION, TRAIN

MANY_REJECTS = "Many rejects"
Feature = statistics_pb2.FeatureNameStatistics
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
