"""Beam transforms for users' pipelines: read and write datasets, or run single steps of a build.

`BuildDataset` and `WriteDataset` end in a committed segment, `ReadDataset` and `ReadSource` begin a
pipeline, `MakeSamples` runs a job's SQL. Elements are pyarrow Tables. The job is checked when the
pipeline is constructed. Launcher and workers find the dataset at the same URL, or under the same
path of a directory that they share; workers need no other file of the launcher.

Arguments of several transforms:
    job: the job file.
    log: directory of raw files, or its URL.
    dataset: directory of the dataset.
    append: whether the dataset must exist.
    num_parts: ranges of keys, processed in parallel; the rows of each fit a worker.
    allow_outside: whether the schema may be outside the folder of the job file.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.transforms.window import GlobalWindows

from presage.pipelines.autogroup.choose import with_groups
from presage.pipelines.beam.build_parts import deserialize_results
from presage.pipelines.beam.jobs import segment_of_rows, segment_pipeline
from presage.pipelines.beam.stage_transforms import REJECTED, EachReject, ReadRows, SamplesOfJob
from presage.pipelines.build import finish_segment_files, segment_hashes
from presage.pipelines.clustering.part import LOOKUPS
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest, context_of, prepare
from presage.pipelines.samples.statements import job_steps
from presage.pipelines.samples.tuples import Tuples
from presage.pipelines.shuffle import SHUFFLE, SourceRows
from presage.pipelines.sources.formats import empty_rows
from presage.pipelines.sources.listing import list_inputs
from presage.pipelines.sources.raw_rows import ORIGIN, Folder, InputSplit, folder_of, typed_chunks
from presage.pipelines.sources.rejects import BUILD_REJECTS_SCHEMA, Reject
from presage.pipelines.stages import REJECTS, SAMPLES, BuildContext
from presage.pipelines.table.commit import check_admissible, commit_segment, discarded_on_error
from presage.pipelines.table.expand import ContentHash, content_hash, row_hashes
from presage.pipelines.table.root import write_copies
from presage.pipelines.table.target import JobFiles, SegmentTarget, load_job_files
from presage.pipelines.transforms.fit import fitted_files, stage_fitted
from presage.schemas.config.job import Job
from presage.schemas.dataset.defaults import missing_column_defaults
from presage.schemas.dataset.manifest import InputFile, hash_of, read_root
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import (
    column_names,
    read_live_row_group,
    row_groups,
    samples_schema,
)
from presage.schemas.errors import SchemaError, suggest_name, suggest_name_or
from presage.schemas.layout import SEGMENTS
from presage.schemas.paths import path_or_url
from presage.schemas.storage.location import Location

SEGMENT = "segment"
ROWS = "rows"
BEAM_ARGS = ["--direct_num_workers=1"]
"""Options of the indexes of a segment, which the last worker builds."""


class BuildDataset(beam.PTransform):
    """Begin a pipeline with a build, to the same bytes as `python -m presage.pipelines build`.

    The input is listed when the pipeline is constructed; an existing segment is not built again.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`; `segment` has the
        segment's name, once it is committed.

    Example: `pipeline | BuildDataset("job.yaml", "log", "dataset")`
    """

    def __init__(
        self, job: str | Path, log: str | Path, dataset: str | Path, append: bool = False,
        *, allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job.

        Raises:
            SchemaError: the job is invalid, or the dataset cannot be written.
        """
        super().__init__()
        self._job = _load_job(job, allow_outside)
        self._request = BuildRequest(
            BuildInput(self._job.path, str(log), allow_outside=allow_outside),
            _target(dataset, append),
            BuildOptions(BEAM_ARGS),
        )

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """List the input, build the parts, commit the segment."""
        pipeline, target = input_or_inputs.pipeline, self._request.target
        request, job = with_groups(self._request, self._job)
        context = prepare(request, job)
        _, key = segment_hashes(job, context.listing, target.day)
        existing = check_admissible(target, job, key, context.listing)
        if existing is not None:
            return {
                SEGMENT: pipeline | "existing segment" >> beam.Create([existing.id]),
                REJECTS: pipeline | "no rejects" >> beam.Create([]).with_output_types(Reject),
            }
        pending = _start_build(target, job, context)
        outputs = segment_pipeline(pipeline, pending.context)
        listing = pipeline | "listing" >> beam.Create([context.listing])
        return add_commit(listing, outputs, pending)


class WriteDataset(beam.PTransform):
    """End a pipeline with a dataset: raw rows to one committed segment.

    The input is a PCollection of pyarrow Tables or RecordBatches, rows of the job's only source;
    the job's SQL makes samples of them. Order and batching of the collection change no byte.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`; `segment` has the
        segment's name, once it is committed.

    Example: `rows | WriteDataset("job.yaml", "dataset", name="2026-01-31", num_parts=8)`
    """

    def __init__(
        self, job: str | Path, dataset: str | Path, name: str, num_parts: int = 1,
        append: bool = False, *, allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job; `name` replaces the name of a file, in the manifest and in rejects.

        Raises:
            SchemaError: the job is invalid, or the dataset cannot be written.
        """
        super().__init__()
        _check_num_parts(num_parts)
        self._job, self._target = _load_job(job, allow_outside), _target(dataset, append)
        self._context = _context_of_rows(self._job, name, num_parts)

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Convert the rows, build the parts, commit the segment."""
        pending = _start_build(self._target, self._job, self._context)
        in_one_window = input_or_inputs | "one window" >> beam.WindowInto(GlobalWindows())
        typed = _typed_rows(in_one_window, pending.context)
        rows = {SAMPLES: typed[SAMPLES], REJECTS: typed[REJECTS]}
        outputs = segment_of_rows(rows, pending.context)
        (file,) = pending.context.listing
        listing = (
            typed[CONTENT]
            | "sum content" >> beam.CombineGlobally(lambda hashes: sum(hashes, ContentHash()))
            | "name rows" >> beam.Map(lambda rows: (replace(file, sha256=hash_of(str(rows))),))
        )
        return add_commit(listing, outputs, pending)


class ReadDataset(beam.PTransform):
    """Begin a pipeline with the samples of a dataset, as tables of one row group each.

    Returns:
        PCollection[pa.Table] with the columns of the schema, including lists, in no order.

    Example: `tables = pipeline | ReadDataset("dataset")`
    """

    def __init__(self, dataset: str | Path, model_inputs: bool = False) -> None:
        """Store the settings.

        Args:
            dataset: directory of the dataset.
            model_inputs: whether to add the columns that transforms and sampling made.
        """
        super().__init__()
        self._path, self._model_inputs = Location.parse(dataset), model_inputs

    @property
    def schema(self) -> pa.Schema:
        """The columns of the tables."""
        dataset = open_dataset(self._path)
        return samples_schema(dataset, column_names(dataset, self._model_inputs))

    def expand(self, input_or_inputs: Any) -> Any:
        """List the row groups, distribute them, read each."""
        groups = [
            (index, file_index, row_group)
            for index, segment in enumerate(open_dataset(self._path).segments)
            for file_index, row_group in row_groups(segment)
        ]
        stage = beam.ParDo(_ReadRowGroup(self._path, self._model_inputs))
        return (
            input_or_inputs
            | "list row groups" >> beam.Create(groups)
            | "spread row groups" >> beam.Reshuffle()
            | "read row groups" >> stage.with_output_types(pa.Table)
        )


class _ReadRowGroup(beam.DoFn):
    def __init__(self, path: Location, model_inputs: bool) -> None:
        self.path, self.model_inputs = path, model_inputs

    def setup(self) -> None:
        self.dataset = open_dataset(self.path)

    def process(self, group: tuple[int, int, int]) -> Iterator[pa.Table]:
        index, file_index, row_group = group
        dataset = self.dataset
        segment = dataset.segments[index]
        absent = missing_column_defaults(dataset, segment)
        table = read_live_row_group(segment, file_index, row_group, dataset.job.data, absent)
        yield table.select(column_names(dataset, self.model_inputs))


class ReadSource(beam.PTransform):
    """Begin a pipeline with the rows of one of a job's sources or side tables.

    Returns:
        `{"rows": PCollection[pa.Table], "rejects": PCollection[Reject]}`: tables of the declared
        types in no order, and what could not be read.

    Example: `rows = (pipeline | ReadSource("job.yaml", "log"))["rows"]`
    """

    def __init__(
        self, job: str | Path, log: str | Path, source: str | None = None, *,
        allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job; `source` is None for the source that samples are made of.

        Raises:
            SchemaError: the job is invalid, or has no such source.
        """
        super().__init__()
        loaded = _load_job(job, allow_outside)
        self._data, self._features = loaded.config.data, loaded.features
        self._folder, self._source = folder_of(log), source or self._data.sample_source
        if self._source not in self._data.inputs:
            advice = suggest_name(self._source, self._data.inputs)
            raise SchemaError(
                f"source must be one of the job's, got {self._source!r}; {advice}",
                file=str(loaded.path),
            )

    @property
    def schema(self) -> pa.Schema:
        """The columns of the tables; reads the first files unless the job declares them."""
        return self._empty_rows(self._listing()).drop_columns([ORIGIN]).schema

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """List the files, then read them on all workers."""
        listing = self._listing()
        context = BuildContext(
            folder=self._folder,
            segment_root=Location.parse("."),  # reading writes nothing
            listing=listing,
            data=self._data,
            features=self._features,
            steps=job_steps(self._data),
            num_parts=1,
            empty_rows={self._source: self._empty_rows(listing)},
            tunes_workers=False,
        )
        read = input_or_inputs | "read" >> ReadRows(context)
        return {
            ROWS: read[SAMPLES]
            | "rows"
            >> beam.MapTuple(lambda _, rows: rows.drop_columns([ORIGIN])).with_output_types(
                pa.Table
            ),
            REJECTS: read[REJECTS] | "rejects" >> EachReject(),
        }

    def _listing(self) -> tuple[InputFile, ...]:
        return list_inputs(self._folder, {self._source: self._data.inputs[self._source]})

    def _empty_rows(self, listing: tuple[InputFile, ...]) -> pa.Table:
        config, paths = self._data.inputs[self._source], [file.path for file in listing]
        return empty_rows(self._folder, self._source, config, paths)


