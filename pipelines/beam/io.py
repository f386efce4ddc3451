"""Beam transforms for users' pipelines: read and write datasets, or run single steps of a build.

`BuildDataset` and `WriteDataset` end in a committed segment, `ReadDataset` and `ReadSource` begin a
pipeline, `MakeSamples` runs a job's SQL. Elements are pyarrow Tables. The job is checked when the
pipeline is constructed. Launcher and workers find the dataset under the same path.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa

from pipelines.autogroup.job import with_groups
from pipelines.beam.build import (
    SEGMENT,
    PendingSegment,
    add_commit,
    segment_of_rows,
    segment_pipeline,
)
from pipelines.beam.coders import SourceRows
from pipelines.beam.external_rows import (
    CONTENT,
    ExternalRowsContext,
    TablesContext,
    listing_of,
    sum_content,
    type_rows,
)
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
from pipelines.prepare import PreparedInput, build_context, prepare
from pipelines.samples.statements import job_steps
from pipelines.sources.formats import empty_rows
from pipelines.sources.listing import folder_of, list_inputs
from pipelines.sources.rejects import Reject
from pipelines.sources.rows import ORIGIN
from pipelines.stages import REJECTS, SAMPLES
from pipelines.table.compatibility import check_admissible
from pipelines.transforms.fit import stage_fitted
from schemas.config.job import Job, check_new_names, load_job
from schemas.dataset import missing_column_defaults, open_dataset
from schemas.errors import SchemaError, suggest_name
from schemas.features import FeatureSet, load_features
from schemas.manifest import InputFile
from schemas.paths import check_writable, local_path, schema_path

INCOMING = ".incoming"
"""Prefix of the directories below a dataset into which pipelines write their parts."""
ROWS = "rows"


class BuildDataset(beam.PTransform):
    """Begin a pipeline with a build, to the same bytes as `python -m pipelines build`.

    The input is listed when the pipeline is constructed; an existing segment is not built again.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`; `segment` has the
        segment's name, once it is committed.

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
            append: whether the dataset must exist.
            single_writer: whether no other process writes there, for a network filesystem.
            allow_outside: whether the schema may be outside the folder of the job file.

        Raises:
            SchemaError: the job is invalid, or the dataset cannot be written.
        """
        super().__init__()
        path, self._job, self._features = _load_job(job, allow_outside)
        target = _check_target(self._job, path, dataset, single_writer)
        self._request = BuildRequest(
            job_path=path,
            input_root=str(log),
            dataset=target,
            beam_args=["--direct_num_workers=1"],  # of the index, which the last worker builds
            attempt=uuid.uuid4().hex[:12],
            append=append,
            allow_outside=allow_outside,
        )

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """List the input, build the parts, commit the segment."""
        pipeline, features = input_or_inputs.pipeline, self._features
        request, job = with_groups(self._request, self._job, features)
        prepared = prepare(request, job, features)
        _, key = segment_hashes(job, features, prepared.listing)
        existing = check_admissible(request, job, features, key, prepared.listing)
        if existing is not None:
            nothing = pipeline | "no rejects" >> beam.Create([])
            return {
                SEGMENT: pipeline | "there already" >> beam.Create([existing.id]),
                REJECTS: nothing | "typed" >> beam.Map(_identity).with_output_types(Reject),
            }
        context = _start_build(pipeline, request, job, features, prepared)
        outputs = segment_pipeline(pipeline, context)
        listing = pipeline | "listing" >> beam.Create([prepared.listing])
        return add_commit(listing, outputs, PendingSegment(request, job, features, context))


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
        append: bool = False, *, single_writer: bool = False, allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job.

        Args:
            job: the job file; its source declares its columns.
            dataset: directory of the dataset.
            name: replaces the name of a file, in the manifest and in rejects.
            num_parts: ranges of session keys, built in parallel; the rows of each fit a worker.
            append: whether the dataset must exist.
            single_writer: whether no other process writes there, for a network filesystem.
            allow_outside: whether the schema may be outside the folder of the job file.

        Raises:
            SchemaError: the job is invalid, or the dataset cannot be written.
        """
        super().__init__()
        self._num_parts = _check_num_parts(num_parts)
        path, self._job, self._features = _load_job(job, allow_outside)
        _check_one_source(self._job, path)
        target = _check_target(self._job, path, dataset, single_writer)
        self._request = BuildRequest(
            job_path=path,
            input_root=target / INCOMING,  # no file is read
            dataset=target,
            beam_args=["--direct_num_workers=1"],  # of the index, which the last worker builds
            attempt=uuid.uuid4().hex[:12],
            append=append,
            listing=(_unread_file(self._job, name),),
            allow_outside=allow_outside,
        )
        self._prepared = prepare(self._request, self._job, self._features)

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Convert the rows, build the parts, commit the segment."""
        pipeline, request = input_or_inputs.pipeline, self._request
        context = _start_build(
            pipeline, request, self._job, self._features, self._prepared,
            kind=ExternalRowsContext, num_parts=self._num_parts,
        )  # fmt: skip
        typed = _typed_rows(input_or_inputs, context)
        rows = {SAMPLES: typed[SAMPLES], REJECTS: typed[REJECTS]}
        outputs = segment_of_rows(pipeline, rows, context)
        listing = (
            typed[CONTENT]
            | "sum content" >> beam.CombineGlobally(sum_content)
            | "name rows" >> beam.Map(listing_of, context.listing[0])
        )
        pending = PendingSegment(request, self._job, self._features, context)
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
        self._path, self._model_inputs = local_path(dataset).resolve(), model_inputs

    @property
    def schema(self) -> pa.Schema:
        """The columns of the tables; reads the first row group."""
        return next(read_samples(open_dataset(self._path), self._model_inputs)).schema

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
    def __init__(self, path: Path, model_inputs: bool) -> None:
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
        """Check the job.

        Args:
            job: the job file.
            log: directory of raw files, or its URL.
            source: name in the job; None for the source that samples are made of.
            allow_outside: whether the schema may be outside the folder of the job file.

        Raises:
            SchemaError: the job is invalid, or has no such source.
        """
        super().__init__()
        path, parsed, self._features = _load_job(job, allow_outside)
        self._data = parsed.data
        self._folder, self._source = folder_of(log), source or self._data.sample_source
        if self._source not in self._data.inputs:
            advice = suggest_name(self._source, self._data.inputs)
            raise SchemaError(
                f"source must be one of the job's, got {self._source!r}; {advice}", file=str(path)
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
            ROWS: read[SAMPLES] | "rows" >> beam.Map(_without_origin).with_output_types(pa.Table),
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
        """Check the job.

        Args:
            job: the job file; its source declares its columns.
            name: replaces the name of a file, in rejects.
            num_parts: ranges of keys for `samples.per`, run in parallel; each fits a worker.
            allow_outside: whether the schema may be outside the folder of the job file.

        Raises:
            SchemaError: the job is invalid.
        """
        super().__init__()
        _check_num_parts(num_parts)
        path, parsed, features = _load_job(job, allow_outside)
        _check_one_source(parsed, path)
        unused = path.parent / ".nowhere"  # no file is read, none is written
        request = BuildRequest(
            job_path=path,
            input_root=unused,
            dataset=path.parent,
            beam_args=[],
            attempt="",
            listing=(_unread_file(parsed, name),),
        )
        prepared = prepare(request, parsed, features)
        self._context = build_context(
            request, parsed, features, prepared, unused,
            kind=TablesContext, num_parts=num_parts, shuffle_by="references",
        )  # fmt: skip

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Convert the rows, run the SQL, join the columns of samples."""
        typed = _typed_rows(input_or_inputs, self._context)
        samples = typed[SAMPLES] | "samples by sql" >> _SamplesBySql(self._context)
        rejects = (typed[REJECTS], samples[REJECTS]) | "join rejects" >> beam.Flatten()
        return {
            SAMPLES: samples[SAMPLES] | "samples" >> beam.Map(_table).with_output_types(pa.Table),
            REJECTS: rejects | "rejects" >> EachReject(),
        }


def _load_job(job: str | Path, allow_outside: bool) -> tuple[Path, Job, FeatureSet]:
    path = Path(job).resolve()
    parsed = load_job(path)
    schema = schema_path(path, parsed.data.schema, allow_outside=allow_outside)
    return path, parsed, load_features(schema)


def _check_target(job: Job, path: Path, dataset: str | Path, single_writer: bool) -> Path:
    target = local_path(dataset).resolve()
    check_writable(target, single_writer=single_writer)
    check_new_names(job, path, target)
    return target


def _check_num_parts(num_parts: int) -> int:
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}; leave it out")
    return num_parts


def _check_one_source(job: Job, path: Path) -> None:
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


def _unread_file(job: Job, name: str) -> InputFile:
    return InputFile(source=job.data.sample_source, path=name, num_bytes=0, sha256="")


def _start_build(
    pipeline: beam.Pipeline,
    request: BuildRequest,
    job: Job,
    features: FeatureSet,
    prepared: PreparedInput,
    **settings: Any,
) -> BuildContext:
    """Make the directory of a segment's parts; return the context of its build."""
    request.dataset.mkdir(parents=True, exist_ok=True)
    root = request.dataset / f"{INCOMING}.{request.attempt}"
    shuffle_by = shuffle_of(pipeline.options)
    context = build_context(
        request, job, features, prepared, root, shuffle_by=shuffle_by, **settings
    )
    root.mkdir()
    stage_fitted(request.dataset, context.learned, root)
    return context


def _typed_rows(tables: Any, context: BuildContext) -> Any:
    stage = beam.FlatMap(type_rows, context).with_output_types(SourceRows)
    return tables | "type rows" >> stage.with_outputs(REJECTS, CONTENT, main=SAMPLES)


def _table(pair: tuple[int, pa.Table]) -> pa.Table:
    return pair[1]


def _without_origin(rows: tuple[str, pa.Table]) -> pa.Table:
    return rows[1].drop_columns([ORIGIN])


def _identity(reject: Reject) -> Reject:
    return reject
