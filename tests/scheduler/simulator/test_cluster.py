"""Invariants of the simulation (work, capacity, seeds), and the cost of faults."""

import re

import numpy as np
import pytest

from presage.scheduler.simulator.baselines import (
    RESTART_SEC,
    THRESHOLD_CHANGE_SEC,
    StaticPolicy,
    ThresholdPolicy,
)
from presage.scheduler.simulator.cluster import (
    ALONE_SEC,
    CHECKPOINT_SEC,
    FOUND_SEC,
    MAX_OOM,
    ROUND_SEC,
    START_SEC,
    JobRun,
    ResourceUse,
    SimulatedCluster,
    outcome_of,
    progress_at_share,
)
from presage.scheduler.simulator.command import POLICIES, cluster_capacity, simulate
from presage.scheduler.simulator.jobs import (
    ACCIDENTS,
    GIB,
    PEAK,
    Knobs,
    TraceJob,
    draw_jobs,
    synthetic_tables,
)
from presage.scheduler.simulator.views import Allocation, Capacity, ClusterView
from tests.scheduler.simulator.simulations import NEVER, run, spec, times

TABLES = synthetic_tables()


def trace(count: int, seed: int = 0) -> list[TraceJob]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(120.0, count))
    return [
        TraceJob(
            name=f"job-{i}",
            submit_sec=float(at[i]),
            duration_sec=float(rng.lognormal(7.5, 1.0)),
            num_replicas=int(rng.integers(1, 5)),
        )
        for i in range(count)
    ]


def test_job_alone_takes_its_length_and_its_start() -> None:
    found = run("static", [spec(0, 30.0, 1000.0)])
    assert times(found) == [pytest.approx(ROUND_SEC - 30.0 + START_SEC + 1000.0)]
    assert outcome_of(found.ended, found.used).completion_rate == 1.0


def test_job_that_does_not_fit_waits_for_the_one_before() -> None:
    found = run("static", [spec(0, 0.0, 570.0), spec(1, 0.0, 570.0)], cpus=3.0)
    # Rounds lie on minutes: the second starts at the one after the end of the first.
    first, second = times(found)
    assert first == pytest.approx(ROUND_SEC + START_SEC + 570.0)
    assert second == pytest.approx(first + ROUND_SEC + START_SEC + 570.0)


def test_lost_process_costs_what_was_trained_since_the_checkpoint() -> None:
    failures = np.full(ACCIDENTS, NEVER)
    failures[0] = 2 * (CHECKPOINT_SEC + 100.0)  # two processes
    lost = run("static", [spec(0, 0.0, 5000.0, failures=failures)])
    assert times(lost)[0] == pytest.approx(ROUND_SEC + START_SEC + 5000.0 + 100.0 + RESTART_SEC)
    alone = run("threshold", [spec(0, 0.0, 5000.0, failures=failures)])
    without = run("threshold", [spec(0, 0.0, 5000.0)])
    assert times(alone)[0] == pytest.approx(times(without)[0] + 100.0 + ALONE_SEC)


def test_lost_process_of_two_replicas_costs_a_pause_where_steps_are_kept() -> None:
    failures = np.full(ACCIDENTS, NEVER)
    failures[0] = 3 * (CHECKPOINT_SEC + 100.0)  # three processes
    request = Allocation(2, 1, PEAK, PEAK, GIB, GIB)
    kept = run("threshold", [spec(0, 0.0, 10_000.0, request=request, failures=failures)])
    without = run("threshold", [spec(0, 0.0, 10_000.0, request=request)])
    assert times(kept)[0] == pytest.approx(times(without)[0] + THRESHOLD_CHANGE_SEC)


def test_accident_never_ends_a_pause_sooner() -> None:
    failure_policy = ThresholdPolicy.failure_policy
    request = Allocation(2, 1, PEAK, PEAK, GIB, GIB)
    one = JobRun(
        job=0,
        spec=spec(0, 0.0, 100.0),
        failure_policy=failure_policy,
        used=ResourceUse(),
        now_sec=0.0,
    )
    one.place(request, 0.0)
    for what in ("loss", "slow", "fast"):
        one.advance(one.now_sec + 1.0)
        one.apply_event(what)
        assert one.resumes_sec == START_SEC


def test_straggler_slows_a_job_until_it_is_replaced() -> None:
    stragglers = np.full(ACCIDENTS, NEVER)
    stragglers[0] = 2 * 300.0
    slow = run("static", [spec(0, 0.0, 5000.0, stragglers=stragglers)])
    # Twice as slow for 600 s: 300 s of work are made up for afterwards.
    assert times(slow)[0] == pytest.approx(ROUND_SEC + START_SEC + 5000.0 + 300.0)
    job = [spec(0, 0.0, 5000.0, stragglers=stragglers)]
    without = times(run("threshold", [spec(0, 0.0, 5000.0)]))[0]
    assert times(run("threshold", job))[0] == pytest.approx(
        without + FOUND_SEC / 2 + THRESHOLD_CHANGE_SEC
    )


def test_job_without_the_memory_fails_under_a_policy_that_gives_no_more() -> None:
    request = Allocation(1, 1, 1.2, 1.2, 0.8 * GIB, 0.8 * GIB)
    job = spec(0, 0.0, 4000.0, request=request)
    found = run("static", [job])
    assert [one.completed for one in found.ended] == [False]
    # It dies at the same place each time, from its checkpoint on.
    worked = progress_at_share(0.8) * 4000.0
    assert worked < CHECKPOINT_SEC
    assert times(found)[0] >= MAX_OOM * worked
    for policy in ("threshold", "presage"):
        assert [one.completed for one in run(policy, [job]).ended] == [True]


