"""Preview of a build: run its stages over the first rows of a log.

The first rows of each source are copied to a temporary folder that a build can read. A copy has the
name, format and compression of its file, so the readers of builds report the same positions and
reasons. How much is read depends on the number of rows requested, not on the size of the log.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines import executor
from presage.pipelines.autogroup.choose import with_chosen_groups, without_groups
from presage.pipelines.build import check_usable, group_warnings, label_warnings
from presage.pipelines.clustering.part import PartResult
from presage.pipelines.exchange import ReadElements
from presage.pipelines.prepare import context_of
from presage.pipelines.quality.gate import reject_findings
from presage.pipelines.samples.lookups import broadcast_sides, key_column, key_type
from presage.pipelines.samples.sql import LIST_INDEX, PREVIEW_TIME
from presage.pipelines.samples.tuples import Tuples, in_evaluation
from presage.pipelines.sources.formats import Excerpt, copy_excerpt
from presage.pipelines.sources.listing import find_files, undeclared_partitions
from presage.pipelines.sources.raw_rows import ORIGIN, Folder, folder_of
from presage.pipelines.sources.rejects import (
    RejectCounts,
    count_rejects,
    python_rows,
    sorted_rejects,
)
from presage.pipelines.sources.types import type_text
from presage.pipelines.stages import REJECTS, SAMPLES, BuildContext, read_rows, split_file
from presage.pipelines.table.segment import group_counts
from presage.pipelines.table.target import JobFiles, load_job_files
from presage.pipelines.transforms.apply import apply_transforms
from presage.pipelines.transforms.fit import FITTED
from presage.schemas.arrays import is_list, one_chunk
from presage.schemas.config.job import GateConfig, Job
from presage.schemas.dataset.fitted import load_fitted
from presage.schemas.errors import SchemaError
from presage.schemas.layout import EVALUATION, REJECTS_SCHEMA, TRAIN
from presage.schemas.storage.location import Location

NUM_SAMPLES = 10
"""Number of samples shown."""
NUM_REJECTS = 5
"""Number of rejects shown, and of reasons."""
OTHER_ROWS = 10_000
"""Number of rows read of each side table and of each source other than the sample source."""


def preview(
    job_path: Path | Location,
    input_root: Path | str,
    *,
    only: tuple[str, ...] = (),
    rows: int = 1000,
    day: str | None = None,
    allow_outside: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the stages of a build over the first rows of a log.

    `rows` are read of the sample source; `day` is for a job whose split needs one.

    Returns:
        What `preview --json` prints.

    Raises:
        ValueError: no rows are to be read.
        SchemaError: the job or the input is invalid, with the message of a build.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}; leave --rows out")
    started = time.perf_counter()
    folder = folder_of(input_root, only)
    job = load_job_files(job_path, day, allow_outside=allow_outside)
    job = replace(job, config=_with_limited_time(job.config))
    with TemporaryDirectory(prefix="presage-preview-") as scratch:
        result = _preview(job, day, folder, rows, Path(scratch), progress)
    return {**result, "wall_sec": round(time.perf_counter() - started, 3)}


def _with_limited_time(job: Job) -> Job:
    limits = job.data.samples.limits
    limits = replace(limits, time=min(limits.time, PREVIEW_TIME))
    samples = replace(job.data.samples, limits=limits)
    return replace(job, data=replace(job.data, samples=samples))


def _preview(
    job: JobFiles,
    day: str | None,
    folder: Folder,
    rows: int,
    scratch: Path,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    data = job.config.data
    files = find_files(folder, data.inputs)
    all_files = [file for name in files for file in files[name]]
    broadcast_sides(data, all_files)  # raises where a build of all files would
    copies: dict[str, Excerpt] = {}
    for name, config in data.inputs.items():
        num_rows = rows if name == data.sample_source else max(rows, OTHER_ROWS)
        copies[name] = copy_excerpt(folder, config, files[name], num_rows, scratch / "input")
    every_file = [file for excerpt in copies.values() for file in excerpt.listing]
    listing = tuple(sorted(every_file, key=lambda file: (file.source, file.path)))
    excerpts = folder_of(scratch / "input")
    with _limited_memory(data.samples.limits.memory):
        if data.has_auto_groups:
            context = context_of(without_groups(job), excerpts, listing, day)
            job = with_chosen_groups(job, context, progress)
        context = context_of(job, excerpts, listing, day)
        root = scratch / "segment"
        root.mkdir()
        context = replace(context, segment_root=Location.parse(root))
        return {"job": job.config.name, "input": folder.root, **_run_stages(context, copies)}


@contextmanager
def _limited_memory(num_bytes: int) -> Iterator[None]:
    """Limit what the process can allocate in addition.

    DuckDB counts no memory of values that one function creates, and is interrupted only between
    vectors of rows: `range` of a large number would take all memory, for minutes.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    if limit == resource.RLIM_INFINITY or limit > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _run_stages(context: BuildContext, copies: Mapping[str, Excerpt]) -> dict[str, Any]:
    raw_rows, num_read = _read_rows(context)
    with executor.open_exchange(context, 1, in_memory=True) as exchange:
        sources, sides = executor.split_inputs(context, exchange)
        partials, _ = executor.make_samples(context, exchange, sources, sides)
        sent = exchange.take(SAMPLES)
        samples = SampleTable.of(
            [each for part in sent.values() for each in ReadElements(part)], context
        )
        files = (executor.fit_transforms(context, partials) if sent else None) or {}
        partitions, _ = executor.write_parts(context, exchange, sent, files)
        numbered = executor.number_tables(context, exchange, partitions)
        distinct = {table: each.num_rows for table, each in numbered}
        tables = [rows for part in exchange.take(REJECTS).values() for rows in ReadElements(part)]
    rejected = sorted_rejects(tables)
    reject_counts = count_rejects(rejected)
    num_rows = sum(p.num_rows for p in partitions)
    rejects = _rejects(rejected, reject_counts, num_rows)
    figures = estimates(context, samples, partitions, distinct, raw_rows)
    stored = {file.path for part in partitions for file in part.files}
    described = {
        name: _source(context, name, excerpt, num_read[name]) for name, excerpt in copies.items()
    }
    first = _with_transforms(context, samples.rows.slice(0, NUM_SAMPLES), files)
    return {
        "rows": num_read[context.data.sample_source],
        "sources": described,
        "num_samples": samples.rows.num_rows,
        "num_sessions": sum(p.num_sessions for p in partitions),
        "samples": python_values(first),
        "rejects": rejects,
        **figures,
        "notes": [
            *_undeclared_notes(context, copies),
            *context.notes,
            *_build_error(context, partitions, reject_counts),
            *_gate_notes(context, reject_counts, num_rows),
            *notes_of(context, described, samples, rejects, figures, stored),
        ],
    }


