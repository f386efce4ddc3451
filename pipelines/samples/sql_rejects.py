"""Run the job's SQL, and find the rows on which it raises, each with DuckDB's reason.

Rows that `tolerant_sql.py` marks are removed first. If the others still raise, they are bisected,
with at most `MAX_ATTEMPTS` runs. A good row is never rejected together with bad ones: if the bad
rows cannot be isolated, the build fails with an error that names the expression.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.samples.sql import BadRowsError, Connection, run
from pipelines.samples.tolerant_sql import (
    Level,
    expression_text,
    levels_of,
    selected_expressions,
    tolerant,
)
from pipelines.sources.listing import first_line
from pipelines.sources.rejects import row_texts
from pipelines.sources.rows import ORIGIN

BAD_ROWS_SCHEMA = pa.schema(
    [
        pa.field("origin", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("value", pa.string(), nullable=False),
    ]
)
"""A raw row that cannot be used, the reason, and the row as text."""

ROW_ERRORS = (duckdb.Error, pa.ArrowInvalid)
"""Errors that a row may cause; Arrow's, if a value cannot be stored in format 1."""

MAX_ATTEMPTS = 2048
"""Maximum runs of a statement to isolate the bad rows of one chunk."""
MAX_EXACT = 32
"""Maximum rows of a chunk that are run alone for each expression that raises."""
_SQL_REASON = "row must pass the job's SQL, got "
_EXEMPLARS = 8
"""Rows that are run alone before the reasons of others are derived from theirs."""
_LINE_END = r"(?s)[\n\r\x0b\x0c\x1c\x1d\x1e\x{85}\x{2028}\x{2029}].*"

Attempt = Callable[[str, pa.Table], pa.Table]
"""Runs a statement over some rows of the source."""
RunAlone = Callable[[pa.Table], object]
"""Runs the job's statement over one row."""


@dataclass(slots=True)
class SqlResult:
    """Samples, and the raw rows on which the SQL raised (`BAD_ROWS_SCHEMA`)."""

    samples: pa.Table | None
    bad_rows: pa.Table = field(default_factory=BAD_ROWS_SCHEMA.empty_table)


def bad_rows(rows: pa.Table, reasons: pa.Array | str) -> pa.Table:
    """Return a table of `BAD_ROWS_SCHEMA`; `reasons` is one for each row or one for all."""
    if isinstance(reasons, str):
        reasons = pa.repeat(pa.scalar(reasons), rows.num_rows)
    origins = rows[ORIGIN].cast(pa.int64()).combine_chunks()
    texts = row_texts(rows.drop_columns([ORIGIN]))
    return pa.table([origins, reasons, texts], schema=BAD_ROWS_SCHEMA)


def reject_reason(error: Exception) -> str:
    """Return the reason of a row on which the SQL raises, in one line."""
    return f"{_SQL_REASON}{first_line(error)}"


def remove_marked(
    statement: str, attempt: Attempt, run_alone: RunAlone, rows: pa.Table
) -> tuple[pa.Table, pa.Table]:
    """Return the rows on which no expression is marked, and the others as bad rows."""
    labels, expressions = _mark_rows(statement, attempt, rows)
    bad: list[pa.Table] = []
    for label, expression in enumerate(expressions):
        members = np.flatnonzero(labels == label)
        marked = rows.take(pa.array(members))
        reasons = _reject_reasons(run_alone, marked, expression) if len(members) else None
        if reasons is None:  # one of the rows passes alone: the mark is wrong
            labels[members] = -1
        else:
            bad.append(bad_rows(marked, reasons))
    unmarked = rows.filter(pa.array(labels < 0))
    return unmarked, pa.concat_tables([BAD_ROWS_SCHEMA.empty_table(), *bad])


def bisect_rows(statement: str, attempt: Attempt, rows: pa.Table) -> SqlResult:
    """Bisect rows until those that raise are isolated, with at most `MAX_ATTEMPTS` runs.

    Raises:
        BadRowsError: the runs do not suffice.
    """
    ranges = deque([(0, rows.num_rows)] if rows.num_rows else [])
    good: list[tuple[int, pa.Table]] = []
    bad = [BAD_ROWS_SCHEMA.empty_table()]
    attempts = 0
    reason = ""
    while ranges and attempts < MAX_ATTEMPTS:
        start, count = ranges.popleft()
        attempts += 1
        half = rows.slice(start, count)
        try:
            good.append((start, attempt(statement, half)))
        except ROW_ERRORS as error:
            reason = reject_reason(error)
            if count == 1:
                bad.append(bad_rows(half, reason))
            else:
                middle = start + count // 2
                ranges.extend([(start, middle - start), (middle, start + count - middle)])
    if ranges:
        largest = rows.slice(*max(ranges, key=lambda each: each[1]))
        raise bad_rows_error(statement, attempt, largest, reason)
    good.sort(key=lambda each: each[0])
    samples = [table for _, table in good]
    return SqlResult(pa.concat_tables(samples) if samples else None, pa.concat_tables(bad))


