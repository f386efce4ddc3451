"""Windows over buffers: exact for any lists, equal to the reference, small for shifting lists."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.arrays import Jagged, offsets_of
from presage.schemas.dataset import group_files as windows
from presage.schemas.dataset.group_files import NULL_LENGTH, Windows, to_windows, window_ranges
from presage.schemas.errors import SchemaError
from tests.schemas import reference

Lists = list[list[int] | None]

few_values = st.lists(st.none() | st.lists(st.integers(0, 2), max_size=7), min_size=0, max_size=14)


def jagged(lists: Lists) -> tuple[Jagged, np.ndarray]:
    lengths = np.array([len(x or []) for x in lists], np.int64)
    values = np.array([v for x in lists for v in x or []], np.uint64)
    return Jagged(values, offsets_of(lengths)), np.array([x is None for x in lists], bool)


def back(x: Jagged, found: Windows) -> Lists:
    first, count = window_ranges(found.offsets, found.buffer, found.start, found.length)
    values = x.values[found.source].tolist()
    return [
        None if length == NULL_LENGTH else values[a : a + n]
        for a, n, length in zip(first.tolist(), count.tolist(), found.length.tolist(), strict=True)
    ]


@st.composite
def shifting(draw: st.DrawFn) -> Lists:
    """Histories of sessions: some entries come, and some leave beyond a cap."""
    cap = draw(st.integers(1, 8))
    newest_first = draw(st.booleans())
    lists: Lists = []
    for _ in range(draw(st.integers(0, 4))):
        history = draw(st.lists(st.integers(0, 9), max_size=cap))
        for _ in range(draw(st.integers(0, 6))):
            kept = history[-cap:]
            lists.append(kept[::-1] if newest_first else kept)
            history = kept + draw(st.lists(st.integers(0, 9), max_size=3))
            if draw(st.integers(0, 9)) == 0:
                lists.append(draw(st.sampled_from([None, []])))
    return lists


@given(few_values | shifting())
def test_windows_give_back_every_list(lists: Lists) -> None:
    x, is_null = jagged(lists)
    assert back(x, to_windows(x, is_null)) == lists


@given(few_values | shifting(), st.sampled_from([1, 3, 64]))
def test_windows_equal_the_slow_reference(lists: Lists, shortest: int) -> None:
    x, is_null = jagged(lists)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "MIN_REPEAT_LENGTH", shortest)
        found = to_windows(x, is_null)
    buffers, expected = reference.windows([x or [] for x in lists], shortest)
    if 2 * sum(map(len, buffers)) > len(x.values):
        turned, _ = reference.windows([x or [] for x in lists[::-1]], shortest)
        if sum(map(len, turned)) < sum(map(len, buffers)):
            assert len(found.source) == sum(map(len, turned))
            return
    cut = found.offsets.tolist()
    entries = x.values[found.source].tolist()
    assert [entries[a:b] for a, b in pairwise(cut)] == buffers
    places = zip(found.buffer.tolist(), found.start.tolist(), found.length.tolist(), strict=True)
    assert [p for p in places if p[2] > 0] == [p for p in expected if p[2] > 0]


@pytest.mark.parametrize("newest_first", [False, True])
def test_history_that_shifts_is_stored_once(newest_first: bool) -> None:
    song = np.random.default_rng(0).integers(0, 1000, 300)
    lists: Lists = [song[max(0, end - 50) : end].tolist() for end in range(301)]
    if newest_first:
        lists = [x and x[::-1] for x in lists]
    x, _ = jagged(lists)
    found = to_windows(x)
    assert len(found.source) == 300
    assert len(found.offsets) == 2
    assert back(x, found) == lists


def test_long_list_that_comes_back_is_stored_once() -> None:
    rng = np.random.default_rng(1)
    one, two = (rng.integers(0, 1000, 100).tolist() for _ in range(2))
    x, _ = jagged([one, two, one, two, None, one])
    assert len(to_windows(x).source) == 200


def test_lists_of_few_values_are_exact_and_cost_bounded_tries() -> None:
    lists: Lists = [[5] * 60 + [n % 2] * (n % 7) for n in range(200)]
    x, _ = jagged(lists)
    assert back(x, to_windows(x)) == lists


@pytest.mark.parametrize(
    ("buffer", "start", "length"),
    [(2, 0, 1), (-1, 0, 1), (0, 4, 2), (0, -1, 2), (0, 0, -2), (1, 1, 1)],
)
def test_window_outside_its_buffer_is_refused(buffer: int, start: int, length: int) -> None:
    message = (
        f"window is outside its buffer: buffer={buffer}, start={start}, length={length} in "
        "row 1; rebuild the dataset"
    )
    with pytest.raises(SchemaError, match=re.escape(message)):
        window_ranges(
            np.array([0, 5, 6]), np.array([0, buffer]), np.array([0, start]), np.array([5, length])
        )
