"""Run the gate on a segment being built; write its report and the files of a refused segment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from pipelines.quality.gate import MANY_REJECTS, GateError, anomalies_text, check_segment
from pipelines.quality.statistics_files import read_statistics, statistics_path
from pipelines.sources.rejects import count_segment_rejects, reject_files
from schemas.config.job import GateConfig
from schemas.layout import ANOMALIES
from schemas.manifest import read_segment


def parse_schema(text: bytes) -> schema_pb2.Schema:
    """Parse a schema that `load_features` has accepted."""
    return text_format.Parse(text, schema_pb2.Schema())


def pass_gate(
    building: Path,
    previous: Path | None,
    schema: schema_pb2.Schema,
    gate: GateConfig | None,
    refused: Path,
    progress: Callable[[str], None],
) -> str:
    """Check a segment that has been built.

    Args:
        building: directory of the segment.
        previous: directory of the previous segment, None for the first one.
        schema: declared columns with their constraints.
        gate: the job's `data.gate`; without one, only too many rejects refuse the segment.
        refused: directory for statistics, anomalies and rejects of a refused segment.
        progress: called with each finding of a segment that is not refused.

    Returns:
        The text of `anomalies.pbtxt`.

    Raises:
        GateError: the segment exceeds a limit, and the gate's action is `fail`.
    """
    rejects = count_segment_rejects(building)
    result = check_segment(
        schema,
        gate,
        read_statistics(statistics_path(building)),
        read_statistics(statistics_path(previous)) if previous else None,
        rejects,
        read_segment(building).num_rows,
    )
    if gate is None:
        fails = any(finding.short == MANY_REJECTS for finding in result.findings)
    else:
        fails = bool(result.findings) and gate.action == "fail"
    severity = "ERROR" if fails else "WARNING"
    text = anomalies_text(rejects, result.findings, result.distances, severity)
    if fails:
        keep_rejects(building, refused)
        shutil.copy(statistics_path(building), refused)
        (refused / ANOMALIES).write_text(text, encoding="utf-8")
        limit = " (data.gate.max_reject_fraction)" if gate is None else ""
        lines = "\n".join(map(str, result.findings))
        raise GateError(
            f"segment must pass the gate, got {len(result.findings)} findings; correct the input "
            f"or the limits{limit}, see {refused}\n{lines}"
        )
    for finding in result.findings:
        progress(f"warning: {finding}")
    shutil.rmtree(refused, ignore_errors=True)
    return text


def keep_rejects(building: Path, refused: Path) -> None:
    """Copy the rejects of a segment that is not committed."""
    shutil.rmtree(refused, ignore_errors=True)
    refused.mkdir()
    for path in reject_files(building):
        target = refused / path.relative_to(building)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