class MakeSamples(beam.PTransform):
    """Make samples of a job's raw rows: its SQL, checks and sampling, without transforms.

    The input is a PCollection of pyarrow Tables or RecordBatches, rows of the job's only source.

    Returns:
        `{"samples": PCollection[pa.Table], "rejects": PCollection[Reject]}`: tables with the
        columns that the schema declares, in no order.

    Example: `samples = (rows | MakeSamples("job.yaml"))["samples"]`
    """

    def __init__(
        self, job: str | Path, name: str = ROWS, num_parts: int = 1, *, allow_outside: bool = False
    ) -> None:
        """Check the job; `name` replaces the name of a file, in rejects.

        Raises:
            SchemaError: the job is invalid.
        """
        super().__init__()
        _check_num_parts(num_parts)
        self._context = _context_of_rows(_load_job(job, allow_outside), name, num_parts)

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Convert the rows, run the SQL, join the columns of samples."""
        typed = _typed_rows(input_or_inputs, self._context)
        samples = typed[SAMPLES] | "samples by sql" >> SamplesOfJob(self._context)
        rejects = (typed[REJECTS], samples[REJECTS]) | "join rejects" >> beam.Flatten()
        return {
            SAMPLES: samples[SAMPLES]
            | "samples" >> beam.Map(_declared_columns, self._context).with_output_types(pa.Table),
            REJECTS: rejects | "rejects" >> EachReject(),
        }


def _load_job(job: str | Path, allow_outside: bool) -> JobFiles:
    return load_job_files(path_or_url(job).resolve(), allow_outside=allow_outside)


def _context_of_rows(job: JobFiles, name: str, num_parts: int) -> BuildContext:
    """Return the context of rows of a user's pipeline, in which `name` stands for their file."""
    listing = (_unread_file(job.config, job.path, name),)
    context = context_of(job, Folder(""), listing, day=None)
    return replace(context, num_parts=num_parts, tunes_workers=False, has_files=False)


