"""Rewrite an SQL statement so that it marks the rows on which it would raise."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import duckdb

from pipelines.samples.connection import parse, unparse
from pipelines.sources.rows import ORIGIN

# Which rows an SQL statement raises on, found by one more pass instead of by trying rows.
#
# DuckDB's `TRY(e)` is null where `e` raises, so `TRY([e]) IS NULL` marks the rows on which an
# expression raises. It takes no subquery, window or aggregate: a statement is therefore taken
# apart into the SELECTs that it is made of (`Level`), and each of them into the largest
# expressions that `TRY` takes (`units`). A level is run with its own FROM and WHERE and with
# marks for a select list. The expression stands in a lambda over one element: what occurs twice
# in plain expressions is computed once, before `TRY`, and raises there.

Node = dict[str, Any]
"""A part of a statement, as `json_serialize_sql` writes it."""

_ELEMENT = "_element"
_LEAVES = ("COLUMN_REF", "CONSTANT", "LAMBDA", "LAMBDA_REF", "STAR", "TYPE")
_BLOCKS_TRY = ("SUBQUERY", "WINDOW")
_TRY = "TRY(list_transform([0], lambda _one: _0))"
"""Null where `_0` raises, else a list with its value."""
_RAISES = "CAST(CAST('error' || _0 AS INTEGER) AS \"NULL\")"
"""What `error(_0)` does, which `TRY` refuses."""
_NESTED_TYPES = ("LIST", "STRUCT", "MAP", "ARRAY", "UNION", "ROW")


@dataclass(frozen=True, slots=True)
class Level:
    """Expressions that a SELECT evaluates on the rows of its FROM clause.

    Attributes:
        from_table: the FROM clause.
        ctes: common table expressions that it may read.
        units: expressions that `TRY` takes.
        where: the WHERE clause that rows pass before the units are evaluated, or None.
        aliases: names of the select list, for units that use them.
        outermost: whether nothing outside the level decides about its rows.
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
        """Return the SELECT of `_origin` and, for each unit, whether it raises."""
        select = _parsed(f'SELECT "{ORIGIN}"')
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
        """Yield the level, and other readings of it where a unit does not bind as it stands.

        Each has the same units in the same order.
        """
        yield self
        if self.aliases:
            units = tuple(_replaced(u, self.aliases) for u in self.units)
            yield replace(self, units=units, aliases={})
        if self.outer_from is not None and self.from_table["type"] == "EMPTY":
            yield replace(self, from_table=self.outer_from, outer_from=None)
        elif self.outer_from is not None:
            joined = _parsed("SELECT 1 FROM _left, _right")["from_table"]
            joined["left"], joined["right"] = self.outer_from, self.from_table
            yield replace(self, from_table=joined, outer_from=None)


def _mark(unit: Node) -> Node:
    """Return whether an expression raises; `TRY` takes a vector with a bad row one by one."""
    if unit["class"] == "CAST" and unit["child"]["class"] == "COLUMN_REF" and _is_plain(unit):
        tried = {**unit, "try_cast": True}
        return _expression("_0 IS NOT NULL AND _1 IS NULL", unit["child"], tried)
    return _expression(f"{_TRY} IS NULL", unit)


def _is_plain(cast: Node) -> bool:
    """Tell whether TRY_CAST gives null for a bad value, not a list or struct with a null in it."""
    return cast["type_expr"]["type_name"].upper() not in _NESTED_TYPES


def select_nodes(statement: str) -> list[Node]:
    """Return the SELECTs of a text, parsed.

    Raises:
        duckdb.Error: it is no SQL; the message has the position.
    """
    tree = parse(statement)
    if tree["error"]:
        raise duckdb.ParserException(tree["error_message"])
    return [s["node"] for s in tree["statements"]]


def text_of(node: Node) -> str:
    """Return a parsed SELECT as text."""
    return unparse({"error": False, "statements": [{"node": node, "named_param_map": []}]})


def expression_text(node: Node) -> str:
    """Return a parsed expression as text."""
    select = _parsed("SELECT 1")
    select["select_list"] = [node]
    return text_of(select).removeprefix("SELECT ")


