"""Before any work: do the transforms fit their columns, their declarations and their tables?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import duckdb
import pyarrow as pa

from pipelines.learned.apply import with_transforms
from pipelines.learned.inputs import Input, learned_inputs
from pipelines.samples.validate import check_type
from schemas.errors import SchemaError, nearest
from schemas.features import FeatureSet
from schemas.job import SAMPLES, DataConfig
from schemas.job_transforms import TransformConfig, rows_of_transform
from schemas.learned import Learned
from schemas.vocabulary import Vocabulary, value_type


def check_transforms(samples: pa.Table, features: FeatureSet, data: DataConfig) -> None:
    """Run every transform on no rows and compare what it makes with what is declared.

    Args:
        samples: no rows of the SQL's result.
        features: declared columns.
        data: the job's data section.

    Raises:
        SchemaError: a transform is wrong, or its column undeclared, of another type, or beyond
            its table.
    """
    nothing = Learned({n: _empty(c.oov_rows) for n, c in data.vocabularies.items()})
    alone = [n for n in samples.column_names if n not in data.group_of_column]
    tables: dict[str, pa.Table] = {
        group: samples.select(list(data.groups.get(group, alone)))
        for group in (*data.groups, SAMPLES)
    }
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            place = f"transforms.{group}.{name}"
            _check_inputs(transform, tables[group].column_names, place)
            try:
                tables[group] = with_transforms(tables[group], group, {name: transform}, nothing)
            except SchemaError as error:
                raise _of_sql(error, place) from error
            check_type(features[name], tables[group].schema.field(name).type)
            _check_table(name, transform, place, data)
    inputs = learned_inputs(data)
    for wanted in inputs:
        if wanted.column not in tables[wanted.group].column_names:
            known = [n for table in tables.values() for n in table.column_names]
            raise SchemaError(
                f"data.vocabularies.{wanted.vocabulary}.columns must be columns of the samples, "
                f"got {wanted.column!r}; {nearest(wanted.column, known)}"
            )
    for name in data.vocabularies:
        _check_vocabulary(name, [i for i in inputs if i.vocabulary == name], tables, data)


def _empty(oov_rows: int) -> Vocabulary:
    return Vocabulary(pa.array([], pa.int64()), oov_rows)


def _check_inputs(transform: str | TransformConfig, known: Iterable[str], place: str) -> None:
    for column in () if isinstance(transform, str) else transform.inputs:
        if column not in known:
            raise SchemaError(
                f"{place} must read columns of its group, or made before it, got {column!r}; "
                f"{nearest(column, known)}"
            )


def _of_sql(error: SchemaError, place: str) -> SchemaError:
    """Return the error with the transform's place in front; SQL fails here on no rows at all."""
    cause = error.__cause__
    if isinstance(cause, duckdb.Error):
        found = str(cause).splitlines()[0]
        return SchemaError(f"{place} must run on the columns of its group, got {found}; correct it")
    return error if error.message.startswith("transforms") else SchemaError(f"{place}: {error}")


def _check_table(name: str, transform: str | TransformConfig, place: str, data: DataConfig) -> None:
    """Refuse ids that an identity table has no rows for."""
    table = data.tables.get(data.table_of_feature.get(name, ""))
    size = rows_of_transform(transform, data.vocabularies)
    if table is None or table.rows != "identity" or size == float("inf"):
        return
    if size > table.num_rows:
        raise SchemaError(
            f"{place} must have ids below the rows of table {data.table_of_feature[name]!r}, got "
            f"{int(size)} and {table.num_rows}; raise data.tables.{data.table_of_feature[name]}"
            ".num_rows"
        )


def _check_vocabulary(
    name: str, counted: Sequence[Input], tables: Mapping[str, pa.Table], data: DataConfig
) -> None:
    """Refuse columns of different types, among those that are counted and those looked up."""
    read = {f"data.vocabularies.{name}.columns": [(i.group, i.column) for i in counted]}
    for group, transforms in data.transforms.items():
        for column, transform in transforms.items():
            config = None if isinstance(transform, str) else transform.vocabulary
            if config is not None and config.name == name:
                read[f"transforms.{group}.{column}"] = [(group, config.column)]
    first: tuple[str, pa.DataType] | None = None
    for place, columns in read.items():
        for group, column in columns:
            try:
                kind = value_type(tables[group].schema.field(column).type)
            except SchemaError as error:
                raise SchemaError(f"{place}: {error.message} for {column!r}") from error
            if first is not None and kind != first[1]:
                raise SchemaError(
                    f"{place} must have one type in vocabulary {name!r}, got {kind} for "
                    f"{column!r} and {first[1]} for {first[0]!r}; cast one in SQL"
                )
            first = first or (column, kind)
