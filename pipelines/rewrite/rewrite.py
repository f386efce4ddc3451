"""`pipelines rewrite`: cluster an existing Parquet dataset by session, as a star schema or flat.

The pipeline is that of a build. The output is compared with the input by a hash of all rows,
independent of their order, before it gets its name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import yaml

from presage.pipelines.build import build
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest, count_parts
from presage.pipelines.rewrite.flat import KEY, TIME, FlatPart, FlatStage, run_flat
from presage.pipelines.rewrite.input import (
    FILES,
    SOURCE,
    Rows,
    check_microseconds,
    decoded,
    inspect_rows,
    is_rewritable,
    star_type,
)
from presage.pipelines.runner_options import LocalOptions, beam_build, local_options
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.statements import Steps
from presage.pipelines.shuffle import SHUFFLE
from presage.pipelines.sources.raw_rows import ORIGIN, Folder, InputSplit, folder_of
from presage.pipelines.sources.rejects import rejects_from_table, sorted_rejects
from presage.pipelines.sources.types import arrow_type
from presage.pipelines.stages import BuildContext
from presage.pipelines.table.expand import (
    VIEW,
    ContentHash,
    content_hash,
    hash_of_values,
    value_hashes,
)
from presage.pipelines.table.indexes import INDEX_PREFIX
from presage.pipelines.table.segment import directory_reference, publish_files, remove_partial
from presage.pipelines.table.target import SegmentTarget
from presage.schemas.config.job import DataConfig, Job, SamplesConfig, SessionConfig
from presage.schemas.dataset.files import sha256_of
from presage.schemas.dataset.group_files import read_group
from presage.schemas.dataset.manifest import find_root, read_segment
from presage.schemas.dataset.opened import Segment, open_dataset
from presage.schemas.dataset.samples import blocks_of_row_group, row_groups, tuples_of_samples
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.features import FeatureSet
from presage.schemas.layout import BUILDS, JOB, SCHEMA, SEGMENTS, part_path
from presage.schemas.machine import num_cores
from presage.schemas.storage.leases import LEASES
from presage.schemas.storage.location import MANIFESTS, Location
from presage.schemas.storage.locks import directory_lock

HIDDEN = (ORIGIN, LIST_INDEX, KEY, TIME)
"""Names that no column of the input may have."""
ROWS = "rows"
"""Directory of the rewritten rows in a temporary directory, moved to the output at the end."""
OWN_FILES = {
    "star": re.compile(
        rf"({MANIFESTS}|{LEASES}|{SEGMENTS}|{INDEX_PREFIX}[^/]*|{BUILDS})/"
        rf"|({JOB}|{SCHEMA})(\.\w+)?$|{VIEW}$"
    ),
    "flat": re.compile(r"\d{5}\.parquet$"),
}
"""Paths of the files of an output, by layout: those of a rewrite that was killed."""
ROW_TIME = "row_time"
"""Column added to a star schema whose rows have no time: a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRequest:
    """Arguments of the command.

    `folder` has Parquet files, `output` is new, empty, or of the same rewrite that was killed. The
    layout `star` is a dataset, `flat`
    plain Parquet with the same schema. `session` and `time`, which orders the rows of a session,
    are guessed when None. With `label` a model can be trained on the star schema.
    """

    folder: str
    output: Location
    layout: Literal["star", "flat"]
    session: str | None
    time: str | None
    label: str | None
    beam_args: list[str]
    attempt: str
    progress: Callable[[str], None] = lambda _: None


def rewrite(request: RewriteRequest) -> dict[str, Any]:
    """Rewrite a dataset and check that the output has every row.

    Returns:
        What `rewrite --json` prints.

    Raises:
        SchemaError: the input is invalid, or a row could not be kept; the output does not exist
            then.
    """
    if request.label is not None and request.layout == "flat":
        raise SchemaError(
            f"--label needs --layout star, not {request.layout!r}; leave it out: a flat file "
            "keeps every column as it is"
        )
    _check_output(request)
    folder = folder_of(request.folder)
    if folder.contains(request.output):
        raise SchemaError(
            f"output must lie outside the input, got {request.output} below {request.folder}; "
            "choose another --output"
        )
    rows = inspect_rows(folder, request.session, request.time)
    if not rows.has_rows():
        raise SchemaError("input must have rows, got none", file=folder.root)
    if rows.partitions:
        columns = ", ".join(f"{name} ({kind})" for name, kind in rows.partitions.items())
        request.progress(f"columns from folder names: {columns}")
    if rows.num_ignored:
        request.progress(
            f"files that are not Parquet, not read: {rows.num_ignored}, such as {rows.ignored}"
        )
    order = f"by {rows.time}" if rows.time else "in the order of the files"
    request.progress(f"session key: {rows.session}; rows of a session {order}")
    with _scratch_of(request.output) as scratch:
        write = _write_star if request.layout == "star" else _write_flat
        return write(request, rows, scratch)


