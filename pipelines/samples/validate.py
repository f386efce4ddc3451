"""Checks of the job's SQL and of the columns of samples, before a build."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa

from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.statements import PER, function_names, nodes, parse
from presage.pipelines.samples.tuples import NUMBERS, sql_weights
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.schemas.arrays import is_list
from presage.schemas.config.job import DataConfig
from presage.schemas.errors import SchemaError, suggest_name, suggest_name_or
from presage.schemas.features import ROLES, Feature, FeatureSet
from presage.schemas.layout import (
    BLOCK,
    SAMPLE_WEIGHT,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    internal_columns,
    window_columns,
)

_HIDDEN = (ORIGIN, LIST_INDEX)


# Columns.


def check_columns(samples: pa.Schema, features: FeatureSet, data: DataConfig) -> None:
    """Compare the columns of the SQL's result with the declared ones.

    `features` are the declared columns without those of transforms.

    Raises:
        SchemaError: a column is missing, undeclared, or of another type.
    """
    names = [n for n in samples.names if n not in _HIDDEN]
    derived = data.derived_columns
    declared = [f.name for f in features.features if f.name not in derived]
    for name in names:
        if name not in declared:
            advice = f"add it to {data.schema}: {_declaration(samples.field(name), data)}"
            raise SchemaError(
                f"column {name!r} must be declared in the schema; "
                f"{suggest_name_or(name, set(declared) - set(names), advice)}"
            )
    for name in declared:
        if name not in names:
            advice = f"let the job's SQL yield it, or remove it from {data.schema}"
            raise SchemaError(
                f"samples have no column {name!r}; "
                f"{suggest_name_or(name, set(names) - set(declared), advice)}"
            )
        check_type(features[name], samples.field(name).type)
    if ORIGIN not in samples.names:
        raise SchemaError(
            "the job's SQL loses the origin of each row in a * over a subquery or EXCLUDE; name "
            "its columns instead"
        )
    _check_reserved(features, data)
    _check_roles(features)
    for key, name in (("session.key", data.session.key), ("session.time", data.session.time)):
        if name not in declared:
            raise _undeclared(key, name, declared, data.schema)
    for name, group in data.group_of_column.items():
        if name not in declared and name not in derived:
            raise _undeclared(f"groups.{group}", name, declared, data.schema)
    for name, table in data.table_of_feature.items():
        if name not in features:
            raise _undeclared(f"tables.{table}.features", name, features.names, data.schema)
        if features[name].role != "sparse":
            raise SchemaError(
                f"data.tables.{table}.features must be sparse, got {name!r} with the role "
                f"{features[name].role}; tag it sparse in {data.schema}"
            )
    for name in features.with_role("sparse"):
        if name not in data.table_of_feature:
            raise SchemaError(f"sparse feature {name!r} must have a table; add it to data.tables")
    _check_tables(features, data)
    if features[data.session.key].is_list:
        raise SchemaError(
            f"session.key must be one value, got a list for {data.session.key!r}; use another"
        )
    _check_time(samples.field(data.session.time).type, data)


def _undeclared(key: str, name: str, declared: Collection[str], schema: str) -> SchemaError:
    return SchemaError(
        f"data.{key} must name columns of {schema}, got {name!r}; {suggest_name(name, declared)}"
    )


def _check_time(kind: pa.DataType, data: DataConfig) -> None:
    """Check the type of the session time; an integer will do if no setting needs its unit."""
    with_unit = (data.session.gap, data.window.span, data.split.evaluation_from)
    is_number = pa.types.is_integer(kind) and not pa.types.is_uint64(kind)
    if not pa.types.is_timestamp(kind) and not (is_number and all(s is None for s in with_unit)):
        raise SchemaError(
            f"session.time must be a timestamp, got {kind} for {data.session.time!r}; "
            "cast it in SQL, for example make_timestamp(ms * 1000)"
        )


def _check_reserved(features: FeatureSet, data: DataConfig) -> None:
    reserved = {BLOCK, UNIQUE_INDEX, TUPLE_INDEX, ORIGIN, LIST_INDEX}
    reserved |= internal_columns(data.groups, data.histories)
    reserved |= {w for f in features.features if f.is_list for w in window_columns(f.name)}
    for name in features.names:
        if name in reserved:
            raise SchemaError(f"column name {name!r} is reserved by the format; rename the column")


def _check_roles(features: FeatureSet) -> None:
    for feature in features.features:
        subject = f"{feature.role} feature {feature.name!r}"
        if feature.role == "sparse" and feature.type == "FLOAT":
            raise SchemaError(
                f"{subject} must be INT or BYTES, got {feature.type}; number its values in SQL"
            )
        if feature.role in NUMBERS and (feature.type == "BYTES" or feature.is_list):
            actual = "a list" if feature.is_list else feature.type
            raise SchemaError(f"{subject} must be one number, got {actual}; convert it in SQL")


def _check_tables(features: FeatureSet, data: DataConfig) -> None:
    """Check that each table has features of one type, and that texts have rows of their own."""
    for name, table in data.tables.items():
        types = {features[f].type: f for f in table.features}
        if "BYTES" in types and table.rows == "identity":
            raise SchemaError(
                f"data.tables.{name} has rows: identity, got the texts of {types['BYTES']!r}; use "
                "rows: hash, or number them with a vocabulary in data.transforms"
            )
        if len(types) > 1:
            raise SchemaError(
                f"data.tables.{name}.features must have one type, got INT for {types['INT']!r} "
                f"and BYTES for {types['BYTES']!r}, so that 7 and '7' have different rows; cast "
                "one in SQL"
            )


def _declaration(field: pa.Field, data: DataConfig) -> str:
    """Return the declaration of a column for the schema, with a likely role."""
    type_name = _type_name(field.type)
    role = "dense" if type_name == "FLOAT" and not is_list(field.type) else "kept"
    role = "sparse" if field.name in data.table_of_feature else role
    count = " value_count { min: 0 }" if is_list(field.type) else ""
    tag = f'annotation {{ tag: "{role}" }}'
    return (
        f'feature {{ name: "{field.name}" type: {type_name}{count} {tag} }}, where tag is one of '
        f"{', '.join(ROLES)}"
    )


def _type_name(kind: pa.DataType) -> str:
    value = kind.value_type if is_list(kind) else kind
    if pa.types.is_string(value):
        return "BYTES"
    return "FLOAT" if pa.types.is_floating(value) else "INT"


def check_type(feature: Feature, kind: pa.DataType) -> None:
    """Compare the type of a column with its declaration.

    Raises:
        SchemaError: they differ.
    """
    if is_list(kind) != feature.is_list:
        expected = "a list" if feature.is_list else "one value"
        raise SchemaError(
            f"feature {feature.name!r} must be {expected}, got {kind}; "
            "change SQL or its value_count"
        )
    if _type_name(kind) != feature.type:
        raise SchemaError(
            f"feature {feature.name!r} must be {feature.type}, got {kind}; change SQL or its type"
        )
    if feature.role in NUMBERS and pa.types.is_timestamp(kind):
        raise SchemaError(
            f"{feature.role} feature {feature.name!r} must be a number, got {kind}; make one of it "
            f"in SQL, such as epoch({feature.name})"
        )


def check_sampling(samples: pa.Schema, features: FeatureSet, data: DataConfig) -> None:
    """Check that a job's negatives can be recognized and weighed.

    Raises:
        SchemaError: the label is not binary, or there is no column for the weight.
    """
    if data.sampling is None:
        return
    label = features[features.label]
    if label.type != "INT" or (label.minimum, label.maximum) != (0, 1):
        raise SchemaError(
            f"data.sampling needs a binary label: {label.name!r} is of type {label.type} from "
            f"{label.minimum} to {label.maximum}; declare it INT with int_domain 0 to 1"
        )
    if SAMPLE_WEIGHT in samples.names:
        raise SchemaError(
            f"samples must not have column {SAMPLE_WEIGHT!r}, which data.sampling adds; "
            "rename it in the job's SQL"
        )
    declared = next((f for f in features.features if f.name == SAMPLE_WEIGHT), None)
    if declared is None or (declared.role, declared.type) != ("weight", "FLOAT"):
        actual = "none" if declared is None else f"{declared.type} tagged {declared.role}"
        raise SchemaError(
            f"data.sampling needs the feature {SAMPLE_WEIGHT!r}, declared is {actual}; add it to "
            "the schema as FLOAT with the tag weight"
        )
    if len(sql_weights(features)) > 1:
        raise SchemaError(
            f"samples have several weights: {list(sql_weights(features))}; multiply them in the "
            "job's SQL"
        )


# SQL: the same samples in each build.

_ALLOWED = frozenset({"error"})
"""Functions that DuckDB calls volatile for another reason: this one raises."""
_NOT_LISTED = frozenset({
    "ago", "current_localtime", "current_localtimestamp", "current_time", "current_timestamp",
    "localtime", "localtimestamp",
})  # fmt: skip
"""Functions of the time that DuckDB does not call volatile."""
WITHOUT_PARENTHESES = frozenset({
    "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp",
})  # fmt: skip
"""Functions that are called without parentheses."""


def check_repeatable(data: DataConfig, sources: Mapping[str, pa.Table]) -> None:
    """Check that the job's statements yield the same samples in each build.

    Raises:
        SchemaError: a statement calls a volatile function, or `samples.map` selects some of the
            rows of a chunk.
    """
    columns = {name for table in sources.values() for name in table.column_names}
    per, text = data.samples.per, data.samples.map
    if per is not None:
        _check_functions(per.sql, "data.samples.per.sql", columns)
    if text is not None:
        _check_functions(text, "data.samples.map", columns)
        _check_row_local(text, PER if per is not None else data.sample_source)
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str):
                key = f"transforms.{group}.{name}"
                _check_functions(f"SELECT ({transform}) FROM tuples", key, columns)


def _check_functions(statement: str, key: str, columns: Collection[str]) -> None:
    volatile = function_names("function_type = 'scalar' AND stability <> 'CONSISTENT'") - _ALLOWED
    for node in nodes(parse(statement)):
        name = _function_name(node)
        is_column = node.get("class") == "COLUMN_REF" and name in columns
        is_age = name == "age" and len(node.get("arguments", ())) == 1  # from today
        if is_age or (name in volatile | _NOT_LISTED and not is_column):
            raise SchemaError(
                f"{key} calls {name}, which gives other values in each build; hash columns "
                "instead of drawing, and write times as constants"
            )


def _function_name(node: Mapping[str, Any]) -> str:
    """Return the function that a node calls, empty if none.

    Functions without parentheses are parsed as columns.
    """
    if node.get("class") == "FUNCTION":
        return str(node["function_name"]).lower()
    path = node.get("column_names") if node.get("class") == "COLUMN_REF" else None
    name = str(path[0]).lower() if path and len(path) == 1 else ""
    return name if name in WITHOUT_PARENTHESES else ""


def _check_row_local(statement: str, source: str) -> None:
    """Check that the samples of a row do not depend on other rows, as far as its syntax shows.

    Raises:
        SchemaError: a SELECT over the rows of the source has a window function, an aggregate,
            LIMIT, DISTINCT or SAMPLE, or the rows are joined with themselves.
    """
    tree = parse(statement)
    selects = [node for node in nodes(tree) if node.get("type") == "SELECT_NODE"]
    rows = {source.lower()}
    for _ in selects:  # a CTE may be made of another one
        for entry in (each for select in selects for each in select["cte_map"]["map"]):
            if _reads(entry["value"], rows):
                rows.add(entry["key"].lower())
    for node in nodes(tree):
        problem = _other_rows(node, rows)
        if problem:
            raise SchemaError(
                f"data.samples.map does not treat each row alone: {problem}; choose rows by "
                "WHERE, or use all rows of a key in data.samples.per"
            )


def _reads(part: Any, tables: Collection[str]) -> bool:
    return any(
        node.get("type") == "BASE_TABLE" and node["table_name"].lower() in tables
        for node in nodes(part)
    )


def _other_rows(node: Mapping[str, Any], rows: Collection[str]) -> str:
    """Return what makes a node of a statement depend on several rows of some tables."""
    kind = node.get("type")
    if kind == "JOIN" and _reads(node["left"], rows) and _reads(node["right"], rows):
        return "a join of the rows with themselves"
    if node.get("class") == "SUBQUERY" and _reads(node["subquery"], rows):
        return "a subquery over all rows"
    if kind not in ("SELECT_NODE", "SET_OPERATION_NODE"):
        return ""
    if not _reads(node.get("from_table", node), rows):
        return ""
    modifiers = {each["type"].split("_")[0] for each in node["modifiers"]}
    for modifier in sorted(modifiers & {"LIMIT", "DISTINCT"}):
        return modifier
    if kind == "SET_OPERATION_NODE":
        return "" if node["setop_all"] else "UNION without ALL"
    if node["sample"] or node["from_table"].get("sample"):
        return "SAMPLE"
    if node["group_expressions"]:
        return "GROUP BY"
    aggregates = function_names("function_type = 'aggregate'")
    parts = [node[name] for name in ("select_list", "where_clause", "having", "qualify")]
    for each in _own_nodes(parts):
        if each.get("class") == "WINDOW":
            return f"the window function {each['function_name']}"
        if each.get("class") == "FUNCTION" and each["function_name"].lower() in aggregates:
            return f"the aggregate {each['function_name']}"
    return ""


def _own_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the nodes of expressions without those of their subqueries."""
    if isinstance(tree, dict):
        yield tree
        if tree.get("class") == "SUBQUERY":
            return
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _own_nodes(part)
