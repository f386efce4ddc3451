"""Sections on the quality gate, the event join and sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import anomalies_pb2, statistics_pb2

from pipelines.quality.gate import (
    Features,
    features_by_slice,
    histogram_counts,
    jensen_shannon,
    to_shares,
)
from pipelines.quality.segment_statistics import (
    DEDUP_FACTOR,
    LABEL_DELAY_SEC,
    SAMPLES_PER_SESSION,
    segment_statistics,
)
from pipelines.report.dedup import group_totals
from pipelines.report.html import Section, count, digits, paragraph, percent, table, words_table
from pipelines.samples.event_join import COUNTS, add_counts, read_counts
from schemas.dataset import Dataset, Segment
from schemas.files import verify_file
from schemas.layout import ANOMALIES

_MEANING = {
    "features": "rows of features",
    "without_event": "of them, without an event",
    "events": "events",
    "late": "of them, too late",
    "unmatched": "of them, without features",
    "duplicates": "pairs beyond the first event of the same features",
}


def event_sections(dataset: Dataset) -> list[Section]:
    """Return the section about events, none for a job without them."""
    config = dataset.job.data.samples.events
    found = add_counts(read_counts(segment) for segment in dataset.segments)
    if config is None or not found:
        return []
    finding = (
        f"{percent(1 - found['without_event'] / max(1, found['features']))} of the features have "
        f"an event within {config.label_wait}."
    )
    rows = [(_MEANING[name], count(found[name])) for name in COUNTS]
    note = "Events that do not count are in each segment's late/, with file and position."
    body = table("Features and events", ["", "rows"], rows) + paragraph(note, "note")
    return [Section("events", "Events", finding, body)]


def sampling_sections(dataset: Dataset) -> list[Section]:
    """Return the section about sampling, none for a job without it."""
    config = dataset.job.data.sampling
    if config is None:
        return []
    finding = (
        f"{percent(config.negatives)} of the negatives of the training range were kept, by "
        f"{config.unit}; each has weight {digits(1 / config.negatives)}."
    )
    rows = [(name, digits(found.dedup_factor)) for name, found in group_totals(dataset).items()]
    head = ["group", f"dedup factor, unit {config.unit}"]
    body = table("Dedup factor after sampling", head, rows) if rows else ""
    return [Section("sampling", "Sampling", finding, body)]


MOST_SEGMENTS = 10
"""Segments that are shown, the last ones."""

_MEASURES = {"L_INFTY": "L-infinity", "JENSEN_SHANNON_DIVERGENCE": "Jensen-Shannon"}
_NOTE = "A session with samples of both splits counts once in each."
_DRIFT = " Drift is the Jensen-Shannon divergence from the segment before, in [0, 1]."
_AGAINST = {"drift": "segment before", "skew": "training and evaluation"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one segment says of itself.

    Attributes:
        name: how the page calls it.
        anomalies: rejects by reason, findings, distances.
        slices: features by name of each slice: `segment`, or `train` and `evaluation`, too.
        num_samples: samples of each slice.
    """

    name: str
    anomalies: anomalies_pb2.Anomalies
    slices: Mapping[str, Features]
    num_samples: Mapping[str, int]


def seen_of(segment: Segment) -> Seen:
    """Read statistics and anomalies of a segment.

    Raises:
        SchemaError: a file is missing or changed.
    """
    path = verify_file(segment.directory / ANOMALIES, segment.files[ANOMALIES].sha256)
    statistics = segment_statistics(segment)
    return Seen(
        f"segment {segment.manifest.position}",
        text_format.Parse(path.read_text("utf-8"), anomalies_pb2.Anomalies()),
        features_by_slice(statistics),
        {d.name: d.num_examples for d in statistics.datasets},
    )


def findings_of(anomalies: anomalies_pb2.Anomalies) -> Iterator[tuple[str, str, str]]:
    """Yield (feature or `segment`, severity, what was found); rejects have no reasons."""
    infos = [*(anomalies.anomaly_info[k] for k in sorted(anomalies.anomaly_info))]
    for info in [*infos, anomalies.dataset_anomaly_info]:
        where = info.path.step[0] if info.path.step else "segment"
        severity = anomalies_pb2.AnomalyInfo.Severity.Name(info.severity).lower()
        for reason in info.reason:
            text = reason.description.partition(": ")[2] or reason.description
            yield where, severity, text


