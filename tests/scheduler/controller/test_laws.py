"""Whatever happens in whatever order: jobs end, nothing is built twice, the budget holds."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.controller.events import Drained, Event
from scheduler.controller.handle import handle
from scheduler.controller.state import Action, State
from tests.scheduler.controller.world import BUDGET, STEPS_PER_SEGMENT, World, run, submitted

JOBS = {
    "one job": [submitted("first")],
    "three jobs that do not fit at once": [
        submitted("first", 4, "  priority: 0"),
        submitted("second", 2, "  priority: 2\n  training: {min_replicas: 2}", 10.0),
        submitted("third", 3, "  preprocessing: {min_workers: 4}\n  priority: 1", 20.0),
    ],
    "two jobs of which the second fits once the first is built": [
        submitted("first", 1, "  training: {replica: {cpus: 4}, max_replicas: 1}", 0.0),
        submitted("second", 1, "  training: {replica: {cpus: 3}, max_replicas: 1}", 10.0),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_handle_ends_every_job_with_each_segment_built_once(name: str, seed: int) -> None:
    jobs = JOBS[name]
    world = World(jobs)
    state = run(world, State(), handle, np.random.default_rng(seed), [BUDGET, *jobs])
    for job in jobs:
        assert state.jobs[job.job].phase == "finished"
        assert world.finished[job.job] == 1
        assert [world.built[job.job, n] for n in range(job.num_segments)] == [1] * job.num_segments
        assert world.steps[job.job] == job.num_segments * STEPS_PER_SEGMENT


@given(seed=st.integers(0, 2**32 - 1), after=st.integers(2, 80))
@settings(max_examples=10)
def test_handle_drains_a_job_that_goes_on_when_it_is_submitted_again(seed: int, after: int) -> None:
    job = JOBS["one job"][0]
    world, rng, told = World([job]), np.random.default_rng(seed), 0

    def tell(state: State, event: Event) -> tuple[State, Sequence[Action]]:
        nonlocal told
        told += 1
        state, actions = handle(state, event)
        if told == after:
            state, more = handle(state, Drained(time_sec=event.time_sec, job=job.job))
            return state, [*actions, *more]
        return state, actions

    state = run(world, State(), tell, rng, [BUDGET, job])
    if state.jobs[job.job].phase == "drained":
        state = run(world, state, handle, rng, [submitted(job.job, time_sec=world.now)])
    assert state.jobs[job.job].phase == "finished"
    assert set(world.built.values()) == {1}