def levels_of(statement: str) -> list[Level]:
    """Return the levels of a statement, those that others read first.

    Example:
        >>> nested = "SELECT a + 1 AS b FROM (SELECT CAST(x AS INT) AS a, _origin FROM log)"
        >>> [expression_text(u) for level in levels_of(nested) for u in level.units]
        ['CAST(x AS INTEGER)', '(a + 1)']
    """
    (node,) = select_nodes(statement)
    levels = _levels(_without_errors(node), (), None, True)
    return [level for level in levels if level.units]


def selected(statement: str) -> Iterator[tuple[str, str]]:
    """Yield each expression that the job's SELECT yields, and the statement with it alone.

    Example:
        >>> list(selected("SELECT * FROM (SELECT a + 1 AS b, c FROM log)"))
        [('(a + 1)', 'SELECT (a + 1) AS b FROM log'), ('c', 'SELECT c FROM log')]
    """
    (node,) = select_nodes(statement)
    while node["from_table"]["type"] == "SUBQUERY" and node["select_list"][0]["class"] == "STAR":
        node = node["from_table"]["subquery"]["node"]  # what `with_hashes` and a user put around
    for expression in node["select_list"]:
        text = expression_text(_without_alias(expression))
        yield text, text_of({**node, "select_list": [expression]})


def _without_errors(part: Any) -> Any:
    """Return a part of a statement with casts that raise in the place of `error`."""
    if isinstance(part, list):
        return [_without_errors(p) for p in part]
    if not isinstance(part, dict):
        return part
    if part.get("function_name") == "error" and len(part["arguments"]) == 1:
        made = _expression(_RAISES, _without_errors(part["arguments"][0]["expression"]))
        return {**made, "alias": part["alias"]}
    return {key: _without_errors(value) for key, value in part.items()}


def tolerant(statement: str, level: Level) -> str:
    """Return the statement with nulls where a unit of one of its levels raises.

    Example:
        >>> nested = "SELECT a FROM (SELECT CAST(x AS INT) AS a, _origin FROM log)"
        >>> tolerant(nested, levels_of(nested)[0])
        'SELECT a FROM (SELECT TRY(...CAST(x AS INTEGER)...)[1] AS a, _origin FROM log)'
    """
    (node,) = select_nodes(statement)

    def tried(part: Any) -> Any:
        if isinstance(part, list):
            return [tried(p) for p in part]
        if not isinstance(part, dict):
            return part
        if "class" in part and _without_alias(part) in level.units:
            first = _expression(f"{_TRY}[1]", _without_alias(part))
            return {**first, "alias": part.get("alias", "")}
        return {key: tried(value) for key, value in part.items()}

    return text_of(tried(node))


def _without_alias(expression: Node) -> Node:
    return {**expression, "alias": ""} if "alias" in expression else expression


def _levels(
    node: Node, ctes: Sequence[Node], outer_from: Node | None, outermost: bool
) -> Iterator[Level]:
    """Yield the levels of a SELECT or of a UNION."""
    own = node["cte_map"]["map"]
    for cte in own:
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
    """Yield a level with the units of expressions, and one with those around subqueries."""
    yield level.only(tuple(u for e in expressions for u in _units(e)))
    subqueries: list[Node] = []
    around = [e for e in (_hoisted(each, subqueries) for each in expressions) if e is not None]
    if subqueries:
        joined = _parsed("SELECT 1 FROM _left, LATERAL (SELECT 1) AS _subqueries")["from_table"]
        joined["left"] = level.from_table
        joined["right"]["subquery"]["node"]["select_list"] = subqueries
        units = tuple(u for e in around for u in _units(e))
        yield replace(level, from_table=joined, units=units)


def _hoisted(expression: Node, subqueries: list[Node]) -> Node | None:
    """Return an expression with columns for its subqueries, None where it has none inside."""
    known = len(subqueries)

    def columns_for(part: Any) -> Any:
        if isinstance(part, list):
            return [columns_for(p) for p in part]
        if not isinstance(part, dict):
            return part
        if part.get("class") == "SUBQUERY":
            name = f"_subquery_{len(subqueries)}"
            subqueries.append({**part, "alias": name})
            return _parsed(f"SELECT {name}")["select_list"][0]
        return {key: columns_for(value) for key, value in part.items()}

    made = columns_for(expression) if expression["class"] != "SUBQUERY" else expression
    return made if len(subqueries) > known else None


