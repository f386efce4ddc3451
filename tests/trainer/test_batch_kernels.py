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
from trainer.data import collate, lookup, shared
from trainer.data.kernels import ListRows, batch_kernels
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


@given(data=st.data())
def test_lists_are_those_of_the_reference(data: st.DataObject) -> None:
    parts: list[ListRows] = []
    for _ in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        values = np.array(data.draw(_indices(100, sum(lengths))), np.int64)
        rows = data.draw(st.none() | st.lists(st.integers(0, len(lengths) - 1), max_size=6))
        size = len(lengths) if rows is None else len(rows)
        start = data.draw(st.integers(0, size))
        indices = None if rows is None else np.array(rows, np.int64)
        end = data.draw(st.integers(start, size))
        has_values = data.draw(st.booleans())
        offsets = offsets_of(np.array(lengths))
        parts.append(ListRows(values if has_values else None, offsets, indices, start, end))

    def make() -> list[list[int]]:
        lengths, offsets = collate._list_offsets(parts)
        out = np.full(int(offsets[-1]), -1)
        collate._write_lists(parts, out)
        return [lengths.tolist(), offsets.tolist(), out.tolist()]

    found, expected = both(make)
    assert found == expected
