"""The compiled kernels that make batches equal their references, on any input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.arrays import offsets_of
from presage.schemas.config.job import TableConfig
from presage.schemas.dataset.order import Step
from presage.trainer.data import batch, collate, shared
from presage.trainer.data.collate import RowGroupBlocks
from presage.trainer.data.decode import BatchSpec, Lists, RowGroup, padding_row_group
from presage.trainer.data.lookup import (
    Inverse,
    KeyedBags,
    TableLookup,
    VectorLayout,
    inverse_of,
    table_lookups,
    vector_layout,
)
from presage.trainer.data.shared import find_shared_features

TABLES = {"items": ("item", "clicked"), "users": ("user",)}
FEATURES = ("clicked", "user", "item")


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
    found = table_lookups(TABLES, bags, layout)
    assert equal(found, {t: reference_lookup(f, bags, layout) for t, f in TABLES.items()})


def reference_lookup(
    features: tuple[str, ...], bags: KeyedBags, layout: VectorLayout
) -> TableLookup:
    ends = np.cumsum(list(bags.num_bags.values())).tolist()
    ranges = {f: (end - n, end) for (f, n), end in zip(bags.num_bags.items(), ends, strict=True)}
    lengths = [bags.lengths[slice(*ranges[f])] for f in features]
    cuts = [slice(*bags.offsets[list(ranges[f])]) for f in features]
    rows, positions = np.unique(np.concatenate([bags.values[c] for c in cuts]), return_inverse=True)
    order = np.argsort(positions, kind="stable")
    vectors = [layout.of(f)[0] + layout.of(f)[1] * np.arange(bags.num_bags[f]) for f in features]
    readers = np.repeat(np.concatenate(vectors), np.concatenate(lengths))[order]
    weights = None
    if bags.weights is not None and not bags.weighted.isdisjoint(features):
        weights = np.concatenate([bags.weights[c] for c in cuts])
    return TableLookup(
        features=features,
        bags_per_feature=tuple(bags.num_bags[f] for f in features),
        values_per_feature=tuple(int(of.sum()) for of in lengths),
        rows=rows,
        longest_bag=int(np.concatenate(lengths).max(initial=0)),
        positions=torch.from_numpy(positions).int(),
        bag_offsets=torch.from_numpy(offsets_of(np.concatenate(lengths))).int(),
        readers=torch.from_numpy(readers).int(),
        reader_offsets=torch.from_numpy(offsets_of(np.bincount(positions))).int(),
        per_sample_weights=None if weights is None else torch.from_numpy(weights),
        reader_weights=None if weights is None else torch.from_numpy(weights[order]),
    )


@given(values=st.lists(st.integers(0, 2**62) | st.integers(0, 70), max_size=60))
def test_positions_are_those_of_the_reference(values: list[int]) -> None:
    for limit in (2**63, 2**40, 2**11, 1):
        array = np.array([value % limit for value in values], np.int64)
        expected = np.unique(array, return_inverse=True)
        found = batch.distinct_positions(array)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@given(rows=st.lists(st.integers(0, 6), max_size=20))
def test_inverse_is_that_of_the_reference(rows: list[int]) -> None:
    found = inverse_of(np.array(rows, np.int64), 7)
    assert found.order.tolist() == sorted(range(len(rows)), key=rows.__getitem__)
    assert found.offsets.tolist() == [sum(row < limit for row in rows) for limit in range(8)]


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0]])
def test_inverse_index_out_of_range_is_an_error(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"inverse indices must be in \[0, 3\), got"):
        inverse_of(np.array(rows), 3)


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
    found = find_shared_features(groups, group_of, tensor)
    indices = {g: inverse.indices.tolist() for g, inverse in groups.items()}
    sizes = {g: inverse.num_unique for g, inverse in groups.items()}
    expected = reference_division(indices, sizes, owners, tensor[:, 0].tolist())
    if expected is None:
        assert found is None
        return
    members, rows, shares_dense = expected
    assert found is not None
    assert set(found.tuples) == set(members)
    assert found.rows.indices.tolist() == rows
    assert (found.shared_dense is not None) == shares_dense
    for group, tuples in found.tuples.items():
        own = range(found.num_rows) if tuples is None else tuples.indices.tolist()
        assert [own[row] for row in rows] == indices[group]


def reference_division(
    indices: dict[str, list[int]],
    sizes: dict[str, int],
    owners: list[str | None],
    dense: list[float],
) -> tuple[list[str], list[int], bool] | None:
    """Return the groups of a greedy search, the row of each sample, whether dense is shared."""

    def products(num_shared: int, num_rows: int) -> int:
        num_own = len(owners) + 1 - num_shared
        own_pairs = num_shared * num_own + num_own * (num_own - 1) // 2
        return num_rows * (num_shared * (num_shared - 1) // 2) + len(dense) * own_pairs

    best: tuple[list[str], list[int], bool] | None = None
    cost = products(0, 0)
    while True:
        candidates: list[tuple[int, tuple[list[str], list[int], bool]]] = []
        chosen = [] if best is None else best[0]
        for group in (g for g in indices if g not in chosen):
            members = [*chosen, group]
            keys = list(zip(*(indices[m] for m in members), strict=True))
            numbers = {key: n for n, key in enumerate(sorted(set(keys), key=_order_of(best, keys)))}
            rows = indices[group] if best is None else [numbers[key] for key in keys]
            num_rows = sizes[group] if best is None else len(numbers)
            shares = len(set(zip(rows, dense, strict=True))) == len(set(rows))
            num_shared = sum(owner in members for owner in owners) + shares
            candidates.append((products(num_shared, num_rows), (members, rows, shares)))
        lowest, candidate = min(candidates, key=lambda pair: pair[0], default=(cost, best))
        if lowest >= cost:
            return best
        cost, best = lowest, candidate


def _order_of(
    best: tuple[list[str], list[int], bool] | None, keys: list[tuple[int, ...]]
) -> Callable[[tuple[int, ...]], tuple[int, int]]:
    """Return the order of pairs: by the row so far, then by the tuple that joins it."""
    row_of = dict(zip(keys, best[1] if best else [0] * len(keys), strict=True))
    return lambda key: (row_of[key], key[-1])


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
    ranges = [RowGroupBlocks(each, 0, 1) for each in (one, other, padding_row_group(spec, 2))]
    step = Step(0, 0, 0, np.zeros(0, np.int64))
    found = collate.collate(spec, step, ranges, expanded=expanded)
    bags = [[19], [14, 15, 16, 17], [14, 15, 16, 17], [], [2, 3, 4, 5], [3, 4], [0], [], []]
    unique = [[14, 15, 16, 17], [], [19], [3, 4], [2, 3, 4, 5], [0], []]
    values = found.sparse["a"]
    assert [list(map(int, bag)) for bag in values.to_dense()] == (bags if expanded else unique)
    first, second = [4 / 3, 5 / 3, 6 / 3, 7 / 3], [2 / 7, 3 / 7, 4 / 7, 5 / 7]
    if expanded:
        expected = [9 / 3, *first, *first, *second, 0, 1 / 7, 1 / 7]
    else:
        expected = [*first, 9 / 3, 0, 1 / 7, *second, 1 / 7]
    assert values.weights()[: len(expected)].tolist() == expected
    plain = found.sparse["b"]
    assert [list(map(int, bag)) for bag in plain.to_dense()] == [
        [7], [], [8, 9], [1], [3], [4], [5], [], []
    ]  # fmt: skip
    assert plain.weights().tolist() == [1.0] * 7