def _read_rows(context: BuildContext) -> tuple[dict[str, list[pa.Table]], Counter[str]]:
    """Return the raw rows of each source, and how many were read or rejected by a reader."""
    num_read, raw_rows = Counter[str](), dict[str, list[pa.Table]]()
    for file in context.files():
        splits, rejects = split_file(context, file)
        chunks = [rows for split in splits for rows in read_rows(context, split)]
        tables = [rows.table for rows in chunks if rows.table is not None]
        raw_rows.setdefault(file.source, []).extend(tables)
        rejects = [rejects, *(each for rows in chunks for each in rows.all_rejects())]
        positions = [each["position"] for each in rejects]
        num_read[file.source] += sum(table.num_rows for table in tables)
        num_read[file.source] += sum(len(rows) - rows.null_count for rows in positions)
    return raw_rows, num_read


def _with_transforms(context: BuildContext, rows: pa.Table, files: Mapping[str, str]) -> pa.Table:
    if not rows.num_rows:
        return rows
    fitted = load_fitted(context.segment_root / FITTED, files, context.data)
    for group, transforms in context.data.transforms.items():
        rows = apply_transforms(rows, group, transforms, fitted)
    present = set(rows.column_names)
    return rows.select([name for name in context.features.names if name in present])


def _undeclared_notes(context: BuildContext, copies: Mapping[str, Excerpt]) -> Iterator[str]:
    for name, excerpt in copies.items():
        paths = [file.path for file in excerpt.files]
        types = context.data.inputs[name].partitions
        columns = context.empty_rows[name].column_names
        note = undeclared_partitions(name, paths, types, columns)
        if note is not None:
            yield note


