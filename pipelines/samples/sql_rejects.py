"""Find the rows on which the job's SQL raises, each with DuckDB's reason.

DuckDB's `TRY(e)` is null where `e` raises. So the expressions of a select list are run again as
marks, `TRY([e]) IS NULL`, which are true for the rows on which they raise, and marked rows are
removed. Rows that raise elsewhere are bisected, with at most `MAX_ATTEMPTS` runs. A good row is
never rejected together with bad ones: if the bad rows cannot be isolated, the build fails with an
error that names the expression.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.samples.statements import function_names, nodes, parse, unparse
from presage.pipelines.sources.raw_rows import ORIGIN, first_line
from presage.pipelines.sources.rejects import TooManyRunsError, isolate_bad, reason_kinds, row_texts

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
EXEMPLARS = 4
"""Marked rows of a chunk that are run alone for each expression."""
_SQL_REASON = "row fails in the job's SQL: "

Attempt = Callable[[str, pa.Table], pa.Table]
"""Runs a statement over some rows of the source."""
RunAlone = Callable[[pa.Table], object]
"""Runs the job's statement over one row."""


class BadRowsError(Exception):
    """Raised when a statement fails on rows that cannot be isolated."""


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


def reject_reason(error: BaseException) -> str:
    """Return the reason of a row on which the SQL raises, in one line."""
    return f"{_SQL_REASON}{first_line(error)}"


def bisect_rows(statement: str, attempt: Attempt, rows: pa.Table) -> SqlResult:
    """Bisect rows until those that raise are isolated, with at most `MAX_ATTEMPTS` runs.

    Raises:
        BadRowsError: the runs do not suffice.
    """

    def run_range(start: int, end: int) -> pa.Table:
        return attempt(statement, rows.slice(start, end - start))

    try:
        good, errors = isolate_bad(rows.num_rows, run_range, ROW_ERRORS, MAX_ATTEMPTS)
    except TooManyRunsError as error:
        largest = rows.slice(error.start, error.end - error.start)
        raise bad_rows_error(statement, attempt, largest, error.cause) from error
    bad = [bad_rows(rows.slice(row, 1), reject_reason(error)) for row, error in errors]
    samples = [table for _, table in good]
    return SqlResult(
        pa.concat_tables(samples) if samples else None,
        pa.concat_tables([BAD_ROWS_SCHEMA.empty_table(), *bad]),
    )


def bad_rows_error(
    statement: str, attempt: Attempt, rows: pa.Table, cause: BaseException
) -> BadRowsError:
    """Return the error for bad rows that cannot be isolated; at least one of them raises."""
    expressions = [
        text for text, select in selected_expressions(statement) if _raises(select, attempt, rows)
    ]
    location = f" in {expressions[0]}" if expressions else ""
    return BadRowsError(
        f"raises on more rows than {MAX_ATTEMPTS} runs can isolate: {first_line(cause)}{location}; "
        "write what fails there as TRY_CAST(... AS ...) or TRY(...), which give null, and leave "
        "rows out by WHERE ... IS NOT NULL"
    )


def _raises(statement: str, attempt: Attempt, rows: pa.Table) -> bool:
    try:
        attempt(statement, rows)
    except ROW_ERRORS:
        return True
    return False


# Marks: on which rows an expression raises.

Node = dict[str, Any]
"""A node of a syntax tree of `json_serialize_sql`."""
_LEAVES = ("COLUMN_REF", "CONSTANT", "LAMBDA", "LAMBDA_REF", "TYPE")
_MARK = "SELECT TRY(list_transform([0], lambda _one: _unit)) IS NULL"
"""True where `_unit` raises. In a lambda: DuckDB evaluates common subexpressions before `TRY`."""
_CAST_MARK = "SELECT _value IS NOT NULL AND _unit IS NULL"
"""The same for a cast as `TRY_CAST`: `TRY` evaluates a vector with a bad row one by one."""
_NESTED_TYPES = ("LIST", "STRUCT", "MAP", "ARRAY", "UNION", "ROW")
"""Types of casts to which `TRY_CAST` gives null for the inner value only."""