def _target(dataset: str | Path, append: bool) -> SegmentTarget:
    return SegmentTarget(Location.parse(dataset), uuid.uuid4().hex[:12], append=append)


def _check_num_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}; leave it out")


def _unread_file(job: Job, path: Path | Location, name: str) -> InputFile:
    """Return the file that stands for the rows of a job's only source, which must be declared."""
    data = job.data
    source = data.sources[data.sample_source]
    if len(data.inputs) != 1 or not source.columns:
        raise SchemaError(
            "job must have one source that declares its columns, got "
            f"{sorted(data.inputs)}; join before, or use python -m presage.pipelines build",
            file=str(path),
        )
    if data.has_auto_groups:
        raise SchemaError("data.groups must be named, got auto; name them", file=str(path))
    return InputFile(source=data.sample_source, path=name, num_bytes=0, sha256="")


def _start_build(target: SegmentTarget, job: JobFiles, context: BuildContext) -> PendingSegment:
    """Make the directory of a segment's parts; return the segment."""
    root = target.dataset / SEGMENTS / target.attempt
    context = replace(
        context,
        segment_root=root,
        fitted=fitted_files(target.dataset),
        tunes_workers=False,
    )
    stage_fitted(target.dataset, context.fitted, root)
    return PendingSegment(target, job, context)


