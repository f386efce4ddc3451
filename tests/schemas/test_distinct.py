"""Distinct values of lists by each of the three methods, against sets."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import oracle as ways
from schemas.arrays import Jagged, offsets_of
from schemas.oracle import distinct

LISTS = st.lists(st.lists(st.integers(0, 30), max_size=9), max_size=12)


def jagged_from(lists: list[list[int]], dtype: type[np.integer]) -> Jagged:
    flat = np.array([value for values in lists for value in values], dtype)
    return Jagged(flat, offsets_of(np.array([len(values) for values in lists], np.int64)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("mapped", "stamped"), [(1 << 40, 0), (0, 1 << 40), (0, 0)], ids=["map", "stamps", "sort"]
)
@pytest.mark.parametrize("cells", [1, 100, 1 << 12])
def test_distinct_values_are_those_of_a_set(
    monkeypatch: pytest.MonkeyPatch,
    mapped: int,
    stamped: int,
    cells: int,
    dtype: type[np.integer],
) -> None:
    for name, value in (
        ("MAPPED", mapped), ("STAMPED", stamped), ("MAP_CELLS", cells), ("STAMP_CELLS", cells),
        ("GROUP_VALUES", cells),
    ):  # fmt: skip
        monkeypatch.setattr(ways, name, value)

    @given(LISTS)
    def law(lists: list[list[int]]) -> None:
        given_lists = jagged_from(lists, dtype)
        kept = given_lists.values.copy()
        found = distinct(given_lists, 31)
        got = [found.values[a:b].tolist() for a, b in pairwise(found.offsets)]
        assert got == [sorted(set(values)) for values in lists]
        assert np.array_equal(given_lists.values, kept)

    law()