@dataclass(frozen=True, slots=True)
class Select:
    """A SELECT of a statement, and the expressions of its select list that `TRY` takes."""

    node: Node
    units: tuple[Node, ...]

    def marks(self, units: Sequence[Node]) -> str:
        """Return the SELECT of `_origin` and of a mark for each unit, over the same rows."""
        select_list = [_constant(f'SELECT "{ORIGIN}"')["select_list"][0]]
        select_list += [{**_mark(u), "alias": f"_mark_{i}"} for i, u in enumerate(units)]
        return _text_of({**self.node, "select_list": select_list})

    def bound_units(self, attempt: Attempt, no_rows: pa.Table) -> list[Node]:
        """Return the units whose marks bind, with expressions instead of aliases if they need."""
        aliases = {e["alias"]: {**e, "alias": ""} for e in self.node["select_list"] if e["alias"]}
        variants = [(unit, _substitute(unit, aliases)) for unit in self.units]
        bound = [
            next((v for v in pair if not _raises(self.marks([v]), attempt, no_rows)), None)
            for pair in variants
        ]
        return [unit for unit in bound if unit is not None]


def _mark(unit: Node) -> Node:
    """Return the expression that is true where a unit raises."""
    text, parts = _MARK, {"_unit": unit}
    is_cast = unit["class"] == "CAST" and unit["child"]["class"] == "COLUMN_REF"
    if is_cast and unit["type_expr"]["type_name"].upper() not in _NESTED_TYPES:
        text = _CAST_MARK
        parts = {"_value": unit["child"], "_unit": {**unit, "try_cast": True}}
    return _substitute(_constant(text)["select_list"][0], parts)


@lru_cache(maxsize=64)
def marked_selects(statement: str) -> tuple[Select, ...]:
    """Return the SELECTs of a statement whose expressions are marked, inner ones first.

    Those are the outermost one and the ones that FROM clauses consist of, as long as each row that
    is read is a row of the result.

    Example:
        >>> nested = "SELECT a + 1 AS b FROM (SELECT CAST(x AS INT) AS a, _origin FROM log)"
        >>> [expression_text(unit) for each in marked_selects(nested) for unit in each.units]
        ['CAST(x AS INTEGER)', '(a + 1)']
    """
    (node,) = select_nodes(statement)
    selects: list[Select] = []
    ctes: dict[str, Node] = {}
    while node is not None and node["type"] == "SELECT_NODE" and _keeps_rows(node):
        ctes |= {cte["key"]: cte for cte in node["cte_map"]["map"]}
        node = {**node, "cte_map": {"map": list(ctes.values())}}
        units = tuple(u for e in _expressions(node["select_list"]) for u in _units(e))
        selects += [Select(node, units)] if units else []
        node = None if node["where_clause"] else _nested(node["from_table"], ctes)
    return tuple(reversed(selects))


def _nested(table: Node, ctes: Mapping[str, Node]) -> Node | None:
    """Return the SELECT that a FROM clause consists of, None if there is none."""
    if table["type"] == "SUBQUERY":
        return table["subquery"]["node"]
    cte = ctes.get(table.get("table_name", ""))
    return cte and cte["value"]["query_node"]


def _keeps_rows(node: Node) -> bool:
    """Return whether a SELECT yields one row for each on which its select list is evaluated."""
    several = any(
        n.get("function_name") in ("unnest", "unlist") for n in nodes(node["select_list"])
    )
    return not (several or node["qualify"] or node["modifiers"] or node["group_expressions"])


def _units(expression: Node) -> Iterator[Node]:
    """Yield the largest parts of an expression that `TRY` takes."""
    if expression["class"] in _LEAVES:
        return
    if not any(
        n.get("class") in ("SUBQUERY", "WINDOW") or n.get("function_name") in _blocking_functions()
        for n in nodes(expression)
    ):
        yield {**expression, "alias": ""}
    elif expression["class"] != "SUBQUERY":
        for child in _expressions(list(expression.values())):
            yield from _units(child)


def _blocking_functions() -> frozenset[str]:
    """Return the functions that `TRY` does not take."""
    return function_names("function_type IN ('aggregate', 'window') OR stability = 'VOLATILE'")


def _expressions(parts: Any) -> Iterator[Node]:
    """Yield the outermost expressions in a part of a statement."""
    if isinstance(parts, dict) and parts.get("class", "STAR") != "STAR":
        yield parts
    elif isinstance(parts, (dict, list)):
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _expressions(part)


