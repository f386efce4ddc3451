"""Ticks of many jobs: their measurements are one event, and the jobs take turns."""

from dataclasses import replace

import numpy as np

from presage.scheduler.controller.events import Read, Stepped, Tick
from presage.scheduler.controller.handle import (
    MAX_CHECKED,
    handle,
    jobs_in_turn,
    num_turns,
    run_tick,
)
from presage.scheduler.controller.state import JobState, State
from tests.scheduler.controller.bench import GROWS, Bench
from tests.scheduler.controller.world import BUDGET, MIB


def trained() -> Bench:
    """Return a machine whose job trains."""
    bench = Bench(BUDGET, GROWS)
    bench.built(0)
    bench.stepped(8, 0.5)
    bench.ticks(1)
    return bench


def many(count: int) -> State:
    """Return a state with copies of a job that trains, checked one after the other."""
    bench = trained()
    jobs = {
        f"job{n}": replace(bench.job, name=f"job{n}", checked_sec=float(n)) for n in range(count)
    }
    budget = bench.state.budget
    budget = replace(budget, cpus=count * budget.cpus, memory=count * budget.memory)
    return replace(bench.state, jobs=jobs, budget=budget, now_sec=1000.0)


def test_tick_with_steps_and_readings_is_what_these_are_one_by_one() -> None:
    state, now = trained().state, 100.0
    who = {"time_sec": now, "job": "first"}
    steps = Stepped(**who, next_step=16, num_samples=4096, num_replicas=1, seconds=(0.5,) * 8)
    names = sorted(state.jobs["first"].processes)
    readings = [
        Read(**who, process=name, position=16, resident_bytes=900 * MIB, busy_cores=0.5)
        for name in (*names, "of-nobody.1")
    ]
    one_by_one = state
    for event in (steps, *readings, Tick(time_sec=now)):
        one_by_one, _ = handle(one_by_one, event)
    of_others = [replace(reading, job="unknown") for reading in readings]
    tick = Tick(time_sec=now, steps=(steps,), readings=(*readings, *of_others))
    assert handle(state, tick)[0] == one_by_one
    (coordinator,) = one_by_one.jobs["first"].of_pool("coordinator")
    assert (coordinator.readings[-1], coordinator.busy_cores) == ((16, 900 * MIB), 0.5)
    assert one_by_one.jobs["first"].next_step == 16


def test_few_jobs_are_checked_at_every_tick() -> None:
    state = many(MAX_CHECKED)
    assert jobs_in_turn(list(state.jobs.values())) == list(state.jobs)
    after, _ = run_tick(state)
    assert {job.checked_sec for job in after.jobs.values()} == {state.now_sec}


def test_many_jobs_take_turns_and_none_waits_longer_than_all_others() -> None:
    state = many(3 * MAX_CHECKED + 1)
    assert num_turns(len(state.jobs)) == 4
    rng = np.random.default_rng(1)
    last = {name: 0 for name in state.jobs}
    for tick in range(1, 20):
        # Half of the places at most are for those that grow, so that the others move up.
        growing = rng.random(len(state.jobs)) < 0.3
        jobs = {
            name: _grown(job, bool(grows))
            for (name, job), grows in zip(state.jobs.items(), growing, strict=True)
        }
        chosen = jobs_in_turn(list(jobs.values()))
        assert len(chosen) == MAX_CHECKED
        for name in chosen:
            last[name] = tick
            jobs[name] = replace(jobs[name], checked_sec=1000.0 + tick)
        state = replace(state, jobs=jobs)
        assert tick - min(last.values()) <= 2 * 4 + 1


def test_job_that_may_run_out_of_memory_before_its_turn_goes_first() -> None:
    state = many(4 * MAX_CHECKED)
    name = f"job{4 * MAX_CHECKED - 1}"
    jobs = {**state.jobs, name: _grown(state.jobs[name], True)}
    assert name not in jobs_in_turn(list(state.jobs.values()))
    assert name in jobs_in_turn(list(jobs.values()))


def _grown(job: JobState, grows: bool) -> JobState:
    """Return a job whose trainer has two readings, the second one larger if it grows."""
    (coordinator,) = job.of_pool("coordinator")
    limit = coordinator.memory_bytes
    second = int(0.8 * limit) if grows else limit // 2
    return job.with_process(replace(coordinator, readings=((1, limit // 2), (2, second))))
