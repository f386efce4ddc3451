"""The functions of the oracle against brute force and a trace computed by other software."""

from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.arrays import Jagged, offsets_of
from presage.schemas.dataset.accesses import merge_dictionaries
from presage.schemas.kernels.oracle import FirstUseNumbering
from presage.schemas.oracle.next_uses import (
    NEVER,
    EpochUses,
    from_gaps,
    next_use,
    sorted_gaps,
    union,
    unique_per_block,
)
from tests.schemas import reference
from tests.schemas.parts import gaps_of

NUM_NUMBERS = 9
STEPS = st.lists(st.frozensets(st.integers(0, NUM_NUMBERS - 1), max_size=6), max_size=25)
ORACLE_RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def arrays(steps: list[frozenset[int]]) -> list[np.ndarray]:
    """Each step as ascending numbers."""
    return [np.array(sorted(step), np.int64) for step in steps]


def jagged_from(rows: list[list[int]]) -> Jagged:
    flat = np.array([value for row in rows for value in row], np.int64)
    return Jagged(flat, offsets_of(np.array([len(row) for row in rows], np.int64)))


def lists_of(x: Jagged) -> list[list[int]]:
    return [x.values[a:b].tolist() for a, b in pairwise(x.offsets)]


@given(STEPS)
def test_next_use_equals_the_reference(steps: list[frozenset[int]]) -> None:
    ascending = arrays(steps)
    found = next_use(ascending, NUM_NUMBERS)
    assert [distances.tolist() for distances in found] == reference.next_use(
        [step.tolist() for step in ascending]
    )
    assert all(distances.dtype == np.int32 for distances in found)


BLOCKS = st.lists(st.lists(st.sampled_from([0, 3, 5, 7, 2**62]), max_size=8), max_size=12)


@given(BLOCKS)
def test_unique_per_block_equals_sorted_sets(lookups: list[list[int]]) -> None:
    flat = jagged_from(lookups)
    blocks = np.repeat(np.arange(len(lookups)), flat.lengths)
    shuffled = np.random.default_rng(len(flat.values)).permutation(len(blocks))
    found = unique_per_block(flat.values[shuffled], blocks[shuffled], len(lookups))
    assert lists_of(found) == [sorted(set(block)) for block in lookups]


ROWS = st.lists(st.lists(st.integers(3, 40), max_size=8, unique=True), max_size=12)


@pytest.mark.parametrize("size", [None, 38])
@given(ROWS, st.integers(1, 5))
def test_rows_are_numbered_by_first_use_in_chunks_of_any_size(
    size: int | None, lookups: list[list[int]], chunk: int
) -> None:
    numbering = FirstUseNumbering(3, size)
    numbers, new = list[int](), list[list[int]]()
    for start in range(0, len(lookups), chunk):
        lists = jagged_from(lookups[start : start + chunk])
        found, *new_rows = numbering.number(lists.values, lists.offsets)
        numbers += found.tolist()
        new += lists_of(Jagged(*new_rows))
    rows = list(dict.fromkeys(row for block in lookups for row in block))
    assert numbers == [rows.index(row) for block in lookups for row in block]
    assert [row for block in new for row in block] == rows
    assert list(map(len, new)) == [
        len(set(block) - {row for earlier in lookups[:position] for row in earlier})
        for position, block in enumerate(lookups)
    ]


def test_a_hash_table_that_grows_keeps_its_numbers() -> None:
    rows = np.random.default_rng(1).integers(0, 2**63 - 1, 20_000)
    numbering = FirstUseNumbering()
    parts = [jagged_from([part.tolist()]) for part in np.array_split(rows, 7)]
    first = [numbering.number(part.values, part.offsets)[0] for part in parts]
    again = [numbering.number(part.values, part.offsets)[0] for part in parts]
    assert np.concatenate(first).tolist() == list(range(len(rows)))
    assert np.concatenate(again).tolist() == list(range(len(rows)))
    assert numbering.count == len(rows)


SPARSE = st.frozensets(st.integers(0, 2**24 - 1), max_size=20)
"""Numbers that are sorted, not marked as bits."""


@given(st.lists(st.one_of(SPARSE, st.frozensets(st.integers(0, 300)))), st.randoms())
def test_gaps_of_unsorted_lists_are_those_of_sorted_ones(
    blocks: list[frozenset[int]], random: Random
) -> None:
    shuffled = [random.sample(sorted(block), len(block)) for block in blocks]
    lists = jagged_from(shuffled)
    gaps = sorted_gaps(Jagged(lists.values.astype(np.int32), lists.offsets), 2**24)
    assert lists_of(from_gaps(Jagged(gaps, lists.offsets))) == [sorted(block) for block in blocks]


