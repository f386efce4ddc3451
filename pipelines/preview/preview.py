"""Look at what a build would make of the first rows of a log; nothing is left behind.

The first rows are copied to a temporary folder (`excerpt.py`), and the stages of a build run over
them in this process, so that what is said of a row, and by which words, is what a build says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from pipelines import executor
from pipelines.beam.context import BuildContext
from pipelines.build import check_usable, load_request
from pipelines.executor import Collected, Rows
from pipelines.gate.judge import reject_findings
from pipelines.groups.job import with_groups
from pipelines.learned.apply import with_transforms
from pipelines.learned.files import load_building
from pipelines.parts.part import PartResult
from pipelines.prepare import BuildRequest, context_of, prepare
from pipelines.preview.estimates import SampleTable, estimates, notes_of, python_values
from pipelines.preview.excerpt import Excerpt, excerpts
from pipelines.runners import IN_PROCESS
from pipelines.samples.check_joins import broadcast_sides
from pipelines.samples.tuples import Tuples
from pipelines.sources.arrow_types import type_text
from pipelines.sources.folder import folder_of
from pipelines.sources.listing import find_files
from pipelines.sources.partitions import undeclared_partitions
from pipelines.sources.reject_files import RejectCounts
from pipelines.sources.reject_files import counted as count_rejects
from pipelines.sources.rejects import sorted_rejects
from pipelines.sources.rows import ORIGIN
from pipelines.stages import REJECTS
from schemas.errors import SchemaError
from schemas.job import Job
from schemas.job_gate import GateConfig
from schemas.layout import REJECTS_SCHEMA
from schemas.manifest import InputFile

NUM_SAMPLES = 10
"""Samples that are shown."""
NUM_REJECTS = 5
"""Rejects that are shown, and reasons."""
OTHER_ROWS = 10_000
"""Rows that are read of each source that samples are not made of, and of each side table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRequest:
    """What is to be looked at.

    Attributes:
        job_path: the job file.
        input_root: directory of raw files, or its URL.
        rows: rows that are read of the source that samples are made of.
        day: label of the segment, for a job whose split needs one.
        allow_outside: whether the job's schema may lie outside the folder of the job file.
        say: told what is going on, one line at a time.
    """

    job_path: Path
    input_root: Path | str
    rows: int = 1000
    day: str | None = None
    allow_outside: bool = False
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        """Refuse to look at nothing."""
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}; leave --rows out")


def preview(request: PreviewRequest) -> dict[str, Any]:
    """Run the stages of a build over the first rows of a log.

    Returns:
        What `preview --json` prints.

    Raises:
        SchemaError: the job or the input does not fit; in the words of a build.
    """
    started = time.perf_counter()
    with TemporaryDirectory(prefix="presage-preview-") as scratch:
        building = BuildRequest(
            job_path=request.job_path,
            input_root=str(Path(scratch, "input")),
            dataset=Path(scratch, "dataset"),
            beam_args=["--runner", IN_PROCESS],
            attempt="preview",
            day=request.day,
            allow_outside=request.allow_outside,
            say=request.say,
        )
        found = _previewed(request, building)
    return {**found, "wall_sec": round(time.perf_counter() - started, 3)}


def _previewed(request: PreviewRequest, building: BuildRequest) -> dict[str, Any]:
    job, features = load_request(building)
    data, folder = job.data, folder_of(request.input_root)
    files = find_files(folder, data.inputs)
    every = [
        InputFile(source=name, path=file.path, num_bytes=file.num_bytes, sha256="")
        for name, found in files.items()
        for file in found
    ]
    broadcast_sides(data, every)  # refuses what a build of all files would
    rows = {name: max(request.rows, OTHER_ROWS) for name in data.inputs}
    rows[data.sample_source] = request.rows
    copied = excerpts(folder, data.inputs, files, rows, Path(building.input_root))
    listing = tuple(file for excerpt in copied.values() for file in excerpt.listing)
    building = replace(building, listing=tuple(sorted(listing, key=lambda f: (f.source, f.path))))
    building, job = with_groups(building, job, features)
    prepared = prepare(building, job, features)
    building.dataset.mkdir()
    context = context_of(building, job, features, prepared, building.dataset / "segment")
    return _run(context, job, copied, request)


