"""Each policy on a trace small enough to compute by hand."""

from dataclasses import replace

import numpy as np
import pytest

from presage.scheduler.model.elasticity import HEADROOM
from presage.scheduler.model.throughput import Window, observe
from presage.scheduler.simulator.baselines import GoodputPolicy, fit_optimus, fit_pollux
from presage.scheduler.simulator.command import (
    POLICIES,
    cluster_capacity,
    fastest_sec,
    lower_bound_sec,
    together_sec,
)
from presage.scheduler.simulator.jobs import GIB, Knobs, draw_jobs, synthetic_tables
from presage.scheduler.simulator.kind_models import allowed_sizes, fit_presage, make_setting
from presage.scheduler.simulator.presage import ALL, PresagePolicy
from presage.scheduler.simulator.views import (
    Allocation,
    Capacity,
    ClusterView,
    Measurement,
    SimulatedJob,
)
from tests.scheduler.simulator.simulations import run, spec, table, times
from tests.scheduler.simulator.test_cluster import trace

REQUEST = Allocation(1, 1, 2.0, 2.0, GIB, GIB)
KIND = table(stores=4)


def view(job: int, **changes: object) -> SimulatedJob:
    found = SimulatedJob(job, "made", 0, REQUEST, None, 0.0, 1000.0, 0.0, 0, 1)
    return replace(found, **changes)  # pyright: ignore[reportArgumentType] by name


def snapshot(
    jobs: list[SimulatedJob], cpus: float, measured: tuple[Measurement, ...] = (), now: float = 0.0
) -> ClusterView:
    def readings(job: int) -> None:
        raise AssertionError(f"nothing is read of {job}")

    return ClusterView(
        now,
        Capacity(cpus, 1000 * GIB),
        tuple(jobs),
        measured,
        {"made": KIND.allowed},
        {"made": 1.0},
        readings,  # pyright: ignore[reportArgumentType] never asked
    )


def everything(job: int = 0) -> tuple[Measurement, ...]:
    """Every size of the table, measured without an error."""
    return tuple(
        Measurement(job, "made", int(r), int(s), 1.0 / float(KIND.speed[s, r]), 1.0, 1.0)
        for r, s in zip(*allowed_sizes(KIND.allowed), strict=True)
    )


def test_static_gives_requests_in_order_and_lets_small_ones_pass() -> None:
    large = replace(REQUEST, num_replicas=4)
    jobs = [view(0), view(1, request=large), view(2), view(3, priority=1)]
    found = POLICIES["static"]().decide(snapshot(jobs, 12.0))
    assert found == {3: REQUEST, 0: REQUEST, 2: REQUEST}


def test_threshold_adds_replicas_until_stores_are_busy_and_takes_back_what_is_not_faster() -> None:
    policy = POLICIES["threshold"]()
    running = view(0, current=REQUEST)
    # One core of two is busy: 0.8 of them bear 1.6 times the replicas, which is still one.
    first = policy.decide(
        snapshot([running], 100.0, (Measurement(0, "made", 1, 1, 1.0, 1.0, 1.0),))
    )
    assert first == {0: REQUEST}
    policy = POLICIES["threshold"]()
    second = policy.decide(
        snapshot([running], 100.0, (Measurement(0, "made", 1, 1, 1.0, 1.0, 0.5),))
    )
    larger = replace(REQUEST, num_replicas=3)
    assert second == {0: larger}
    slower = (Measurement(0, "made", 3, 1, 0.99, 1.0, 0.5),)
    third = policy.decide(snapshot([view(0, current=larger)], 100.0, slower))
    assert third == {0: REQUEST}


def test_threshold_doubles_the_memory_of_what_ran_out_of_it() -> None:
    found = POLICIES["threshold"]().decide(snapshot([view(0, num_oom=2)], 100.0))
    assert found[0].replica_memory == 4 * GIB
    assert found[0].num_replicas == 1


def test_marginal_gives_replicas_to_the_job_that_is_helped_most() -> None:
    # Time is left / replicas: from 1 to 2 the longer one saves 1,500 s, the other one 500.
    jobs = [view(0, left_samples=1000.0), view(1, left_samples=3000.0)]
    found = POLICIES["marginal"]().decide(snapshot(jobs, 2 * 4.0 + 2.0, everything()))
    assert (found[0].num_replicas, found[1].num_replicas) == (1, 2)
    # From 2 to 3 it saves 500 s too, from 1 to 2 the first one: then the first one is served.
    found = POLICIES["marginal"]().decide(snapshot(jobs, 2 * 4.0 + 6.0, everything()))
    assert sum(sizes.num_replicas for sizes in found.values()) == 5


