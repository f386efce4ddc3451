"""Anomalies as a tensorflow-metadata proto: rejects by reason, and what the gate found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import anomalies_pb2

from pipelines.sources.reject_files import SHOWN_CHARACTERS, RejectCounts
from pipelines.sources.rejects import Reject

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
