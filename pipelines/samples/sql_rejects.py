"""Find the rows on which an SQL statement raises, in a few passes, each with DuckDB's reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.samples.connection import BadRowsError
from pipelines.samples.tolerant_sql import Level, expression_text, levels_of, selected, tolerant
from pipelines.sources.rejects import row_texts
from pipelines.sources.rows import ORIGIN

# Rows that an SQL statement raises on: found in a few passes, each with DuckDB's own reason.
#
# What `marks` finds is taken out first; the other rows then pass as they are. What still raises
# is halved, at most `MAX_ATTEMPTS` times: a good row is never rejected with bad ones, so where
# that does not tell them apart the build ends and names the expression.

BAD_ROWS_SCHEMA = pa.schema(
    [
        pa.field("origin", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("value", pa.string(), nullable=False),
    ]
)
"""A raw row that cannot be used, why, and the row as text."""

ROW_ERRORS = (duckdb.Error, pa.ArrowInvalid)
"""What a row may raise; Arrow does when a value has no stored form."""

MAX_ATTEMPTS = 2048
"""Most times that one statement is run to isolate the bad rows of one chunk."""
MAX_EXACT = 32
"""Most rows of a chunk that are run by themselves for each expression that raises."""
_SQL_REASON = "row must pass the job's SQL, got "
_EXEMPLARS = 8
"""Rows that are run by themselves before the reasons of others are written from theirs."""
_LINE_END = r"(?s)[\n\r\x0b\x0c\x1c\x1d\x1e\x{85}\x{2028}\x{2029}].*"

Attempt = Callable[[str, pa.Table], pa.Table]
"""Runs a statement over some rows of the source."""
Alone = Callable[[pa.Table], object]
"""Runs the job's statement over one row."""


@dataclass(slots=True)
class SqlResult:
    """Samples, and the raw rows that gave none because the SQL raised (`BAD_ROWS_SCHEMA`)."""

    samples: pa.Table | None
    bad_rows: pa.Table = field(default_factory=BAD_ROWS_SCHEMA.empty_table)


def bad_rows(rows: pa.Table, reasons: pa.Array | str) -> pa.Table:
    """Return rows as bad ones.

    Args:
        rows: with their origins.
        reasons: one for each, or one for all.
    """
    if isinstance(reasons, str):
        reasons = pa.repeat(pa.scalar(reasons), rows.num_rows)
    origins = rows[ORIGIN].cast(pa.int64()).combine_chunks()
    texts = row_texts(rows.drop_columns([ORIGIN]))
    return pa.table([origins, reasons, texts], schema=BAD_ROWS_SCHEMA)


def reason_of(error: Exception) -> str:
    """Return why a row is bad, in one line."""
    return f"{_SQL_REASON}{_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def without_marked(
    statement: str, attempt: Attempt, alone: Alone, rows: pa.Table
) -> tuple[pa.Table, pa.Table]:
    """Return the rows on which no marked expression raises, and the others as bad rows.

    Args:
        statement: the job's, which raises on some of the rows.
        attempt: runs a statement over some of the rows, in their place.
        alone: runs the job's statement over one of them.
        rows: with origins.
    """
    labels, names = _labels(statement, attempt, rows)
    found: list[pa.Table] = []
    for label, name in enumerate(names):
        members = np.flatnonzero(labels == label)
        mine = rows.take(pa.array(members))
        reasons = _reasons(alone, mine, name) if len(members) else None
        if reasons is None:  # a row of them passes alone: the mark says nothing
            labels[members] = -1
        else:
            found.append(bad_rows(mine, reasons))
    good = rows.filter(pa.array(labels < 0))
    return good, pa.concat_tables([BAD_ROWS_SCHEMA.empty_table(), *found])


