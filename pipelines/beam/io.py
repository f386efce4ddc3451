"""Transforms for the pipelines of others.

ReadSource, MakeSamples, BuildDataset, WriteDataset, ReadDataset.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import pyarrow as pa

from pipelines.autogroup.job import with_groups
from pipelines.beam.build import (
    SEGMENT,
    CommitRequest,
    add_commit,
    segment_of_rows,
    segment_pipeline,
)
from pipelines.beam.coders import SourceRows
from pipelines.beam.given_rows import CONTENT, GivenContext, TypeRows, listing_of, sum_content
from pipelines.beam.runner import shuffle_of
from pipelines.beam.transforms import EachReject, ReadRows
from pipelines.beam.transforms import MakeSamples as _SamplesBySql
from pipelines.build import segment_hashes
from pipelines.clustering.reader import (
    column_names,
    read_live_row_group,
    read_samples,
    row_groups,
)
from pipelines.context import BuildContext, BuildRequest
from pipelines.prepare import build_context, prepare
from pipelines.samples.statements import job_steps
from pipelines.samples.tuples import Tuples
from pipelines.shuffle import ShuffleTransport
from pipelines.sources.listing import folder_of, list_inputs
from pipelines.sources.read import empty_rows
from pipelines.sources.rejects import Reject
from pipelines.sources.rows import ORIGIN
from pipelines.stages import REJECTS, SAMPLES
from pipelines.table.compatibility import check_admissible
from pipelines.transforms.fit import learned_so_far, stage_learned
from schemas.config.job import Job, check_new_names, load_job
from schemas.dataset import missing_column_defaults, open_dataset
from schemas.errors import SchemaError, suggest_name
from schemas.features import load_features
from schemas.manifest import InputFile
from schemas.paths import check_writable, local_path, schema_path

# Transforms for the pipelines of others: end one with a dataset, begin one with a dataset.
#
# A job file says what the dataset is; whatever of it does not fit is refused when the pipeline is
# made. The dataset lies where the launcher and all workers find it under the same path.

INCOMING = ".incoming"
"""Begin of the names of directories below a dataset into which pipelines write their parts."""


class WriteDataset(beam.PTransform):
    """End a pipeline with a dataset: raw rows in, one committed segment out.

    The input is a PCollection of pyarrow Tables or RecordBatches, rows of the job's only source;
    the job's SQL makes samples of them. How the collection is ordered and cut changes no byte.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`; the segment's name comes
        when it is committed.

    Example: `rows | WriteDataset("job.yaml", "dataset", name="2026-01-31", num_parts=8)`
    """

    def __init__(
        self, job: str | Path, dataset: str | Path, name: str, num_parts: int = 1,
        append: bool = False, *, single_writer: bool = False, allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job.

        Args:
            job: the job file; its source declares its columns.
            dataset: directory of the dataset.
            name: stands for the rows where a file would, in the manifest and in rejects.
            num_parts: ranges of session keys that are built apart; the rows of each fit a worker.
            append: whether the dataset must be there already.
            single_writer: whether nothing else writes there, for a network filesystem.
            allow_outside: whether the schema may lie outside the folder of the job file.

        Raises:
            SchemaError: the job does not fit, or the dataset is no place to write to.
        """
        super().__init__()
        path = Path(job).resolve()
        if num_parts < 1:
            raise ValueError(f"num_parts must be at least 1, got {num_parts}; leave it out")
        self._parsed = load_job(path)
        schema = schema_path(path, self._parsed.data.schema, allow_outside=allow_outside)
        self._features = load_features(schema)
        check_one_source(self._parsed, path)
        file = InputFile(source=self._parsed.data.sample_source, path=name, num_bytes=0, sha256="")
        target = local_path(dataset).resolve()
        check_writable(target, single_writer=single_writer)
        check_new_names(self._parsed, path, target)
        self._request = BuildRequest(
            job_path=path,
            input_root=target / INCOMING,  # no file is read
            dataset=target,
            beam_args=["--direct_num_workers=1"],  # of the index, which the last worker makes
            attempt=uuid.uuid4().hex[:12],
            append=append,
            listing=(file,),
            allow_outside=allow_outside,
        )
        self._prepared = prepare(self._request, self._parsed, self._features)
        self._num_parts = num_parts

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Type the rows, build the parts, commit the segment."""
        pipeline, request = input_or_inputs.pipeline, self._request
        request.dataset.mkdir(parents=True, exist_ok=True)
        context = GivenContext(
            folder=folder_of(request.input_root),
            segment_root=request.dataset / f"{INCOMING}.{request.attempt}",
            listing=self._prepared.listing,
            data=self._parsed.data,
            features=self._features,
            steps=self._prepared.steps,
            num_parts=self._num_parts,
            empty_rows=self._prepared.empty_rows,
            learned=learned_so_far(request.dataset),
            shuffle_by=shuffle_of(pipeline.options),
        )
        context.segment_root.mkdir()
        stage_learned(request.dataset, context.learned, context.segment_root)
        typing = beam.ParDo(TypeRows(context, REJECTS)).with_output_types(SourceRows)
        tags = (REJECTS, CONTENT)
        typed = input_or_inputs | "type rows" >> typing.with_outputs(*tags, main=SAMPLES)
        rows = {SAMPLES: typed[SAMPLES], REJECTS: typed[REJECTS]}
        made: dict[str, Any] = dict(segment_of_rows(pipeline, rows, context))
        file = context.listing[0]
        listing = (
            typed[CONTENT]
            | "sum content" >> beam.CombineGlobally(sum_content)
            | "name rows" >> beam.Map(listing_of, file)
        )
        wanted = CommitRequest(request, self._parsed, self._features, context)
        return add_commit(listing, made, wanted)


def check_one_source(job: Job, path: Path) -> None:
    """Refuse a job of more than one source, or whose source does not declare its columns.

    Raises:
        SchemaError: naming the sources.
    """
    data = job.data
    source = data.sources[data.sample_source]
    if len(data.inputs) != 1 or not source.columns:
        raise SchemaError(
            "job must have one source that declares its columns, got "
            f"{sorted(data.inputs)}; join before, or use python -m pipelines build",
            file=str(path),
        )
    if data.has_auto_groups:
        raise SchemaError("data.groups must be named, got auto; name them", file=str(path))


class ReadDataset(beam.PTransform):
    """Begin a pipeline with the samples of a dataset, as tables of one row group each.

    Returns:
        PCollection[pa.Table] with the columns of the schema, lists and all, in no order.

    Example: `tables = pipeline | ReadDataset("dataset")`
    """

    def __init__(self, dataset: str | Path, model_inputs: bool = False) -> None:
        """Remember what to read.

        Args:
            dataset: directory of the dataset.
            model_inputs: whether to add the columns that transforms and sampling made.
        """
        super().__init__()
        self.dataset, self.model_inputs = local_path(dataset).resolve(), model_inputs

    def expand(self, input_or_inputs: Any) -> Any:
        """List the row groups, spread them, join each."""
        places = [
            (index, file_index, row_group)
            for index, segment in enumerate(open_dataset(self.dataset).segments)
            for file_index, row_group in row_groups(segment)
        ]
        stage = beam.ParDo(_ReadRowGroup(self.dataset, self.model_inputs))
        return (
            input_or_inputs
            | "list row groups" >> beam.Create(places)
            | "spread row groups" >> beam.Reshuffle()
            | "read row groups" >> stage.with_output_types(pa.Table)
        )


class _ReadRowGroup(beam.DoFn):
    def __init__(self, path: Path, model_inputs: bool) -> None:
        self.path, self.model_inputs = path, model_inputs

    def setup(self) -> None:
        self.dataset = open_dataset(self.path)

    def process(self, place: tuple[int, int, int]) -> Iterator[pa.Table]:
        index, file_index, row_group = place
        dataset = self.dataset
        segment = dataset.segments[index]
        absent = missing_column_defaults(dataset, segment)
        table = read_live_row_group(segment, file_index, row_group, dataset.job.data, absent)
        yield table.select(column_names(dataset, self.model_inputs))


def columns_of(path: Path, model_inputs: bool) -> pa.Schema:
    """Return the columns of the tables that `ReadDataset` gives, by a look at the first.

    Args:
        path: directory of the dataset.
        model_inputs: whether to add the columns that transforms and sampling made.
    """
    return next(read_samples(open_dataset(path), model_inputs)).schema


# The steps of a build, each for a pipeline of somebody else: read a source, make samples.
#
# What goes from step to step are pyarrow Tables, so that whatever a pipeline does between two of
# them needs to know nothing of this project.

ROWS = "rows"


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
        """Check the job.

        Args:
            job: the job file.
            log: directory of raw files, or its URL.
            source: name in the job; the source that samples are made of when None.
            allow_outside: whether the schema may lie outside the folder of the job file.

        Raises:
            SchemaError: the job does not fit, or has no such source.
        """
        super().__init__()
        path = Path(job).resolve()
        self._data = load_job(path).data
        schema = schema_path(path, self._data.schema, allow_outside=allow_outside)
        self._features = load_features(schema)
        self._folder, self._source = folder_of(log), source or self._data.sample_source
        if self._source not in self._data.inputs:
            advice = suggest_name(self._source, self._data.inputs)
            raise SchemaError(
                f"source must be one of the job's, got {self._source!r}; {advice}", file=str(path)
            )

    @property
    def schema(self) -> pa.Schema:
        """The columns of the tables; looks into the first files unless the job declares them."""
        listing = self._listing()
        return _without_origin(self._empty_rows(listing)).schema

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """List the files, then read them on all workers."""
        listing = self._listing()
        context = BuildContext(
            folder=self._folder,
            segment_root=Path(),  # reading writes nothing
            listing=listing,
            data=self._data,
            features=self._features,
            steps=job_steps(self._data),
            num_parts=1,
            empty_rows={self._source: self._empty_rows(listing)},
        )
        read = input_or_inputs | "read" >> ReadRows(context)
        return {
            ROWS: read[SAMPLES] | "rows" >> beam.Map(_rows).with_output_types(pa.Table),
            REJECTS: read[REJECTS] | "rejects" >> EachReject(),
        }

    def _listing(self) -> tuple[InputFile, ...]:
        return list_inputs(self._folder, {self._source: self._data.inputs[self._source]})

    def _empty_rows(self, listing: tuple[InputFile, ...]) -> pa.Table:
        config, paths = self._data.inputs[self._source], [file.path for file in listing]
        return empty_rows(self._folder, self._source, config, paths)


class MakeSamples(beam.PTransform):
    """Make samples of a job's raw rows: its SQL, its checks and its sampling, and no more.

    The input is a PCollection of pyarrow Tables or RecordBatches, rows of the job's only source.

    Returns:
        `{"samples": PCollection[pa.Table], "rejects": PCollection[Reject]}`: tables with the
        columns that the schema declares, in no order; transforms are a build's.

    Example: `samples = (rows | MakeSamples("job.yaml"))["samples"]`
    """

    def __init__(
        self, job: str | Path, name: str = ROWS, num_parts: int = 1, *, allow_outside: bool = False
    ) -> None:
        """Check the job.

        Args:
            job: the job file; its source declares its columns.
            name: stands for the rows where a file would, in rejects.
            num_parts: ranges of keys that `samples.per` works on apart; those of each fit a worker.
            allow_outside: whether the schema may lie outside the folder of the job file.

        Raises:
            SchemaError: the job does not fit.
        """
        super().__init__()
        path = Path(job).resolve()
        if num_parts < 1:
            raise ValueError(f"num_parts must be at least 1, got {num_parts}; leave it out")
        parsed = load_job(path)
        schema = schema_path(path, parsed.data.schema, allow_outside=allow_outside)
        features = load_features(schema)
        check_one_source(parsed, path)
        nowhere = path.parent / ".nowhere"  # no file is read, none is written
        file = InputFile(source=parsed.data.sample_source, path=name, num_bytes=0, sha256="")
        request = BuildRequest(
            job_path=path,
            input_root=nowhere,
            dataset=path.parent,
            beam_args=[],
            attempt="",
            listing=(file,),
        )
        prepared = prepare(request, parsed, features)
        self._context = TablesContext(
            folder=folder_of(nowhere),
            segment_root=nowhere,
            listing=prepared.listing,
            data=parsed.data,
            features=features,
            steps=prepared.steps,
            num_parts=num_parts,
            empty_rows=prepared.empty_rows,
        )

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Type the rows, run the SQL, put the samples' columns together."""
        typing = (
            beam.ParDo(TypeRows(self._context, REJECTS))
            .with_output_types(SourceRows)
            .with_outputs(REJECTS, CONTENT, main=SAMPLES)
        )
        typed = input_or_inputs | "type rows" >> typing
        made = typed[SAMPLES] | "samples by sql" >> _SamplesBySql(self._context)
        rejects = (typed[REJECTS], made[REJECTS]) | "join rejects" >> beam.Flatten()
        return {
            SAMPLES: made[SAMPLES] | "samples" >> beam.Map(_table).with_output_types(pa.Table),
            REJECTS: rejects | "rejects" >> EachReject(),
        }