def bad_rows_error(statement: str, attempt: Attempt, rows: pa.Table, reason: str) -> BadRowsError:
    """Return the error for bad rows that cannot be isolated.

    At least one of the rows raises, for the given reason.
    """
    expressions = [
        text for text, select in selected_expressions(statement) if _raises(select, attempt, rows)
    ]
    location = f" in {expressions[0]}" if expressions else ""
    return BadRowsError(
        f"raises on more rows than {MAX_ATTEMPTS} runs can isolate: "
        f"{reason.removeprefix(_SQL_REASON)}{location}; write what fails there as TRY_CAST(... AS "
        "...) or TRY(...), which give null, and leave rows out by WHERE ... IS NOT NULL"
    )


def _raises(statement: str, attempt: Attempt, rows: pa.Table) -> bool:
    try:
        attempt(statement, rows)
    except ROW_ERRORS:
        return True
    return False


# Marks: which expression raises on which row.


def _mark_rows(
    statement: str, attempt: Attempt, rows: pa.Table
) -> tuple[NDArray[np.int32], list[str]]:
    """Return the label of each row, -1 for none, and the expression that raises for each label."""
    numbers = pa.array(np.arange(rows.num_rows))
    numbered = rows.set_column(rows.column_names.index(ORIGIN), ORIGIN, numbers)
    labels = np.full(rows.num_rows, -1, np.int32)
    expressions: list[str] = []
    for level in _levels(statement):
        unlabeled = numbered.filter(pa.array(labels < 0))
        for written, bound in _bound_levels(level, attempt, unlabeled.slice(0, 0)):
            for unit, marked in _run_marks(bound, attempt, unlabeled):
                positions = np.unique(marked)
                positions = positions[labels[positions] < 0]
                groups = [positions]
                if not level.outermost:
                    groups = _split_by_filter(statement, written, attempt, numbered, positions)
                for group in groups:
                    if len(group):
                        labels[group] = len(expressions)
                        expressions.append(expression_text(written.units[unit]))
    return labels, expressions


@lru_cache(maxsize=64)
def _levels(statement: str) -> tuple[Level, ...]:
    try:
        return tuple(levels_of(statement))
    except (duckdb.Error, KeyError):  # the statement cannot be decomposed
        return ()


def _bound_levels(
    level: Level, attempt: Attempt, no_rows: pa.Table
) -> Iterator[tuple[Level, Level]]:
    """Yield the units of a level as they are written and in a variant of the level that binds."""
    if _binds(level, attempt, no_rows):
        yield level, level
        return
    unbound = list(range(len(level.units)))
    for variant in level.variants():
        bound = [i for i in unbound if _binds(variant.only((variant.units[i],)), attempt, no_rows)]
        if bound:
            unbound = [i for i in unbound if i not in bound]
            written, variant_units = (tuple(v.units[i] for i in bound) for v in (level, variant))
            yield level.only(written), variant.only(variant_units)
    for unit in unbound:
        smaller = level.smaller(level.units[unit])
        if smaller.units:
            yield from _bound_levels(smaller, attempt, no_rows)


def _binds(level: Level, attempt: Attempt, no_rows: pa.Table) -> bool:
    return not _raises(level.statement(), attempt, no_rows)