def test_goodput_evens_speedups_out_whatever_is_left() -> None:
    jobs = [view(0, left_samples=10.0, most_replicas=2), view(1, most_replicas=2)]
    found = POLICIES["goodput"]().decide(snapshot(jobs, 2 * 4.0 + 8.0, everything()))
    assert [found[job].num_replicas for job in (0, 1)] == [2, 2]


def test_goodput_at_most_doubles_the_replicas_that_a_job_had() -> None:
    found = POLICIES["goodput"]().decide(snapshot([view(0)], 1000.0, everything()))
    assert found[0].num_replicas <= 2


def test_presage_gives_a_measured_job_its_cores_and_the_job_with_less_to_do_more() -> None:
    policy = POLICIES["presage"]()
    jobs = [view(0, left_samples=100_000.0), view(1, left_samples=100.0)]
    found = policy.decide(snapshot(jobs, 11.0, everything()))
    assert found[0].replica_cpus == pytest.approx(1.3)
    assert found[1].replica_cpus == REQUEST.replica_cpus
    assert found[1].num_replicas > found[0].num_replicas
    assert sum(sizes.cpus for sizes in found.values()) <= 11.0


def test_presage_takes_the_request_of_a_kind_that_it_does_not_know() -> None:
    found = POLICIES["presage"]().decide(snapshot([view(7)], 100.0))
    assert found[7].replica_cpus == REQUEST.replica_cpus


def test_presage_keeps_a_running_job_where_too_little_is_gained() -> None:
    running = Allocation(3, 1, 1.37, 1.37, GIB, GIB)
    for left, changed in ((90.0, False), (100_000.0, True)):
        policy = POLICIES["presage"]()
        found = running
        for tick in range(6):
            here = view(0, current=running, left_samples=left)
            now = 1000.0 + 300.0 * tick
            measured = (Measurement(0, "made", 3, 1, 1.0 / 3.0, 1.0, 1.0),)
            measurements = (*everything(1), *measured) if tick == 0 else ()
            jobs = [here, view(1, current=REQUEST)] if tick == 0 else [here]
            found = policy.decide(snapshot(jobs, 100.0, measurements, now))[0]
            if found != running:
                break
            assert (policy.interval_sec < 300.0) == changed
        assert (found.num_replicas == 4) == changed
        assert changed or found == running


def test_presage_leaves_a_job_alone_that_has_nothing_left() -> None:
    policy = PresagePolicy()
    running = Allocation(1, 1, 1.3, 1.3, GIB, GIB)
    policy.decide(snapshot([view(0, current=running)], 100.0, everything()))
    found = policy.decide(snapshot([view(0, current=running, left_samples=0.0)], 100.0))
    assert found == {0: running}


def test_presage_shares_anew_only_when_a_job_came_or_something_was_measured() -> None:
    policy = PresagePolicy()
    policy.decide(snapshot([view(0), view(1)], 9.2, everything()))
    shared = policy.shared
    policy.decide(snapshot([view(0, left_samples=1.0), view(1)], 9.2))
    assert policy.shared is shared
    policy.decide(snapshot([view(0), view(1)], 9.2, everything()))
    assert policy.shared is not shared
    shared = policy.shared
    policy.decide(snapshot([view(1)], 9.2))
    assert policy.shared is not shared


def test_presage_takes_back_what_a_running_job_holds_when_another_comes() -> None:
    policy = PresagePolicy()
    running = Allocation(4, 4, 1.3, 1.3, GIB, GIB)
    alone = policy.decide(snapshot([view(0, current=running)], 10.4, everything()))
    assert alone[0] == running
    # Another one has much less to do: it goes first, and what runs gives back.
    jobs = [view(0, current=running, left_samples=1e6), view(1, left_samples=500.0)]
    both = policy.decide(snapshot(jobs, 10.4))
    assert both[0].cpus < running.cpus
    assert sum(sizes.cpus for sizes in both.values()) <= 10.4


