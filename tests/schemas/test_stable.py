"""Hashes of values depend only on the value."""

import numpy as np
import pyarrow as pa
import pytest

from presage.schemas.arrays import NULL, combine_hashes, hash_values
from tests.schemas.reference import hash_text, splitmix64

MASK = (1 << 64) - 1


def test_hash_of_numbers_follows_the_formula() -> None:
    salt = splitmix64(0)
    numbers = [0, 1, -1, 2**63 - 1]
    expected = [splitmix64(splitmix64(n & MASK ^ salt) ^ salt) for n in numbers]
    assert hash_values(pa.array(numbers)).tolist() == expected


def test_hash_of_a_list_of_texts_is_that_of_the_list_of_their_hashes() -> None:
    salt, lists = splitmix64(0), [["a", ""], [], ["b", "a", "a"]]
    for rows, found in zip(lists, hash_values(pa.array(lists)).tolist(), strict=True):
        hashes = [hash_text(text) & MASK for text in rows]
        total = sum(splitmix64(h + splitmix64(i) + salt & MASK) for i, h in enumerate(hashes))
        assert found == splitmix64(splitmix64(total + len(rows) & MASK) ^ salt)
    nulls = hash_values(pa.array([None, ["a"]]))
    assert nulls.tolist() == [int(NULL), int(hash_values(pa.array([["a"]]))[0])]


SAME = {
    "integers of two widths": (pa.array([3, -1], pa.int8()), pa.array([3, -1], pa.int64())),
    "signed and unsigned": (pa.array([3], pa.int64()), pa.array([3], pa.uint64())),
    "booleans and integers": (pa.array([True, False]), pa.array([1, 0], pa.int32())),
    "floats of two widths": (pa.array([0.5], pa.float32()), pa.array([0.5], pa.float64())),
    "times and their microseconds": (pa.array([7], pa.timestamp("us")), pa.array([7])),
    "lists of two widths": (
        pa.array([[1, 2], []], pa.large_list(pa.int64())),
        pa.array([[1, 2], []], pa.list_(pa.int16())),
    ),
}


@pytest.mark.parametrize(("left", "right"), SAME.values(), ids=SAME)
def test_equal_values_of_two_types_have_one_hash(left: pa.Array, right: pa.Array) -> None:
    assert hash_values(left).tolist() == hash_values(right).tolist()


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.float32(), pa.large_list(pa.int64())])
def test_nulls_do_not_change_the_hashes_of_the_others(kind: pa.DataType) -> None:
    value = {"string": "x", "float": 0.5, "large_list<item: int64>": [1]}.get(str(kind), 9)
    found = hash_values(pa.array([None, value, None], kind))
    assert found[0] == found[2] == NULL
    assert found[1] == hash_values(pa.array([value], kind))[0]
    assert hash_values(pa.array([None], kind)).tolist() == [int(NULL)]
    assert len(hash_values(pa.array([], kind))) == 0


def test_combined_hash_depends_on_the_order_of_columns() -> None:
    table = pa.table({"b": [1, 2], "a": [2, 1]})
    a, b = hash_values(table["a"]), hash_values(table["b"])
    combined = combine_hashes([a, b])
    assert combined[0] != combined[1]
    expected = [
        splitmix64(splitmix64(int(x)) * 31 + int(y) & MASK) for x, y in zip(a, b, strict=True)
    ]
    assert combined.tolist() == expected
    assert np.array_equal(a, hash_values(table["a"]))