def _build_error(
    context: BuildContext, partitions: list[PartResult], rejects: RejectCounts
) -> Iterator[str]:
    try:
        check_usable(partitions, rejects, context.data)
    except SchemaError as error:
        yield f"a build ends here: {error}"


def _gate_notes(context: BuildContext, counts: RejectCounts, num_rows: int) -> Iterator[str]:
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
    first = rejected.slice(0, NUM_REJECTS).select(REJECTS_SCHEMA.names)
    return {
        "num": reasons.num_rejects,
        "share": round(reasons.share(num_rows), 6),
        "reasons": [
            {"reason": reason, "num": kind.count}
            for reason, kind in reasons.by_count()[:NUM_REJECTS]
        ],
        "first": first.to_pylist(),
    }


# Estimates from the first samples: groups, tables, splits and look-ups.

MANY_REJECTS = 0.01
"""Share of rejects above which a note reports them."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of the SQL, in the order of their raw rows.

    `rows` have the declared columns, without those that transforms make; `is_evaluation` is
    (num_samples,) bool.
    """

    rows: pa.Table
    is_evaluation: np.ndarray

    @staticmethod
    def of(tuples: Sequence[Tuples], context: BuildContext) -> SampleTable:
        """Join the columns of tuples back to the samples."""
        names = [n for n in context.features.names if n not in context.data.derived_columns]
        if not tuples:
            empty = pa.table({n: pa.array([], pa.null()) for n in names})
            return SampleTable(empty, np.zeros(0, bool))
        columns = [*names, ORIGIN, LIST_INDEX]
        rows = pa.concat_tables(pa.table({n: t.column(n) for n in columns}) for t in tuples)
        is_evaluation = np.concatenate([in_evaluation(t, context.data) for t in tuples])
        order = np.lexsort([rows[LIST_INDEX].to_numpy(), rows[ORIGIN].to_numpy()])
        return SampleTable(rows.select(names).take(pa.array(order)), is_evaluation[order])


def estimates(
    context: BuildContext,
    samples: SampleTable,
    partitions: Sequence[PartResult],
    distinct: Mapping[str, int],
    rows: Mapping[str, Sequence[pa.Table]],
) -> dict[str, Any]:
    """Return groups, tables, splits and look-ups of the first samples.

    `distinct` is table to number of distinct rows, `rows` has the raw rows by source and side
    table.
    """
    data = context.data
    counts = group_counts(partitions) if partitions else {}
    return {
        "groups": {
            name: {
                "columns": list(columns),
                "num_unique": counts[name].num_unique if name in counts else 0,
                "dedup_factor": counts[name].dedup_factor if name in counts else None,
            }
            for name, columns in data.groups.items()
        },
        "tables": {
            name: {
                "features": list(table.features),
                "rows": table.rows,
                "num_rows": table.num_rows,
                "num_lookups": sum(p.lookups.get(name, (0, 0))[0] for p in partitions),
                "num_unique_rows": distinct.get(name, 0),
            }
            for name, table in data.tables.items()
        },
        "splits": _splits(context, samples),
        "joins": list(_joins(context, samples, rows)),
    }


def _splits(context: BuildContext, samples: SampleTable) -> dict[str, Any]:
    names = (TRAIN, EVALUATION) if context.data.split.evaluation_from else (TRAIN,)
    splits: dict[str, Any] = {}
    for name in names:
        rows = samples.rows.filter(pa.array(samples.is_evaluation == (name == EVALUATION)))
        times = pc.min_max(rows[context.data.session.time])
        labels = [n for n in context.features.with_role("label") if n in rows.column_names]
        mean = pc.mean(rows[labels[0]].cast(pa.float64())).as_py() if labels and len(rows) else None
        splits[name] = {
            "num_samples": rows.num_rows,
            "first_time": _plain(times["min"].as_py()),
            "last_time": _plain(times["max"].as_py()),
            "label_mean": None if mean is None else round(float(mean), 6),
        }
    return splits


