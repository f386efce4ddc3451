"""Arrow columns as flat arrays: equal exactly if the rows are equal."""

import re
from datetime import date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from presage.schemas.arrays import comparable, jagged_of, large_list, numpy_of, unique_tuples
from presage.schemas.errors import SchemaError
from tests.schemas.reference import dedup

# Type to values that are easily taken for each other: nulls and zeros, empty texts, empty lists.
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int": (pa.int64(), [None, 0, 1, -1]),
    "small int": (pa.int8(), [None, 0, 1, -1]),
    "float": (pa.float32(), [None, 0.0, 1.5]),
    "bool": (pa.bool_(), [None, False, True]),
    "text": (pa.string(), [None, "", "a", "ab", "b", "a\0", "\N{SNOWMAN}"]),
    "large text": (pa.large_string(), [None, "", "a", "ab"]),
    "text view": (pa.string_view(), [None, "", "a", "a text that is longer than a view"]),
    "bytes": (pa.binary(), [None, b"", b"\0", b"\0\0"]),
    "fixed bytes": (pa.binary(2), [None, b"ab", b"\0\0"]),
    "time": (pa.timestamp("us"), [None, datetime(1970, 1, 1), datetime(2026, 1, 1)]),
    "zoned time": (pa.timestamp("ms", "UTC"), [None, 0, 1]),
    "date": (pa.date32(), [None, date(1970, 1, 1), date(2026, 1, 1)]),
    "time of day": (pa.time32("s"), [None, 0, 1]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), [None, "", "a"]),
    "list": (pa.list_(pa.int64()), [None, [], [0], [0, 0], [None], [0, None], [None, 0]]),
    "large text without nulls": (pa.large_string(), ["", "a", "ab", "ba"]),
    "large list without nulls": (pa.large_list(pa.int64()), [[], [0], [0, 1], [1, 0]]),
    "large list": (pa.large_list(pa.float64()), [None, [], [0.0], [1.0]]),
    "list of texts": (
        pa.large_list(pa.string()),
        [None, [], [""], ["", ""], ["ab"], ["a", "b"], ["b", "a"], [None], [None, ""]],
    ),
    "list of texts without nulls": (
        pa.list_(pa.large_string()),
        [[], [""], ["a", "bc"], ["ab", "c"]],
    ),
    "list of lists": (pa.list_(pa.list_(pa.int64())), [[], [[]], [[1]], [[1], []], [[], [1]]]),
    "fixed list": (pa.list_(pa.int32(), 2), [None, [0, 0], [0, 1], [None, 0]]),
}


def array_of(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """An array of any type, a dictionary too."""
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)


def hashable(value: Any) -> Any:
    """A row as the reference takes it."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


@pytest.mark.parametrize(("kind", "values"), VALUES.values(), ids=VALUES.keys())
def test_comparable_finds_the_distinct_rows_of_each_type(
    kind: pa.DataType, values: list[Any]
) -> None:
    rng = np.random.default_rng(0)
    rows = [values[index] for index in rng.integers(0, len(values), 60)]
    # A sliced array: offsets and validity then start in the middle.
    array = array_of(kind, [values[-1], *rows])[1:]
    expected, expected_inverse = dedup([hashable(row) for row in rows])
    for column in (array, pa.chunked_array([array]), pa.chunked_array([array[:20], array[20:]])):
        first, inverse_indices = unique_tuples(comparable(column))
        assert [hashable(rows[index]) for index in first] == expected
        assert inverse_indices.tolist() == expected_inverse
    first, inverse_indices = unique_tuples(comparable(array_of(kind, [])))
    assert len(first) == len(inverse_indices) == 0


def test_jagged_of_a_masked_list_leaves_out_what_lies_below_the_null() -> None:
    array = pa.LargeListArray.from_arrays(
        pa.array([0, 2, 4]), pa.array([1, 2, 3, 4]), mask=pa.array([True, False])
    )
    x = jagged_of(array)
    assert (x.values.tolist(), x.offsets.tolist()) == ([3, 4], [0, 0, 2])


def test_jagged_of_large_list_gives_back_the_same_list() -> None:
    array = large_list(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
    x = jagged_of(array)
    assert large_list(x.values, x.offsets).equals(array)
    assert array.type == pa.large_list(pa.int64())


def test_numpy_of_times_and_bools_gives_numbers() -> None:
    assert numpy_of(pa.array([date(1970, 1, 3)])).tolist() == [2]
    assert numpy_of(pa.array([datetime(1970, 1, 1, 0, 0, 1)])).tolist() == [1_000_000]
    assert numpy_of(pa.array([True, False])).tolist() == [1, 0]


REFUSED = {
    "null in numbers": (
        lambda: numpy_of(pa.array([1, None])),
        "column has nulls: 1; fill them first",
    ),
    "null in a list": (
        lambda: jagged_of(pa.array([[1, None]])),
        "column has nulls: 1; fill them first",
    ),
    "no list": (
        lambda: jagged_of(pa.array([1])),
        "column must be a list, got int64; declare it as one",
    ),
    "map": (
        lambda: comparable(pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))),
        "column must hold numbers, times or texts, got map<string, int64>; cast it in SQL",
    ),
    "only nulls": (
        lambda: comparable(pa.nulls(2)),
        "column must hold numbers, times or texts, got null; cast it in SQL",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_column_of_a_type_that_does_not_fit_raises(call, message: str) -> None:
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        call()
