"""The request of a build, and its preparation: list the input, check the job against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa

from presage.pipelines.histories.event_rows import EventSql
from presage.pipelines.runner_options import LocalOptions
from presage.pipelines.samples.event_join import join_events
from presage.pipelines.samples.lookups import (
    broadcast_sides,
    check_column,
    key_type,
    key_types,
    look_up,
    side_table,
    sort_side_rows,
)
from presage.pipelines.samples.per_key import visible_rows
from presage.pipelines.samples.sql import Connection, name_errors, run
from presage.pipelines.samples.statements import PER, SqlError, job_steps, original_error
from presage.pipelines.samples.validate import check_columns, check_repeatable, check_sampling
from presage.pipelines.sources.formats import empty_rows
from presage.pipelines.sources.listing import list_inputs, undeclared_partitions
from presage.pipelines.sources.raw_rows import ORIGIN, Folder, folder_of
from presage.pipelines.stages import BuildContext
from presage.pipelines.table.target import JobFiles, SegmentTarget
from presage.pipelines.transforms.apply import check_transforms
from presage.pipelines.transforms.fit import fitted_files
from presage.schemas.config.job import Job
from presage.schemas.dataset.manifest import InputFile, find_root
from presage.schemas.dataset.opened import Segment, open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.features import FeatureSet
from presage.schemas.machine import machine_budget
from presage.schemas.storage.location import Location

PART_INPUT_BYTES = 28 << 20
"""Input bytes of one part of a small segment, which fill row groups of 64 MiB."""
SMALL_PARTS, LARGE_PART_BYTES = 64, 64 << 20
"""Parts after which the next ones are larger, and the input bytes of a part of a large segment:
about 256 MiB of samples in memory, which fit a worker of 2 GiB even if they take 20 times as much
memory as input."""
MEMORY_INPUT_BYTES, MEMORY_FACTOR = 224 << 20, 18
"""Most input bytes of a segment that is held in memory by default, and the memory for each byte."""


@dataclass(frozen=True, slots=True)
class BuildInput:
    """What a segment is built from.

    Attributes:
        job_path: the job file, or its URL.
        root: directory of raw files, or its URL.
        only: paths below `root` of the files to read; all when empty.
        listing: input files; listed when None.
        allow_outside: whether the job's schema may be outside the folder of the job file.
    """

    job_path: Path | Location
    root: Path | str
    only: tuple[str, ...] = ()
    listing: tuple[InputFile, ...] | None = None
    allow_outside: bool = False


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a segment is built.

    Attributes:
        beam_args: Beam options.
        check_sql: map all rows twice, in other chunks, and compare the samples.
        progress: called with each progress message, one line.
        check: called with the complete segment and its job before it is committed; raises to
            refuse it.
    """

    beam_args: list[str]
    check_sql: bool = False
    progress: Callable[[str], None] = lambda _: None
    check: Callable[[Location, Job], None] = lambda *_: None


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments of a build."""

    input: BuildInput
    target: SegmentTarget
    options: BuildOptions


def prepare(request: BuildRequest, job: JobFiles) -> BuildContext:
    """List the input and check the SQL against the declared columns.

    Returns:
        The context of a build, without `segment_root`.

    Raises:
        SchemaError: the input, the job or the schema is invalid.
    """
    files, target, progress = request.input, request.target, request.options.progress
    folder, inputs = _input_folder(files, target.dataset), job.config.data.inputs
    listing = files.listing or list_inputs(folder, inputs)
    context = context_of(job, folder, listing, target.day)
    for note in context.notes if files.listing is None else ():
        progress(note)
    for name, config in inputs.items() if files.listing is None else ():
        columns = context.empty_rows[name].column_names
        paths = [f.path for f in listing if f.source == name]
        note = undeclared_partitions(name, paths, config.partitions, columns)
        if note is not None:
            progress(note)
    before = _segment_before(target) if job.config.data.histories else None
    return replace(context, fitted=fitted_files(target.dataset), before=before)


def _segment_before(target: SegmentTarget) -> Segment | None:
    """Return the newest segment of the dataset before the one that is built."""
    if find_root(target.dataset) is None:
        return None
    segments, position = open_dataset(target.dataset).segments, target.position
    earlier = [s for s in segments if position is None or s.reference.position < position]
    return earlier[-1] if earlier else None


def context_of(
    job: JobFiles, folder: Folder, listing: tuple[InputFile, ...], day: str | None
) -> BuildContext:
    """Return the context of some files, without `segment_root`; raises as `prepare`."""
    data, features = job.config.data, job.features
    if data.split.evaluation_last is not None and data.split.evaluation_from is None:
        raise SchemaError(
            "data.split.evaluation_last needs the day of the segment; use --day",
            file=str(job.path),
        )
    notes = list[str]()
    paths_of = {name: [f.path for f in listing if f.source == name] for name in data.inputs}
    try:
        context = BuildContext(
            folder=folder,
            segment_root=Location.parse("."),
            listing=listing,
            data=data,
            features=features,
            steps=job_steps(data),
            day=None if day is None else date.fromisoformat(day),
            num_parts=count_parts(sum(f.num_bytes for f in listing if f.source in data.sources)),
            empty_rows={
                name: _without_null_types(
                    empty_rows(folder, name, config, paths_of[name], notes, day),
                    features,
                )
                for name, config in data.inputs.items()
            },
        )
        return replace(_compile_sql(context), notes=tuple(notes))
    except SqlError as error:
        raise error.in_file(job.path) from error
    except SchemaError as error:
        if error.file is None:
            raise SchemaError(error.message, file=str(job.path)) from error
        raise


def _without_null_types(empty: pa.Table, features: FeatureSet) -> pa.Table:
    """Return columns that are null in all files with the type of the feature of their name."""
    schema = empty.schema
    for index, field in enumerate(schema):
        if pa.types.is_null(field.type) and field.name in features.names:
            feature = features[field.name]
            kind = {"INT": pa.int64(), "FLOAT": pa.float32(), "BYTES": pa.string()}[feature.type]
            kind = pa.large_list(kind) if feature.is_list else kind
            schema = schema.set(index, field.with_type(kind))
    return schema.empty_table()


def _compile_sql(context: BuildContext) -> BuildContext:
    """Run the SQL on empty tables, check the columns of its result; complete the context."""
    data, features, empty = context.data, context.features, context.empty_rows
    check_repeatable(data, empty)
    broadcast = broadcast_sides(data, context.listing)
    if data.samples.per is not None:
        key_type({name: empty[name] for name in data.sources}, data.samples.per.key)
    samples = _run_without_rows(context, {name: empty[name] for name in broadcast})
    types = key_types(data, samples.schema, {name: empty[name].schema for name in data.sides})
    for join in data.samples.joins:
        config = data.sides[join.side]
        side = side_table(sort_side_rows(empty[join.side], config, types[join.side]), config)
        samples = look_up(samples, side, config, join, join.as_of or data.session.time)
    check_sampling(samples.schema, features, data)
    context = replace(context, session_type=_check_histories(context, samples.schema))
    check_columns(samples.schema, features, data)
    check_transforms(samples, features, data)
    return replace(context, broadcast=broadcast, key_types=types)


def _check_histories(context: BuildContext, samples: pa.Schema) -> pa.DataType:
    """Check the histories of a job on empty tables; return the type of the samples' session keys.

    Raises:
        SchemaError: a statement does not fit its source, or a column its use.
    """
    data, session = context.data, context.data.session
    if session.key not in samples.names:
        return pa.int64()  # `check_columns` names it
    kind = samples.field(session.key).type
    for name, history in data.histories.items():
        for column in (session.time, *([history.order] if history.before == "order" else [])):
            check_column(f"data.histories.{name}", column or "", samples, "a column of the samples")
        if not pa.types.is_timestamp(samples.field(session.time).type):
            raise SchemaError(
                f"session.time must be a timestamp for data.histories, got "
                f"{samples.field(session.time).type} for {session.time!r}; cast it in SQL, for "
                "example make_timestamp(ms * 1000)"
            )
    if data.histories:
        sql = EventSql(Connection(data.samples.limits), data, kind)
        text_tables = {
            data.table_of_feature[name]: context.features[name].type == "BYTES"
            for name in data.table_of_feature
        }
        text_tables |= {n: False for n, table in data.tables.items() if table.rows == "identity"}
        for source in data.sources:
            sql.check(source, context.empty_rows[source], text_tables)
    return kind


def _run_without_rows(context: BuildContext, sides: Mapping[str, pa.Table]) -> pa.Table:
    """Return the empty result of the SQL, before look-ups; `sides` are the tables that it can read.

    Raises:
        SchemaError: a statement does not fit the columns.
    """
    data, connection = context.data, Connection(context.data.samples.limits)
    tables: Mapping[str, pa.Table] = {name: context.empty_rows[name] for name in data.sources}
    if data.samples.events is not None:
        tables = join_events(tables, data, ()).tables
    for name, table in sides.items():
        connection.register(name, table.drop_columns([ORIGIN]))
    visible = visible_rows(tables, data.sample_source)
    per = data.samples.per.sql if data.samples.per else ""
    for key, statement, text in (
        ("data.samples.per.sql", context.steps.per, per),
        ("data.samples.map", context.steps.map, data.samples.map or ""),
    ):
        if statement is None:
            continue
        try:
            with name_errors(key):
                samples = run(connection, statement, visible)
        except duckdb.Error as error:
            raise original_error(key, text, {**visible, **sides}, error) from error
        visible = {PER: samples}
    (samples,) = visible.values()
    return samples


def holds_in_memory(options: LocalOptions, num_bytes: int) -> bool:
    """Return whether a local build holds a segment in memory.

    `num_bytes` are those of all input files, with side tables.
    """
    if options.in_memory is not None:
        return options.in_memory
    return num_bytes <= min(MEMORY_INPUT_BYTES, machine_budget().memory // MEMORY_FACTOR)


def count_parts(num_bytes: int) -> int:
    """Return the parts of a segment by the bytes of its sources without side tables."""
    large = max(SMALL_PARTS, -(-num_bytes // LARGE_PART_BYTES))
    return max(1, min(large, -(-num_bytes // PART_INPUT_BYTES)))


def _input_folder(files: BuildInput, dataset: Location) -> Folder:
    """Return the input directory.

    Raises:
        SchemaError: the output lies in the input.
    """
    folder = folder_of(files.root, files.only)
    if folder.contains(dataset):
        raise SchemaError(
            f"output must lie outside the input, got {dataset} below {files.root}; "
            "choose another --output"
        )
    return folder