class TablesContext(GivenContext):
    """Samples of given rows that go to somebody else instead of through the shuffle."""

    __slots__ = ()

    @property
    def transport(self) -> ShuffleTransport:
        """Samples as tables."""
        made = self.data.derived_columns
        return AsTables(tuple(n for n in self.features.names if n not in made))


@dataclass(frozen=True, slots=True)
class AsTables:
    """Samples as they were before their tuples were taken apart; nobody receives them here.

    Attributes:
        columns: names in the order of the schema.
    """

    columns: tuple[str, ...]
    element: ClassVar[type] = pa.Table

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the samples of each part."""
        for index, part in enumerate(parts):
            if part is not None:
                yield index, pa.table({name: part.column(name) for name in self.columns})

    def receive(self, sent: Any) -> Any:
        """Refuse: samples that were handed out do not come back."""
        raise AssertionError("samples that were handed out must not come back")


def _without_origin(table: pa.Table) -> pa.Table:
    return table.drop_columns([ORIGIN])


def _rows(pair: tuple[str, pa.Table]) -> pa.Table:
    return _without_origin(pair[1])


def _table(pair: tuple[int, pa.Table]) -> pa.Table:
    return pair[1]


class BuildDataset(beam.PTransform):
    """Begin a pipeline with a build: what `python -m pipelines build` does, to the same bytes.

    The input is listed and the job checked when the pipeline is made; a segment that is there
    already is not built again.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`; the segment's name comes
        when it is committed.

    Example: `pipeline | BuildDataset("job.yaml", "log", "dataset")`
    """

    def __init__(
        self, job: str | Path, log: str | Path, dataset: str | Path, append: bool = False,
        *, single_writer: bool = False, allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job.

        Args:
            job: the job file.
            log: directory of raw files, or its URL.
            dataset: directory of the dataset.
            append: whether the dataset must be there already.
            single_writer: whether nothing else writes there, for a network filesystem.
            allow_outside: whether the schema may lie outside the folder of the job file.

        Raises:
            SchemaError: the job does not fit, or the dataset is no place to write to.
        """
        super().__init__()
        path = Path(job).resolve()
        self._parsed = load_job(path)
        schema = schema_path(path, self._parsed.data.schema, allow_outside=allow_outside)
        self._features = load_features(schema)
        target = local_path(dataset).resolve()
        check_writable(target, single_writer=single_writer)
        check_new_names(self._parsed, path, target)
        self._request = BuildRequest(
            job_path=path,
            input_root=str(log),
            dataset=target,
            beam_args=["--direct_num_workers=1"],  # of the index, which the last worker makes
            attempt=uuid.uuid4().hex[:12],
            append=append,
            allow_outside=allow_outside,
        )

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """List the input, build the parts, commit the segment."""
        pipeline, features = input_or_inputs.pipeline, self._features
        request, job = with_groups(self._request, self._parsed, features)
        prepared = prepare(request, job, features)
        _, key = segment_hashes(job, features, prepared.listing)
        reference = check_admissible(request, job, features, key, prepared.listing)
        if reference is not None:
            nothing = pipeline | "no rejects" >> beam.Create([])
            return {
                SEGMENT: pipeline | "there already" >> beam.Create([reference.id]),
                REJECTS: nothing | "typed" >> beam.Map(_as_is).with_output_types(Reject),
            }
        request.dataset.mkdir(parents=True, exist_ok=True)
        building = request.dataset / f"{INCOMING}.{request.attempt}"
        context = replace(
            build_context(request, job, features, prepared, building),
            shuffle_by=shuffle_of(pipeline.options),
        )
        context.segment_root.mkdir()
        stage_learned(request.dataset, context.learned, context.segment_root)
        made = segment_pipeline(pipeline, context)
        listing = pipeline | "listing" >> beam.Create([prepared.listing])
        return add_commit(listing, made, CommitRequest(request, job, features, context))


def _as_is(reject: Reject) -> Reject:
    return reject