def remove_marked(
    statement: str, attempt: Attempt, run_alone: RunAlone, rows: pa.Table
) -> tuple[pa.Table, pa.Table]:
    """Return the rows on which no expression is marked, and the others as bad rows."""
    bad = [BAD_ROWS_SCHEMA.empty_table()]
    for select in marked_selects(statement):
        numbers = pa.array(np.arange(rows.num_rows))
        numbered = rows.set_column(rows.column_names.index(ORIGIN), ORIGIN, numbers)
        marked = _run_marks(select, attempt, numbered)
        if marked is None:  # other parts of the SELECT raise
            continue
        units, marks = marked
        left = np.ones(rows.num_rows, bool)
        for index, unit in enumerate(units):
            marked = np.unique(marks[ORIGIN].to_numpy()[marks[f"_mark_{index}"].to_numpy()])
            marked = marked[left[marked]]
            some = rows.take(pa.array(marked))
            reasons = _reasons(run_alone, some, unit) if len(marked) else None
            if reasons is not None:
                left[marked] = False
                bad.append(bad_rows(some, reasons))
        rows = rows.filter(pa.array(left))
    return rows, pa.concat_tables(bad)


def _run_marks(
    select: Select, attempt: Attempt, rows: pa.Table
) -> tuple[Sequence[Node], pa.Table] | None:
    """Return the units of a SELECT that bind, and its marks; None if it raises without them."""
    for are_bound in (False, True):
        units = select.bound_units(attempt, rows.slice(0, 0)) if are_bound else select.units
        try:
            return units, attempt(select.marks(units), rows)
        except ROW_ERRORS:
            continue
    return None


def _reasons(run_alone: RunAlone, rows: pa.Table, unit: Node) -> pa.Array | None:
    """Return the reasons of rows on which one expression raises, None if a row passes alone.

    Of many rows some are run alone. The others get their reason without its values if they all
    have the same one, else a reason that names the expression.
    """
    exact: dict[int, str] = {}
    count = rows.num_rows
    for index in np.linspace(0, count - 1, min(EXEMPLARS, count)).astype(int).tolist():
        try:
            run_alone(rows.slice(index, 1))
            return None
        except ROW_ERRORS as error:
            exact[index] = reject_reason(error)
    kinds = pc.unique(reason_kinds(pa.array(exact.values()))).to_pylist()
    rest = kinds[0] if len(kinds) == 1 else f"{_SQL_REASON}an error in {expression_text(unit)}"
    return pa.array([exact.get(index, rest) for index in range(count)])


# Syntax trees.


def select_nodes(statement: str) -> list[Node]:
    """Return the SELECT nodes of a text.

    Raises:
        duckdb.Error: it is not SQL; the message has the position.
    """
    tree = parse(statement)
    if tree["error"]:
        raise duckdb.ParserException(tree["error_message"])
    return [s["node"] for s in tree["statements"]]


def expression_text(node: Node) -> str:
    """Return the text of an expression node."""
    return _text_of({**_constant("SELECT 1"), "select_list": [node]}).removeprefix("SELECT ")


def selected_expressions(statement: str) -> Iterator[tuple[str, str]]:
    """Yield each expression of the job's select list, and the statement with only that one.

    Example:
        >>> list(selected_expressions("SELECT * FROM (SELECT a + 1 AS b, c FROM log)"))
        [('(a + 1)', 'SELECT (a + 1) AS b FROM log'), ('c', 'SELECT c FROM log')]
    """
    (node,) = select_nodes(statement)
    while node["from_table"]["type"] == "SUBQUERY" and node["select_list"][0]["class"] == "STAR":
        node = node["from_table"]["subquery"]["node"]
    for expression in node["select_list"]:
        text = expression_text({**expression, "alias": ""})
        yield text, _text_of({**node, "select_list": [expression]})


def _text_of(node: Node) -> str:
    return unparse({"error": False, "statements": [{"node": node, "named_param_map": []}]})


def _constant(statement: str) -> Node:
    """Return a new tree of a statement of this module."""
    return json.loads(_constant_json(statement))


@cache
def _constant_json(statement: str) -> str:
    return json.dumps(select_nodes(statement)[0])


def _substitute(part: Any, expressions: Mapping[str, Node]) -> Any:
    """Return a part of a statement with expressions instead of unqualified columns."""
    if isinstance(part, list):
        return [_substitute(p, expressions) for p in part]
    if not isinstance(part, dict):
        return part
    if part.get("class") == "COLUMN_REF" and len(part["column_names"]) == 1:
        return expressions.get(part["column_names"][0], part)
    return {key: _substitute(value, expressions) for key, value in part.items()}
