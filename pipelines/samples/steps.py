"""The statements of a job, one after the other: per key, row by row, look-ups, hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import duckdb
import pyarrow as pa

from pipelines.samples.bad_rows import SqlResult
from pipelines.samples.connection import Connection, named
from pipelines.samples.passed_lists import Passed, map_samples
from pipelines.samples.per_key import visible_rows
from pipelines.samples.sides import joined, side_table, sorted_rows
from pipelines.samples.sql import carry_origin, run, table_names
from pipelines.samples.sql_errors import located
from pipelines.samples.tuples import with_hashes
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN
from pipelines.sources.streams import with_events
from schemas.job import DataConfig

PER = "per"
"""Table that `samples.map` reads when there is `samples.per`, too."""

_SAMPLES = "_samples"

NOTHING_PASSED = Passed((), ())


@dataclass(frozen=True, slots=True)
class Steps:
    """What is run on raw rows, in this order; a step that the job has not is None.

    Attributes:
        per: over all rows of a key.
        map: row by row, over `per` or the sample source.
        hashes: over the samples, after all look-ups.
        passed: lists that go around `map`.
    """

    per: str | None
    map: str | None
    hashes: str | None = None
    passed: Passed = NOTHING_PASSED


def steps_of(data: DataConfig) -> Steps:
    """Return the statements of a job, with the origin carried through.

    Raises:
        SchemaError: a statement is no single SELECT, or it aggregates.
    """
    per, text = data.samples.per, data.samples.map
    return Steps(
        carry_origin(per.sql, "data.samples.per.sql") if per else None,
        carry_origin(text, "data.samples.map") if text else None,
    )


def last_hashed(steps: Steps, data: DataConfig, passed: Passed) -> Steps:
    """Return the statements, the last of them with the hashes of the groups.

    Args:
        steps: from `steps_of`.
        data: the job's data section.
        passed: lists that go around `samples.map`.
    """
    if data.samples.joins:
        return replace(steps, hashes=with_hashes(f"SELECT * FROM {_SAMPLES}", data.groups))
    if steps.map is not None:
        last = with_hashes(steps.map, data.groups, passed.lists)
        return replace(steps, map=last, passed=passed)
    return replace(steps, per=with_hashes(steps.per or "", data.groups))


def tables_in(data: DataConfig) -> frozenset[str]:
    """Return the names of the tables that the job's SQL reads."""
    texts = [data.samples.map, data.samples.per.sql if data.samples.per else None]
    return frozenset(name for text in texts if text for name in table_names(text))


def mapped(
    connection: Connection, steps: Steps, source: str, result: SqlResult
) -> Iterator[SqlResult]:
    """Yield what `samples.map` makes of rows, in chunks; the rows themselves without it.

    Args:
        connection: from `sql.connect`.
        steps: the job's statements.
        source: name of the table in the statement.
        result: rows with origins, and rows that are bad already.
    """
    if steps.map is None or result.samples is None:
        yield result
        return
    if result.bad_rows.num_rows:
        yield SqlResult(None, result.bad_rows)
    for start in range(0, result.samples.num_rows, CHUNK_ROWS):
        chunk = result.samples.slice(start, CHUNK_ROWS)
        with named("data.samples.map"):
            made = map_samples(connection, steps.map, steps.passed, source, chunk)
        yield made


def hashed(connection: Connection, steps: Steps, samples: pa.Table) -> pa.Table:
    """Return samples with the hashes of their groups, where no statement before has made them."""
    if steps.hashes is None:
        return samples
    with named("data.groups"):
        return run(connection, steps.hashes, {_SAMPLES: samples})


def samples_of_nothing(
    connection: Connection,
    steps: Steps,
    data: DataConfig,
    tables: Mapping[str, pa.Table],
    sides: Mapping[str, pa.Table],
) -> pa.Table:
    """Return what the SQL yields, before look-ups, of no rows.

    Args:
        connection: from `sql.connect`.
        steps: the job's statements.
        data: the job's data section.
        tables: by source, a table without rows.
        sides: by side table that SQL may read, a table without rows.

    Raises:
        SchemaError: a step does not fit the columns.
    """
    if data.samples.events is not None:
        tables = with_events(tables, data, ()).tables
    for name, table in sides.items():
        connection.register(name, table.drop_columns([ORIGIN]))
    made = visible_rows(tables, data.sample_source)
    per = data.samples.per.sql if data.samples.per else ""
    for key, statement, text in (
        ("data.samples.per.sql", steps.per, per),
        ("data.samples.map", steps.map, data.samples.map or ""),
    ):
        if statement is None:
            continue
        try:
            with named(key):
                samples = run(connection, statement, made)
        except duckdb.Error as error:
            raise located(key, text, {**made, **sides}, error) from error
        made = {PER: samples}
    (samples,) = made.values()
    return samples


def looked_up_nothing(
    samples: pa.Table,
    data: DataConfig,
    sides: Mapping[str, pa.Table],
    kinds: Mapping[str, pa.DataType],
) -> pa.Table:
    """Return no samples with the columns of all look-ups.

    Args:
        samples: from `samples_of_nothing`.
        data: the job's data section.
        sides: by side table, a table without rows.
        kinds: by side table, the common type of its key.

    Raises:
        SchemaError: a column has a type that format 1 has not.
    """
    for join in data.samples.joins:
        config = data.sides[join.side]
        side = side_table(sorted_rows(sides[join.side], config, kinds[join.side]), config)
        samples = joined(samples, side, config, join, join.as_of or data.session.time)
    return samples
