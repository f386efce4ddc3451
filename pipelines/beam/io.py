"""Transforms for the pipelines of others: end one with a dataset, begin one with a dataset.

A job file says what the dataset is; whatever of it does not fit is refused when
the pipeline is made. The dataset lies where the launcher and all workers find
it under the same path.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa

from pipelines.beam.coders import SourceRows
from pipelines.beam.commit import Wanted, committed
from pipelines.beam.options import shuffle_of
from pipelines.beam.segment import segment_of_rows
from pipelines.learned.files import learned_so_far, stage_learned
from pipelines.parts.expand import expanded_tables, remembered_row_group, row_groups, sample_columns
from pipelines.prepare import BuildRequest, prepare
from pipelines.sources.folder import folder_of
from pipelines.sources.given_rows import CONTENT, GivenContext, TypeRows, listing_of, sum_content
from pipelines.stages import REJECTS, SAMPLES
from schemas.absent import absent_columns
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.features import load_features
from schemas.job import Job, check_new_names, load_job
from schemas.manifest import InputFile
from schemas.paths import check_writable, local_path, schema_path

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
        wanted = Wanted(request, self._parsed, self._features, context)
        return committed(listing, made, wanted)


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
        absent = absent_columns(dataset, segment)
        table = remembered_row_group(segment, file_index, row_group, dataset.job.data, absent)
        yield table.select(sample_columns(dataset, self.model_inputs))


def columns_of(path: Path, model_inputs: bool) -> pa.Schema:
    """Return the columns of the tables that `ReadDataset` gives, by a look at the first.

    Args:
        path: directory of the dataset.
        model_inputs: whether to add the columns that transforms and sampling made.
    """
    return next(expanded_tables(open_dataset(path), model_inputs)).schema
