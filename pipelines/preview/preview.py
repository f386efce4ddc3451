"""Preview what a build would make of the first rows of a log."""

from __future__ import annotations

import gzip
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines import executor
from pipelines.autogroup.job import with_groups
from pipelines.build import check_usable, load_request
from pipelines.clustering.part import PartResult
from pipelines.context import BuildContext, BuildRequest
from pipelines.executor import OutputCollector, SourceRows
from pipelines.prepare import build_context, prepare
from pipelines.preview.estimates import SampleTable, estimates, notes_of, python_values
from pipelines.quality.gate import reject_findings
from pipelines.runners import IN_PROCESS
from pipelines.samples.check_sql import broadcast_sides
from pipelines.samples.tuples import Tuples
from pipelines.sources.listing import (
    Folder,
    SourceFile,
    codec_of,
    decompressed,
    find_files,
    folder_of,
    is_transient,
    undeclared_partitions,
)
from pipelines.sources.rejects import RejectCounts, count_rejects, sorted_rejects
from pipelines.sources.rows import ORIGIN, type_text
from pipelines.stages import REJECTS
from pipelines.transforms.apply import apply_transforms
from pipelines.transforms.fit import load_staged
from schemas.config.job import GateConfig, Job
from schemas.config.sources import SourceConfig
from schemas.errors import SchemaError
from schemas.layout import REJECTS_SCHEMA
from schemas.manifest import InputFile

# The first rows of each source of a log, copied to a folder that a build can read.
#
# A copy has the name, the format and the compression of its file, so that the readers of builds
# read it and say of a row what they would say of it in its file: positions are the same. How much
# is read follows from the rows that are asked for, not from the size of the log.

MAX_FILES = 32
"""Files of a source that are begun at most."""
MAX_BYTES = 8 << 20
"""Bytes of text, decompressed, that are read of a file at most."""
_BLOCK_BYTES = 256 << 10
_BATCH_ROWS = 1000
_TRIES = 1000
"""Ends of lines that are tried for one outside quotes."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What was copied of one source.

    Attributes:
        files: all of its files.
        listing: the copies, as a listing of the folder they are in.
        is_whole: whether nothing was left out.
    """

    files: tuple[SourceFile, ...]
    listing: tuple[InputFile, ...]
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def excerpts(
    folder: Folder,
    sources: Mapping[str, SourceConfig],
    files: Mapping[str, Iterable[SourceFile]],
    rows: Mapping[str, int],
    target: Path,
) -> dict[str, Excerpt]:
    """Copy the first rows of each source.

    Args:
        folder: input directory.
        sources: sources and side tables.
        files: of each, in order.
        rows: of each, how many.
        target: directory to write to.
    """
    found: dict[str, Excerpt] = {}
    for name, config in sources.items():
        left, listing, whole = rows[name], list[InputFile](), True
        every = tuple(files[name])
        for file in every[:MAX_FILES]:
            if left <= 0:
                break
            copy = target / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copied, all_of_it = _copy(folder, file.path, config, copy, left)
            left, whole = left - copied, whole and all_of_it
            size = copy.stat().st_size
            listing.append(InputFile(source=name, path=file.path, num_bytes=size, sha256=""))
        found[name] = Excerpt(every, tuple(listing), whole and len(listing) == len(every))
    return found


