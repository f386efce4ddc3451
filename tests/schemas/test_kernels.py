"""The compiled kernels equal their references in plain Python and numpy, on any input."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.quality import column_statistics as statistics
from presage.pipelines.quality.column_statistics import (
    column_statistics,
    exact_sums,
    mean_and_deviation,
)
from presage.pipelines.samples.tuples import unique_in_ranges
from presage.schemas.arrays import (
    Jagged,
    comparable_tuple,
    numpy_of,
    offsets_of,
    take_ranges,
    take_rows,
    unique_tuples,
)
from presage.schemas.config.job import TableConfig
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import hash_rows, salt_of, splitmix64
from presage.schemas.kernels import arrays as kernels
from presage.schemas.oracle.next_uses import distinct
from presage.schemas.rows import distinct_rows, rows_of_ids
from tests.schemas import reference

VALUES = {
    "int8": st.integers(-3, 3),
    "int64": st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1)),
    "uint32": st.integers(0, 2**32 - 1),
    "float64": st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
    "float32": st.sampled_from([0.0, -0.0, 1.5, float("nan")]),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Tables of numbers, texts and lists, with and without nulls, as slices of larger ones."""
    rows = draw(st.integers(0, 40))
    columns: dict[str, pa.Array] = {}
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from([*VALUES, "string", "bool", "timestamp"]))
        value = VALUES.get(kind)
        if value is None:
            value = {
                "string": st.sampled_from(["", "a", "b", "a\0", "ab", "a" * 40]),
                "bool": st.booleans(),
                "timestamp": st.integers(0, 3),
            }[kind]
        arrow = pa.timestamp("us") if kind == "timestamp" else pa.type_for_alias(kind)
        if kind in VALUES and draw(st.booleans()):
            value, arrow = st.lists(value, max_size=6), pa.large_list(arrow)
        if draw(st.booleans()):
            value = st.one_of(st.none(), value)
        values = draw(st.lists(value, min_size=rows, max_size=rows))
        columns[str(index)] = pa.array(values, arrow)
    return pa.table(columns).slice(draw(st.integers(0, 3)))


def row_keys(table: pa.Table) -> list[tuple[object, ...]]:
    """Return keys of rows that are equal exactly if the bits of all values are."""

    def key(value: object) -> object:
        if isinstance(value, list):
            return tuple(map(key, value))
        return value.hex() if isinstance(value, float) else value

    return [tuple(key(v) for v in row.values()) for row in table.to_pylist()]


@given(tables())
def test_distinct_rows_are_those_of_a_dictionary(table: pa.Table) -> None:
    first, inverse = unique_tuples(comparable_tuple(table, table.column_names))
    numbers: dict[tuple[object, ...], int] = {}
    expected = [numbers.setdefault(key, len(numbers)) for key in row_keys(table)]
    assert inverse.tolist() == expected
    assert [expected.index(number) for number in range(len(numbers))] == first.tolist()


@given(tables(), st.data())
def test_rows_are_taken_as_by_arrow(table: pa.Table, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, table.num_rows - 1))) if table.num_rows else []
    result = take_rows(table, np.array(rows, np.int64))
    expected = table.take(pa.array(rows, pa.int64()))
    assert result.schema == expected.schema
    assert row_keys(result) == row_keys(expected)


