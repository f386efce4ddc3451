"""The horizon of a run and the step at each position."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.job import OrderConfig
from schemas.errors import PlanError
from schemas.order import Order
from trainer.follow import DatasetExtent, Horizon, common_extent, horizon_of, next_action

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def order_of(counts: list[int], epochs: int, shuffle: str = "blocks") -> Order:
    """Return an order of two blocks a batch."""
    config = OrderConfig(shuffle="blocks" if shuffle == "blocks" else "none", seed=3)
    return Order(tuple(counts), 2, epochs, config)


@given(COUNTS, st.integers(1, 3), st.sampled_from(["none", "blocks"]))
def test_steps_before_a_horizon_are_those_of_the_finished_dataset(
    counts: list[int], epochs: int, shuffle: str
) -> None:
    whole = order_of(counts, epochs, shuffle)
    for n in range(1, len(counts) + 1):
        then = order_of(counts[:n], epochs, shuffle)
        known = DatasetExtent(num_segments=n, sealed=False)
        assert horizon_of(then, known) == horizon_of(whole, known)
        for step in range(horizon_of(then, known).end_step):
            a, b = then.step(step), whole.step(step)
            assert (a.epoch, a.segment) == (b.epoch, b.segment) == (0, a.segment)
            assert np.array_equal(a.positions, b.positions)


@given(COUNTS, st.integers(1, 3), st.integers(0, 60))
def test_run_over_growing_segments_trains_each_step_once_and_ends(
    counts: list[int], epochs: int, stop: int
) -> None:
    for limit in (None, stop):
        step, waits, horizon = 0, 0, Horizon(end_step=0, known_end=0, is_final=False)
        for n in range(1, len(counts) + 1):
            known = DatasetExtent(num_segments=n, sealed=n == len(counts))
            horizon = horizon_of(order_of(counts[:n], epochs), known, limit)
            while next_action(step, horizon) == "train":
                step += 1
            waits += next_action(step, horizon) == "wait"
            if next_action(step, horizon) == "end":
                break
        total = order_of(counts, epochs).num_steps
        assert next_action(step, horizon) == "end"
        assert step == (total if limit is None else min(total, limit))
        assert waits < len(counts)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5))
def test_what_is_agreed_is_known_to_all_whatever_their_order(
    states: list[tuple[int, bool]],
) -> None:
    known = [DatasetExtent(num_segments=n, sealed=f) for n, f in states]
    found = common_extent(known)
    assert found == common_extent(known[::-1]) == common_extent([found, *known])
    assert all(found.num_segments <= state.num_segments for state in known)
    assert found.sealed == all(state.sealed for state in known)


@pytest.mark.parametrize(
    ("known", "num_segments"),
    [
        (DatasetExtent(num_segments=3, sealed=False), 2),
        (DatasetExtent(num_segments=1, sealed=True), 2),
    ],
)
def test_order_of_other_segments_is_refused(known: DatasetExtent, num_segments: int) -> None:
    message = (
        f"order is of {num_segments} segments, but the dataset has {known.num_segments}; "
        "open the dataset again"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        horizon_of(order_of([4] * num_segments, 1), known)


def test_empty_horizon_of_an_open_dataset_is_waited_at() -> None:
    horizon = horizon_of(order_of([0, 4], 2), DatasetExtent(num_segments=1, sealed=False))
    assert horizon == Horizon(end_step=0, known_end=0, is_final=False)
    assert next_action(0, horizon) == "wait"
