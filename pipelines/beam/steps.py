"""The steps of a build, each for a pipeline of somebody else: read a source, make samples.

What goes from step to step are pyarrow Tables, so that whatever a pipeline does
between two of them needs to know nothing of this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import pyarrow as pa

from pipelines.beam.coders import SourceRows
from pipelines.beam.context import BuildContext
from pipelines.beam.io import check_one_source
from pipelines.beam.shuffle import Crossing
from pipelines.beam.transforms import EachReject, ReadRows
from pipelines.beam.transforms import MakeSamples as _SamplesBySql
from pipelines.prepare import BuildRequest, prepare
from pipelines.samples.steps import steps_of
from pipelines.samples.tuples import Tuples
from pipelines.sources.folder import folder_of
from pipelines.sources.given_rows import CONTENT, GivenContext, TypeRows
from pipelines.sources.listing import list_inputs
from pipelines.sources.read import empty_rows
from pipelines.sources.rows import ORIGIN
from pipelines.stages import REJECTS, SAMPLES
from schemas.errors import SchemaError, nearest
from schemas.features import load_features
from schemas.job import load_job
from schemas.manifest import InputFile
from schemas.paths import schema_path

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
            advice = nearest(self._source, self._data.inputs)
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
            steps=steps_of(self._data),
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
    def crossing(self) -> Crossing:
        """Samples as tables."""
        made = self.data.made_columns
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