def _joins(
    context: BuildContext, samples: SampleTable, rows: Mapping[str, Sequence[pa.Table]]
) -> Iterator[dict[str, Any]]:
    """Yield how many keys occur in another table, of each look-up and each other source."""
    data, shard = context.data, context.shard
    for join in data.samples.joins:
        config, kind = data.sides[join.side], context.key_types[join.side]
        key = join.key or config.key
        keys = [key_column(samples.rows, key, kind)] if samples.rows.num_rows else []
        others = [key_column(table, config.key, kind) for table in rows.get(join.side, [])]
        yield _matches(join.side, key, keys, others)
    if shard is not None:
        kind = key_type({name: context.empty_rows[name] for name in data.sources}, shard)
        keys = [key_column(table, shard, kind) for table in rows.get(data.sample_source, [])]
        for name in data.sources:
            if name != data.sample_source:
                others = [key_column(table, shard, kind) for table in rows.get(name, [])]
                yield _matches(name, shard, keys, others)


def _matches(
    table: str, key: str, keys: Sequence[pa.Array], others: Sequence[pa.Array]
) -> dict[str, Any]:
    matched = 0
    if keys and others:
        values = pa.concat_arrays(others).drop_null()
        matched = sum(pc.sum(pc.is_in(k, value_set=values)).as_py() or 0 for k in keys)
    return {"table": table, "key": key, "of": sum(map(len, keys)), "matched": matched}


def notes_of(
    context: BuildContext,
    sources: Mapping[str, Mapping[str, Any]],
    samples: SampleTable,
    rejects: Mapping[str, Any],
    figures: Mapping[str, Any],
    stored: Collection[str],
) -> list[str]:
    """Return notes on the result, one line each; `stored` are the files of its parts."""
    data, notes = context.data, list[str]()
    source, num_samples = sources[data.sample_source], samples.rows.num_rows
    whole = all(each["whole"] for each in sources.values())
    if not whole:
        notes.append(
            f"groups, tables, splits and joins are estimates from the first {source['rows_read']} "
            f"rows of {data.sample_source!r}; --rows N reads more"
        )
    if rejects["share"] > MANY_REJECTS:
        notes.append(f"{rejects['share']:.1%} of the rows that samples are made from are rejected")
    for join in figures["joins"]:
        read = sources[join["table"]]
        if join["of"] > join["matched"] and (not join["matched"] or not read["whole"]):
            count = f"only {join['matched']}" if join["matched"] else "none"
            rows = "all" if read["whole"] else "the first"
            notes.append(
                f"{count} of {join['of']} samples have their {join['key']!r} in {rows} "
                f"{read['rows_read']} rows of {join['table']!r}"
                + ("" if read["whole"] else "; others may follow")
            )
    notes.extend(_split_notes(context, figures["splits"], num_samples, whole))
    if num_samples:
        factors = {name: group["dedup_factor"] for name, group in figures["groups"].items()}
        notes.extend(group_warnings(factors, data.groups, stored))
    labels = context.features.with_role("label")
    extremes = None
    if len(labels) == 1 and pc.count(samples.rows[labels[0]]).as_py() > 1:
        least, greatest = pc.min_max(samples.rows[labels[0]]).as_py().values()
        extremes = (least, greatest)
    notes.extend(label_warnings(labels, extremes))
    for name in samples.rows.column_names if num_samples else ():
        column = one_chunk(samples.rows[name])
        if column.null_count == num_samples:
            notes.append(f"column {name!r} is null in every sample")
        elif is_list(column.type) and not len(column.flatten()):
            notes.append(f"column {name!r} is empty in every sample")
    return notes


def _split_notes(
    context: BuildContext, splits: Mapping[str, Any], num_samples: int, whole: bool
) -> list[str]:
    start = context.data.split.evaluation_from
    if start is None or not num_samples:
        return []
    rest = "" if whole else "; later rows may be there"
    if not splits[EVALUATION]["num_samples"]:
        last = splits[TRAIN]["last_time"]
        return [f"no sample is for evaluation: the last one, {last}, is before {start}{rest}"]
    if not splits[TRAIN]["num_samples"]:
        first = splits[EVALUATION]["first_time"]
        return [f"no sample is for training: the first one, {first}, is not before {start}{rest}"]
    return []


def python_values(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as JSON values: times as text, NaN and infinity as null."""
    return [{k: _plain(v) for k, v in row.items()} for row in python_rows(table)]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, float) and not isfinite(value):
        return None
    return [_plain(v) for v in value] if isinstance(value, list) else value
