"""Before the work: what is asked for, which files there are, whether the SQL fits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems

from pipelines.check_sql import check_map_sql
from pipelines.check_transforms import check_transforms
from pipelines.folder import Folder, folder_of
from pipelines.listing import list_inputs
from pipelines.passed_lists import Passed, passed_lists
from pipelines.per_key import visible_rows
from pipelines.rows import FilePart
from pipelines.runner import pipeline_options
from pipelines.sampling import check_sampling
from pipelines.sources import empty_rows, parts_of_file, read_part
from pipelines.sql import carry_origin, connect, run
from pipelines.tuples import with_hashes
from pipelines.validate import check_columns
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.job import DataConfig, Job
from schemas.manifest import InputFile


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What is to be built.

    Attributes:
        job_path: the job file.
        input_root: directory of raw files, or its URL.
        dataset: directory of the dataset.
        beam_args: Beam options.
        attempt: name of this attempt, unique among those that may run at once.
        check_sql: whether to compare the SQL's result on three cuts of the same rows first.
        append: whether the dataset must be there already.
        position: place among its segments, with `append`; the next free one when None.
        say: told what is going on, one line at a time.
        listing: input files, where they are known already.
        job_bytes: what becomes the dataset's job file, where that is not the job file as it is.
    """

    job_path: Path
    input_root: Path | str
    dataset: Path
    beam_args: list[str]
    attempt: str
    check_sql: bool = False
    append: bool = False
    position: int | None = None
    say: Callable[[str], None] = lambda _: None
    listing: tuple[InputFile, ...] | None = None
    job_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before the work starts.

    Attributes:
        listing: input files, sorted.
        statement: the SQL that workers run.
        passed: lists that go around it.
        empty_rows: by source, a table without rows that has its columns.
    """

    listing: tuple[InputFile, ...]
    statement: str
    passed: Passed
    empty_rows: Mapping[str, pa.Table]


def prepare(request: BuildRequest, job: Job, features: FeatureSet) -> Prepared:
    """List the input and check the SQL against the declared columns.

    Raises:
        SchemaError: naming what does not fit, before any work is done.
    """
    data = job.data
    folder = _input_folder(request)
    listing = request.listing or list_inputs(folder, data.sources)
    key = "data.samples.map" if data.samples.map is not None else "data.samples.per.sql"
    text = data.samples.map or (data.samples.per.sql if data.samples.per else "")
    try:
        statement = carry_origin(text, key)
        empty = {
            name: empty_rows(folder, name, config, [f.path for f in listing if f.source == name])
            for name, config in data.sources.items()
        }
        visible = visible_rows(empty, data.sample_source)
        samples = run(connect(), statement, visible)
        check_sampling(samples.schema, features, data)
        check_columns(samples.schema, features, data)
        check_transforms(samples, features, data)
    except SchemaError as error:
        if error.file is None:
            raise SchemaError(error.message, file=str(request.job_path)) from error
        raise
    except duckdb.Error as error:
        raise SchemaError(
            f"{key} must run on its sources, got {str(error).splitlines()[0]}; correct it",
            file=str(request.job_path),
        ) from error
    lists: tuple[str, ...] = ()
    if data.samples.map is not None:
        lists = passed_lists(statement, data.sample_source, empty[data.sample_source].schema)
    passed = Passed(lists, tuple(samples.column_names))
    return Prepared(listing, with_hashes(statement, data.groups, lists), passed, empty)


def check_map(request: BuildRequest, data: DataConfig, prepared: Prepared) -> int:
    """Compare what `samples.map` makes of the same rows cut three ways.

    Raises:
        SchemaError: the results differ, or the job has no `samples.map`.
    """
    if data.samples.map is None:
        raise SchemaError("--check-sql must have a job with samples.map; samples.per is not cut")
    folder, source = folder_of(request.input_root), data.sample_source
    config, schema = data.sources[source], prepared.empty_rows[source].schema
    files = [FilePart(f.source, f.path, i) for i, f in enumerate(prepared.listing)]
    parts = (p for file in files for p in parts_of_file(folder, file, config)[0])
    chunks = (rows.table for part in parts for rows in read_part(folder, part, config, schema))
    return check_map_sql(prepared.statement, source, (c for c in chunks if c is not None))


def _input_folder(request: BuildRequest) -> Folder:
    """Return the input directory, after Beam's filesystems know their options.

    Raises:
        SchemaError: the output lies in it.
    """
    folder = folder_of(request.input_root)
    if not folder.is_local:
        FileSystems.set_options(pipeline_options(request.beam_args))
    elif request.dataset.resolve().is_relative_to(Path(folder.root).resolve()):
        raise SchemaError(
            f"output must lie outside the input, got {request.dataset} below {request.input_root}; "
            "choose another --output"
        )
    return folder
