"""The transforms of `beam/io.py` for Beam YAML, whose elements are rows with a schema.

`deploy/beam_yaml/providers.yaml` names them. Beam evaluates the annotations when it checks a
pipeline file, so this module does not import `annotations` from `__future__`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import Timestamp

from presage.pipelines.beam.io import SEGMENT, BuildDataset, ReadDataset, ReadSource, WriteDataset
from presage.pipelines.sources.rejects import Reject, isolate_bad
from presage.pipelines.sources.types import arrow_type
from presage.pipelines.stages import REJECTS
from presage.schemas.config.job import load_job

_SEGMENT_ROW = RowTypeConstraint.from_fields([("segment", str)])
_REJECT_FIELDS: list[Any] = [
    ("file", str), ("position", int | None), ("reason", str), ("value", str),
]  # fmt: skip
_REJECT_ROW = RowTypeConstraint.from_fields(_REJECT_FIELDS)
_BATCH_ROWS = 1 << 14


class PresageBuild(beam.PTransform):
    """Build a dataset from a job's input, as `python -m presage.pipelines build` does.

    Outputs: `segment`, one row with the segment's name; `rejects`, the rejected rows.
    """

    _yaml_requires_inputs = False

    def __init__(self, job: str, input: str, output: str, append: bool = False) -> None:
        """Check the job; see `BuildDataset`."""
        super().__init__()
        self._build = BuildDataset(job, input, output, append)

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Build."""
        return _as_rows(input_or_inputs.pipeline | "build" >> self._build)


class PresageWriteDataset(beam.PTransform):
    """End a pipeline with a dataset: rows of the job's only source to one segment.

    Outputs: `segment` and `rejects`, as of PresageBuild.
    """

    def __init__(
        self, job: str, output: str, name: str, num_parts: int = 1, append: bool = False,
    ) -> None:  # fmt: skip
        """Check the job; see `WriteDataset`."""
        super().__init__()
        self._write = WriteDataset(job, output, name, num_parts, append)
        data = load_job(job).data
        declared = data.sources[data.sample_source].declared
        self._types = {column: arrow_type(name) for column, name in declared.items()}

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Collect rows into tables, then write."""
        tables = (
            input_or_inputs
            | "batch rows" >> beam.BatchElements(1000, _BATCH_ROWS)
            | "to tables" >> beam.FlatMap(tables_of_rows, self._types).with_output_types(pa.Table)
        )
        return _as_rows(tables | "write" >> self._write)


class PresageReadDataset(beam.PTransform):
    """Begin a pipeline with the samples of a dataset, one row each."""

    _yaml_requires_inputs = False

    def __init__(self, dataset: str, model_inputs: bool = False) -> None:
        """Store the settings; see `ReadDataset`."""
        super().__init__()
        self._read = ReadDataset(dataset, model_inputs)

    def expand(self, input_or_inputs: Any) -> Any:
        """Read tables, convert them to rows."""
        tables = input_or_inputs.pipeline | "read" >> self._read
        return _rows_of_tables(tables, self._read.schema)


class PresageReadSource(beam.PTransform):
    """Begin a pipeline with the rows of one of a job's sources, typed as the job declares them.

    Outputs: `rows`; `rejects`, rows that could not be read.
    """

    _yaml_requires_inputs = False

    def __init__(self, job: str, input: str, source: str | None = None) -> None:
        """Check the job; see `ReadSource`."""
        super().__init__()
        self._read = ReadSource(job, input, source)

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """Read tables, convert them to rows."""
        read = input_or_inputs.pipeline | "read" >> self._read
        return {
            "rows": _rows_of_tables(read["rows"], self._read.schema),
            REJECTS: _reject_rows(read[REJECTS]),
        }


def _as_rows(outputs: Mapping[str, Any]) -> dict[str, Any]:
    stage = beam.Map(lambda name: beam.Row(segment=name)).with_output_types(_SEGMENT_ROW)
    segment = outputs[SEGMENT] | "segment row" >> stage
    return {SEGMENT: segment, REJECTS: _reject_rows(outputs[REJECTS])}


def _reject_rows(rejects: Any) -> Any:
    return rejects | "reject rows" >> beam.Map(_reject_row).with_output_types(_REJECT_ROW)


def _reject_row(reject: Reject) -> beam.Row:
    return beam.Row(
        file=reject.file, position=reject.position, reason=reject.reason, value=reject.value
    )


def _rows_of_tables(tables: Any, schema: pa.Schema) -> Any:
    fields: list[Any] = [(f.name, python_type(f.type) | None) for f in schema]
    row_type = RowTypeConstraint.from_fields(fields)
    return tables | "to rows" >> beam.FlatMap(rows_of_table).with_output_types(row_type)


def python_type(kind: pa.DataType) -> Any:
    """Return the Python type of an Arrow type in the schema of Beam rows.

    Example:
        >>> python_type(pa.int8()), python_type(pa.list_(pa.float32()))
        (<class 'int'>, collections.abc.Sequence[float])
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return Sequence[python_type(kind.value_type)]
    for is_type, python in (
        (pa.types.is_boolean, bool),
        (pa.types.is_integer, int),
        (pa.types.is_floating, float),
        (pa.types.is_timestamp, Timestamp),
        (pa.types.is_string, str),
        (pa.types.is_large_string, str),
    ):
        if is_type(kind):
            return python
    return bytes


def rows_of_table(table: pa.Table) -> Iterator[beam.Row]:
    """Yield the rows of a table, with times as Beam Timestamps."""
    times = [f.name for f in table.schema if pa.types.is_timestamp(f.type)]
    for name in times:
        micros = table[name].cast(pa.timestamp("us")).cast(pa.int64())
        table = table.set_column(table.column_names.index(name), name, micros)
    for row in table.to_pylist():
        for name in times:
            if row[name] is not None:
                row[name] = Timestamp(micros=row[name])
        yield beam.Row(**row)


def tables_of_rows(rows: Sequence[Any], types: Mapping[str, pa.DataType]) -> Iterator[pa.Table]:
    """Yield rows as tables of the declared types; a row that does not convert is a table of texts.

    Missing columns and values that do not convert are left to `WriteDataset` to refuse or reject.

    Columns that are not in `types` are dropped.
    """
    dicts = [row.as_dict() if isinstance(row, beam.Row) else row._asdict() for row in rows]
    plain = [{n: _plain(v) for n, v in d.items() if n in types} for d in dicts]
    names = [name for name in types if plain and name in plain[0]]

    def table(start: int, end: int) -> pa.Table:
        some = plain[start:end]
        return pa.table({n: _array([row[n] for row in some], types[n]) for n in names})

    errors = (pa.ArrowException, TypeError, ValueError, OverflowError)
    good, bad = isolate_bad(len(plain), table, errors)  # so that batching does not change results
    yield from (rows for _, rows in good)
    for row, _ in bad:  # as text, for the reject
        texts = {n: None if plain[row][n] is None else str(plain[row][n]) for n in names}
        yield pa.table({n: pa.array([text], pa.string()) for n, text in texts.items()})


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError):
        return pa.array(values).cast(kind)


def _plain(value: Any) -> Any:
    return value.micros if isinstance(value, Timestamp) else value