def _run(
    context: BuildContext, job: Job, copied: Mapping[str, Excerpt], request: PreviewRequest
) -> dict[str, Any]:
    """Run the stages, and say what came of each."""
    found, counted, side_rows = Collected(), Counter[str](), dict[str, list[pa.Table]]()

    def rows() -> Iterator[Rows]:
        read, rejects = executor.read_all(context, found), found.values[REJECTS]
        while True:
            known = len(rejects)
            each = next(read, None)
            for table in rejects[known:]:  # what the readers reject was read, too
                positions = table.filter(table["position"].is_valid())
                counted.update(sources_of[file] for file in positions["file"].to_pylist())
            if each is None:
                return
            source, table = each
            counted[source] += table.num_rows
            side_rows.setdefault(source, []).append(table)
            yield source, table

    sources_of = {file.path: file.source for file in context.listing}

    sent = executor.make_samples(context, rows(), found)
    tuples: list[Tuples] = [t for part in sent.values() for t in part]
    samples = SampleTable.of(tuples, context)
    learned = executor.learn(context, found) if tuples else []
    files = learned[0] if learned else {}
    parts = executor.write_parts(context, sent, files)
    distinct = dict(executor.number_tables(context, parts))
    rejected = sorted_rejects(found.values[REJECTS])
    reasons = count_rejects(rejected)
    num_rows = sum(part.num_rows for part in parts)
    rejects = _rejects(rejected, reasons, num_rows)
    made = estimates(context, samples, parts, distinct, side_rows)
    sources = {
        name: _source(context, name, excerpt, counted[name]) for name, excerpt in copied.items()
    }
    return {
        "job": job.name,
        "input": str(request.input_root),
        "rows": counted[context.data.sample_source],
        "sources": sources,
        "num_samples": samples.rows.num_rows,
        "num_sessions": sum(part.num_sessions for part in parts),
        "samples": python_values(_with_made(context, samples.rows.slice(0, NUM_SAMPLES), files)),
        "rejects": rejects,
        **made,
        "notes": [
            *_undeclared(context, copied),
            *_refusal(context, parts, reasons),
            *_at_the_gate(context, reasons, num_rows),
            *notes_of(context, sources, samples, rejects, made),
        ],
    }


def _with_made(context: BuildContext, rows: pa.Table, files: Mapping[str, str]) -> pa.Table:
    """Return samples with the columns that transforms make of them."""
    if not rows.num_rows:
        return rows
    learned = load_building(context.segment_root, files, context.data)
    for group, transforms in context.data.transforms.items():
        rows = with_transforms(rows, group, transforms, learned)
    return rows.select([name for name in context.features.names if name in rows.column_names])


def _undeclared(context: BuildContext, copied: Mapping[str, Excerpt]) -> Iterator[str]:
    """Yield a note for each source whose folder names give columns that the job does not read."""
    for name, excerpt in copied.items():
        paths = [file.path for file in excerpt.files]
        types = context.data.inputs[name].partitions
        columns = context.empty_rows[name].column_names
        note = undeclared_partitions(name, paths, types, columns)
        if note is not None:
            yield note


def _refusal(
    context: BuildContext, parts: list[PartResult], rejects: RejectCounts
) -> Iterator[str]:
    """Yield what would end a build of these rows."""
    try:
        check_usable(parts, rejects, context.data)
    except SchemaError as error:
        yield f"a build ends here: {error}"


def _at_the_gate(context: BuildContext, counts: RejectCounts, num_rows: int) -> Iterator[str]:
    """Yield that so many rejects would keep the segment out."""
    if num_rows and counts.num_rows:
        gate = context.data.gate or GateConfig()
        for finding in reject_findings(gate, counts, num_rows):
            yield f"the gate keeps such a segment out (data.gate): {finding.text}"


def _source(context: BuildContext, name: str, excerpt: Excerpt, rows: int) -> dict[str, Any]:
    schema = context.empty_rows[name].schema
    return {
        "format": context.data.inputs[name].format,
        "num_files": len(excerpt.files),
        "num_bytes": excerpt.num_bytes,
        "rows_read": rows,
        "whole": excerpt.is_whole,
        "columns": {f.name: type_text(f.type) for f in schema if f.name != ORIGIN},
    }


def _rejects(rejected: pa.Table, reasons: RejectCounts, num_rows: int) -> dict[str, Any]:
    """Return how many rows cannot be used, why, and the first of them."""
    first = rejected.slice(0, NUM_REJECTS).select(REJECTS_SCHEMA.names)
    return {
        "num": reasons.num_rejects,
        "share": round(reasons.share(num_rows), 6),
        "reasons": [
            {"reason": reason, "num": found.count}
            for reason, found in reasons.by_count()[:NUM_REJECTS]
        ],
        "first": first.to_pylist(),
    }