@given(
    st.sampled_from([(0, 4), (1, 1)]).flatmap(  # one value per row is a case of its own
        lambda sizes: st.lists(st.lists(st.integers(0, 9), min_size=sizes[0], max_size=sizes[1]))
    ),
    st.data(),
)
def test_lists_are_taken_as_from_python_lists(lists: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else []
    result = jagged(lists).take(np.array(rows, np.int32))
    assert result.values.tolist() == [v for row in rows for v in lists[row]]
    assert result.lengths.tolist() == [len(lists[row]) for row in rows]


@given(st.lists(st.one_of(st.none(), st.integers(0, 9))), st.data())
def test_ranges_are_taken_as_from_python_lists(
    values: list[int | None], data: st.DataObject
) -> None:
    ends = st.lists(st.integers(0, len(values)), min_size=2, max_size=2).map(sorted)
    ranges = np.array(data.draw(st.lists(ends)), np.int64).reshape(-1, 2)
    array = pa.array([0, *values], pa.int16()).slice(1)
    result = take_ranges(array, ranges[:, 0].copy(), ranges[:, 1] - ranges[:, 0])
    assert result.to_pylist() == [v for start, end in ranges for v in values[start:end]]


@given(st.lists(st.lists(st.integers(0, 9) | st.integers(0, 2**63 - 1))))
def test_distinct_values_of_lists_are_sorted_sets(lists: list[list[int]]) -> None:
    found = distinct(jagged(lists))
    expected = [sorted(set(values)) for values in lists]
    assert found.values.tolist() == [v for values in expected for v in values]
    assert found.lengths.tolist() == list(map(len, expected))


def jagged(lists: list[list[int]]) -> Jagged:
    values = np.array([v for values in lists for v in values], np.int64)
    return Jagged(values, offsets_of(np.array(list(map(len, lists)), np.int64)))


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_hashes_are_those_of_the_algorithm(ids: list[int]) -> None:
    expected = [reference.splitmix64(x % 2**64) for x in ids]
    assert splitmix64(np.array(ids, np.int64)).tolist() == expected
    assert splitmix64(np.array([ids, ids], np.int64)).tolist() == [expected, expected]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.sampled_from([1, 7, 64, 2**63 - 1, 2**63]))
def test_rows_of_hashed_tables_are_remainders_of_hashes(ids: list[int], num_rows: int) -> None:
    salt = int(salt_of("items"))
    expected = [reference.splitmix64(x % 2**64 ^ salt) % 2**63 % num_rows for x in ids]
    assert hash_rows(np.array(ids, np.int64), "items", num_rows).tolist() == expected


def test_rows_of_one_hash_are_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seeds = kernels.unique_tuples, list[int]()

    def collide(columns: Any, seed: int) -> object:
        seeds.append(seed)
        return None if seed < 2 else found(columns, seed)

    monkeypatch.setattr(kernels, "unique_tuples", collide)
    assert unique_tuples([np.array([4, 4, 1])])[1].tolist() == [0, 0, 1]
    assert seeds == [0, 1, 2]


def overlap(before: list[int], after: list[int], max_candidates: int) -> int:
    shorter = min(len(before), len(after))
    lengths = [n for n in range(shorter, 0, -1) if before[-n] == after[0] and 2 * n >= shorter]
    return next((n for n in lengths[:max_candidates] if before[-n:] == after[:n]), 0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12))
def test_overlaps_equal_those_of_python_lists(lists: list[list[int]]) -> None:
    rows = np.arange(0, len(lists), 1 + len(lists) // 7)
    flat = jagged(lists)
    found = kernels.overlaps(flat.values.view(np.uint64), flat.offsets, rows, 3)
    chosen = [lists[row] for row in rows]
    assert found.tolist() == [0, *(overlap(a, b, 3) for a, b in pairwise(chosen))]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=60))
def test_unique_references_in_ranges_are_those_of_a_dictionary(
    pairs: list[tuple[int, int]],
) -> None:
    ranges, references = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    references = np.random.default_rng(0).permutation(references)
    first, inverse = (x.tolist() for x in unique_in_ranges(ranges, references))
    keys = list(zip(ranges.tolist(), references.tolist(), strict=True))
    assert [keys[i] for i in first] == list(dict.fromkeys(keys))
    assert [keys[first[i]] for i in inverse] == keys


SMALL = st.lists(st.lists(st.integers(-4, 70), max_size=40), min_size=3, max_size=3)