def _copy(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first rows of a file; return about how many, and whether that is all."""
    try:
        if config.format == "parquet":
            return _copy_parquet(folder, path, copy, rows)
        if config.format == "avro":
            return _copy_avro(folder, path, copy, rows)
        return _copy_text(folder, path, config, copy, rows)
    except Exception as error:  # fastavro's parser has no error of its own
        if is_transient(error) or isinstance(error, FileNotFoundError):
            raise
        return _copy_bytes(folder, path, copy)  # what is wrong with it, its reader will say


def _copy_bytes(folder: Folder, path: str, copy: Path) -> tuple[int, bool]:
    with folder.open(path) as file:
        content = file.read(MAX_BYTES)
        whole = not file.read(1)
    copy.write_bytes(content)
    return 0, whole


def _copy_parquet(folder: Folder, path: str, copy: Path, rows: int) -> tuple[int, bool]:
    with folder.arrow_file(path) as source:
        file = pq.ParquetFile(source)
        batches: list[pa.RecordBatch] = []
        copied = 0
        for batch in file.iter_batches(min(rows, _BATCH_ROWS), use_threads=False):
            batches.append(batch.slice(0, rows - copied))
            copied += batches[-1].num_rows
            if copied >= rows:
                break
        schema = file.schema_arrow
        pq.write_table(pa.Table.from_batches(batches, schema), copy, compression="none")
        return copied, copied == file.metadata.num_rows


def _copy_avro(folder: Folder, path: str, copy: Path, rows: int) -> tuple[int, bool]:
    with folder.open(path) as file:
        copied, end, whole = 0, 0, True
        for block in fastavro.block_reader(file):
            if copied >= rows:
                whole = False
                break
            copied, end = copied + block.num_records, block.offset + block.size
        file.seek(0)
        copy.write_bytes(file.read(end) if end else file.read(MAX_BYTES))
    return copied, whole


def _copy_text(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    lines = rows + (config.format == "csv" and config.header)
    text, blocks, found, whole = b"", list[bytes](), 0, False
    with folder.open(path) as stored:
        file = decompressed(stored, path)
        while found <= lines and sum(map(len, blocks)) < MAX_BYTES:
            block = file.read(_BLOCK_BYTES)
            if not block:
                whole = True
                break
            blocks.append(block)
            found += block.count(b"\n")
    text = b"".join(blocks)
    if not whole:
        quote = config.quote if config.format == "csv" else None
        text = text[: _end_of_lines(text, lines, quote)]
    copy.write_bytes(_compressed(text, path))
    return max(0, min(found, lines) - (lines - rows)), whole


def _end_of_lines(text: bytes, lines: int, quote: str | None) -> int:
    r"""Return where the first lines of a text end: at the last end of a line outside quotes.

    Example:
        >>> [_end_of_lines(b'a\n"b\nc"\nd\n', lines, '"') for lines in (2, 3)]
        [2, 8]
    """
    content = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(content == ord("\n"))[:lines]
    if not len(ends):
        return len(text)
    if quote is not None and quote.isascii():
        inside = np.cumsum(content == ord(quote))[ends[-_TRIES:]] % 2
        outside = ends[-_TRIES:][inside == 0]
        ends = outside if len(outside) else ends
    return int(ends[-1]) + 1


def _compressed(text: bytes, path: str) -> bytes:
    codec = codec_of(path)
    if codec is None:
        return text
    if codec == "gzip":
        return gzip.compress(text, 1, mtime=0)
    return pa.Codec(codec).compress(text, asbytes=True)


WIDTH = 100
_VALUE_WIDTH = 28
_LIST_VALUES = 4


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print what `preview` returns.

    Args:
        found: from `preview`.
        console: where to; `WIDTH` columns are enough.
    """
    whole = all(source["whole"] for source in found["sources"].values())
    console.print(
        f"{found['job']}: {found['num_samples']} samples in {found['num_sessions']} sessions from "
        f"{'all' if whole else 'the first'} {found['rows']} rows of {found['input']}",
        soft_wrap=True,
    )
    _print(console, _sources(found["sources"]))
    for name, source in found["sources"].items():
        columns = ", ".join(f"{column} {kind}" for column, kind in source["columns"].items())
        console.print(Text.assemble((f"{name}: ", "bold"), columns), highlight=False)
    _print(console, _samples(found["samples"]))
    _reject_lines(console, found["rejects"])
    estimate = "" if whole else ", estimated"
    _print(console, _groups(found["groups"], estimate), _tables(found["tables"], estimate))
    _print(console, _splits(found["splits"], estimate))
    if found["joins"]:
        _print(console, _joins(found["joins"], estimate))
    for note in found["notes"]:
        console.print(Text.assemble(("note: ", "bold"), note), highlight=False)


def _print(console: Console, *tables: Table) -> None:
    for table in tables:
        console.print(table, highlight=False)


def _table(title: str, columns: Sequence[str], numbers: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right = name in numbers
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    return table


def _sources(sources: Mapping[str, Mapping[str, Any]]) -> Table:
    names = ("source", "format", "files", "MB", "rows read")
    table = _table("Sources", names, names[2:])
    for name, source in sources.items():
        read = f"{source['rows_read']:,}" + ("" if source["whole"] else " of more")
        size = f"{source['num_bytes'] / 1e6:,.1f}"
        table.add_row(name, source["format"], f"{source['num_files']:,}", size, read)
    return table


def _samples(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each column: samples are wide, and values repeat along a session."""
    table = _table(f"First {len(samples)} samples, one after the other", ("column", "values"))
    for name in samples[0] if samples else ():
        runs = [(v, len(list(run))) for v, run in groupby(_short(s[name]) for s in samples)]
        values = (f"{value} (x{times})" if times > 1 else value for value, times in runs)
        table.add_row(name, Text("  ".join(values)))
    return table


def _short(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(_short(v) for v in value[:_LIST_VALUES])
        more = f", +{len(value) - _LIST_VALUES}" if len(value) > _LIST_VALUES else ""
        return f"[{shown}{more}]"
    text = str(value)
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 3] + "..."


def _reject_lines(console: Console, rejects: Mapping[str, Any]) -> None:
    if not rejects["num"]:
        console.print("No rejects.\n")
        return
    table = _table(
        f"Rejects: {rejects['num']:,}, {rejects['share']:.1%} of the rows for samples",
        ("rows", "reason"),
        ("rows",),
    )
    for each in rejects["reasons"]:
        table.add_row(f"{each['num']:,}", Text(each["reason"]))
    first = _table("First rejects", ("file", "row", "value"), ("row",))
    for each in rejects["first"]:
        row = "" if each["position"] is None else str(each["position"])
        first.add_row(Text(each["file"]), row, Text(each["value"][: 2 * WIDTH]))
    _print(console, table, first)


def _groups(groups: Mapping[str, Mapping[str, Any]], estimate: str) -> Table:
    names = ("group", "columns", "unique", "dedup factor")
    table = _table(f"Groups{estimate}", names, names[2:])
    for name, group in groups.items():
        factor = group["dedup_factor"]
        text = "" if factor is None else f"{factor:.2f}"
        table.add_row(name, ", ".join(group["columns"]), f"{group['num_unique']:,}", text)
    return table


def _tables(tables: Mapping[str, Mapping[str, Any]], estimate: str) -> Table:
    names = ("table", "features", "rows", "num_rows", "look-ups", "rows used")
    shown = _table(f"Tables, training samples{estimate}", names, names[3:])
    for name, table in tables.items():
        counts = (table[key] for key in ("num_rows", "num_lookups", "num_unique_rows"))
        features = ", ".join(table["features"])
        shown.add_row(name, features, table["rows"], *(f"{count:,}" for count in counts))
    return shown


def _splits(splits: Mapping[str, Mapping[str, Any]], estimate: str) -> Table:
    names = ("split", "samples", "first", "last", "label mean")
    table = _table(f"Splits{estimate}", names, ("samples", "label mean"))
    for name, split in splits.items():
        times = (str(split[key] or "") for key in ("first_time", "last_time"))
        mean = "" if split["label_mean"] is None else f"{split['label_mean']:.4f}"
        table.add_row(name, f"{split['num_samples']:,}", *times, mean)
    return table


def _joins(joins: Sequence[Mapping[str, Any]], estimate: str) -> Table:
    table = _table(f"Joins{estimate}", ("table", "key", "found", "of"), ("found", "of"))
    for join in joins:
        table.add_row(join["table"], join["key"], f"{join['matched']:,}", f"{join['of']:,}")
    return table


# Look at what a build would make of the first rows of a log; nothing is left behind.
#
# The first rows are copied to a temporary folder, and the stages of a build run
# over them in this process, so that what is said of a row, and by which words, is what a build
# says.

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
        progress: called with each progress message, one line.
    """

    job_path: Path
    input_root: Path | str
    rows: int = 1000
    day: str | None = None
    allow_outside: bool = False
    progress: Callable[[str], None] = lambda _: None

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
            progress=request.progress,
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
    context = build_context(building, job, features, prepared, building.dataset / "segment")
    return _run(context, job, copied, request)


def _run(
    context: BuildContext, job: Job, copied: Mapping[str, Excerpt], request: PreviewRequest
) -> dict[str, Any]:
    """Run the stages, and say what came of each."""
    found, counted, side_rows = OutputCollector(), Counter[str](), dict[str, list[pa.Table]]()

    def rows() -> Iterator[SourceRows]:
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
    files = (executor.fit_transforms(context, found) if tuples else None) or {}
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
    learned = load_staged(context.segment_root, files, context.data)
    for group, transforms in context.data.transforms.items():
        rows = apply_transforms(rows, group, transforms, learned)
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
