"""A stream of measurements: what is kept, what takes whose place, what fades."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.fit import (
    HALF_LIFE,
    MAX_CELLS,
    MAX_PER_CELL,
    TrainingSetting,
    Window,
    merge_windows,
    observe,
)


def at(*replicas: float, rows: float = 1.0) -> TrainingSetting:
    return TrainingSetting(num_replicas=list(replicas), unique_rows=rows)


def test_observe_keeps_the_latest_of_each_setting_whatever_comes_after() -> None:
    window = observe(Window(), at(3), [5.0], 0.0)
    for tick in range(3 * MAX_PER_CELL):
        window = observe(window, at(2), [1.0 + tick / 1000], float(tick))
    assert window.columns()[:, 3].tolist() == [2.0, 3.0]
    assert window.num_measurements == MAX_PER_CELL + 1
    assert window.medians() == pytest.approx([1.0 + (2.5 * MAX_PER_CELL - 0.5) / 1000, 5.0])


def test_observe_of_a_setting_that_takes_another_time_forgets_what_is_older() -> None:
    window = observe(
        observe(Window(), at(3), [5.0], 0.0), at(*[2] * MAX_PER_CELL), [1.0] * MAX_PER_CELL, 1.0
    )
    kept = [len(window)]
    for _ in range(MAX_PER_CELL // 2):
        window = observe(window, at(2), [2.0], 2.0)
        kept.append(len(window))
    assert kept[0] == kept[MAX_PER_CELL // 4] == 2
    assert window.columns()[:, 3].tolist() == [2.0]
    assert window.medians().tolist() == [2.0]


@given(st.integers(0, 1000), st.sampled_from([0.05, 0.2, 0.5]))
@settings(max_examples=20)
def test_observe_of_noise_and_stragglers_forgets_nothing(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    taken = np.exp(noise * rng.standard_normal(20 * MAX_PER_CELL))
    taken[rng.random(len(taken)) < 0.1] *= 20.0
    window = observe(observe(Window(), at(3), [5.0], 0.0), at(*[2] * len(taken)), taken, 1.0)
    assert len(window) == 2


def test_observe_leaves_out_what_is_no_time_and_changes_nothing_given() -> None:
    empty = Window()
    window = observe(empty, at(1, 2, 3, 4), [0.0, -1.0, float("inf"), float("nan")], 0.0)
    assert len(window) == len(empty) == 0


def test_observe_of_similar_loads_is_one_cell_and_of_other_sizes_another() -> None:
    window = observe(Window(), at(1, rows=4900.0), [1.0], 0.0)
    window = observe(window, at(1, rows=4920.0), [3.0], 0.0)
    assert len(window) == 1
    assert window.columns()[0, 0] == 4910.0
    assert len(observe(window, at(1, rows=6000.0), [1.0], 0.0)) == 2
    assert len(observe(observe(window, at(22, rows=4900.0), [1.0], 0.0), at(21), [1.0], 0.0)) == 3


def test_observe_of_too_many_settings_drops_the_ones_used_longest_ago() -> None:
    window = observe(Window(), at(*range(1, MAX_CELLS + 1)), [1.0] * MAX_CELLS, 0.0)
    window = observe(window, at(1), [1.0], 1.0)
    window = observe(window, at(MAX_CELLS + 1), [1.0], 2.0)
    kept = window.columns()[:, 3].tolist()
    assert len(kept) == MAX_CELLS
    assert 1.0 in kept
    assert 2.0 not in kept


def test_weights_halve_with_each_half_life() -> None:
    window = observe(Window(), at(1), [1.0], 0.0)
    window = observe(window, at(2), [1.0], HALF_LIFE)
    window = observe(window, at(3), [1.0], 2 * HALF_LIFE)
    assert window.weights() == pytest.approx([0.25, 0.5, 1.0])


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 9.0)), min_size=1, max_size=60))
def test_observe_one_by_one_equals_all_at_once(stream: list[tuple[int, float]]) -> None:
    replicas, taken = [r for r, _ in stream], [sec for _, sec in stream]
    together = observe(Window(), at(*replicas), taken, 7.0)
    single = Window()
    for count, sec in stream:
        single = observe(single, at(count), [sec], 7.0)
    np.testing.assert_allclose(single.columns(), together.columns())
    assert single.medians().tolist() == together.medians().tolist()


def test_over_takes_the_newer_of_what_both_measured() -> None:
    older = observe(Window(), at(1, 2), [1.0, 2.0], 0.0)
    newer = observe(Window(), at(2, 3), [20.0, 30.0], 5.0)
    assert merge_windows(older, newer).medians().tolist() == [1.0, 20.0, 30.0]
