"""Rows that another pipeline made, with origins that follow from their content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam import pvalue

from pipelines.context import BuildContext
from pipelines.sources.rejects import BUILD_REJECTS_SCHEMA
from pipelines.sources.rows import ORIGIN, FilePart, typed_chunks
from pipelines.table.content_hash import ContentHash, content_hash, row_hashes
from schemas.errors import SchemaError, suggest_name_or
from schemas.manifest import InputFile, hash_of

# Raw rows that another pipeline made: typed, with origins that follow from their content.
#
# Such rows have no file and no position. A hash of their values stands for both, so that order
# and cuts of the collection change no byte of the dataset: rows with equal origins are equal.

CONTENT = "content"


class GivenContext(BuildContext):
    """A build whose rows come from no file."""

    __slots__ = ()

    def rejects(self, bad: pa.Table) -> pa.Table:
        """Return bad rows as rejects; their text stands for their place."""
        name = pa.repeat(pa.scalar(self.listing[0].path, pa.string()), bad.num_rows)
        none = pa.nulls(bad.num_rows, pa.int64())
        rows_unknown = pa.repeat(pa.scalar(False), bad.num_rows)
        columns = [name, none, bad["reason"], bad["value"], rows_unknown]
        return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)


class TypeRows(beam.DoFn):
    """Tables to (source, table) pairs of the declared types, rejects, and what was given."""

    def __init__(self, context: GivenContext, rejects: str) -> None:
        """Remember the build.

        Args:
            context: of the build; its only listed file names the rows.
            rejects: tag of rows that cannot be used.
        """
        self.context, self.rejects = context, rejects

    def process(self, element: pa.Table | pa.RecordBatch) -> Iterator[Any]:
        """Check, number and cut one table."""
        file, context = self.context.listing[0], self.context
        words = context.data.sources[file.source].declared
        table = chosen_columns(element, words, file.path)
        if not table.num_rows:
            return
        yield pvalue.TaggedOutput(CONTENT, content_hash([table]))
        part = FilePart(file.source, file.path, 0)
        origins = (row_hashes(table) >> np.uint64(1)).astype(np.int64)
        numbered = table.append_column(ORIGIN, pa.array(origins))
        schema = context.empty_rows[file.source].schema
        for rows in typed_chunks(numbered, part, schema, words):
            for rejects in rows.all_rejects():
                none = pa.nulls(rejects.num_rows, pa.int64())
                placed = rejects.set_column(1, BUILD_REJECTS_SCHEMA.field("position"), none)
                yield pvalue.TaggedOutput(self.rejects, placed)
            if rows.table is not None and rows.table.num_rows:
                yield file.source, rows.table


def chosen_columns(
    element: pa.Table | pa.RecordBatch, names: Iterable[str], place: str
) -> pa.Table:
    """Return the declared columns of some rows.

    Raises:
        SchemaError: the element is no table, or lacks a column.
    """
    if isinstance(element, pa.RecordBatch):
        element = pa.Table.from_batches([element])
    if not isinstance(element, pa.Table):
        raise SchemaError(
            f"rows must come as pyarrow Tables or RecordBatches, got {type(element).__name__}; "
            "convert them",
            file=place,
        )
    for name in names:
        if name not in element.column_names:
            raise SchemaError(
                f"rows must have column {name!r}, got none; "
                f"{suggest_name_or(name, element.column_names, 'add it')}",
                file=place,
            )
    return element.select(list(names))


def sum_content(values: Iterable[ContentHash]) -> ContentHash:
    """Return the hash of all rows together."""
    return reduce(add, values, ContentHash())


def listing_of(content: ContentHash, file: InputFile) -> tuple[InputFile, ...]:
    """Return the listing of rows without files: their name and the hash of their content."""
    return (replace(file, sha256=hash_of(str(content))),)