def isolated(statement: str, attempt: Attempt, rows: pa.Table) -> SqlResult:
    """Halve rows until those that raise are alone, at most `MAX_ATTEMPTS` times.

    Args:
        statement: the job's.
        attempt: runs a statement over some of the rows.
        rows: with origins.

    Raises:
        BadRowsError: more rows fail than so many attempts tell apart.
    """
    waiting = deque([(0, rows.num_rows)] if rows.num_rows else [])
    good: list[tuple[int, pa.Table]] = []
    bad = [BAD_ROWS_SCHEMA.empty_table()]
    attempts = 0
    reason = ""
    while waiting and attempts < MAX_ATTEMPTS:
        start, count = waiting.popleft()
        attempts += 1
        part = rows.slice(start, count)
        try:
            good.append((start, attempt(statement, part)))
        except ROW_ERRORS as error:
            reason = reason_of(error)
            if count == 1:
                bad.append(bad_rows(part, reason))
            else:
                half = count // 2
                waiting.extend([(start, half), (start + half, count - half)])
    if waiting:
        left = rows.slice(*max(waiting, key=lambda part: part[1]))
        raise too_many(statement, attempt, left, reason)
    good.sort(key=lambda one: one[0])
    samples = [table for _, table in good]
    return SqlResult(pa.concat_tables(samples) if samples else None, pa.concat_tables(bad))


def too_many(statement: str, attempt: Attempt, rows: pa.Table, reason: str) -> BadRowsError:
    """Return the error of rows that raise and cannot be told apart.

    Args:
        statement: the job's.
        attempt: runs a statement over some of the rows.
        rows: of which at least one raises.
        reason: why it does.
    """
    names = [text for text, alone in selected(statement) if _raises(alone, attempt, rows)]
    what = f" in {names[0]}" if names else ""
    return BadRowsError(
        f"raises on so many rows that {MAX_ATTEMPTS} runs do not tell which: "
        f"{reason.removeprefix(_SQL_REASON)}{what}; write what fails there as TRY_CAST(... AS ...) "
        "or TRY(...), which give null, and leave rows out by WHERE ... IS NOT NULL"
    )


def _raises(statement: str, attempt: Attempt, rows: pa.Table) -> bool:
    try:
        attempt(statement, rows)
    except ROW_ERRORS:
        return True
    return False


def _labels(
    statement: str, attempt: Attempt, rows: pa.Table
) -> tuple[NDArray[np.int32], list[str]]:
    """Return for each row which expression raises on it, -1 for none, and those expressions."""
    numbers = pa.array(np.arange(rows.num_rows))
    numbered = rows.set_column(rows.column_names.index(ORIGIN), ORIGIN, numbers)
    labels = np.full(rows.num_rows, -1, np.int32)
    names: list[str] = []
    for level in _levels(statement):
        left = numbered.filter(pa.array(labels < 0))
        for written, bound in _bound(level, attempt, left.slice(0, 0)):
            for place, positions in _marked(bound, attempt, left):
                hit = np.unique(positions)
                hit = hit[labels[hit] < 0]
                groups = [hit] if level.outermost else _by_arrival(statement, written, attempt,
                                                                   numbered, hit)  # fmt: skip
                for group in groups:
                    if len(group):
                        labels[group] = len(names)
                        names.append(expression_text(written.units[place]))
    return labels, names


@lru_cache(maxsize=64)
def _levels(statement: str) -> tuple[Level, ...]:
    try:
        return tuple(levels_of(statement))
    except (duckdb.Error, KeyError):  # nothing that can be taken apart
        return ()


def _bound(level: Level, attempt: Attempt, none: pa.Table) -> Iterator[tuple[Level, Level]]:
    """Yield a level's units as they are written and as they bind, those of a variant together.

    Args:
        level: of the statement.
        attempt: runs a statement.
        none: no rows.
    """
    if _binds(level, attempt, none):
        yield level, level
        return
    left = list(range(len(level.units)))
    for variant in level.variants():
        mine = [i for i in left if _binds(variant.only((variant.units[i],)), attempt, none)]
        if mine:
            left = [i for i in left if i not in mine]
            written, bound = (tuple(v.units[i] for i in mine) for v in (level, variant))
            yield level.only(written), variant.only(bound)
    for unit in left:
        smaller = level.smaller(level.units[unit])
        if smaller.units:
            yield from _bound(smaller, attempt, none)