@given(
    st.sampled_from(["int8", "int64", "uint16"]),
    st.lists(SMALL, min_size=1, max_size=3),
    st.sampled_from(["hash", "identity"]),
    st.sampled_from([1, 64, 70, 5000, 1 << 24, (1 << 24) + 1, 2**63]),
)
def test_distinct_rows_of_ids_are_sorted_sets(
    kind: str, blocks: list[list[list[int]]], rule: Literal["hash", "identity"], num_rows: int
) -> None:
    if kind.startswith("u"):
        blocks = [[[abs(i) for i in ids] for ids in lists] for lists in blocks]
    columns = [jagged(lists) for lists in blocks]
    columns = [Jagged(c.values.astype(kind), c.offsets) for c in columns]
    table = TableConfig(features=("a",), rows=rule, num_rows=num_rows)
    ids = [[i for lists in blocks for i in lists[block]] for block in range(3)]
    if rule == "identity" and any(not 0 <= i < num_rows for block in ids for i in block):
        with pytest.raises(SchemaError, match="id must be in"):
            distinct_rows(columns, "items", table)
        return
    found = distinct_rows(columns, "items", table)
    expected = [sorted(set(rows_of_ids(np.array(i, np.int64), "items", table))) for i in ids]
    assert found.values.tolist() == [row for rows in expected for row in rows]
    assert found.lengths.tolist() == list(map(len, expected))


def limits(sign: str, bits: int) -> st.SearchStrategy[int]:
    """Return integers of a type, often small ones or the limits."""
    low, high = (0, 2**bits - 1) if sign == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.one_of(st.integers(0, 3), st.integers(low, high), st.sampled_from([low, high]))


VALUES_OF_KIND: dict[str, st.SearchStrategy[object]] = {
    **{f"{s}int{b}": limits(s, b) for s in ("", "u") for b in (8, 16, 32, 64)},
    **{f"float{b}": st.floats(width=b) for b in (16, 32, 64)},
    "timestamp": limits("", 64),
    "bool": st.booleans(),
}


@st.composite
def columns_of_numbers(draw: st.DrawFn) -> pa.Array:
    """Columns of any numbers, with nulls, as slices; limits and equal values are frequent."""
    kind = draw(st.sampled_from([*VALUES_OF_KIND]))
    value = VALUES_OF_KIND[kind]
    arrow = pa.timestamp("us") if kind == "timestamp" else pa.type_for_alias(kind)
    if draw(st.booleans()):
        value, arrow = st.lists(value, max_size=5), pa.large_list(arrow)
    if draw(st.booleans()):
        value = st.one_of(st.none(), value)
    return pa.array(draw(st.lists(value, max_size=60)), arrow)[draw(st.integers(0, 2)) :]


def described(column: pa.Array) -> tuple[object, ...]:
    """Return what `column_statistics` says of the values of a column, by numpy and fractions."""
    present = column.drop_null()
    if pa.types.is_large_list(present.type):
        present = present.flatten().drop_null()
    values = numpy_of(present)
    finite = values[np.isfinite(values)]
    exact = [Fraction(x) for x in finite.tolist()]
    buckets = Counter((finite.astype(np.float64) + 0.0).view(np.uint64) >> np.uint64(50))
    counts = Counter(finite.tolist())
    least = len(finite) / 4 / TOP if len(counts) > TOP else 0
    frequent = [each for each in counts.items() if each[1] >= least]
    top = sorted(frequent, key=lambda item: (-item[1], item[0]))[:TOP]
    hashes = sorted({reference.splitmix64(int(x) % 2**64) for x in finite.tolist()})[:HASHES]
    is_whole = finite.dtype.kind != "f"
    return (
        len(finite),
        sum(x == 0 for x in exact),
        float(min(finite.tolist(), default=float("inf"))),
        float(max(finite.tolist(), default=float("-inf"))),
        sum(exact) * 2**1074,
        sum(x * x for x in exact) * 2**2148,
        dict(buckets),
        dict(top) if is_whole else {},
        hashes if is_whole else [],
    )


TOP, HASHES = 4, 3