def distances_of(
    anomalies: anomalies_pb2.Anomalies,
) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield (feature, against, measure, distance, threshold) of every comparator."""
    names = anomalies_pb2.DriftSkewInfo.Measurement.Type
    for info in anomalies.drift_skew_info:
        sides = {"drift": info.drift_measurements, "skew": info.skew_measurements}
        for against, measurements in sides.items():
            for m in measurements:
                yield info.path.step[0], against, names.Name(m.type), m.value, m.threshold


def gate_section(dataset: Dataset) -> Section:
    """Return the section about what the gate saw, of the last segments."""
    shown = [seen_of(s) for s in dataset.segments[-MOST_SEGMENTS:]]
    findings = [(s.name, *f) for s in shown for f in findings_of(s.anomalies)]
    distances = [(s.name, *d) for s in shown for d in distances_of(s.anomalies)]
    body = ""
    if findings:
        rows = [(where, name, severity, text) for name, where, severity, text in findings]
        body += words_table("Findings", ["", "segment", "severity", "finding"], rows)
    if distances:
        body += _distances(distances)
    body += _sessions(shown, dataset.features.with_role("label"))
    left_out = len(dataset.segments) - len(shown)
    if left_out:
        body += paragraph(f"The {count(left_out)} segments before are left out.", "note")
    return Section("gate", "Statistics and the gate", _finding(dataset, shown), body)


def _finding(dataset: Dataset, shown: Sequence[Seen]) -> str:
    found = sum(1 for s in shown for _ in findings_of(s.anomalies))
    measured = [d for s in shown for d in distances_of(s.anomalies)]
    far = sum(value > threshold for *_, value, threshold in measured)
    gate = dataset.job.data.gate
    if gate is None:
        action = "the job has no data.gate, so findings are only written down"
    elif gate.action == "fail":
        action = "a segment that breaks a limit stays out of the dataset"
    else:
        action = "data.gate only warns"
    limits = f"{_many(found, 'finding')} in {_many(len(shown), 'segment')}; {action}."
    if not measured:
        return f"{limits} No distance was measured: the schema has no comparator that applies."
    return f"{limits} Of {_many(len(measured), 'distance')}, {count(far)} exceed their threshold."


def _many(number: int, what: str) -> str:
    return f"{count(number) if number else 'No'} {what}{'' if number == 1 else 's'}"


def _distances(distances: Sequence[tuple[str, str, str, str, float, float]]) -> str:
    rows = [
        (feature, name, _AGAINST[against], _MEASURES[measure], digits(value), digits(threshold),
         "beyond" if value > threshold else "within")
        for name, feature, against, measure, value, threshold in distances
    ]  # fmt: skip
    head = ["feature", "segment", "between", "measure", "distance", "at most", ""]
    title = "Distances: drift from the segment before, skew between training and evaluation"
    return table(title, head, rows)


def _sessions(shown: Sequence[Seen], labels: Sequence[str]) -> str:
    """Return a table of figures by segment and split."""
    customs = {n for s in shown for n in _customs(s.slices["segment"])}
    groups = sorted(n for n in customs if n.startswith(DEDUP_FACTOR))
    delayed = LABEL_DELAY_SEC in customs
    head = ["", "samples", "samples per session", *(f"mean {label}" for label in labels)]
    head += ["median label delay"] if delayed else []
    head += [f"dedup factor of {g.removeprefix(DEDUP_FACTOR)}" for g in groups]
    head += ["drift of samples per session"] if len(shown) > 1 else []
    rows: list[list[str | None]] = []
    before: Features | None = None
    for seen in shown:
        for name, features in seen.slices.items():
            custom = _customs(features)
            lengths = histogram_counts(custom[SAMPLES_PER_SESSION].histogram)
            num_samples = seen.num_samples[name]
            row: list[str | None] = [
                seen.name if name == "segment" else f"{seen.name}, {name}",
                count(num_samples),
                digits(num_samples / max(1, sum(lengths.values()))),
                *(digits(features[x].num_stats.mean) if x in features else None for x in labels),
            ]
            if delayed:
                row.append(_median(custom.get(LABEL_DELAY_SEC)))
            row += [digits(custom[g].num) if g in custom else None for g in groups]
            if len(shown) > 1:
                is_whole = name == "segment" and before is not None
                row.append(digits(_drift(features, before)) if is_whole and before else None)
            rows.append(row)
        before = seen.slices["segment"]
    body = table("Sessions, labels and deduplication by segment and split", head, rows)
    return body + paragraph(_NOTE + (_DRIFT if len(shown) > 1 else ""), "note")


def _customs(features: Features) -> dict[str, statistics_pb2.CustomStatistic]:
    return {c.name: c for f in features.values() for c in f.custom_stats}


def _drift(here: Features, past: Features) -> float:
    one, other = (
        to_shares(histogram_counts(_customs(side)[SAMPLES_PER_SESSION].histogram))
        for side in (here, past)
    )
    return jensen_shannon(one, other)


def _median(delays: statistics_pb2.CustomStatistic | None) -> str | None:
    """Return the bucket that holds the median, as text."""
    if delays is None or not delays.histogram.buckets:
        return None
    left = sum(b.sample_count for b in delays.histogram.buckets) / 2
    for bucket in delays.histogram.buckets:
        left -= bucket.sample_count
        if left <= 0:
            return f"{digits(bucket.low_value)} to {digits(bucket.high_value)} s"
    return None