def _binds(level: Level, attempt: Attempt, none: pa.Table) -> bool:
    return not _raises(level.statement(), attempt, none)


def _marked(
    level: Level, attempt: Attempt, rows: pa.Table
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield which rows each unit of a level raises on; nothing of those that cannot be asked."""
    try:
        marks = attempt(level.statement(), rows)
    except ROW_ERRORS:
        if len(level.units) > 1:
            for place, unit in enumerate(level.units):
                for _, positions in _marked(level.only((unit,)), attempt, rows):
                    yield place, positions
        return
    origins = marks[ORIGIN].to_numpy()
    for place in range(len(level.units)):
        yield place, origins[marks[f"_mark_{place}"].to_numpy()]


def _by_arrival(
    statement: str, level: Level, attempt: Attempt, rows: pa.Table, hit: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return rows that a WHERE further out lets pass apart from those that it does not."""
    if not len(hit):
        return []
    try:
        made = attempt(tolerant(statement, level), rows.take(pa.array(hit)))
    except ROW_ERRORS:
        return [hit]
    arrives = np.isin(hit, made[ORIGIN].to_numpy())
    return [hit[arrives], hit[~arrives]]


def _reasons(alone: Alone, rows: pa.Table, expression: str) -> pa.Array | None:
    """Return why rows on which one expression raises are bad, None when one of them passes alone.

    Of more than a few rows, some are run by themselves, and the others get a reason of the same
    text with their own value, where all that were run show how it is made.
    """
    count = rows.num_rows
    exact: dict[int, str] = {}
    for most in (_EXEMPLARS, MAX_EXACT):
        for index in np.unique(np.linspace(0, count - 1, min(most, count)).astype(int)).tolist():
            if index not in exact:
                reason = _reason_alone(alone, rows.slice(index, 1))
                if reason is None:
                    return None
                exact[index] = reason
        if len(exact) == count:
            return pa.array([exact[i] for i in range(count)])
        made = _like(exact, rows)
        if made is not None:
            return made
    rest = f"{_SQL_REASON}an error in {expression}"
    return pa.array([exact.get(i, rest) for i in range(count)])


def _reason_alone(alone: Alone, row: pa.Table) -> str | None:
    try:
        alone(row)
    except ROW_ERRORS as error:
        return reason_of(error)
    return None


def _like(exact: dict[int, str], rows: pa.Table) -> pa.Array | None:
    """Return reasons made as the known ones are, None when it does not show how."""
    found: list[pa.Array] = []
    for name in rows.column_names:
        kind = rows[name].type
        if name != ORIGIN and (pa.types.is_string(kind) or pa.types.is_integer(kind)):
            texts = rows[name].combine_chunks().cast(pa.string())
            made = (_written(reason, texts, place) for place, reason in exact.items())
            found.extend([m for m in made if m is not None and _agrees(m, exact)][:1])
    if found:
        certain = not found[0].null_count and all(made.equals(found[0]) for made in found)
        return found[0] if certain else None
    reason = next(iter(exact.values()))
    same = len(set(exact.values())) == 1 and "'" not in reason.partition(", got ")[2]
    return pa.repeat(pa.scalar(reason), rows.num_rows) if same else None


def _written(reason: str, texts: pa.Array, place: int) -> pa.Array | None:
    """Return a row's reason with the value of each row, None when it does not quote its own."""
    before, quoted, after = reason.partition(f"'{texts[place].as_py()}'")
    if not quoted:
        return None
    made = pc.binary_join_element_wise(f"{before}'", texts, f"'{after}", "")
    return pc.replace_substring_regex(made, _LINE_END, "")


def _agrees(made: pa.Array, exact: dict[int, str]) -> bool:
    return made.take(pa.array(list(exact))).to_pylist() == list(exact.values())
