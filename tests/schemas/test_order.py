"""Global order: a pure function with every block exactly once per epoch."""

import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.schemas.config.job import OrderConfig
from presage.schemas.dataset.order import (
    NUM_LANES,
    SHUFFLED_ROW_GROUPS,
    Order,
    block_order,
    even_part,
)
from tests.schemas import reference

SEGMENTS = st.lists(st.integers(0, 12), min_size=1, max_size=4)
SHUFFLES = st.sampled_from(["none", "blocks"])


def order_of(
    num_blocks: list[int], blocks_per_batch: int, epochs: int, shuffle: str, seed: int
) -> Order:
    config = OrderConfig(shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    return Order(tuple(num_blocks), blocks_per_batch, epochs, config)


def row_groups_of(*sizes: int) -> bytes:
    """Return row groups of consecutive blocks."""
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes).tobytes()


def test_block_order_equals_ten_pinned_numbers() -> None:
    config = OrderConfig(shuffle="blocks", seed=7)
    assert block_order(config, 3, 2, row_groups_of(10), 1).tolist() == [
        0,
        4,
        2,
        9,
        7,
        1,
        3,
        5,
        8,
        6,
    ]
    first = OrderConfig(shuffle="blocks", seed=0)
    assert block_order(first, 0, 0, row_groups_of(10), 1).tolist() == [0, 1, 9, 4, 2, 3, 6, 8, 7, 5]


@st.composite
def row_groups(draw: st.DrawFn) -> bytes:
    """Draw the row groups of up to 200 blocks; those of several parts may lie side by side."""
    parts = draw(st.lists(st.lists(st.integers(1, 5), max_size=8), max_size=5))
    first, blocks = 0, []
    for sizes in parts:
        of_part = np.repeat(np.arange(len(sizes)), sizes)
        windows = draw(st.integers(1, 3)) * np.arange(len(of_part)) // max(1, len(of_part))
        blocks += list(zip(windows.tolist(), (of_part + first).tolist(), strict=True))
        first += len(sizes)
    numbers: dict[int, int] = {}
    for _, each in sorted(blocks, key=lambda block: block[0]):
        numbers.setdefault(each, len(numbers))
    ids = [numbers[each] for _, each in sorted(blocks, key=lambda block: block[0])]
    return np.array(ids, np.int32).tobytes()


