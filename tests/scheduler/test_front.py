"""Fronts, ranks and areas equal the definitions, pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from scheduler.planner.candidates import nondominated_ranks, pareto_front
from tests.scheduler.made import hypervolume

points = st.integers(1, 12).flatmap(
    lambda n: arrays(float, (n, 2), elements=st.integers(0, 6).map(float))
)


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


@given(points)
def test_front_is_what_nothing_dominates_without_repetition(objectives: np.ndarray) -> None:
    found = pareto_front(objectives)
    best = {
        tuple(point)
        for point in objectives.tolist()
        if not any(dominates(other, np.array(point)) for other in objectives)
    }
    assert [tuple(point) for point in objectives[found].tolist()] == sorted(best)


@pytest.mark.slow
@given(points, st.data())
def test_ranks_put_what_dominates_first_and_what_is_allowed_before_what_is_not(
    objectives: np.ndarray, data: st.DataObject
) -> None:
    violations = np.array(
        data.draw(
            st.lists(
                st.sampled_from([0.0, 0.0, 1.0, 2.0]),
                min_size=len(objectives),
                max_size=len(objectives),
            )
        )
    )
    rank = nondominated_ranks(objectives, violations)
    for i, a in enumerate(objectives):
        for j, b in enumerate(objectives):
            if violations[i] < violations[j] or (
                violations[i] == violations[j] == 0 and dominates(a, b)
            ):
                assert rank[i] < rank[j]


@pytest.mark.slow
@given(points)
def test_hypervolume_counts_the_unit_squares_that_a_point_covers(objectives: np.ndarray) -> None:
    size = 8
    covered = sum(
        any(x >= a and y >= b for a, b in objectives) for x in range(size) for y in range(size)
    )
    assert hypervolume(objectives, (float(size), float(size))) == covered