def test_larger_peak_asks_for_more_cores_that_are_busy_no_more() -> None:
    jobs = trace(5)
    calm, bursty = (draw_jobs(jobs, TABLES, Knobs(peak=peak), 0) for peak in (1.0, 1.5))
    for one, other in zip(calm, bursty, strict=True):
        assert other.request.cpus == pytest.approx(1.5 * one.request.cpus)
    found = [simulate(specs, StaticPolicy(), Capacity(1e6, 1e18)) for specs in (calm, bursty)]
    assert times(found[0]) == pytest.approx(times(found[1]))
    assert found[0].used.cpus_busy == pytest.approx(found[1].used.cpus_busy)
    # Half the cores of one that needs its request twice: it takes twice as long.
    short = [spec(0, 0.0, 1000.0, peak=2.0 * PEAK)]
    assert times(run("static", short))[0] == pytest.approx(ROUND_SEC + START_SEC + 2000.0)


def test_too_few_cores_stretch_a_job_in_proportion() -> None:
    request = Allocation(1, 1, 0.6, 1.2, GIB, GIB)
    found = run("static", [spec(0, 0.0, 1000.0, request=request)])
    assert times(found)[0] == pytest.approx(ROUND_SEC + START_SEC + 2000.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_gives_the_same_result_within_the_capacity(policy: str) -> None:
    jobs = trace(30)
    knobs = Knobs(failures=5.0, stragglers=5.0, oom=0.2)
    specs = draw_jobs(jobs, TABLES, knobs, 3)
    capacity = cluster_capacity(specs, jobs, 1.5)
    first, second = (simulate(specs, POLICIES[policy](), capacity) for _ in range(2))
    assert first == second
    assert len(first.ended) == len(jobs)
    used = first.used
    assert 0.0 < used.cpus_busy <= used.cpus_given
    assert 0.0 < used.memory_held <= used.memory_given


@pytest.mark.parametrize("policy", ["static", "threshold"])
def test_work_of_finished_jobs_is_conserved(policy: str) -> None:
    # Busy core seconds are the table's, however often nothing but time is lost.
    specs = [spec(i, 100.0 * i, 1000.0 + i) for i in range(5)]
    found = run(policy, specs, cpus=5.0)
    # A replica is one core and one sample a second; a store is another core, held beside it.
    least = sum(spec.num_samples for spec in specs)
    assert least <= found.used.cpus_busy <= 2.0 * least * (1.0 + 1e-9)
    if policy == "static":
        assert found.used.cpus_busy == pytest.approx(2.0 * least)


@pytest.mark.parametrize("knob", ["failures", "stragglers", "oom", "over_request"])
def test_larger_knob_never_makes_things_better_for_users_sizes(knob: str) -> None:
    centre = {"failures": 0.5, "stragglers": 0.5, "oom": 0.1, "over_request": 1.5}
    jobs = trace(40)
    roomy = Capacity(1e6, 1e18)
    found: list[tuple[float, float, float]] = []
    for factor in (1.0, 2.0, 4.0):
        knobs = Knobs(**{**centre, knob: centre[knob] * factor})
        result = simulate(draw_jobs(jobs, TABLES, knobs, 1), StaticPolicy(), roomy)
        outcome = outcome_of(result.ended, result.used)
        ends = sum(one.end_sec for one in result.ended if one.completed)
        found.append((ends if knob != "oom" else 0.0, outcome.completion_rate, 0.0))
        if knob == "over_request":
            found[-1] = (-outcome.cpu_utilisation, 0.0, 0.0)
    assert [one[0] for one in found] == sorted(one[0] for one in found)
    assert [one[1] for one in found] == sorted((one[1] for one in found), reverse=True)
    assert found[0] != found[-1]


class Greedy(StaticPolicy):
    """Gives what is not there."""

    def decide(self, snapshot: ClusterView) -> dict[int, Allocation]:
        return {view.job: view.request for view in snapshot.jobs}


def test_policy_that_takes_more_than_there_is_is_found_out() -> None:
    specs = [spec(i, 0.0, 1000.0) for i in range(3)]
    cluster = SimulatedCluster(specs, Greedy(), Capacity(6.0, 100 * GIB))
    with pytest.raises(
        AssertionError, match=re.escape("static exceeds the capacity: 1.2000, 0.0600")
    ):
        cluster.simulate()


def test_job_does_not_depend_on_the_jobs_behind_it() -> None:
    jobs = trace(10)
    longer = draw_jobs(jobs, TABLES, Knobs(), 0)
    shorter = draw_jobs(jobs[:4], TABLES, Knobs(), 0)
    assert [one.request for one in longer[:4]] == [one.request for one in shorter]


@pytest.mark.parametrize("policy", ["threshold", "presage"])
def test_job_whose_memory_outgrows_the_cluster_fails_and_ends(policy: str) -> None:
    request = Allocation(1, 1, 1.2, 1.2, 0.7 * GIB, 0.7 * GIB)
    found = run(policy, [spec(0, 0.0, 4000.0, request=request)], gib=1.45)
    assert [one.completed for one in found.ended] == [False]