def _check_output(request: RewriteRequest) -> None:
    """Raise SchemaError if the output has files that no rewrite of its layout writes."""
    is_own = OWN_FILES[request.layout].match
    if request.output.stat() is not None or not all(
        is_own(entry.path) for entry in request.output.entries()
    ):
        raise _output_error(request)


def _output_error(request: RewriteRequest) -> SchemaError:
    return SchemaError(
        "output is a directory with files; choose another --output",
        file=str(request.output),
    )


@contextmanager
def _scratch_of(output: Location) -> Generator[Path]:
    """Yield an empty directory beside a local output; it is removed after the body.

    A killed process leaves it to the next one.

    Raises:
        SchemaError: another rewrite of the output runs.
    """
    if output.local is None:
        with TemporaryDirectory(prefix="presage-rewrite-") as name:
            yield Path(name)
        return
    scratch = output.local.with_name(f".{output.name}.rewrite")
    lock = directory_lock(
        scratch, "another rewrite has this output", "wait for it, or choose another --output"
    )
    with lock:
        try:
            for path in scratch.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _result(
    request: RewriteRequest, rows: Rows, content: ContentHash, num_bytes: int, sessions: int
) -> dict[str, Any]:
    return {
        "layout": request.layout,
        "session": rows.session,
        "time": rows.time,
        "num_rows": content.num_rows,
        "num_sessions": sessions,
        "bytes_before": rows.num_bytes,
        "bytes_after": num_bytes,
        "ratio": round(rows.num_bytes / num_bytes, 3),
        "content_hash": str(content),
    }


def hash_input(rows: Rows, converted: Callable[[pa.Table], pa.Table]) -> ContentHash:
    """Return the content hash of the input; `converted` returns batches in the output's types."""

    def hash_split(split: InputSplit) -> ContentHash:
        return content_hash(map(converted, rows.batches(split)))

    return _sum_hashes(hash_split, rows.splits())


def _sum_hashes(function: Callable[[Any], ContentHash], items: Iterable[Any]) -> ContentHash:
    """Return the sum of the function of all items, on all processors."""
    with ThreadPoolExecutor(num_cores()) as pool:
        return sum(pool.map(function, items), ContentHash())


def _check_equal(before: ContentHash, after: ContentHash) -> None:
    if before != after:
        raise SchemaError(
            f"rewritten rows have content hash {after}, the input has {before}; the input changed "
            "meanwhile, or please report this"
        )


# Layout `flat`.


def _write_flat(request: RewriteRequest, rows: Rows, building: Path) -> dict[str, Any]:
    """Write plain Parquet files, and compare them with the input.

    They are written to `building`; by Beam workers, which share the store of the output and nothing
    else, beside the output.
    """
    options, target = local_options(request.beam_args), Location.parse(building) / ROWS
    if options is None and request.output.local is None:
        target = request.output.parent / f".{request.output.name}.{request.attempt}"
    if target.local is not None:
        target.local.mkdir()
    try:
        return _write_rows(request, rows, target, options)
    finally:
        target.remove_all()


