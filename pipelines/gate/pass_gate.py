"""A finished segment at the gate: its files are judged, and set aside when it may not pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from pipelines.gate.anomalies import anomalies_text
from pipelines.gate.judge import GateError, judge
from pipelines.sources.rejects import Reject
from pipelines.statistics.stored import read_statistics, statistics_in
from schemas.job_gate import GateConfig
from schemas.layout import ANOMALIES, rejects_path


def schema_of(text: bytes) -> schema_pb2.Schema:
    """Return a schema that `load_features` has accepted."""
    return text_format.Parse(text, schema_pb2.Schema())


def rejects_of(segment: Path) -> list[Reject]:
    """Return the rejects of a segment."""
    path = segment / rejects_path(0)
    return [Reject(**row) for row in pq.read_table(path).to_pylist()] if path.exists() else []


def pass_gate(
    building: Path,
    earlier: Path | None,
    schema: schema_pb2.Schema,
    gate: GateConfig | None,
    aside: Path,
    say: Callable[[str], None],
) -> str:
    """Judge a finished segment.

    Args:
        building: its directory.
        earlier: the segment before it, None for the first.
        schema: declared columns with their constraints.
        gate: the job's `data.gate`; without one, findings are written down only.
        aside: where statistics, anomalies and rejects of a refused segment are kept.
        say: told of findings that do not keep the segment out.

    Returns:
        The text of `anomalies.pbtxt`.

    Raises:
        GateError: the segment breaks a limit, and the job says that it must not.
    """
    rejects = rejects_of(building)
    before = read_statistics(statistics_in(earlier)) if earlier else None
    verdict = judge(schema, gate, read_statistics(statistics_in(building)), before, rejects)
    fails = bool(verdict.findings) and gate is not None and gate.action == "fail"
    severity = "ERROR" if fails else "WARNING"
    text = anomalies_text(rejects, verdict.findings, verdict.distances, severity)
    if fails:
        keep_aside(building, aside, text)
        lines = "\n".join(map(str, verdict.findings))
        raise GateError(
            f"segment must pass the gate, got {len(verdict.findings)} findings; mend the input or "
            f"the limits, see {aside}\n{lines}"
        )
    for finding in verdict.findings:
        say(f"warning: {finding}")
    shutil.rmtree(aside, ignore_errors=True)
    return text


def keep_aside(building: Path, aside: Path, anomalies: str) -> None:
    """Copy what explains a refusal; the samples themselves are not kept."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    shutil.copy(statistics_in(building), aside)
    (aside / ANOMALIES).write_text(anomalies, encoding="utf-8")
    if (building / rejects_path(0)).exists():
        (aside / rejects_path(0)).parent.mkdir()
        shutil.copy(building / rejects_path(0), aside / rejects_path(0))