def _typed_rows(tables: Any, context: BuildContext) -> Any:
    stage = beam.FlatMap(type_rows, context).with_output_types(SourceRows)
    return tables | "type rows" >> stage.with_outputs(REJECTS, CONTENT, main=SAMPLES)


def _declared_columns(samples: Tuples, context: BuildContext) -> pa.Table:
    """Return samples as a table of the columns that the job's SQL makes."""
    derived = context.data.derived_columns
    names = [name for name in context.features.names if name not in derived]
    return pa.table({name: samples.column(name) for name in names})


# Commit as the last step of a pipeline.


@dataclass(frozen=True, slots=True)
class PendingSegment:
    """A segment that a pipeline writes; `context.segment_root` holds its parts."""

    target: SegmentTarget
    job: JobFiles
    context: BuildContext


def add_commit(
    listing: Any, outputs: Mapping[str, Any], pending: PendingSegment
) -> dict[str, beam.PCollection]:
    """Add the commit to a pipeline.

    `listing` is a PCollection of one tuple, the input as the manifest names it; `outputs` are those
    of `segment_of_rows`.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`.
    """
    names = tuple(name for name in outputs if name != REJECTED)
    lists = [
        pvalue.AsSingleton(outputs[name] | f"all {name} to commit" >> beam.combiners.ToList())
        for name in names
    ]
    stage = beam.ParDo(_Commit(pending, names), *lists)
    segment = listing | "commit" >> stage.with_output_types(str)
    return {SEGMENT: segment, REJECTS: outputs[REJECTED] | "each reject" >> EachReject()}


class _Commit(beam.DoFn):
    def __init__(self, pending: PendingSegment, names: tuple[str, ...]) -> None:
        self.pending, self.names = pending, names

    def process(self, listing: tuple[InputFile, ...], *values: list[Any]) -> Iterator[str]:
        yield commit_pending(self.pending, listing, dict(zip(self.names, values, strict=True)))


