"""Which columns have to be looked at before parts are built, and how they come about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.samples.syntax import parse
from schemas.errors import SchemaError
from schemas.job import SAMPLES, DataConfig
from schemas.job_transforms import TransformConfig
from schemas.learned import number_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One column from whose training samples something is learned."""

    group: str
    """Group of the column, or `samples`."""
    column: str
    """The column."""
    before: Mapping[str, str | TransformConfig]
    """Transforms that make it, in order; none for an original column."""
    vocabulary: str | None = None
    """Vocabulary that counts it."""
    numbers: str | None = None
    """Key of the numbers that it gives."""
    quantiles: int | None = None
    """Buckets, when the numbers are quantiles."""


def learned_inputs(data: DataConfig) -> list[Input]:
    """Return the columns that something is learned from, in the job's order.

    Raises:
        SchemaError: a column itself depends on what is learned.
    """
    found: list[Input] = []
    for name, config in data.vocabularies.items():
        for column in config.columns:
            place = f"data.vocabularies.{name}.columns"
            group = data.group_of_column.get(column, SAMPLES)
            before = transforms_before(group, column, place, data)
            found.append(Input(group=group, column=column, before=before, vocabulary=name))
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str) or not transform.learns or transform.vocabulary:
                continue
            (column,) = transform.inputs
            place = f"transforms.{group}.{name}"
            quantiles = transform.bucketize.quantiles if transform.bucketize else None
            found.append(
                Input(
                    group=group,
                    column=column,
                    before=transforms_before(group, column, place, data),
                    numbers=number_key(group, name),
                    quantiles=quantiles,
                )
            )
    return found


def transforms_before(
    group: str, column: str, place: str, data: DataConfig
) -> dict[str, str | TransformConfig]:
    """Return the transforms that make a column, and those that make their inputs, in order.

    Raises:
        SchemaError: one of them learns something itself.
    """
    made = data.transforms.get(group, {})
    needed: set[str] = set()
    waiting = [column]
    while waiting:
        name = waiting.pop()
        if name not in made or name in needed:
            continue
        transform = made[name]
        if not isinstance(transform, str) and transform.learns:
            raise SchemaError(
                f"{place} must not learn from what is learned, got {name!r}; "
                "read the column that it is made of"
            )
        needed.add(name)
        waiting.extend(inputs_of(transform))
    return {name: transform for name, transform in made.items() if name in needed}


def inputs_of(transform: str | TransformConfig) -> set[str]:
    """Return the names that a transform reads."""
    return columns_of(transform) if isinstance(transform, str) else set(transform.inputs)


def columns_of(expression: str) -> set[str]:
    """Return the names that a scalar SQL expression reads; parameters of lambdas are no columns.

    Example:
        >>> sorted(columns_of("ln(1 + len(list_filter(history, lambda x: x > age)))"))
        ['age', 'history']
    """
    tree = parse(f"SELECT ({expression})")
    of_lambdas = [n["lhs"] for n in _nodes(tree) if n.get("class") == "LAMBDA"]
    parameters = {c for lhs in of_lambdas for c in _column_names(lhs)}
    return _column_names(tree) - parameters


def _column_names(tree: object) -> set[str]:
    return {n["column_names"][-1] for n in _nodes(tree) if n.get("class") == "COLUMN_REF"}


def _nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Yield every object of a parsed statement."""
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _nodes(part)