def _write_rows(
    request: RewriteRequest, rows: Rows, target: Location, options: LocalOptions | None
) -> dict[str, Any]:
    """Write plain Parquet files to `target`, compare them with the input, then move them."""
    reserved = [n for n in rows.schema.names if n in HIDDEN]
    if reserved:
        raise SchemaError(f"column must not be named {reserved[0]!r}; rename it")
    unsupported = next((f for f in rows.schema if not is_rewritable(f.type)), None)
    if unsupported is not None:
        raise SchemaError(
            f"column {unsupported.name!r} has a type that cannot be rewritten, {unsupported.type}; "
            "cast it, or leave it out"
        )
    data = DataConfig(
        sources={SOURCE: rows.source},
        samples=SamplesConfig(map=f"SELECT * FROM {SOURCE}"),
        session=SessionConfig(key="_key", time="_time"),
        tables={},
        block_samples=16,  # a chunk that fits in memory consists of whole blocks
    )
    schema = rows.schema.remove_metadata().append(pa.field(ORIGIN, pa.int64()))
    context = BuildContext(
        folder=rows.folder,
        segment_root=target,
        listing=rows.listing,
        data=data,
        features=FeatureSet(()),
        steps=Steps(None, None),
        num_parts=count_parts(rows.num_bytes),
        empty_rows={SOURCE: schema.empty_table()},
    )
    schema = pa.ipc.read_schema(rows.schema.serialize())  # as workers receive it
    stage = FlatStage(context, schema, rows.session, rows.time)
    if options is not None:
        values = run_flat(stage, options)
    else:
        values = beam_build().run_flat(stage, request.beam_args)
    for reject in rejects_from_table(sorted_rejects(values["rejects"]).slice(0, 1)):
        raise SchemaError(f"{reject}; replace or remove the file")
    parts: list[FlatPart] = values["parts"]
    if not parts:
        raise SchemaError("input must have rows, got none", file=rows.folder.root)
    (target / SHUFFLE).remove_all()
    remove_partial(target)
    content = sum((p.content for p in parts), ContentHash())
    request.progress("comparing all rows with the input")
    _check_equal(hash_input(rows, decoded), content)
    num_bytes = sum(p.num_bytes for p in parts)
    _move_files(request, target)
    return _result(request, rows, content, num_bytes, sum(p.num_sessions for p in parts))


def _move_files(request: RewriteRequest, target: Location) -> None:
    """Move the files to the output, which may have some or all of them from a killed rewrite.

    Raises:
        SchemaError: it has other files.
    """
    for entry in request.output.entries():
        new = target / entry.path
        if new.stat() is None or sha256_of(new) != sha256_of(request.output / entry.path):
            raise _output_error(request)
    if target.local is None:
        publish_files(target, request.output)
    elif request.output.local is None or not request.output.exists():
        request.output.move_from(target.local)


# Layout `star`.


def _write_star(request: RewriteRequest, rows: Rows, building: Path) -> dict[str, Any]:
    """Build a dataset that is committed if it equals the input; `building` is for the job."""
    types = {f.name: star_type(f.name, f.type) for f in rows.schema}
    check_microseconds(rows)
    if request.output.local is not None and find_root(request.output) is None:
        for name in {entry.path.partition("/")[0] for entry in request.output.entries()}:
            (request.output / name).remove_all()  # of a rewrite that was killed
    job_folder = building / "job"
    job_folder.mkdir()
    write_job(job_folder, request, rows, types)
    contents: list[ContentHash] = []

    def check(directory: Location, job: Job) -> None:
        request.progress("comparing all rows with the input")
        segment = Segment(directory, directory_reference(directory), read_segment(directory))
        content = hash_star(segment, job.data, rows.schema.names)
        _check_equal(hash_input(rows, lambda b: b.cast(_star_schema(b, types))), content)
        contents.append(content)

    summary = _build(
        BuildRequest(
            BuildInput(job_folder / "job.yaml", rows.folder.root),
            SegmentTarget(request.output, request.attempt),
            BuildOptions(request.beam_args, progress=request.progress, check=check),
        )
    )
    if not contents:  # a rewrite that was killed has committed the segment
        dataset = open_dataset(request.output)
        check(dataset.segments[0].directory, dataset.job)
    result = _result(request, rows, contents[0], summary["dataset_bytes"], summary["num_sessions"])
    return {**result, "groups": summary["groups"]}


def _build(request: BuildRequest) -> dict[str, Any]:
    """Build; in errors about rows that cannot be kept, advise the flat layout."""
    try:
        return build(request)
    except SchemaError as error:
        problem, _, advice = error.message.partition("; ")
        if problem.startswith("groups: auto found no samples"):
            raise SchemaError(
                "--layout star can keep none of the rows: the session key or the time is null, or "
                "lists hold nulls; use --layout flat, which keeps every row"
            ) from error
        if "data.on_error" not in advice:
            raise
        message = f"{problem}; repair the row, or use --layout flat, which keeps every row"
        raise SchemaError(message, file=error.file, location=error.location) from error