def test_presage_of_a_kind_that_nobody_measured_is_as_urgent_as_most() -> None:
    policy = PresagePolicy()
    few = [view(0, left_samples=1000.0), view(1, kind="other", left_samples=1.0)]
    known = snapshot(few, 100.0, everything())
    known = replace(
        known,
        allowed={"made": KIND.allowed, "other": KIND.allowed},
        batch_samples={"made": 1.0, "other": 1.0},
    )
    policy.decide(known)
    options = policy._options(known)
    assert options[1].urgency == options[0].urgency


def test_live_takes_cores_of_the_request() -> None:
    policy = POLICIES["presage"]()
    running = replace(REQUEST, num_stores=2)
    jobs = [view(0, current=running, left_samples=1e6), view(1)]
    found = policy.decide(snapshot(jobs, 1000.0, everything()))
    assert {sizes.replica_cpus for sizes in found.values()} == {REQUEST.replica_cpus}


def test_live_gives_a_size_that_it_did_not_measure_no_fewer_cores_than_requested() -> None:
    policy = PresagePolicy()
    wide = replace(REQUEST, num_replicas=4, num_stores=4)
    policy.decide(snapshot([view(0), view(1, current=REQUEST)], 100.0, everything(1)))
    # Half a core of two is busy, and 0.65 are enough.
    for cpus in (REQUEST.replica_cpus, HEADROOM * 0.5):
        current = replace(wide, replica_cpus=cpus, store_cpus=cpus)
        running = view(0, request=wide, current=current)
        measured = Measurement(0, "made", 4, 4, 0.25, 0.5, 0.5)
        policy.decide(snapshot([running], 100.0, (measured,)))
    kind = policy.estimates.kinds["made"]
    replica, store = policy.estimates.cores(running, kind)
    at = kind.index_of(4, 4)
    assert at is not None
    assert replica[at] == pytest.approx(HEADROOM * 0.5)
    others = np.arange(len(replica)) != at
    assert min(replica[others].min(), store[others].min()) >= REQUEST.replica_cpus
    # Four stores had 0.65 cores each for a step that takes as long with one.
    one = kind.index_of(4, 1)
    assert one is not None
    assert store[one] == pytest.approx(4 * HEADROOM * 0.5)


@pytest.mark.parametrize(("cpus", "tried"), [(4.9, True), (4.0, False)])
def test_live_tries_more_cores_only_if_they_are_free(cpus: float, tried: bool) -> None:
    policy = PresagePolicy()
    running = view(0, current=REQUEST, left_samples=1e6)
    busy = (Measurement(0, "made", 1, 1, 1.0, 1.9, 1.9),)
    found = policy.decide(snapshot([running], cpus, busy))[0]
    assert (found.cpus > REQUEST.cpus) == tried
    assert (found.num_replicas, found.num_stores) == (1, 1)
    # It keeps them until they are measured, unless another job needs them.
    running = replace(running, current=found)
    assert policy.decide(snapshot([running], cpus))[0] == found
    if tried:
        both = policy.decide(snapshot([running, view(1)], 8.5))
        assert (both[0], both[1]) == (REQUEST, REQUEST)


@pytest.mark.parametrize(("left", "cpus"), [(1000.0, 2.0), (10_000.0, HEADROOM * 0.5)])
def test_live_takes_spare_cores_of_jobs_that_last(left: float, cpus: float) -> None:
    policy = PresagePolicy()
    running = view(0, current=REQUEST, left_samples=left)
    measured = (Measurement(0, "made", 1, 1, 1.0, 0.5, 0.5),)
    found = policy.decide(snapshot([running], 4.5, measured))
    assert found[0].replica_cpus == pytest.approx(cpus)
    # Others that wait get them in any case.
    both = policy.decide(snapshot([running, view(1)], 5.5))
    assert both[0].replica_cpus == pytest.approx(HEADROOM * 0.5)
    assert both[1] == REQUEST


@pytest.mark.parametrize(("left", "kept"), [(100.0, True), (1e6, False)])
def test_live_changes_no_job_that_ends_soon_for_another(left: float, kept: bool) -> None:
    policy = PresagePolicy()
    running = Allocation(4, 4, 2.0, 2.0, GIB, GIB)
    policy.decide(snapshot([view(0, current=running, left_samples=1e6)], 18.0, everything()))
    jobs = [view(0, current=running, left_samples=left), view(1, left_samples=10.0)]
    found = policy.decide(snapshot(jobs, 18.0))
    assert (found.get(0) == running) == kept
    assert (1 in found) != kept