def compare_statistics(column: pa.Array) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "TOP_VALUES", TOP)
        patch.setattr(statistics, "SMALLEST_HASHES", HASHES)
        found = column_statistics(column)
    values = [] if found.sketch.values is None else found.sketch.values.to_pylist()
    assert described(column) == (
        found.num_values,
        found.num_zeros,
        found.minimum,
        found.maximum,
        found.total,
        found.total_squares,
        found.sketch.buckets,
        dict(zip(values, found.sketch.counts.tolist(), strict=True)),
        found.sketch.hashes.tolist(),
    )


@given(columns_of_numbers())
def test_statistics_equal_those_of_numpy(column: pa.Array) -> None:
    compare_statistics(column)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "zipf", "integers", "small"])
def test_statistics_of_many_numbers_equal_those_of_numpy(kind: str) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.normal(0, 1e3, 70_000)
    numbers[:3] = 0.0, -0.0, 5e-324
    columns = {
        "normal": numbers,
        "zipf": rng.zipf(1.3, 70_000),
        "integers": rng.integers(-(2**63), 2**63 - 1, 70_000),
        "small": rng.integers(-1000, 1000, 70_000, np.int32),
    }
    compare_statistics(pa.array(columns[kind]))


SUMMED = st.lists(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([5e-324, -5e-324, 1e308, -1e308, 1.0, 2**53 + 2.0])
)


@given(SUMMED, st.integers(0, 20), st.randoms())
def test_sums_are_those_of_fractions_in_any_order_and_parts(
    values: list[float], cut: int, random: Random
) -> None:
    total, squares = exact_sums(np.array(values, np.float64))
    exact = [Fraction(x) for x in values]
    assert (total, squares) == (sum(exact) * 2**1074, sum(x * x for x in exact) * 2**2148)
    shuffled = np.array(random.sample(values, len(values)), np.float64)
    parts = exact_sums(shuffled[:cut]), exact_sums(shuffled[cut:])
    assert tuple(map(sum, zip(*parts, strict=True))) == (total, squares)
    if values:
        mean, deviation = mean_and_deviation(total, squares, len(values))
        assert mean == float(sum(exact) / len(exact))
        variance = sum((x - sum(exact) / len(exact)) ** 2 for x in exact) / len(exact)
        if Fraction(2) ** -1000 < variance < Fraction(2) ** 1000:
            assert deviation == math.sqrt(float(variance))
        else:
            assert 0 <= deviation < float("inf")


def test_sums_of_more_squares_than_fit_128_bits_are_exact() -> None:
    largest = np.full((1 << 22) + 3, np.finfo(np.float64).max)
    exact = Fraction(float(largest[0]))
    assert exact_sums(largest) == (
        exact * len(largest) * 2**1074,
        exact**2 * len(largest) * 2**2148,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_sums_of_values_that_are_not_finite_are_an_error(value: float) -> None:
    with pytest.raises(ValueError, match="values must be finite"):
        exact_sums(np.array([1.0, value, -value]))


@pytest.mark.parametrize(
    ("values", "offsets", "rows", "error"),
    [
        ([1, 2], np.array([0, 2], np.int32), [0], TypeError),
        ([1, 2], np.array([0, 1, 2])[::2], [0], TypeError),
        ([1, 2], np.array([[0, 2]]), [0], TypeError),
        ([1, 2], [0, 2], np.array([0.0]), TypeError),
        ([1, 2], [], [], ValueError),
        ([1, 2], [0, 3], [0], ValueError),
        ([1, 2], [-1, 2], [0], ValueError),
        ([1, 2], [0, 2, 1], [0], ValueError),
        ([1, 2], [0, 2], [1], ValueError),
        ([1, 2], [0, 2], [-1], ValueError),
    ],
)
def test_arguments_of_kernels_are_checked(
    values: list[int], offsets: Any, rows: Any, error: type[Exception]
) -> None:
    """Types are those of the signature; nothing is converted, and nothing outside is read."""
    arrays = [
        np.asarray(x, None if isinstance(x, np.ndarray) else np.int64) for x in (offsets, rows)
    ]
    with pytest.raises(error):
        kernels.take_lists(np.array(values), *arrays)