def commit_pending(
    pending: PendingSegment,
    listing: tuple[InputFile, ...],
    values: Mapping[str, list[Any]],
) -> str:
    """Finish and commit the segment that a pipeline wrote; idempotent.

    Returns:
        The segment's name.

    Raises:
        SchemaError: the segment must not enter the dataset.
    """
    target, job, parts = pending.target, pending.job, pending.context.segment_root
    hashes, key = segment_hashes(job, listing, target.day)
    reference = check_admissible(target, job, key, listing)
    if reference is None:
        # A step may run twice, even at the same time: each run finishes a copy of its own.
        directory = parts.parent / f"{key}-{parts.name}-{uuid.uuid4().hex[:6]}"
        with discarded_on_error(target.dataset, directory):
            _copy_parts(parts, directory)
            context = replace(pending.context, segment_root=directory, listing=listing)
            results = {**values, "parts": deserialize_results(values["parts"])}
            finish_segment_files(target.dataset, context, hashes, results)
            reference = commit_segment(target, job, key, directory, BEAM_ARGS, lambda _: None)
    write_copies(target.dataset, read_root(target.dataset))
    parts.remove_all()
    return reference.id


def _copy_parts(parts: Location, directory: Location) -> None:
    """Copy the parts that a pipeline wrote: by hard links, or by the store itself.

    Raises:
        SchemaError: another run of this step has committed and removed them.
    """
    try:
        for entry in parts.entries():
            if entry.path.partition("/")[0] not in (SHUFFLE, LOOKUPS):
                (directory / entry.path).copy_from(parts / entry.path)
    except FileNotFoundError as error:
        raise SchemaError(
            "parts of the segment are missing; run the pipeline again", file=str(parts)
        ) from error


# Rows from a user's pipeline. They have no file and no position: a hash of their values replaces
# both, so that order and batching of the collection do not change the dataset; rows with equal
# origins are equal.

CONTENT = "content"
"""Output of `type_rows` with the hash of each table."""


def type_rows(element: pa.Table | pa.RecordBatch, context: BuildContext) -> Iterator[Any]:
    """Yield (source, table) of the declared types, rejects, and the content hash of a table."""
    file = context.listing[0]
    declared = context.data.sources[file.source].declared
    table = select_columns(element, declared, file.path)
    if not table.num_rows:
        return
    yield pvalue.TaggedOutput(CONTENT, content_hash([table]))
    split = InputSplit(file.source, file.path, 0)
    origins = (row_hashes(table) >> np.uint64(1)).astype(np.int64)
    numbered = table.append_column(ORIGIN, pa.array(origins))
    schema = context.empty_rows[file.source].schema
    for rows in typed_chunks(numbered, split, schema, declared):
        for rejects in rows.all_rejects():
            none = pa.nulls(rejects.num_rows, pa.int64())
            field = BUILD_REJECTS_SCHEMA.field("position")
            yield pvalue.TaggedOutput(REJECTS, rejects.set_column(1, field, none))
        if rows.table is not None and rows.table.num_rows:
            yield file.source, rows.table


def select_columns(element: pa.Table | pa.RecordBatch, names: Iterable[str], file: str) -> pa.Table:
    """Return the declared columns of an element.

    Raises:
        SchemaError: the element is no table, or lacks a column.
    """
    if isinstance(element, pa.RecordBatch):
        element = pa.Table.from_batches([element])
    if not isinstance(element, pa.Table):
        raise SchemaError(
            f"rows must come as pyarrow Tables or RecordBatches, got {type(element).__name__}; "
            "convert them",
            file=file,
        )
    for name in names:
        if name not in element.column_names:
            raise SchemaError(
                f"rows have no column {name!r}; "
                f"{suggest_name_or(name, element.column_names, 'add it')}",
                file=file,
            )
    return element.select(list(names))
