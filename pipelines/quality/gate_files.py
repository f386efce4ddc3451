"""The files of the gate: its report, and segments that it refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from pipelines.quality.gate import MANY_REJECTS, GateError, anomalies_text, judge
from pipelines.quality.statistics_files import read_statistics, statistics_in
from pipelines.sources.rejects import count_segment_rejects, reject_files
from schemas.config.job import GateConfig
from schemas.layout import ANOMALIES
from schemas.manifest import read_segment

_NO_GATE = " (data.gate.max_reject_fraction)"


def schema_of(text: bytes) -> schema_pb2.Schema:
    """Return a schema that `load_features` has accepted."""
    return text_format.Parse(text, schema_pb2.Schema())


def pass_gate(
    building: Path,
    earlier: Path | None,
    schema: schema_pb2.Schema,
    gate: GateConfig | None,
    aside: Path,
    progress: Callable[[str], None],
) -> str:
    """Judge a finished segment.

    Args:
        building: its directory.
        earlier: the segment before it, None for the first.
        schema: declared columns with their constraints.
        gate: the job's `data.gate`; without one, only too many rejects keep the segment out.
        aside: where statistics, anomalies and rejects of a refused segment are kept.
        progress: called with each finding that does not keep the segment out.

    Returns:
        The text of `anomalies.pbtxt`.

    Raises:
        GateError: the segment breaks a limit, and the job says that it must not.
    """
    rejects = count_segment_rejects(building)
    before = read_statistics(statistics_in(earlier)) if earlier else None
    here, num_rows = read_statistics(statistics_in(building)), read_segment(building).num_rows
    verdict = judge(schema, gate, here, before, rejects, num_rows)
    refused = verdict.findings if gate is not None and gate.action == "fail" else ()
    if gate is None:
        refused = tuple(f for f in verdict.findings if f.short == MANY_REJECTS)
    fails = bool(refused)
    severity = "ERROR" if fails else "WARNING"
    text = anomalies_text(rejects, verdict.findings, verdict.distances, severity)
    if fails:
        keep_aside(building, aside, text)
        lines = "\n".join(map(str, verdict.findings))
        raise GateError(
            f"segment must pass the gate, got {len(verdict.findings)} findings; mend the input or "
            f"the limits{_NO_GATE if gate is None else ''}, see {aside}\n{lines}"
        )
    for finding in verdict.findings:
        progress(f"warning: {finding}")
    shutil.rmtree(aside, ignore_errors=True)
    return text


def keep_aside(building: Path, aside: Path, anomalies: str) -> None:
    """Copy what explains a refusal; the samples themselves are not kept."""
    keep_rejects(building, aside)
    shutil.copy(statistics_in(building), aside)
    (aside / ANOMALIES).write_text(anomalies, encoding="utf-8")


def keep_rejects(building: Path, aside: Path) -> None:
    """Copy the rejects of a segment that does not enter the dataset."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for path in reject_files(building):
        place = aside / path.relative_to(building)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(path, place)
