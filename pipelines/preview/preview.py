"""Preview of a build: run its stages over the first rows of a log.

The first rows of each source are copied to a temporary folder that a build can read. A copy has the
name, format and compression of its file, so the readers of builds report the same positions and
reasons. How much is read depends on the number of rows requested, not on the size of the log.
"""

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

NUM_SAMPLES = 10
"""Number of samples shown."""
NUM_REJECTS = 5
"""Number of rejects shown, and of reasons."""
OTHER_ROWS = 10_000
"""Number of rows read of each side table and of each source other than the sample source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRequest:
    """Arguments of the command.

    Attributes:
        job_path: the job file.
        input_root: directory of raw files, or its URL.
        rows: rows to read of the sample source.
        day: label of the segment, for a job whose split needs one.
        allow_outside: whether the job's schema may be outside the folder of the job file.
        progress: called with each progress message, one line.
    """

    job_path: Path
    input_root: Path | str
    rows: int = 1000
    day: str | None = None
    allow_outside: bool = False
    progress: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        """Check the number of rows."""
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}; leave --rows out")


def preview(request: PreviewRequest) -> dict[str, Any]:
    """Run the stages of a build over the first rows of a log.

    Returns:
        What `preview --json` prints.

    Raises:
        SchemaError: the job or the input is invalid, with the message of a build.
    """
    started = time.perf_counter()
    with TemporaryDirectory(prefix="presage-preview-") as scratch:
        build_request = BuildRequest(
            job_path=request.job_path,
            input_root=str(Path(scratch, "input")),
            dataset=Path(scratch, "dataset"),
            beam_args=["--runner", IN_PROCESS],
            attempt="preview",
            day=request.day,
            allow_outside=request.allow_outside,
            progress=request.progress,
        )
        result = _preview(request, build_request)
    return {**result, "wall_sec": round(time.perf_counter() - started, 3)}


def _preview(request: PreviewRequest, build_request: BuildRequest) -> dict[str, Any]:
    job, features = load_request(build_request)
    data, folder = job.data, folder_of(request.input_root)
    files = find_files(folder, data.inputs)
    all_files = [
        InputFile(source=name, path=file.path, num_bytes=file.num_bytes, sha256="")
        for name, source_files in files.items()
        for file in source_files
    ]
    broadcast_sides(data, all_files)  # raises where a build of all files would
    rows = {name: max(request.rows, OTHER_ROWS) for name in data.inputs}
    rows[data.sample_source] = request.rows
    copies = excerpts(folder, data.inputs, files, rows, Path(build_request.input_root))
    listing = [file for excerpt in copies.values() for file in excerpt.listing]
    listing.sort(key=lambda file: (file.source, file.path))
    build_request = replace(build_request, listing=tuple(listing))
    build_request, job = with_groups(build_request, job, features)
    prepared = prepare(build_request, job, features)
    build_request.dataset.mkdir()
    root = build_request.dataset / "segment"
    context = build_context(build_request, job, features, prepared, root)
    return _run_stages(context, job, copies, request)


def _run_stages(
    context: BuildContext, job: Job, copies: Mapping[str, Excerpt], request: PreviewRequest
) -> dict[str, Any]:
    outputs, num_read = OutputCollector(), Counter[str]()
    raw_rows: dict[str, list[pa.Table]] = {}
    source_of = {file.path: file.source for file in context.listing}

    def rows() -> Iterator[SourceRows]:
        reader, rejects = executor.read_all(context, outputs), outputs.values[REJECTS]
        while True:
            num_rejects = len(rejects)
            source_rows = next(reader, None)
            for table in rejects[num_rejects:]:  # rows that a reader rejects count as read
                positions = table.filter(table["position"].is_valid())
                num_read.update(source_of[file] for file in positions["file"].to_pylist())
            if source_rows is None:
                return
            source, table = source_rows
            num_read[source] += table.num_rows
            raw_rows.setdefault(source, []).append(table)
            yield source, table

    sent = executor.make_samples(context, rows(), outputs)
    tuples: list[Tuples] = [t for part in sent.values() for t in part]
    samples = SampleTable.of(tuples, context)
    files = (executor.fit_transforms(context, outputs) if tuples else None) or {}
    parts = executor.write_parts(context, sent, files)
    distinct = dict(executor.number_tables(context, parts))
    rejected = sorted_rejects(outputs.values[REJECTS])
    reject_counts = count_rejects(rejected)
    num_rows = sum(part.num_rows for part in parts)
    rejects = _rejects(rejected, reject_counts, num_rows)
    figures = estimates(context, samples, parts, distinct, raw_rows)
    sources = {
        name: _source(context, name, excerpt, num_read[name]) for name, excerpt in copies.items()
    }
    first = _with_transforms(context, samples.rows.slice(0, NUM_SAMPLES), files)
    return {
        "job": job.name,
        "input": str(request.input_root),
        "rows": num_read[context.data.sample_source],
        "sources": sources,
        "num_samples": samples.rows.num_rows,
        "num_sessions": sum(part.num_sessions for part in parts),
        "samples": python_values(first),
        "rejects": rejects,
        **figures,
        "notes": [
            *_undeclared_notes(context, copies),
            *_build_error(context, parts, reject_counts),
            *_gate_notes(context, reject_counts, num_rows),
            *notes_of(context, sources, samples, rejects, figures),
        ],
    }


def _with_transforms(context: BuildContext, rows: pa.Table, files: Mapping[str, str]) -> pa.Table:
    if not rows.num_rows:
        return rows
    learned = load_staged(context.segment_root, files, context.data)
    for group, transforms in context.data.transforms.items():
        rows = apply_transforms(rows, group, transforms, learned)
    return rows.select([name for name in context.features.names if name in rows.column_names])


def _undeclared_notes(context: BuildContext, copies: Mapping[str, Excerpt]) -> Iterator[str]:
    for name, excerpt in copies.items():
        paths = [file.path for file in excerpt.files]
        types = context.data.inputs[name].partitions
        columns = context.empty_rows[name].column_names
        note = undeclared_partitions(name, paths, types, columns)
        if note is not None:
            yield note


def _build_error(
    context: BuildContext, parts: list[PartResult], rejects: RejectCounts
) -> Iterator[str]:
    try:
        check_usable(parts, rejects, context.data)
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


# Copies of the first rows.

MAX_FILES = 32
"""Maximum number of files of a source to open."""
MAX_BYTES = 8 << 20
"""Maximum bytes of text, decompressed, to read of a file."""
_BLOCK_BYTES = 256 << 10
_BATCH_ROWS = 1000
_TRIES = 1000
"""Number of line ends to try for one outside quotes."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The copy of the first rows of one source.

    Attributes:
        files: all of its files.
        listing: the copies, as a listing of the target folder.
        is_whole: whether all rows were copied.
    """

    files: tuple[SourceFile, ...]
    listing: tuple[InputFile, ...]
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
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
        files: files of each, in order.
        rows: number of rows of each.
        target: directory to write to.
    """
    copies: dict[str, Excerpt] = {}
    for name, config in sources.items():
        remaining, listing, whole = rows[name], list[InputFile](), True
        source_files = tuple(files[name])
        for file in source_files[:MAX_FILES]:
            if remaining <= 0:
                break
            copy = target / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            num_copied, is_whole = _copy(folder, file.path, config, copy, remaining)
            remaining, whole = remaining - num_copied, whole and is_whole
            size = copy.stat().st_size
            listing.append(InputFile(source=name, path=file.path, num_bytes=size, sha256=""))
        whole = whole and len(listing) == len(source_files)
        copies[name] = Excerpt(source_files, tuple(listing), whole)
    return copies