def _star_schema(table: pa.Table, types: Mapping[str, str]) -> pa.Schema:
    return pa.schema([(n, arrow_type(types[n])) for n in table.column_names])


def hash_star(segment: Segment, data: DataConfig, columns: list[str]) -> ContentHash:
    """Return the content hash of a segment; each tuple is hashed once."""

    def hash_row_group(position: tuple[int, int]) -> ContentHash:
        return hash_of_values(_row_group_hashes(segment, *position, data, columns))

    return _sum_hashes(hash_row_group, row_groups(segment))


def _row_group_hashes(
    segment: Segment, file_index: int, row_group: int, data: DataConfig, columns: list[str]
) -> dict[str, np.ndarray]:
    samples = segment.file(part_path(file_index, "samples")).read_row_group(row_group)
    blocks = blocks_of_row_group(segment, file_index, row_group)
    own = set(samples.column_names)
    hashes = {c: value_hashes(samples[c]) for c in columns if c in own}
    for group, members in data.groups.items():
        table = read_group(segment.file, group, file_index, row_group)
        tuples = tuples_of_samples(segment, group, blocks, samples)
        hashes |= {c: value_hashes(table[c])[tuples] for c in members if c in columns}
    return hashes


def write_job(
    directory: Path, request: RewriteRequest, rows: Rows, types: Mapping[str, str]
) -> None:
    """Write the job and the schema of a build that keeps every column."""
    if ROW_TIME in rows.schema.names:
        raise SchemaError(f"column must not be named {ROW_TIME!r}; rename it")
    if request.label is not None and request.label not in rows.schema.names:
        raise SchemaError(
            f"--label must name a column, got {request.label!r}; "
            f"{suggest_name(request.label, rows.schema.names)}"
        )
    time = rows.time or ROW_TIME
    constant = "" if rows.time else f", TIMESTAMP '1970-01-01' AS {ROW_TIME}"
    roles = {n: _role(n, types[n], request.label, rows.time) for n in types}
    feature_types = {**types, **({time: "timestamp_us"} if time == ROW_TIME else {})}
    features = "".join(_feature(n, t, roles.get(n, "kept")) for n, t in feature_types.items())
    (directory / "schema.pbtxt").write_text(features, encoding="utf-8")
    tables = {
        re.sub(r"[^A-Za-z0-9_-]", "_", n).lstrip("-") + f"_{i}": {
            "features": [n],
            "num_rows": 1 << 20,
        }
        for i, (n, role) in enumerate(roles.items())
        if role == "sparse"
    }
    source = {
        "files": FILES,
        "format": "parquet",
        "columns": {n: type_ for n, type_ in types.items() if n not in rows.partitions},
        **({"partitions": {n: types[n] for n in rows.partitions}} if rows.partitions else {}),
    }
    body = {
        "name": re.sub(r"[^A-Za-z0-9_-]+", "_", _name(rows.folder)) or "rewritten",
        "data": {
            "sources": {SOURCE: source},
            "samples": {"map": f"SELECT *{constant} FROM {SOURCE}"},
            "session": {"key": rows.session, "time": time},
            "groups": "auto",
            "tables": tables,
            "on_error": "fail",
        },
    }
    text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=1 << 20)
    (directory / "job.yaml").write_text(text, encoding="utf-8")


def _name(folder: Folder) -> str:
    return Path(folder.root).resolve().name if folder.is_local else Path(folder.root).name


def _role(name: str, type_: str, label: str | None, time: str | None) -> str:
    """Return a column's role: `kept` without a label, else `sparse` for integers."""
    if label is None:
        return "kept"
    if name == label:
        return "label"
    integer = type_.removeprefix("list<").startswith(("int", "uint"))
    return "sparse" if integer and name != time and type_ != "uint64" else "kept"


def _feature(name: str, type_: str, role: str) -> str:
    value = type_.removeprefix("list<").removesuffix(">")
    kind = {"float32": "FLOAT", "float64": "FLOAT", "string": "BYTES"}.get(value, "INT")
    text = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    count = " value_count { min: 0 }" if type_.startswith("list<") else ""
    return f'feature {{ name: "{text}" type: {kind}{count} annotation {{ tag: "{role}" }} }}\n'
