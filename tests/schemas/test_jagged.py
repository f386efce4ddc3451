"""Deduplication: exact for any bits, equal to the reference, and correct under hash collisions."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.arrays import (
    Jagged,
    check_inverse,
    dedup,
    expand,
    offsets_of,
    ranges,
    unique_tuples,
)
from presage.schemas.errors import SchemaError
from tests.schemas import reference

# Few distinct values, so that rows repeat.
IDS = st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1])
ROWS_OF_IDS = st.lists(st.lists(IDS, max_size=3), max_size=30)


def jagged_from(rows: Sequence[Sequence[int]], dtype: str) -> Jagged:
    """Build a jagged tensor whose values have the given bits."""
    flat = np.array([value & ((1 << 64) - 1) for row in rows for value in row], np.uint64)
    lengths = np.array([len(row) for row in rows], np.int64)
    return Jagged(flat.view(dtype), offsets_of(lengths))


def tuples_of(x: Jagged) -> list[tuple[int, ...]]:
    """The rows as tuples of bits."""
    bits = x.values.view(np.uint64).tolist()
    return [tuple(bits[a:b]) for a, b in zip(x.offsets[:-1], x.offsets[1:], strict=True)]


@given(ROWS_OF_IDS)
def test_dedup_equals_the_reference(rows: list[list[int]]) -> None:
    x = jagged_from(rows, "i8")
    unique, inverse_indices = dedup(x)
    expected, expected_inverse = reference.dedup(tuples_of(x))
    assert tuples_of(unique) == expected
    assert inverse_indices.tolist() == expected_inverse
    assert inverse_indices.dtype == np.int32
    assert tuples_of(expand(unique, inverse_indices)) == reference.expand(
        expected, expected_inverse
    )


def test_dedup_tells_nan_bits_and_signed_zeros_apart() -> None:
    x = jagged_from([[0], [1 << 63], [0x7FF8 << 48], [(0x7FF8 << 48) + 1], [0x7FF8 << 48]], "f8")
    unique, inverse_indices = dedup(x)
    assert tuples_of(expand(unique, inverse_indices)) == tuples_of(x)
    assert unique.num_rows == 4
    assert inverse_indices.tolist() == [0, 1, 2, 3, 2]


def test_dedup_tells_rows_apart_that_differ_in_order_length_or_cut() -> None:
    rows = [[1, 2], [2, 1], [1], [2], [], [1, 2, 0], [0, 1, 2]]
    unique, inverse_indices = dedup(jagged_from(rows, "i8"))
    assert tuples_of(unique) == [tuple(row) for row in rows]
    assert inverse_indices.tolist() == list(range(len(rows)))


DTYPES = ("i1", "u2", "i4", "f2", "f4", "f8", "i8", "u8", "?")


@pytest.mark.parametrize("dtype", DTYPES)
def test_expand_of_dedup_is_identity_for_each_width(dtype: str) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 3, 200)
    values = rng.integers(0, 2, int(lengths.sum())).astype(dtype)
    x = Jagged(values, offsets_of(lengths))
    unique, inverse_indices = dedup(x)
    expanded = expand(unique, inverse_indices)
    assert expanded.values.dtype == x.values.dtype
    np.testing.assert_array_equal(expanded.values, x.values)
    np.testing.assert_array_equal(expanded.offsets, x.offsets)
    assert unique.num_rows == 1 + 2 + 4


def test_dedup_changes_no_input() -> None:
    x = jagged_from([[3, 4], [], [3, 4]], "i8")
    values, offsets = x.values.copy(), x.offsets.copy()
    x.values.flags.writeable = x.offsets.flags.writeable = False
    expand(*dedup(x))
    np.testing.assert_array_equal(x.values, values)
    np.testing.assert_array_equal(x.offsets, offsets)


def test_unique_tuples_of_no_column_raises() -> None:
    with pytest.raises(ValueError, match=re.escape("columns is empty; add a column")):
        unique_tuples([])


BAD_INVERSE = {
    "below": ([0, -1], "got inverse_indices[1]=-1"),
    "above": ([0, 1, 2], "got inverse_indices[2]=2"),
}


@pytest.mark.parametrize(("inverse", "found"), BAD_INVERSE.values(), ids=BAD_INVERSE.keys())
def test_expand_with_an_entry_outside_raises(inverse: list[int], found: str) -> None:
    message = f"inverse_indices must be in [0, 2), {found}; rebuild the dataset"
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        expand(jagged_from([[1], [2]], "i8"), np.array(inverse))


def test_check_inverse_of_nothing_passes() -> None:
    check_inverse(np.empty(0, np.int32), 0)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), max_size=10))
def test_ranges_equals_a_loop(pairs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in pairs], np.int64)
    lengths = np.array([length for _, length in pairs], np.int64)
    assert ranges(starts, lengths).tolist() == [s + i for s, n in pairs for i in range(n)]