def _run_marks(
    level: Level, attempt: Attempt, rows: pa.Table
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the index of each unit of a level and the rows on which it raises.

    Units whose marks raise are left out.
    """
    try:
        marks = attempt(level.statement(), rows)
    except ROW_ERRORS:
        if len(level.units) > 1:
            for index, unit in enumerate(level.units):
                for _, positions in _run_marks(level.only((unit,)), attempt, rows):
                    yield index, positions
        return
    origins = marks[ORIGIN].to_numpy()
    for index in range(len(level.units)):
        yield index, origins[marks[f"_mark_{index}"].to_numpy()]


def _split_by_filter(
    statement: str, level: Level, attempt: Attempt, rows: pa.Table, positions: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Split marked rows into those that the WHERE of an outer SELECT keeps, and the others."""
    if not len(positions):
        return []
    try:
        samples = attempt(tolerant(statement, level), rows.take(pa.array(positions)))
    except ROW_ERRORS:
        return [positions]
    kept = np.isin(positions, samples[ORIGIN].to_numpy())
    return [positions[kept], positions[~kept]]


# Reasons of marked rows.


def _reject_reasons(run_alone: RunAlone, rows: pa.Table, expression: str) -> pa.Array | None:
    """Return the reasons of rows on which one expression raises, None if a row passes alone.

    Of many rows only some are run alone. The others get the same reason with their own value, if
    all exact reasons follow one pattern.
    """
    count = rows.num_rows
    exact: dict[int, str] = {}
    for limit in (_EXEMPLARS, MAX_EXACT):
        for index in np.unique(np.linspace(0, count - 1, min(limit, count)).astype(int)).tolist():
            if index not in exact:
                reason = _reason_alone(run_alone, rows.slice(index, 1))
                if reason is None:
                    return None
                exact[index] = reason
        if len(exact) == count:
            return pa.array([exact[i] for i in range(count)])
        reasons = _derive_reasons(exact, rows)
        if reasons is not None:
            return reasons
    rest = f"{_SQL_REASON}an error in {expression}"
    return pa.array([exact.get(i, rest) for i in range(count)])


def _reason_alone(run_alone: RunAlone, row: pa.Table) -> str | None:
    try:
        run_alone(row)
    except ROW_ERRORS as error:
        return reject_reason(error)
    return None


def _derive_reasons(exact: dict[int, str], rows: pa.Table) -> pa.Array | None:
    """Return the reasons of all rows in the pattern of the exact ones, None if there is none."""
    candidates: list[pa.Array] = []
    for name in rows.column_names:
        kind = rows[name].type
        if name != ORIGIN and (pa.types.is_string(kind) or pa.types.is_integer(kind)):
            texts = rows[name].combine_chunks().cast(pa.string())
            for row, reason in exact.items():
                reasons = _with_own_values(reason, texts, row)
                if reasons is not None and _agrees(reasons, exact):
                    candidates.append(reasons)
                    break
    if candidates:
        first = candidates[0]
        unambiguous = not first.null_count and all(c.equals(first) for c in candidates)
        return first if unambiguous else None
    reason = next(iter(exact.values()))
    same = len(set(exact.values())) == 1 and "'" not in reason.partition(", got ")[2]
    return pa.repeat(pa.scalar(reason), rows.num_rows) if same else None


def _with_own_values(reason: str, texts: pa.Array, row: int) -> pa.Array | None:
    """Replace the quoted value of `row` in its reason by each row's; None if it is not quoted."""
    before, quoted, after = reason.partition(f"'{texts[row].as_py()}'")
    if not quoted:
        return None
    reasons = pc.binary_join_element_wise(f"{before}'", texts, f"'{after}", "")
    return pc.replace_substring_regex(reasons, _LINE_END, "")


def _agrees(reasons: pa.Array, exact: dict[int, str]) -> bool:
    return reasons.take(pa.array(list(exact))).to_pylist() == list(exact.values())


# Statements over raw rows.


def map_rows(connection: Connection, statement: str, source: str, rows: pa.Table) -> SqlResult:
    """Run row-local SQL over raw rows; rows that raise become bad rows.

    The statement is from `select_origin` and reads the rows as `source`.

    Raises:
        BadRowsError: the rows that raise cannot be bisect_rows.
    """

    def attempt(text: str, some_rows: pa.Table) -> pa.Table:
        return run(connection, text, {source: some_rows})

    try:
        return SqlResult(attempt(statement, rows))
    except ROW_ERRORS:
        unmarked, bad = remove_marked(statement, attempt, partial(attempt, statement), rows)
    rest = bisect_rows(statement, attempt, unmarked)
    return SqlResult(rest.samples, pa.concat_tables([bad, rest.bad_rows]))


def run_key(
    connection: Connection,
    statement: str,
    source: str,
    tables: Mapping[str, pa.Table],
) -> SqlResult:
    """Run SQL over all rows of one key; rows of `source` that raise become bad rows.

    A row is bad if the statement raises on it alone; the statement is then run again over the
    others. If no row raises alone, all are bad.

    `tables` has all rows of the key by source; samples are made from the rows of `source`.
    """

    def attempt(text: str, some_rows: pa.Table) -> pa.Table:
        return run(connection, text, {**tables, source: some_rows})

    try:
        return SqlResult(attempt(statement, tables[source]))
    except ROW_ERRORS:
        run_alone = partial(attempt, statement)
        rows, bad = remove_marked(statement, attempt, run_alone, tables[source])
    while rows.num_rows:
        try:
            return SqlResult(attempt(statement, rows), bad)
        except ROW_ERRORS as error:
            more = bisect_rows(statement, attempt, rows).bad_rows
            more = more if more.num_rows else bad_rows(rows, reject_reason(error))
        bad = pa.concat_tables([bad, more])
        rows = rows.filter(pc.invert(pc.is_in(rows[ORIGIN], value_set=more["origin"])))
    return SqlResult(None, bad)