@given(
    row_groups(), st.integers(1, 20), SHUFFLES, st.integers(-(2**63), 2**63 - 1), st.integers(0, 9)
)
def test_block_order_equals_the_reference(
    row_groups: bytes, per_batch: int, shuffle: str, seed: int, epoch: int
) -> None:
    config = OrderConfig(shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    order = block_order(config, epoch, 2**64 - 1, row_groups, per_batch)
    ids = np.frombuffer(row_groups, np.int32).tolist()
    wanted = reference.block_order(
        seed if shuffle == "blocks" else None, epoch, 2**64 - 1, ids, per_batch
    )
    assert order.dtype == np.int64
    assert order.tolist() == wanted
    assert sorted(wanted) == list(range(len(ids)))


SIZES = st.integers(0, 99).map(lambda seed: np.random.default_rng(seed).integers(16, 24, 80))


@given(SIZES, st.sampled_from([4, 8, 32, 48]), SHUFFLES)
def test_no_step_is_between_two_uses_of_more_row_groups_than_fit(
    sizes: NDArray[np.int64], per_batch: int, shuffle: str
) -> None:
    config = OrderConfig(shuffle=shuffle, seed=5)  # type: ignore[arg-type]
    row_groups = row_groups_of(*sizes)
    order = block_order(config, 0, 3, row_groups, per_batch)
    used = np.frombuffer(row_groups, np.int32)[order]
    first, last = np.full((2, len(sizes)), -1)
    for position, each in enumerate(used.tolist()):
        step = position // per_batch
        first[each] = step if first[each] < 0 else first[each]
        last[each] = step
    steps = np.arange(last.max() + 1)[:, None]
    num_lanes = math.gcd(per_batch, NUM_LANES)
    limit = SHUFFLED_ROW_GROUPS if shuffle == "blocks" else num_lanes
    # Besides them, the row groups that end in this step, and those whose last blocks come last.
    assert ((first <= steps) & (steps <= last)).sum(1).max() <= limit + 2 * num_lanes


@given(SIZES, st.sampled_from([8, 32, 48]), SHUFFLES, st.sampled_from([2, 4, 8]))
def test_rank_reads_the_row_groups_of_its_lanes_and_few_others(
    sizes: NDArray[np.int64], per_batch: int, shuffle: str, world_size: int
) -> None:
    config = OrderConfig(shuffle=shuffle, seed=5)  # type: ignore[arg-type]
    row_groups = row_groups_of(*sizes)
    order = block_order(config, 0, 3, row_groups, per_batch)
    used = np.frombuffer(row_groups, np.int32)[order]
    batches = [used[i : i + per_batch] for i in range(0, len(used), per_batch)]
    for rank in range(world_size):
        own = [b[even_part(len(b), rank, world_size)] for b in batches]
        assert len(np.unique(np.concatenate(own))) <= 1.1 * len(sizes) / world_size + 4


@given(SEGMENTS, st.integers(1, 5), st.integers(1, 3), SHUFFLES, st.integers(0, 3))
def test_steps_have_every_block_once_an_epoch_and_straddle_no_segment(
    num_blocks: list[int], per_batch: int, epochs: int, shuffle: str, seed: int
) -> None:
    order = order_of(num_blocks, per_batch, epochs, shuffle, seed)
    steps = [order.step(train_step) for train_step in range(order.num_steps)]
    assert [step.train_step for step in steps] == list(range(order.num_steps))
    for epoch in range(epochs):
        mine = [step for step in steps if step.epoch == epoch]
        found = [(step.segment, position) for step in mine for position in step.positions.tolist()]
        wanted = [(s, position) for s, n in enumerate(num_blocks) for position in range(n)]
        assert sorted(found) == wanted
        assert [step.segment for step in mine] == sorted(step.segment for step in mine)
        for segment, count in enumerate(num_blocks):
            lengths = [len(step.positions) for step in mine if step.segment == segment]
            assert lengths[:-1] == [per_batch] * (-(-count // per_batch) - 1 if count else 0)


@given(SEGMENTS, st.integers(1, 12), st.integers(1, 5), SHUFFLES)
def test_first_epoch_keeps_its_steps_when_a_segment_is_added(
    num_blocks: list[int], more: int, per_batch: int, shuffle: str
) -> None:
    before = order_of(num_blocks, per_batch, 1, shuffle, 5)
    after = order_of([*num_blocks, more], per_batch, 1, shuffle, 5)
    for train_step in range(before.num_steps):
        a, b = before.step(train_step), after.step(train_step)
        assert (a.segment, a.positions.tolist()) == (b.segment, b.positions.tolist())


@pytest.mark.parametrize("train_step", [-1, 6, 100])
def test_step_outside_the_run_raises(train_step: int) -> None:
    message = f"train_step must be in [0, 6), got train_step={train_step}; add epochs or segments"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        order_of([3, 1], 2, 2, "none", 0).step(train_step)


def scanned(order: Order, train_step: int) -> tuple[int, int, list[int]]:
    """Return epoch, segment and positions of a step: segment after segment is counted off."""
    epoch, rest = divmod(train_step, sum(order.steps_per_segment))
    segment = 0
    while rest >= order.steps_per_segment[segment]:
        rest -= order.steps_per_segment[segment]
        segment += 1
    blocks = order.blocks_of(epoch, segment)
    start = rest * order.blocks_per_batch
    return epoch, segment, blocks[start : start + order.blocks_per_batch].tolist()


MANY = st.lists(st.integers(0, 9) | st.just(0), min_size=1, max_size=60)


@given(MANY, st.integers(1, 5), st.integers(1, 3), SHUFFLES, st.integers(0, 3))
def test_steps_equal_those_of_a_scan_over_all_segments(
    num_blocks: list[int], per_batch: int, epochs: int, shuffle: str, seed: int
) -> None:
    order = order_of(num_blocks, per_batch, epochs, shuffle, seed)
    assert order.num_steps == epochs * sum(-(-n // per_batch) for n in num_blocks)
    for train_step in range(order.num_steps):
        step = order.step(train_step)
        found = step.epoch, step.segment, step.positions.tolist()
        assert found == scanned(order, train_step)
        assert (step.train_step, step.positions.dtype) == (train_step, np.int64)


class Counted(tuple[int, ...]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        """Count, and go through it."""
        Counted.times += 1
        return super().__iter__()


def test_step_goes_through_no_list_of_segments() -> None:
    order = order_of([3] * 2000, 2, 2, "blocks", 1)
    order = replace(order, num_blocks=Counted(order.num_blocks))
    before = Counted.times
    assert [order.step(step).segment for step in (0, 3999, 4000, 7999)] == [0, 1999, 0, 1999]
    assert order.num_steps == 8000
    assert Counted.times == before


def test_order_that_was_pickled_is_the_same() -> None:
    order = order_of([3, 0, 5], 2, 2, "blocks", 1)
    again = pickle.loads(pickle.dumps(order))
    assert again == order
    assert hash(again) == hash(order)
    assert again.step(9).positions.tolist() == order.step(9).positions.tolist()
