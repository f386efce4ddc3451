"""Raw rows from a user's pipeline, with origins that follow from their content.

Such rows have no file and no position. A hash of their values replaces both, so that order and
batching of the collection do not change the dataset: rows with equal origins are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from apache_beam import pvalue

from pipelines.context import BuildContext
from pipelines.samples.tuples import Tuples
from pipelines.shuffle import ShuffleTransport
from pipelines.sources.rejects import BUILD_REJECTS_SCHEMA
from pipelines.sources.rows import ORIGIN, InputSplit, typed_chunks
from pipelines.stages import REJECTS
from pipelines.table.content_hash import ContentHash, content_hash, row_hashes
from schemas.errors import SchemaError, suggest_name_or
from schemas.manifest import InputFile, hash_of

CONTENT = "content"
"""Output of `type_rows` with the hash of each table."""


class ExternalRowsContext(BuildContext):
    """A build whose rows come from no file; its only listed file names them."""

    __slots__ = ()

    def rejects(self, bad: pa.Table) -> pa.Table:
        """Return bad rows as rejects without a position."""
        name = pa.repeat(pa.scalar(self.listing[0].path, pa.string()), bad.num_rows)
        none = pa.nulls(bad.num_rows, pa.int64())
        rows_unknown = pa.repeat(pa.scalar(False), bad.num_rows)
        columns = [name, none, bad["reason"], bad["value"], rows_unknown]
        return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)


class TablesContext(ExternalRowsContext):
    """Samples that leave as tables instead of crossing the shuffle."""

    __slots__ = ()

    @property
    def transport(self) -> ShuffleTransport:
        """Samples as tables."""
        derived = self.data.derived_columns
        return AsTables(tuple(n for n in self.features.names if n not in derived))


@dataclass(frozen=True, slots=True)
class AsTables:
    """Samples as tables, with the columns of tuples joined back.

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
        """Raise: no stage of a build follows."""
        raise AssertionError("samples as tables are not received")


def type_rows(element: pa.Table | pa.RecordBatch, context: BuildContext) -> Iterator[Any]:
    """Yield (source, table) of the declared types, rejects, and the content hash of a table.

    Args:
        element: rows of the job's only source.
        context: of class `ExternalRowsContext`.
    """
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
                f"rows must have column {name!r}, got none; "
                f"{suggest_name_or(name, element.column_names, 'add it')}",
                file=file,
            )
    return element.select(list(names))


def sum_content(values: Iterable[ContentHash]) -> ContentHash:
    """Return the hash of all rows together."""
    return reduce(add, values, ContentHash())


def listing_of(content: ContentHash, file: InputFile) -> tuple[InputFile, ...]:
    """Return the listing of a segment of such rows: their name and the hash of their content."""
    return (replace(file, sha256=hash_of(str(content))),)
