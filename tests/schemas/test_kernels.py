"""The compiled kernels equal their references in numpy, on any input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.quality import column_statistics as column_statistics_module
from pipelines.quality.column_statistics import column_statistics
from pipelines.samples import tuples
from pipelines.samples.tuples import unique_in_ranges
from schemas import arrays, group_files, hashing, oracle
from schemas import rows as rows_module
from schemas.arrays import (
    Jagged,
    comparable_tuple,
    offsets_of,
    take_ranges,
    take_rows,
    unique_tuples,
)
from schemas.config.job import TableConfig
from schemas.errors import SchemaError
from schemas.hashing import hash_rows, splitmix64
from schemas.kernels.arrays import ArrayKernels, array_kernels
from schemas.oracle import distinct_of_lists
from schemas.rows import distinct_rows


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the references alone."""
    for module in (arrays, hashing, oracle):
        monkeypatch.setattr(module, "array_kernels", lambda: None)


def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the body with the kernels, then with the references."""
    yield "compiled"
    for module in (arrays, hashing, oracle):
        monkeypatch.setattr(module, "array_kernels", lambda: None)
    yield "numpy"


def kernels() -> ArrayKernels:
    found = array_kernels()
    assert found is not None, "the tests need g++"
    return found


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
    taken = take_rows(table, np.array(rows, np.int64))
    expected = table.take(pa.array(rows, pa.int64()))
    assert taken.schema == expected.schema
    assert row_keys(taken) == row_keys(expected)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4)), st.data())
def test_lists_are_taken_as_from_python_lists(lists: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else []
    taken = jagged(lists).take(np.array(rows, np.int32))
    assert taken.values.tolist() == [v for row in rows for v in lists[row]]
    assert taken.lengths.tolist() == [len(lists[row]) for row in rows]


@given(st.lists(st.one_of(st.none(), st.integers(0, 9))), st.data())
def test_ranges_are_taken_as_from_python_lists(
    values: list[int | None], data: st.DataObject
) -> None:
    ends = st.lists(st.integers(0, len(values)), min_size=2, max_size=2).map(sorted)
    ranges = np.array(data.draw(st.lists(ends)), np.int64).reshape(-1, 2)
    array = pa.array([0, *values], pa.int16()).slice(1)
    taken = take_ranges(array, ranges[:, 0].copy(), ranges[:, 1] - ranges[:, 0])
    assert taken.to_pylist() == [v for start, end in ranges for v in values[start:end]]


@given(st.lists(st.lists(st.lists(st.integers(-5, 5)), min_size=4, max_size=4), min_size=1))
def test_distinct_values_of_lists_are_sorted_sets(sources: list[list[list[int]]]) -> None:
    found = distinct_of_lists([jagged(lists) for lists in sources])
    expected = [sorted({v for lists in sources for v in lists[block]}) for block in range(4)]
    assert found.values.tolist() == [v for values in expected for v in values]
    assert found.lengths.tolist() == list(map(len, expected))


def jagged(lists: list[list[int]]) -> Jagged:
    values = np.array([v for values in lists for v in values], np.int64)
    return Jagged(values, offsets_of(np.array(list(map(len, lists)), np.int64)))


@pytest.mark.parametrize("size", [0, 1, 63, 1000])
def test_hashes_equal_those_of_numpy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(size).integers(-(2**63), 2**63 - 1, size)
    hashes = [splitmix64(ids).tolist() for _ in both(monkeypatch)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("num_rows", [1, 7, 2**63])
def test_rows_of_hashed_tables_equal_those_of_numpy(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, (5, 40))
    rows = [hash_rows(ids, "items", num_rows).tolist() for _ in both(monkeypatch)]
    assert rows[0] == rows[1]


@pytest.mark.usefixtures("in_numpy")
@given(tables())
def test_references_number_the_same_rows(table: pa.Table) -> None:
    columns = comparable_tuple(table, table.column_names)
    flat = [(c.values, c.offsets) if isinstance(c, Jagged) else (c, None) for c in columns]
    found = kernels().unique_tuples(flat, table.num_rows)
    expected = unique_tuples(columns)
    assert found is not None
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def test_rows_of_one_hash_are_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seeds = ArrayKernels.unique_tuples, list[int]()

    def collide(self: ArrayKernels, columns: object, num_rows: int, seed: int = 0) -> object:
        seeds.append(seed)
        return None if seed < 2 else found(self, columns, num_rows, seed)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ArrayKernels, "unique_tuples", collide)
    assert unique_tuples([np.array([4, 4, 1])])[1].tolist() == [0, 0, 1]
    assert seeds == [0, 1, 2]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12))
def test_overlaps_equal_those_of_numpy(lists: list[list[int]]) -> None:
    rows = np.arange(0, len(lists), 1 + len(lists) // 7)
    flat = jagged(lists)
    flat = Jagged(flat.values.view(np.uint64), flat.offsets)
    compiled = kernels().overlaps(flat.values, flat.offsets, rows, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_files, "array_kernels", lambda: None)
        patch.setattr(group_files, "MAX_CANDIDATES", 3)
        assert group_files._overlaps(flat, rows).tolist() == compiled.tolist()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=60))
def test_unique_references_in_ranges_equal_those_of_numpy(pairs: list[tuple[int, int]]) -> None:
    ranges, references = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    references = np.random.default_rng(0).permutation(references)
    compiled = [x.tolist() for x in unique_in_ranges(ranges, references)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuples, "array_kernels", lambda: None)
        assert [x.tolist() for x in unique_in_ranges(ranges, references)] == compiled
    first, inverse = compiled
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
def test_distinct_rows_of_ids_equal_those_of_numpy(
    kind: str, blocks: list[list[list[int]]], rule: Literal["hash", "identity"], num_rows: int
) -> None:
    if kind.startswith("u"):
        blocks = [[[abs(i) for i in ids] for ids in lists] for lists in blocks]
    columns = [jagged(lists) for lists in blocks]
    columns = [Jagged(c.values.astype(kind), c.offsets) for c in columns]
    table = TableConfig(features=("a",), rows=rule, num_rows=num_rows)

    def found() -> object:
        try:
            rows = distinct_rows(columns, "items", table)
        except SchemaError as error:
            return str(error)
        return rows.values.tolist(), rows.offsets.tolist()

    compiled = found()
    with pytest.MonkeyPatch.context() as patch:
        for module in (arrays, hashing, oracle, rows_module):
            patch.setattr(module, "array_kernels", lambda: None)
        assert found() == compiled


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


@given(columns_of_numbers())
def test_statistics_equal_those_of_numpy(column: pa.Array) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_statistics_module, "SAMPLED_VALUES", 20)
        patch.setattr(column_statistics_module, "TOP_VALUES", 4)
        patch.setattr(column_statistics_module, "SMALLEST_HASHES", 3)
        compiled = column_statistics(column)
        patch.setattr(column_statistics_module, "statistics_kernels", lambda: None)
        assert column_statistics(column) == compiled


def test_statistics_of_many_numbers_equal_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.normal(0, 1e3, 70_000)
    numbers[:3] = 0.0, -0.0, 5e-324
    columns = [numbers, rng.zipf(1.3, 200_000), rng.integers(-(2**63), 2**63 - 1, 200_000)]
    compiled = [column_statistics(pa.array(c)) for c in columns]
    monkeypatch.setattr(column_statistics_module, "statistics_kernels", lambda: None)
    assert [column_statistics(pa.array(c)) for c in columns] == compiled
