"""Preparation of a build: list the input and check the job against it, before any work."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pipelines.context import BuildContext, BuildRequest
from pipelines.runners import in_process, runner_module
from pipelines.samples.event_join import join_events
from pipelines.samples.lookups import broadcast_sides, key_type, key_types
from pipelines.samples.sql import Connection, SqlError
from pipelines.samples.statements import (
    PER,
    Passthrough,
    PerKey,
    Steps,
    add_group_hashes,
    dry_run_lookups,
    dry_run_sql,
    job_steps,
    run_keys,
    unchanged_lists,
)
from pipelines.samples.tuples import check_sampling
from pipelines.samples.validate import check_columns, check_map_sql, check_repeatable, first_rows
from pipelines.sources.formats import empty_rows, input_splits, read_split
from pipelines.sources.listing import Folder, folder_of, list_inputs, undeclared_partitions
from pipelines.sources.rows import ORIGIN, InputSplit
from pipelines.transforms.apply import check_transforms
from pipelines.transforms.fit import fitted_files
from schemas.config.job import DataConfig, Job
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.manifest import InputFile

PART_INPUT_BYTES = 28 << 20
"""Input bytes of one part: a part's samples fit a worker of 2 GiB even when they take 20 times as
much in memory, and fill row groups of 64 MiB."""


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """The input of a build and the SQL that its job compiles to.

    Attributes:
        listing: input files, sorted.
        steps: the SQL that workers run.
        empty_rows: empty table with the columns of each source and side table.
        broadcast: side tables that every worker holds.
        key_types: type in which the key of each side table is compared.
    """

    listing: tuple[InputFile, ...]
    steps: Steps
    empty_rows: Mapping[str, pa.Table]
    broadcast: frozenset[str] = frozenset()
    key_types: Mapping[str, pa.DataType] = field(default_factory=dict)


def prepare(request: BuildRequest, job: Job, features: FeatureSet) -> PreparedInput:
    """List the input and check the SQL against the declared columns.

    Raises:
        SchemaError: the input, the job or the schema is invalid.
    """
    data = job.data
    if data.split.evaluation_last is not None and data.split.evaluation_from is None:
        raise SchemaError(
            "data.split.evaluation_last needs the day of the segment; use --day",
            file=str(request.job_path),
        )
    folder = _input_folder(request)
    listing = request.listing or list_inputs(folder, data.inputs)
    try:
        empty: dict[str, pa.Table] = {}
        for name, config in data.inputs.items():
            paths = [f.path for f in listing if f.source == name]
            empty[name] = empty_rows(folder, name, config, paths)
            if request.listing is None:
                columns = empty[name].column_names
                note = undeclared_partitions(name, paths, config.partitions, columns)
                if note is not None:
                    request.progress(note)
        return _compile_job(data, features, listing, empty)
    except SqlError as error:
        raise error.in_file(request.job_path) from error
    except SchemaError as error:
        if error.file is None:
            raise SchemaError(error.message, file=str(request.job_path)) from error
        raise


def _compile_job(
    data: DataConfig,
    features: FeatureSet,
    listing: tuple[InputFile, ...],
    empty: Mapping[str, pa.Table],
) -> PreparedInput:
    """Compile the SQL, run it on empty tables, and check the columns of its result."""
    steps = job_steps(data)
    check_repeatable(data, empty)
    broadcast = broadcast_sides(data, listing)
    sources = {name: empty[name] for name in data.sources}
    sides = {name: empty[name] for name in data.sides}
    if data.samples.per is not None:
        key_type(sources, data.samples.per.key)
    visible = {name: empty[name] for name in broadcast}
    mapped = dry_run_sql(Connection(data.samples.limits), steps, data, sources, visible)
    types = key_types(data, mapped.schema, {name: table.schema for name, table in sides.items()})
    samples = dry_run_lookups(mapped, data, sides, types)
    check_sampling(samples.schema, features, data)
    check_columns(samples.schema, features, data)
    check_transforms(samples, features, data)
    lists: tuple[str, ...] = ()
    if steps.map is not None and steps.per is None and not data.samples.joins:
        lists = unchanged_lists(steps.map, data.sample_source, empty[data.sample_source].schema)
    passed = Passthrough(lists, tuple(samples.column_names))
    return PreparedInput(listing, add_group_hashes(steps, data, passed), empty, broadcast, types)


def build_context(
    request: BuildRequest,
    job: Job,
    features: FeatureSet,
    prepared: PreparedInput,
    segment_root: Path,
    *,
    kind: type[BuildContext] = BuildContext,
    num_parts: int | None = None,
    shuffle_by: str | None = None,
) -> BuildContext:
    """Return the context of a build.

    Args:
        request: the request of the build.
        job: the job file.
        features: declared columns.
        prepared: from `prepare`.
        segment_root: directory of the segment being built.
        kind: class of the context.
        num_parts: parts of the segment; by default from the bytes of the sources.
        shuffle_by: how samples cross the shuffle; by default `choose_shuffle`.
    """
    size = sum(f.num_bytes for f in prepared.listing if f.source in job.data.sources)
    return kind(
        folder=folder_of(request.input_root),
        segment_root=segment_root,
        listing=prepared.listing,
        data=job.data,
        features=features,
        steps=prepared.steps,
        empty_rows=prepared.empty_rows,
        broadcast=prepared.broadcast,
        key_types=prepared.key_types,
        num_parts=num_parts or count_parts(size),
        learned=fitted_files(request.dataset),
        shuffle_by=shuffle_by or choose_shuffle(request.beam_args, prepared.listing),
    )


def choose_shuffle(beam_args: list[str], listing: Sequence[InputFile]) -> str:
    """Return how samples cross the shuffle; `memory` if the build runs in this process."""
    size = sum(f.num_bytes for f in listing)  # with side tables: they are held in memory, too
    if in_process(beam_args, is_small=count_parts(size) == 1):
        return "memory"
    runner = runner_module("runner")
    return runner.shuffle_of(runner.pipeline_options(beam_args))


def count_parts(num_bytes: int) -> int:
    """Return the parts of a segment by the bytes of its sources without side tables."""
    return max(1, -(-num_bytes // PART_INPUT_BYTES))


def check_map(request: BuildRequest, data: DataConfig, prepared: PreparedInput) -> int:
    """Compare the samples that `samples.map` yields for the same rows in three batchings.

    Returns:
        The number of rows compared.

    Raises:
        SchemaError: the results differ, or the job has no `samples.map`.
    """
    if data.samples.map is None:
        raise SchemaError(
            "--check-sql needs a job with samples.map; rows of samples.per are not batched"
        )
    table = PER if data.samples.per is not None else data.sample_source
    connection = Connection(data.samples.limits)
    for name in prepared.broadcast:
        rows = list(_chunks(request, data, prepared, name))
        whole = pa.concat_tables(rows) if rows else prepared.empty_rows[name]
        connection.register(name, whole.drop_columns([ORIGIN]))
    chunks = _chunks(request, data, prepared, data.sample_source)
    if prepared.steps.per is not None:
        chunks = _per_key(connection, request, data, prepared)
    assert prepared.steps.map is not None, "the job has samples.map"
    return check_map_sql(prepared.steps.map, table, chunks, connection)


def _chunks(
    request: BuildRequest, data: DataConfig, prepared: PreparedInput, source: str
) -> Iterator[pa.Table]:
    folder, config = folder_of(request.input_root), data.inputs[source]
    schema = prepared.empty_rows[source].schema
    for index, file in enumerate(prepared.listing):
        whole = InputSplit(file.source, file.path, index)
        splits = input_splits(folder, whole, config)[0] if file.source == source else []
        for split in splits:
            for rows in read_split(folder, split, config, schema):
                if rows.table is not None:
                    yield rows.table


def _per_key(
    connection: Connection,
    request: BuildRequest,
    data: DataConfig,
    prepared: PreparedInput,
) -> Iterator[pa.Table]:
    """Yield the samples that `samples.per` yields for the first rows of each source."""
    assert data.samples.per is not None, "called for samples.per only"
    assert prepared.steps.per is not None, "called for samples.per only"
    tables: dict[str, pa.Table] = {}
    for name in data.sources:
        rows = pa.concat_tables(
            [prepared.empty_rows[name], *first_rows(_chunks(request, data, prepared, name))]
        )
        tables[name] = rows.filter(rows[data.samples.per.key].is_valid())
    if data.samples.events is not None:
        tables = join_events(tables, data, prepared.listing).tables
    sql = PerKey(prepared.steps.per, data.sample_source, data.samples.per.key)
    for result in run_keys(connection, sql, tables):
        if result.samples is not None:
            yield result.samples


def _input_folder(request: BuildRequest) -> Folder:
    """Return the input directory, and pass the Beam options to Beam's filesystems.

    Raises:
        SchemaError: the output lies in the input.
    """
    folder = folder_of(request.input_root)
    if not folder.is_local:
        args = [] if in_process(request.beam_args) else request.beam_args
        importlib.import_module("pipelines.beam.filesystem").use_options(args)
    elif request.dataset.resolve().is_relative_to(Path(folder.root).resolve()):
        raise SchemaError(
            f"output must lie outside the input, got {request.dataset} below {request.input_root}; "
            "choose another --output"
        )
    return folder