def _copy(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first rows of a file; return the estimated number, and whether these are all."""
    try:
        if config.format == "parquet":
            return _copy_parquet(folder, path, copy, rows)
        if config.format == "avro":
            return _copy_avro(folder, path, copy, rows)
        return _copy_text(folder, path, config, copy, rows)
    except Exception as error:  # fastavro has no exception class of its own
        if is_transient(error) or isinstance(error, FileNotFoundError):
            raise
        return _copy_bytes(folder, path, copy)  # the reader of builds will report the damage


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
    blocks, num_lines, whole = list[bytes](), 0, False
    with folder.open(path) as stored:
        file = decompressed(stored, path)
        while num_lines <= lines and sum(map(len, blocks)) < MAX_BYTES:
            block = file.read(_BLOCK_BYTES)
            if not block:
                whole = True
                break
            blocks.append(block)
            num_lines += block.count(b"\n")
    text = b"".join(blocks)
    if not whole:
        quote = config.quote if config.format == "csv" else None
        text = text[: _end_of_lines(text, lines, quote)]
    copy.write_bytes(_compressed(text, path))
    return max(0, min(num_lines, lines) - (lines - rows)), whole


def _end_of_lines(text: bytes, lines: int, quote: str | None) -> int:
    r"""Return the index of the end of the first lines: the last line end outside quotes.

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


# Printing.

WIDTH = 100
_VALUE_WIDTH = 28
_LIST_VALUES = 4


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the result of `preview`; `WIDTH` columns are enough."""
    whole = all(source["whole"] for source in result["sources"].values())
    samples = f"{result['num_samples']} samples in {result['num_sessions']} sessions"
    rows = f"{'all' if whole else 'the first'} {result['rows']} rows of {result['input']}"
    console.print(f"{result['job']}: {samples} from {rows}", soft_wrap=True)
    _print(console, _sources(result["sources"]))
    for name, source in result["sources"].items():
        columns = ", ".join(f"{column} {kind}" for column, kind in source["columns"].items())
        console.print(Text.assemble((f"{name}: ", "bold"), columns), highlight=False)
    _print(console, _samples(result["samples"]))
    _reject_lines(console, result["rejects"])
    estimate = "" if whole else ", estimated"
    _print(console, _groups(result["groups"], estimate), _tables(result["tables"], estimate))
    _print(console, _splits(result["splits"], estimate))
    if result["joins"]:
        _print(console, _joins(result["joins"], estimate))
    for note in result["notes"]:
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
    """Return a row for each column: samples have many, and values repeat within a session."""
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
