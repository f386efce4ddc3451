"""Whatever happens in whatever order: jobs end, nothing is built twice, the budget holds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.scheduler.controller.events import Drained, Event
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.state import Action, State
from tests.scheduler.controller.world import BUDGET, GIB, STEPS_PER_SEGMENT, World, run, submitted

JOBS = {
    "one job": [submitted("first")],
    "three jobs that do not fit at once": [
        submitted("first", 4, "  priority: 0"),
        submitted("second", 2, "  priority: 2\n  training: {min_replicas: 2}", 10.0),
        submitted("third", 3, "  preprocessing: {min_workers: 4}\n  priority: 1", 20.0),
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


SCHEDULES = (
    "  priority: 0",
    "  priority: 1\n  training: {min_replicas: 2}",
    "  preprocessing: {min_workers: 3}",
    "  training: {replica: {cpus: 4}, max_replicas: 1}",
    "  training: {replica: {memory: 6GiB}, max_replicas: 1}",
)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32 - 1),
    schedules=st.lists(st.sampled_from(SCHEDULES), min_size=2, max_size=4),
    cpus=st.sampled_from((5.0, 6.5)),
    gib=st.sampled_from((12, 32)),
    resizes=st.booleans(),
)
@settings(max_examples=10)
def test_handle_ends_all_jobs_of_a_small_budget(
    seed: int, schedules: list[str], cpus: float, gib: int, resizes: bool
) -> None:
    jobs = [
        submitted(f"job{number}", 2, schedule, 5.0 * number)
        for number, schedule in enumerate(schedules)
    ]
    budget = replace(BUDGET, cpus=cpus, memory_bytes=gib * GIB, resizes=resizes)
    state = run(World(jobs), State(), handle, np.random.default_rng(seed), [budget, *jobs])
    assert {job.phase for job in state.jobs.values()} == {"finished"}


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), after=st.integers(2, 80))
@settings(max_examples=10)
def test_handle_drains_a_job_that_goes_on_when_it_is_submitted_again(seed: int, after: int) -> None:
    job = JOBS["one job"][0]
    world, rng, num_events = World([job]), np.random.default_rng(seed), 0

    def send(state: State, event: Event) -> tuple[State, Sequence[Action]]:
        nonlocal num_events
        num_events += 1
        state, actions = handle(state, event)
        if num_events == after:
            state, more = handle(state, Drained(time_sec=event.time_sec, job=job.job))
            return state, [*actions, *more]
        return state, actions

    state = run(world, State(), send, rng, [BUDGET, job])
    if state.jobs[job.job].phase == "drained":
        state = run(world, state, handle, rng, [submitted(job.job, time_sec=world.now)])
    assert state.jobs[job.job].phase == "finished"
    assert set(world.built.values()) == {1}
