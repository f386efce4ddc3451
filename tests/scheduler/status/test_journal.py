"""A journal agrees with what happened in a simulated world."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict

import pytest

from presage.scheduler.controller.events import Ended, Started, Stepped
from presage.scheduler.controller.journal import KEPT, POINTS, Journal
from presage.scheduler.controller.state import State
from presage.scheduler.model.pools import GIB
from presage.scheduler.status.view import View, view_of
from tests.scheduler.controller.world import BATCH
from tests.scheduler.status.recordings import SEEDS, Recording, record_jobs


def cost_of_processes(recording: Recording) -> dict[str, float]:
    """Add up what each process cost from its start to its end, one by one."""
    began: dict[tuple[str, str], tuple[float, float]] = {}
    found: defaultdict[str, float] = defaultdict(float)
    for _, event, after, actions in recording.events:
        if isinstance(event, Ended) and (event.job, event.process) in began:
            start, price = began.pop((event.job, event.process))
            found[event.job] += price * (after.now_sec - start) / 3600
        for action in actions:
            if action.verb == "start":
                process = after.jobs[action.job].processes[action.process]
                budget = after.jobs[action.job].snapshot.job.schedule.budget
                price = process.cpus * budget.cpu_hour_price
                price += process.memory_bytes / GIB * budget.gib_hour_price
                began[action.job, action.process] = (after.now_sec, price)
    return dict(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_view_of_a_world_that_has_ended_tells_what_happened(seed: int) -> None:
    recording = record_jobs(seed)
    view = recording.view()
    assert view.is_over
    assert {job.phase for job in view.jobs} == {"finished"}
    assert (view.used_cpus, view.used_memory_bytes) == (0.0, 0)
    actions = [action for _, _, _, found in recording.events for action in found]
    with_facts = [(d.job, d.action, d.process, d.reason) for d in reversed(view.decisions)]
    assert with_facts == [(a.job, a.verb, a.process, a.reason) for a in actions][-KEPT:]
    counts = Counter((action.job, action.verb) for action in actions)
    assert {(job, verb): n for job, verb, n in view.num_decided} == counts
    spent = cost_of_processes(recording)
    assert {job.name: job.spent for job in view.jobs} == pytest.approx(spent)
    for job in view.jobs:
        assert job.segments_built == job.num_segments
        assert job.num_trained == job.num_to_train
        assert job.forecast is None
        assert not job.pools
        assert job.ended_sec is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_incidents_are_the_ends_without_work_and_what_came_into_their_place(seed: int) -> None:
    recording = record_jobs(seed)
    view = recording.view()
    gone = Counter(
        (event.job, event.process)
        for before, event, _, _ in recording.events
        if isinstance(event, Ended)
        and event.outcome in ("lost", "oom")
        and before.jobs[event.job].processes[event.process].status != "leaving"
    )
    lost = [one for one in view.incidents if one.kind == "lost"]
    assert Counter((one.job, one.process) for one in lost) == gone
    started = {
        (event.job, event.process): after.now_sec
        for _, event, after, _ in reversed(recording.events)
        if isinstance(event, Started)
    }
    for one in view.incidents:
        assert not view.is_open(one), "jobs that have ended miss nobody"
        if one.back_sec is None:
            continue
        assert one.back_sec >= one.time_sec
        assert started[one.job, one.successor] == one.back_sec
        assert one.successor != one.process
        assert one.successor.partition(".")[0] == one.process.partition(".")[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_views_on_the_way_agree_with_the_state_and_never_take_back_what_was_spent(
    seed: int,
) -> None:
    recording, spent = record_jobs(seed), 0.0
    for most in range(1, len(recording.events) + 1, 7):
        view = recording.view(most)
        check_view(view, recording.state(most))
        now = sum(job.spent for job in view.jobs)
        assert now >= spent
        spent = now
        json.dumps(asdict(view), allow_nan=False)


def check_view(view: View, state: State) -> None:
    """Check what holds of every view."""
    assert (view.used_cpus, view.used_memory_bytes) == state.used
    assert (view.usage[-1].cpus, view.usage[-1].memory_bytes) == state.used
    for job in view.jobs:
        shown = {one.name for pool in job.pools for one in pool.processes}
        assert shown == set(state.jobs[job.name].processes)
        assert (job.forecast is not None) == (job.phase == "running")
        assert len(job.speeds) <= POINTS
        for speed in job.speeds:
            assert 0.0 < speed.low <= speed.predicted <= speed.high
    for one in view.incidents:
        if view.is_open(one):
            processes = state.jobs[one.job].processes.values()
            place = one.process.partition(".")[0]
            assert not [p for p in processes if p.task_id == place and p.status == "running"]


def test_speeds_are_those_of_the_steps_beside_what_was_predicted_before() -> None:
    recording = record_jobs(3)
    view = recording.view()
    stepped = Counter(e.job for _, e, _, _ in recording.events if isinstance(e, Stepped))
    for job in view.jobs:
        training = [speed for speed in job.speeds if speed.pool == "training"]
        assert len(training) == stepped[job.name]
        assert {speed.measured for speed in training} == {BATCH / 0.5}
        off = [abs(speed.predicted / speed.measured - 1.0) for speed in training]
        assert off[0] > 0.1, "nothing was known before the first"
        assert off[-1] < 0.1


def test_view_of_nothing_is_empty() -> None:
    view = view_of(State(), Journal())
    assert not view.jobs
    assert view.num_events == 0
