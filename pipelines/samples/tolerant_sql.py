"""Rewrite an SQL statement so that it marks the rows on which it raises.

DuckDB's `TRY(e)` is null where `e` raises, so `TRY([e]) IS NULL` marks the rows on which an
expression raises. It takes no subquery, window or aggregate. A statement is therefore decomposed
into its SELECTs (`Level`), and each of them into the largest expressions that `TRY` takes (units).
A level is run with its own FROM and WHERE and with marks as its select list. The expression is put
into a lambda over one element: DuckDB evaluates common subexpressions once, before `TRY`, where
they raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import duckdb

from pipelines.samples.sql import parse, unparse
from pipelines.sources.rows import ORIGIN

Node = dict[str, Any]
"""A node of a syntax tree of `json_serialize_sql`."""

_ELEMENT = "_element"
_LEAVES = ("COLUMN_REF", "CONSTANT", "LAMBDA", "LAMBDA_REF", "STAR", "TYPE")
_BLOCKS_TRY = ("SUBQUERY", "WINDOW")
_TRY = "TRY(list_transform([0], lambda _one: _0))"
"""Null if `_0` raises, else a list with its value."""
_RAISES = "CAST(CAST('error' || _0 AS INTEGER) AS \"NULL\")"
"""An expression that raises like `error(_0)`, which `TRY` does not take."""
_NESTED_TYPES = ("LIST", "STRUCT", "MAP", "ARRAY", "UNION", "ROW")


@dataclass(frozen=True, slots=True)
class Level:
    """Expressions that a SELECT evaluates on the rows of its FROM clause.

    Attributes:
        from_table: the FROM clause.
        ctes: common table expressions that it may read.
        units: expressions that `TRY` takes.
        where: the WHERE clause that is evaluated before the units, or None.
        aliases: of the select list, for units that use them.
        outermost: whether no SELECT outside the level filters its rows.
        outer_from: FROM clause of the SELECT around a subquery in an expression, or None.
    """

    from_table: Node
    ctes: Sequence[Node]
    units: tuple[Node, ...]
    where: Node | None = None
    aliases: Mapping[str, Node] = field(default_factory=dict)
    outermost: bool = False
    outer_from: Node | None = None

    def statement(self) -> str:
        """Return the SELECT of `_origin` and of a mark for each unit."""
        select = _parse_constant(f'SELECT "{ORIGIN}"')
        marks = [_mark(unit) for unit in self.units]
        for index, mark in enumerate(marks):
            mark["alias"] = f"_mark_{index}"
        select["select_list"] += marks
        select["from_table"], select["where_clause"] = self.from_table, self.where
        select["cte_map"] = {"map": list(self.ctes)}
        return text_of(select)

    def only(self, units: tuple[Node, ...]) -> Level:
        """Return the level with some of its units."""
        return replace(self, units=units)

    def smaller(self, unit: Node) -> Level:
        """Return the level with the units inside one of its units."""
        inner = _expressions(list(unit.values()))
        return self.only(tuple(u for e in inner for u in _units(e)))

    def variants(self) -> Iterator[Level]:
        """Yield the level, and variants in which units bind that do not bind as written.

        Each has the same units in the same order.
        """
        yield self
        if self.aliases:
            units = tuple(_substitute(u, self.aliases) for u in self.units)
            yield replace(self, units=units, aliases={})
        if self.outer_from is not None and self.from_table["type"] == "EMPTY":
            yield replace(self, from_table=self.outer_from, outer_from=None)
        elif self.outer_from is not None:
            join = _parse_constant("SELECT 1 FROM _left, _right")["from_table"]
            join["left"], join["right"] = self.outer_from, self.from_table
            yield replace(self, from_table=join, outer_from=None)


def _mark(unit: Node) -> Node:
    """Return the expression that is true where a unit raises."""
    is_cast = unit["class"] == "CAST" and unit["child"]["class"] == "COLUMN_REF"
    if is_cast and unit["type_expr"]["type_name"].upper() not in _NESTED_TYPES:
        # Faster than TRY, which evaluates a vector with a bad row one by one. TRY_CAST to a nested
        # type gives null for the inner value only.
        try_cast = {**unit, "try_cast": True}
        return _expression("_0 IS NOT NULL AND _1 IS NULL", unit["child"], try_cast)
    return _expression(f"{_TRY} IS NULL", unit)


def select_nodes(statement: str) -> list[Node]:
    """Return the SELECT nodes of a text.

    Raises:
        duckdb.Error: it is not SQL; the message has the position.
    """
    tree = parse(statement)
    if tree["error"]:
        raise duckdb.ParserException(tree["error_message"])
    return [s["node"] for s in tree["statements"]]


def text_of(node: Node) -> str:
    """Return the text of a SELECT node."""
    return unparse({"error": False, "statements": [{"node": node, "named_param_map": []}]})


def expression_text(node: Node) -> str:
    """Return the text of an expression node."""
    select = _parse_constant("SELECT 1")
    select["select_list"] = [node]
    return text_of(select).removeprefix("SELECT ")


def levels_of(statement: str) -> list[Level]:
    """Return the levels of a statement, inner ones before the outer ones that read them.

    Example:
        >>> nested = "SELECT a + 1 AS b FROM (SELECT CAST(x AS INT) AS a, _origin FROM log)"
        >>> [expression_text(u) for level in levels_of(nested) for u in level.units]
        ['CAST(x AS INTEGER)', '(a + 1)']
    """
    (node,) = select_nodes(statement)
    levels = _levels(_replace_error_calls(node), (), None, True)
    return [level for level in levels if level.units]


def selected_expressions(statement: str) -> Iterator[tuple[str, str]]:
    """Yield each expression of the job's select list, and the statement with only that one.

    Example:
        >>> list(selected_expressions("SELECT * FROM (SELECT a + 1 AS b, c FROM log)"))
        [('(a + 1)', 'SELECT (a + 1) AS b FROM log'), ('c', 'SELECT c FROM log')]
    """
    (node,) = select_nodes(statement)
    while node["from_table"]["type"] == "SUBQUERY" and node["select_list"][0]["class"] == "STAR":
        node = node["from_table"]["subquery"]["node"]  # of `with_passthrough` or the user
    for expression in node["select_list"]:
        text = expression_text(_without_alias(expression))
        yield text, text_of({**node, "select_list": [expression]})


def _replace_error_calls(part: Any) -> Any:
    """Return a part of a statement with casts that raise instead of calls of `error`."""

    def cast(node: Node) -> Node | None:
        if node.get("function_name") != "error" or len(node["arguments"]) != 1:
            return None
        message = _replace_error_calls(node["arguments"][0]["expression"])
        return {**_expression(_RAISES, message), "alias": node["alias"]}

    return _replace_nodes(part, cast)


def tolerant(statement: str, level: Level) -> str:
    """Return the statement with nulls where units of a level raise.

    Example:
        >>> nested = "SELECT a FROM (SELECT CAST(x AS INT) AS a, _origin FROM log)"
        >>> tolerant(nested, levels_of(nested)[0])
        'SELECT a FROM (SELECT TRY(...CAST(x AS INTEGER)...)[1] AS a, _origin FROM log)'
    """
    (node,) = select_nodes(statement)

    def wrap(part: Node) -> Node | None:
        if "class" not in part or _without_alias(part) not in level.units:
            return None
        value = _expression(f"{_TRY}[1]", _without_alias(part))
        return {**value, "alias": part.get("alias", "")}

    return text_of(_replace_nodes(node, wrap))


def _without_alias(expression: Node) -> Node:
    return {**expression, "alias": ""} if "alias" in expression else expression


def _levels(
    node: Node, ctes: Sequence[Node], outer_from: Node | None, outermost: bool
) -> Iterator[Level]:
    """Yield the levels of a SELECT or of a UNION."""
    for cte in node["cte_map"]["map"]:
        yield from _levels(cte["value"]["query_node"], ctes, None, False)
        ctes = (*ctes, cte)
    if node["type"] != "SELECT_NODE":
        for child in node.get("children", []):
            yield from _levels(child, ctes, outer_from, False)
        return
    from_table = node["from_table"]
    yield from _from_levels(from_table, ctes)
    expressions = list(_expressions(node["select_list"]))
    where = node["where_clause"]
    others = [node[k] for k in ("group_expressions", "having", "qualify", "modifiers")]
    for subquery in _subqueries([*expressions, where, *others]):
        yield from _levels(subquery, ctes, from_table, False)
    aliases = {e["alias"]: {**e, "alias": ""} for e in expressions if e.get("alias")}
    if where is not None:
        level = Level(from_table, ctes, (), None, {}, outermost, outer_from)
        yield from _with_units(level, [_short_circuited(where)])
    level = Level(from_table, ctes, (), where, aliases, outermost, outer_from)
    yield from _with_units(level, [*expressions, *_expressions(others)])


def _with_units(level: Level, expressions: Sequence[Node]) -> Iterator[Level]:
    """Yield the level of the units in expressions, and that of the units around subqueries."""
    yield level.only(tuple(u for e in expressions for u in _units(e)))
    subqueries: list[Node] = []
    hoisted = [_hoist_subqueries(e, subqueries) for e in expressions]
    if subqueries:
        join = _parse_constant("SELECT 1 FROM _left, LATERAL (SELECT 1) AS _subqueries")
        from_table = join["from_table"]
        from_table["left"] = level.from_table
        from_table["right"]["subquery"]["node"]["select_list"] = subqueries
        units = tuple(u for e in hoisted if e is not None for u in _units(e))
        yield replace(level, from_table=from_table, units=units)


def _hoist_subqueries(expression: Node, subqueries: list[Node]) -> Node | None:
    """Replace the subqueries in an expression by columns; None if there are none.

    The subqueries are appended to the given list.
    """
    if expression["class"] == "SUBQUERY":
        return None
    num_before = len(subqueries)

    def column(part: Node) -> Node | None:
        if part.get("class") != "SUBQUERY":
            return None
        name = f"_subquery_{len(subqueries)}"
        subqueries.append({**part, "alias": name})
        return _parse_constant(f"SELECT {name}")["select_list"][0]

    hoisted = _replace_nodes(expression, column)
    return hoisted if len(subqueries) > num_before else None


def _from_levels(table: Node, ctes: Sequence[Node], left_of: Node | None = None) -> Iterator[Level]:
    """Yield the levels of a FROM clause: of subqueries, join conditions and table functions.

    Args:
        table: the FROM clause.
        ctes: common table expressions that it may read.
        left_of: table on the left of the join, which a lateral subquery may read.
    """
    if table["type"] == "SUBQUERY":
        yield from _levels(table["subquery"]["node"], ctes, left_of, False)
    elif table["type"] == "JOIN":
        left, right = table["left"], table["right"]
        yield from _from_levels(left, ctes, left_of)
        yield from _from_levels(right, ctes, left)
        parts = [e for e in (table.get("condition"), right.get("function")) if e]
        expressions = [c for e in parts for c in _expressions(list(e.values()))]
        yield Level(left, ctes, tuple(u for e in expressions for u in _units(e)))


def _expressions(parts: Any) -> Iterator[Node]:
    """Yield the outermost expressions in a part of a statement."""
    if isinstance(parts, list):
        for part in parts:
            yield from _expressions(part)
    elif isinstance(parts, dict):
        if "class" in parts and parts["class"] != "STAR":
            yield parts
        else:
            yield from _expressions(list(parts.values()))


def _subqueries(parts: Any) -> Iterator[Node]:
    """Yield the outermost SELECTs inside expressions."""
    if isinstance(parts, list):
        for part in parts:
            yield from _subqueries(part)
    elif isinstance(parts, dict):
        if parts.get("class") == "SUBQUERY":
            yield parts["subquery"]["node"]
        else:
            yield from _subqueries(list(parts.values()))


def _units(expression: Node) -> Iterator[Node]:
    """Yield the largest parts of an expression that `TRY` takes."""
    if expression["class"] in _LEAVES:
        return
    unnests = list(_unnests(expression))
    if len(unnests) == 1 and expression is not unnests[0]:
        element = _parse_constant(f"SELECT {_ELEMENT}")["select_list"][0]
        of_element = _replace_nodes(expression, lambda n: element if n is unnests[0] else None)
        if not _is_blocked(of_element):
            (values,) = _expressions(list(unnests[0]["arguments"]))
            of_list = _expression(f"list_transform(_0, lambda {_ELEMENT}: _1)", values, of_element)
            yield from _units(values)
            if not _is_blocked(of_list):
                yield of_list
            return
    if not _is_blocked(expression):
        yield _without_alias(expression)
        return
    inner = {**expression, "subquery": None}  # a subquery has its own levels
    for child in _expressions(list(inner.values())):
        yield from _units(child)


def _unnests(expression: Node) -> Iterator[Node]:
    """Yield the calls of `unnest` in an expression."""
    if expression.get("function_name") == "unnest":
        yield expression
    elif expression["class"] != "SUBQUERY":
        for child in _expressions(list(expression.values())):
            yield from _unnests(child)


def _is_blocked(expression: Node) -> bool:
    """Return whether `TRY` does not take an expression."""
    if expression["class"] in _BLOCKS_TRY:
        return True
    if expression.get("function_name") in _blocking_functions():
        return True
    return any(_is_blocked(child) for child in _expressions(list(expression.values())))


@cache
def _blocking_functions() -> frozenset[str]:
    """Return the functions that `TRY` does not take."""
    rows = duckdb.connect().execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE function_type IN ('aggregate', 'window') OR stability = 'VOLATILE'"
    )
    return frozenset({"unnest", "unlist", *(name for (name,) in rows.fetchall())})


def _short_circuited(condition: Node) -> Node:
    """Return a condition that `TRY` evaluates from left to right, as WHERE does."""
    if condition["class"] != "CONJUNCTION":
        return condition
    first, *others = (_short_circuited(c) for c in condition["children"])
    text = "CASE WHEN _0 THEN true ELSE _1 END"
    if condition["type"] == "CONJUNCTION_AND":
        text = "CASE WHEN _0 THEN _1 ELSE false END"
    for other in others:
        first = _expression(text, first, other)
    return first


def _expression(text: str, *parts: Node) -> Node:
    """Return the expression of a text with expressions for its columns `_0`, `_1`, ..."""
    node = _parse_constant(f"SELECT {text}")["select_list"][0]
    return _substitute(node, {f"_{i}": part for i, part in enumerate(parts)})


def _parse_constant(statement: str) -> Node:
    """Return a new tree of a statement of this module."""
    return json.loads(_constant_json(statement))


@cache
def _constant_json(statement: str) -> str:
    return json.dumps(select_nodes(statement)[0])


def _substitute(part: Any, expressions: Mapping[str, Node]) -> Any:
    """Return a part of a statement with expressions instead of unqualified columns."""

    def expression(node: Node) -> Node | None:
        is_column = node.get("class") == "COLUMN_REF" and len(node["column_names"]) == 1
        return expressions.get(node["column_names"][0], node) if is_column else None

    return _replace_nodes(part, expression)


def _replace_nodes(part: Any, replacement: Callable[[Node], Node | None]) -> Any:
    """Return a part of a statement with its outermost nodes that have a replacement replaced."""
    if isinstance(part, list):
        return [_replace_nodes(p, replacement) for p in part]
    if not isinstance(part, dict):
        return part
    new = replacement(part)
    if new is not None:
        return new
    return {key: _replace_nodes(value, replacement) for key, value in part.items()}