@pytest.mark.parametrize("counts", [[20_000, 3, 0, 1_000], [0]])
def test_gaps_of_long_lists_over_many_numbers_are_those_of_sorted_ones(counts: list[int]) -> None:
    rng = np.random.default_rng(2)
    lists = [np.unique(rng.integers(0, 2**22, count)) for count in counts]
    shuffled = jagged_from([rng.permutation(numbers).tolist() for numbers in lists])
    gaps = sorted_gaps(Jagged(shuffled.values.astype(np.int32), shuffled.offsets), 2**22)
    found = from_gaps(Jagged(gaps, shuffled.offsets))
    assert lists_of(found) == [numbers.tolist() for numbers in lists]


@given(st.lists(st.frozensets(st.integers(0, 9)), max_size=9), st.data())
def test_next_uses_of_an_epoch_equal_the_reference(
    blocks: list[frozenset[int]], data: st.DataObject
) -> None:
    """In steps of several blocks, in calls of several steps, for a range of the numbers."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(blocks))))) if blocks else []
    bounds = sorted({0, *cuts, len(blocks)})
    calls = sorted({0, *data.draw(st.sets(st.integers(0, len(bounds) - 1))), len(bounds) - 1})
    low, size = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 10))
    uses, found = EpochUses(low, size), list[list[int]]()
    for start, end in reversed(list(pairwise(calls))):
        lists = jagged_from([sorted(b) for b in blocks[bounds[start] : bounds[end]]])
        gaps = Jagged(gaps_of(lists).astype(np.int32), lists.offsets)
        steps = np.array(bounds[start : end + 1]) - bounds[start]
        found = lists_of(uses.link(gaps, steps, start)) + found
    joined = [frozenset[int]().union(*blocks[a:b]) for a, b in pairwise(bounds)]
    entries = [sorted(n for n in step if low <= n < low + size) for step in joined]
    assert found == reference.next_use(entries)
    for number in range(size):
        users = [s for s, step in enumerate(entries) if number + low in step] or [0]
        assert (uses.first[number], uses.last[number]) == (users[0], users[-1])


def test_from_gaps_of_numbers_beyond_32_bits_is_exact() -> None:
    gaps = jagged_from([[0, 2**40], [], [2**62, 1]])
    assert lists_of(from_gaps(gaps)) == [[0, 2**40], [], [2**62, 2**62 + 1]]


@given(STEPS)
def test_union_equals_that_of_sets(steps: list[frozenset[int]]) -> None:
    lists = [np.array(sorted(step), np.int64) for step in steps]
    assert union(lists).tolist() == sorted(set().union(*steps))


@pytest.mark.parametrize("at_once", [1 << 21, 3, 1])
@given(st.lists(st.lists(st.integers(-3, 9), unique=True, max_size=6), min_size=1, max_size=4))
def test_stitch_numbers_the_joined_segments_by_first_use(
    at_once: int, segments: list[list[int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("presage.schemas.dataset.accesses.MERGE_CHUNK_ROWS", at_once)
        numbers, rows = merge_dictionaries([np.array(rows, np.int64) for rows in segments])
    joined = [row for rows in segments for row in rows]
    assert rows.tolist() == list(dict.fromkeys(joined))
    for mine, theirs in zip(numbers, segments, strict=True):
        assert rows[mine].tolist() == theirs


@pytest.mark.slow
def test_next_use_of_a_published_trace_equals_its_authors(shared_data: Path) -> None:
    """Each request is one step with one row; `next` is the 1-based index of the next request."""
    folder = shared_data / "cache_oracle_ref"
    trace = np.fromfile(folder / "cloudPhysicsIO.oracleGeneral.bin", ORACLE_RECORD)
    _, numbers = np.unique(trace["id"], return_inverse=True)
    distances = np.concatenate(next_use(list(numbers.reshape(-1, 1)), int(numbers.max()) + 1))
    position = np.arange(1, len(trace) + 1)
    ours = np.where(distances == NEVER, -1, position + distances)
    assert len(trace) == 113_872
    assert int((ours == -1).sum()) == len(np.unique(trace["id"])) == 48_974
    np.testing.assert_array_equal(ours, trace["next"])


@pytest.mark.parametrize("num_steps", [1, 2])
def test_next_use_of_an_empty_step_is_empty(num_steps: int) -> None:
    found = next_use([np.empty(0, np.int64)] * num_steps, 0)
    assert [distances.tolist() for distances in found] == [[]] * num_steps
