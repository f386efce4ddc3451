"""The compiled kernels that make batches equal their references in numpy, on any input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.arrays import offsets_of
from schemas.config.job import TableConfig
from schemas.order import Step
from trainer.data import collate, lookup, shared
from trainer.data.collate import BlockRange
from trainer.data.decode import BatchSpec, Lists, RowGroup, padding_row_group
from trainer.data.kernels import batch_kernels
from trainer.data.lookup import (
    Inverse,
    KeyedBags,
    TableLookup,
    distinct_positions,
    inverse_of,
    table_lookups,
    vector_layout,
)
from trainer.data.shared import find_shared_features

TABLES = {"items": ("item", "clicked"), "users": ("user",)}
FEATURES = ("clicked", "user", "item")
T = TypeVar("T")


def both(make: Callable[[], T]) -> tuple[T, T]:
    """Return what the kernels make, and what the references make."""
    assert batch_kernels() is not None, "the tests need g++"
    compiled = make()
    with pytest.MonkeyPatch.context() as patch:
        for module in (collate, lookup, shared):
            patch.setattr(module, "batch_kernels", lambda: None)
        return compiled, make()


def equal(one: Any, other: Any) -> bool:
    """Return whether fields, tensors and arrays are equal, with their types."""
    if isinstance(one, TableLookup | Inverse | shared.SharedFeatures):
        return all(equal(getattr(one, n), getattr(other, n)) for n in type(one).__slots__)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


@st.composite
def steps(draw: st.DrawFn) -> KeyedBags:
    """Bags of all features, some weighted: rows of small tables, and of larger than any."""
    largest = draw(st.sampled_from([3, 5000, 2**24 - 1, 2**24, 2**63 - 1]))
    row = st.integers(0, largest) | st.integers(max(0, largest - 3), largest)
    bags = draw(st.lists(st.lists(st.lists(row, max_size=5), max_size=6), min_size=3, max_size=3))
    lengths = np.array([len(bag) for of_feature in bags for bag in of_feature], np.int64)
    values = np.array([r for of_feature in bags for bag in of_feature for r in bag], np.int64)
    dtype = draw(st.sampled_from([None, np.float32, np.float64]))
    return KeyedBags(
        num_bags=dict(zip(FEATURES, map(len, bags), strict=True)),
        values=values,
        lengths=lengths,
        offsets=offsets_of(lengths),
        weights=None if dtype is None else np.arange(len(values)).astype(dtype) / 3,
        weighted=frozenset() if dtype is None else frozenset(["clicked"]),
    )


@pytest.mark.slow
@given(bags=steps())
def test_lookups_are_those_of_the_reference(bags: KeyedBags) -> None:
    num_tuples = {"group": bags.num_bags["user"]}
    layout = vector_layout({"clicked": None, "user": "group", "item": None}, num_tuples, 6)
    found, expected = both(lambda: table_lookups(TABLES, bags, layout))
    assert equal(found, expected)
    items = found["items"]
    rows = items.rows[items.positions.numpy()]
    ends = {
        f: int(bags.offsets[sum(bags.num_bags[g] for g in FEATURES[: i + 1])])
        for i, f in enumerate(FEATURES)
    }
    assert rows.tolist() == [*bags.values[ends["user"] :], *bags.values[: ends["clicked"]]]


@given(values=st.lists(st.integers(0, 2**62) | st.integers(0, 70), max_size=60))
def test_positions_are_those_of_the_reference(values: list[int]) -> None:
    for limit in (2**63, 2**40, 2**11, 1):
        array = np.array([value % limit for value in values], np.int64)
        found, expected = both(lambda array=array: distinct_positions(array))
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@given(rows=st.lists(st.integers(0, 6), max_size=20))
def test_inverse_is_that_of_the_reference(rows: list[int]) -> None:
    found, expected = both(lambda: inverse_of(np.array(rows, np.int64), 7))
    assert equal(found, expected)


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0]])
def test_inverse_index_out_of_range_is_an_error(rows: list[int]) -> None:
    def message() -> str:
        with pytest.raises(ValueError, match="inverse indices must be in") as error:
            inverse_of(np.array(rows), 3)
        return str(error.value)

    found, expected = both(message)
    assert found == expected


@pytest.mark.slow
@given(data=st.data())
def test_shared_rows_are_those_of_the_reference(data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(1, 12))
    num_tuples = data.draw(st.lists(st.integers(1, 4), max_size=4))
    groups = {
        f"g{g}": inverse_of(np.array(data.draw(_indices(count, num_samples)), np.int64), count)
        for g, count in enumerate(num_tuples)
    }
    owners = data.draw(st.lists(st.sampled_from([None, *groups]), min_size=1, max_size=6))
    group_of = {f"f{i}": owner for i, owner in enumerate(owners)}
    dense = np.array(data.draw(_indices(2, num_samples))).reshape(-1, 1) * np.ones((1, 2))
    tensor = torch.from_numpy(dense.astype(data.draw(st.sampled_from([np.float32, np.float64]))))
    found, expected = both(lambda: find_shared_features(groups, group_of, tensor))
    assert equal(found, expected)


def _indices(count: int, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count - 1), min_size=size, max_size=size)


def row_group(
    values: Lists, weights: Lists, inverse: list[int], plain: list[list[int]]
) -> RowGroup:
    """Return one block of samples, whose feature `a` is in a group and has weights."""
    num_samples, offsets = len(inverse), offsets_of(np.array([len(bag) for bag in plain]))
    flat = np.array([row for bag in plain for row in bag], np.int64)
    zeros = np.zeros(num_samples)
    return RowGroup(
        sample_offsets=np.array([0, num_samples]),
        unique_offsets={"g": np.array([0, len(values.starts)])},
        labels=zeros,
        weights=zeros,
        dense=np.zeros((num_samples, 0)),
        kept={},
        inverse={"g": np.array(inverse, np.int64)},
        sparse={"a": values, "b": Lists(flat, offsets[:-1], offsets[1:])},
        per_sample_weights={"a": weights},
    )


@pytest.mark.parametrize("expanded", [False, True])
def test_bags_of_two_row_groups_are_those_of_the_reference(expanded: bool) -> None:
    starts, ends = np.array([4, 0, 9]), np.array([8, 0, 10])
    overlapping = Lists(np.arange(10), np.array([3, 2, 0]), np.array([5, 6, 1]))
    weights = Lists(np.arange(6) / 7, np.array([0, 2, 1]), np.array([2, 6, 2]))
    one = row_group(
        Lists(np.arange(10, 20), starts, ends),
        Lists(np.arange(10) / 3, starts, ends),
        [2, 0, 0, 1],
        [[7], [], [8, 9], [1]],
    )
    other = row_group(overlapping, weights, [1, 0, 2], [[3], [4], [5]])
    table = TableConfig(num_rows=100, rows="identity", features=("a", "b"))
    spec = BatchSpec(
        label="label",
        weight=None,
        dense=(),
        sparse=("a", "b"),
        weighted=("a",),
        kept=(),
        owner={"a": "g"},
        tables={"t": table},
        table_of={"a": "t", "b": "t"},
        dtype="float64",
    )
    ranges = [BlockRange(each, 0, 1) for each in (one, other, padding_row_group(spec, 2))]
    step = Step(0, 0, 0, np.zeros(0, np.int64))
    found, expected = both(lambda: collate.collate(spec, step, ranges, expanded=expanded))
    bags = [[19], [14, 15, 16, 17], [14, 15, 16, 17], [], [2, 3, 4, 5], [3, 4], [0], [], []]
    unique = [[14, 15, 16, 17], [], [19], [3, 4], [2, 3, 4, 5], [0], []]
    values = found.sparse["a"]
    assert [list(map(int, bag)) for bag in values.to_dense()] == (bags if expanded else unique)
    assert torch.allclose(values.weights()[:5] * 3 + 10, values.values()[:5].double())
    assert equal(found.lookups, expected.lookups)
    for name in ("values", "weights", "lengths", "offsets"):
        assert equal(*(getattr(batch.sparse, name)() for batch in (found, expected))), name