def _from_levels(table: Node, ctes: Sequence[Node], before: Node | None = None) -> Iterator[Level]:
    """Yield the levels of a FROM clause: of subqueries, and of what joins are made by."""
    if table["type"] == "SUBQUERY":
        yield from _levels(table["subquery"]["node"], ctes, before, False)
    elif table["type"] == "JOIN":
        left, right = table["left"], table["right"]
        yield from _from_levels(left, ctes, before)
        yield from _from_levels(right, ctes, left)
        asked = [table.get("condition"), right.get("function")]
        units = tuple(u for e in asked if e for c in _expressions(list(e.values()))
                      for u in _units(c))  # fmt: skip
        yield Level(left, ctes, units)


def _expressions(parts: Any) -> Iterator[Node]:
    """Yield the expressions in a part of a statement, not those inside them."""
    if isinstance(parts, list):
        for part in parts:
            yield from _expressions(part)
    elif isinstance(parts, dict):
        if "class" in parts and parts["class"] != "STAR":
            yield parts
        else:
            yield from _expressions(list(parts.values()))


def _subqueries(parts: Any) -> Iterator[Node]:
    """Yield the SELECTs that stand inside expressions, not those inside them."""
    if isinstance(parts, list):
        for part in parts:
            yield from _subqueries(part)
    elif isinstance(parts, dict):
        if parts.get("class") == "SUBQUERY":
            yield parts["subquery"]["node"]
        else:
            yield from _subqueries(list(parts.values()))


def _units(expression: Node) -> Iterator[Node]:
    """Yield the largest expressions inside one that `TRY` takes."""
    if expression["class"] in _LEAVES:
        return
    unnests = list(_unnests(expression))
    if len(unnests) == 1 and expression is not unnests[0]:
        element = _parsed(f"SELECT {_ELEMENT}")["select_list"][0]
        around = _swapped(expression, unnests[0], element)
        if not _is_blocked(around):
            (values,) = _expressions(list(unnests[0]["arguments"]))
            made = _expression(f"list_transform(_0, lambda {_ELEMENT}: _1)", values, around)
            yield from _units(values)
            yield from [made] if not _is_blocked(made) else []
            return
    if not _is_blocked(expression):
        yield _without_alias(expression)
        return
    inner = {**expression, "subquery": None}  # its own levels have what is in it
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
    """Tell whether `TRY` refuses an expression."""
    if expression["class"] in _BLOCKS_TRY or expression.get("function_name") in _blocking():
        return True
    return any(_is_blocked(child) for child in _expressions(list(expression.values())))


@cache
def _blocking() -> frozenset[str]:
    """Return the functions that `TRY` refuses."""
    rows = duckdb.connect().execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE function_type IN ('aggregate', 'window') OR stability = 'VOLATILE'"
    )
    return frozenset({"unnest", "unlist", *(name for (name,) in rows.fetchall())})


def _short_circuited(condition: Node) -> Node:
    """Return a condition that is evaluated inside `TRY` as WHERE does it: from left to right."""
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
    """Return an expression whose `_0`, `_1` are other expressions."""
    return _replaced(copy.deepcopy(_parsed(f"SELECT {text}")["select_list"][0]),
                     {f"_{i}": part for i, part in enumerate(parts)})  # fmt: skip


@cache
def _parsed_text(statement: str) -> str:
    return json.dumps(select_nodes(statement)[0])


def _parsed(statement: str) -> Node:
    """Return a fresh tree of a statement of this module."""
    return json.loads(_parsed_text(statement))


def _replaced(part: Any, names: Mapping[str, Node]) -> Any:
    """Return a part of a statement with expressions in the place of plain column names."""
    if isinstance(part, list):
        return [_replaced(p, names) for p in part]
    if not isinstance(part, dict):
        return part
    if part.get("class") == "COLUMN_REF" and len(part["column_names"]) == 1:
        return names.get(part["column_names"][0], part)
    return {key: _replaced(value, names) for key, value in part.items()}


def _swapped(part: Any, old: Node, new: Node) -> Any:
    """Return a part of a statement with one of its expressions replaced."""
    if part is old:
        return new
    if isinstance(part, list):
        return [_swapped(p, old, new) for p in part]
    if isinstance(part, dict):
        return {key: _swapped(value, old, new) for key, value in part.items()}
    return part
