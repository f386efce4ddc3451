"""Rows of any types clustered by session, as plain Parquet with the schema they had."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.beam.context import BuildContext
from pipelines.executor import Collected, read_all
from pipelines.parts.cluster import cluster, hash_session_keys, part_of_key
from pipelines.parts.encodings import choose, open_writer
from pipelines.parts.write import ROW_GROUP_BYTES
from pipelines.rewrite.input import ordering
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, join, split
from pipelines.segments.content_hash import ContentHash, content_hash
from pipelines.sources.rows import ORIGIN
from pipelines.stages import REJECTS
from schemas.layout import part_name

KEY, TIME = "_key", "_time"
"""Columns that order the rows while they are moved; in no file."""


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One written file.

    Attributes:
        num_bytes: of the file.
        num_sessions: in it.
        content: hash of its rows.
    """

    num_bytes: int
    num_sessions: int
    content: ContentHash


@dataclass(frozen=True, slots=True)
class FlatStage:
    """The two stages of a rewriting: rows to parts by session, parts to files.

    Attributes:
        context: of the rewriting.
        schema: of the rows.
        session: the session key.
        time: what orders the rows of a session, if anything does.
    """

    context: BuildContext
    schema: pa.Schema
    session: str
    time: str | None

    def hand_over(self, table: pa.Table) -> Iterator[tuple[int, Any]]:
        """Yield (part, element of `context.crossing`) for rows, by the hash of their session."""
        ordered = with_order(decoded(table), self.session, self.time)
        num_parts = self.context.num_parts
        target = part_of_key(hash_session_keys(ordered[KEY]), num_parts)
        yield from self.context.crossing.send(split(Tuples(ordered, {}, {}), target, num_parts))

    def write(self, part: int, sent: Iterable[Any]) -> FlatPart:
        """Write the file of one part."""
        rows = join(list(self.context.crossing.receive(sent)))
        clustered = cluster(rows, self.context.data)
        table = clustered.samples.samples.select(self.schema.names)
        path = self.context.segment_root / part_name(part)
        write_flat_part(path, encoded(table, self.schema))
        content = content_hash(table.slice(i, 1 << 16) for i in range(0, table.num_rows, 1 << 16))
        return FlatPart(path.stat().st_size, clustered.num_sessions, content)


def run_flat(stage: FlatStage) -> Mapping[str, list[Any]]:
    """Rewrite all rows in this process; return `parts` and `rejects`."""
    collected = Collected()
    sent: defaultdict[int, list[Any]] = defaultdict(list)
    for _, table in read_all(stage.context, collected):
        for part, rows in stage.hand_over(table):
            sent[part].append(rows)
    parts = [stage.write(part, sent.pop(part)) for part in sorted(sent)]
    return {"parts": parts, "rejects": collected.values[REJECTS]}


def with_order(table: pa.Table, session: str, time: str | None) -> pa.Table:
    """Add the columns that `cluster` sorts by; rows without a key form one session."""
    moment = ordering(table[time]) if time else pa.array(np.zeros(table.num_rows, np.int64))
    index = pa.array(np.zeros(table.num_rows, np.int32))
    added = table.append_column(KEY, table[session]).append_column(TIME, moment)
    return added.append_column(LIST_INDEX, index)


def decoded(table: pa.Table) -> pa.Table:
    """Return the table in types that Arrow's kernels take; `encoded` undoes it."""
    for index, field in enumerate(table.schema):
        kind = _plain_type(field.type)
        if kind != field.type:
            table = table.set_column(index, field.name, table[field.name].cast(kind))
    return table


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionary, extension (UUID, JSON) and view, at its top level."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def can_be_moved(kind: pa.DataType, nested: bool = False) -> bool:
    """Tell whether rows with a column of that type can be sorted, hashed and written again."""
    t = pa.types
    if t.is_list_view(kind) or t.is_large_list_view(kind) or t.is_run_end_encoded(kind):
        return False
    if nested and _plain_type(kind) != kind and not t.is_dictionary(kind):
        return False
    fields = [kind.field(i).type for i in range(kind.num_fields)]
    return all(can_be_moved(field, nested=True) for field in fields)


def encoded(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the schema that it had, dictionaries, metadata and all."""
    columns = []
    for field in schema:
        column = table[field.name]
        if pa.types.is_dictionary(field.type):
            column = column.combine_chunks().dictionary_encode()
        if column.type != field.type:
            column = column.cast(field.type)
        columns.append(column)
    return pa.table(columns, schema=schema)


def write_flat_part(path: Path, table: pa.Table) -> None:
    """Write a file in row groups of about 64 MiB, under its name only when it is whole."""
    partial = path.with_suffix(".partial")
    per_group = max(1, int(ROW_GROUP_BYTES * table.num_rows / max(1, table.nbytes)))
    with open_writer(str(partial), table.schema, choose(table.slice(0, per_group))) as writer:
        for start in range(0, table.num_rows, per_group):
            writer.write_table(table.slice(start, per_group), row_group_size=per_group)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


HIDDEN = (ORIGIN, LIST_INDEX, KEY, TIME)
"""Names that no column of the input may have."""