def test_ours_without_its_part_moves_no_store_of_a_job_that_ran() -> None:
    policy = PresagePolicy(replace(ALL, move_stores=False))
    running = replace(REQUEST, num_stores=2)
    jobs = [view(0, current=running, left_samples=1e6), view(1)]
    policy.decide(snapshot(jobs, 1000.0, everything()))
    for _ in range(4):
        jobs = [view(0, left_samples=1e6)]
        assert policy.decide(snapshot(jobs, 1000.0))[0].num_stores == 2


def test_goodput_gives_back_only_as_much_as_others_need() -> None:
    policy = GoodputPolicy()
    requests = [replace(REQUEST, num_replicas=2, num_stores=2), replace(REQUEST, num_replicas=2)]
    speeds = {job: {1: 1.0, 2: 1.05, 3: 1.06} for job in (0, 1, 2)}
    jobs = [view(0, current=requests[0]), view(1, current=requests[1]), view(2)]
    wanted = {job: REQUEST for job in (0, 1, 2)}
    found = policy._keep_small_changes(wanted, speeds, snapshot(jobs, 16.0))
    assert found == {0: REQUEST, 1: requests[1], 2: REQUEST}
    assert policy._keep_small_changes(wanted, speeds, snapshot(jobs, 20.0)) == {
        0: requests[0],
        1: requests[1],
        2: REQUEST,
    }
    assert policy._keep_small_changes(wanted, speeds, snapshot(jobs, 12.0)) == wanted


FITS = {"ours": fit_presage, "optimus": fit_optimus, "pollux": fit_pollux}


@pytest.mark.parametrize("name", FITS)
def test_fit_of_some_sizes_predicts_the_others(name: str) -> None:
    kind = table(replicas=8, stores=4)
    replicas, stores = allowed_sizes(kind.allowed)
    seconds = 0.2 + 1.0 / replicas
    known = (replicas + stores) % 2 == 0
    setting = make_setting(replicas[known], stores[known], 1.0)
    window = observe(Window(), setting, seconds[known].tolist(), 0.0)
    found = FITS[name](window, kind.allowed, 1.0)
    assert found[~known] == pytest.approx(seconds[~known], rel=0.05)


def test_bounds_of_a_hand_made_trace() -> None:
    jobs = [spec(0, 0.0, 400.0), spec(1, 0.0, 800.0)]
    assert [fastest_sec(job) for job in jobs] == [100.0, 200.0]
    assert lower_bound_sec(jobs, 1e9) == 150.0
    # At 4 replicas and 1 store, 5 cores of which PEAK are held: 1.5 core seconds a sample.
    assert together_sec(jobs, 1.0) == pytest.approx((600.0 + 1800.0) / 2)
    late = [spec(0, 0.0, 800.0), spec(1, 300.0, 400.0)]
    # The one that comes at 300 has less to do than the 900 that are left of the first.
    assert together_sec(late, 1.0) == pytest.approx((1800.0 + 600.0) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound(policy: str) -> None:
    jobs = trace(30, seed=5)
    specs = draw_jobs(jobs, synthetic_tables(), Knobs(failures=0.0, stragglers=0.0, oom=0.0), 0)
    capacity = cluster_capacity(specs, jobs, 1.2)
    result = run(policy, specs, capacity.cpus, capacity.memory_bytes / GIB)
    assert np.mean(times(result)) >= lower_bound_sec(specs, capacity.cpus)


@pytest.mark.slow
@pytest.mark.parametrize("peak", [1.0, 1.5, 2.0])
def test_cores_fitted_to_busy_ones_never_starve_a_job_however_it_bursts(peak: float) -> None:
    jobs = trace(40, seed=7)
    specs = draw_jobs(jobs, synthetic_tables(), Knobs(peak=peak, oom=0.0), 0)
    capacity = cluster_capacity(specs, jobs, 0.8)
    found = {
        name: float(np.mean(times(run(name, specs, capacity.cpus, capacity.memory_bytes / GIB))))
        for name in ("static", "presage")
    }
    assert found["presage"] <= 1.03 * found["static"]
