"""The closed form of both pools' timeline equals a walk through the segments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.planner.candidates import build_timeline

seconds = st.floats(1e-5, 10.0)


def slow_timeline(
    segment: float, segments: int, jobs: int, unit: float, epochs: int
) -> tuple[float, float]:
    """Walk through the segments one by one: when training ends, how long it waited."""
    now, waited = segment, 0.0
    for position in range(segments):
        committed = segment * (position // jobs + 1)
        waited += max(0.0, committed - now)
        now = max(now, committed) + unit
    return now + (epochs - 1) * segments * unit, waited


@given(seconds, st.integers(1, 40), st.integers(1, 40), seconds, st.integers(1, 3))
def test_timeline_equals_a_walk_through_the_segments(
    segment: float, segments: int, jobs: int, unit: float, epochs: int
) -> None:
    found = build_timeline(np.array(segment), segments, jobs, unit, epochs)
    end, waited = slow_timeline(segment, segments, jobs, unit, epochs)
    assert float(found.end_sec) == pytest.approx(end, rel=1e-9)
    assert float(found.waiting_sec) == pytest.approx(waited, rel=1e-9, abs=1e-9 * end)
    assert float(found.built_sec) == pytest.approx(segment * -(-segments // jobs))
