"""What our policy learns: suspect cores, their use, and refits."""

from dataclasses import replace

import numpy as np
import pytest

from presage.scheduler.model.elasticity import (
    GROWTH,
    HEADROOM,
    MIN_RATIO,
    CoreReadings,
    add_readings,
    fit_pool_cores,
)
from presage.scheduler.model.throughput import MAX_PER_CELL, Window, observe
from presage.scheduler.simulator.jobs import GIB, PEAK, Table
from presage.scheduler.simulator.kind_models import (
    KindModels,
    allowed_sizes,
    fit_presage,
    make_setting,
)
from presage.scheduler.simulator.presage import ALL, OFF, Estimates, readings_of
from presage.scheduler.simulator.views import (
    Allocation,
    Capacity,
    ClusterView,
    Measurement,
    Readings,
    SimulatedJob,
)
from tests.scheduler.simulator.simulations import table

TIGHT = Allocation(1, 1, PEAK, PEAK, GIB, GIB)
KIND = table(replicas=8, stores=16)


def measured(sizes: Allocation, need: float, job: int = 0, noise: float = 1.0) -> Measurement:
    """Return what a job measures that keeps one core busy and needs so many in its bursts."""
    kept = min(1.0, sizes.replica_cpus / need, sizes.store_cpus / need)
    busy = kept
    speed = kept * sizes.num_replicas
    return Measurement(job, "made", sizes.num_replicas, sizes.num_stores, noise / speed, busy, busy)


def view(job: int, current: Allocation | None, request: Allocation = TIGHT) -> SimulatedJob:
    return SimulatedJob(job, "made", 0, request, current, 0.0, 1e6, 0.5, 0, 1)


def snapshot(
    views: list[SimulatedJob],
    found: tuple[Measurement, ...] = (),
    peak: float = GIB,
    kind: Table = KIND,
) -> ClusterView:
    steps = np.arange(0.0, 501.0)
    readings = Readings(steps, np.full(501, peak), np.linspace(0.0, 1.0, 1001), 1.0)
    return ClusterView(
        0.0,
        Capacity(1e6, 1e18),
        tuple(views),
        found,
        {"made": kind.allowed},
        {"made": 1.0},
        lambda _job: readings,
    )


def add_measurement(
    core_readings: CoreReadings, found: Measurement, given: Allocation
) -> CoreReadings:
    at = found.num_replicas, found.num_stores
    return add_readings(core_readings, at, readings_of(found, given))


def next_sizes(sizes: Allocation, core_readings: CoreReadings) -> Allocation:
    given = fit_pool_cores(core_readings)
    assert given is not None
    return replace(sizes, replica_cpus=given.cpus[0], store_cpus=given.cpus[1])


def simulate_job(sizes: Allocation, need: float, count: int) -> tuple[CoreReadings, Allocation]:
    """Return what is known of a job without noise, and its sizes, after so many measurements."""
    core_readings = CoreReadings()
    for _ in range(count):
        core_readings = add_measurement(core_readings, measured(sizes, need), sizes)
        sizes = next_sizes(sizes, core_readings)
    return core_readings, sizes


def test_fitted_of_a_job_with_what_it_needs_tries_more_once_and_never_again() -> None:
    core_readings = add_measurement(CoreReadings(), measured(TIGHT, PEAK), TIGHT)
    first = fit_pool_cores(core_readings)
    assert first is not None
    assert (first.trying, first.slower) == (True, False)
    assert next_sizes(TIGHT, core_readings).cpus == pytest.approx(GROWTH * TIGHT.cpus)
    core_readings, sizes = simulate_job(TIGHT, PEAK, 2)
    second = fit_pool_cores(core_readings)
    assert second is not None
    assert (second.trying, second.limited) == (False, False)
    assert sizes.replica_cpus == pytest.approx(HEADROOM)
    assert simulate_job(TIGHT, PEAK, 3)[1] == simulate_job(TIGHT, PEAK, 9)[1] == sizes


@pytest.mark.parametrize("need", [PEAK, 1.5, 2.0])
@pytest.mark.parametrize("factor", [0.4, 1.0, 2.0])
def test_fitted_ends_with_what_a_job_needs_wherever_it_begins(need: float, factor: float) -> None:
    begun = replace(TIGHT, replica_cpus=factor * need, store_cpus=factor * need)
    kept = [simulate_job(begun, need, count)[1] for count in (14, 15, 16)]
    assert kept[0] == kept[1] == kept[2]
    assert need / MIN_RATIO <= kept[0].replica_cpus <= 1.3 * max(need, HEADROOM)


def test_fitted_of_the_pool_that_has_enough_grows_with_the_one_in_doubt() -> None:
    sizes = replace(TIGHT, store_cpus=3.0)
    core_readings = add_measurement(CoreReadings(), measured(sizes, PEAK), sizes)
    given = fit_pool_cores(core_readings)
    assert given is not None
    assert given.trying
    assert given.cpus == pytest.approx((GROWTH * PEAK, GROWTH * HEADROOM))


def test_heard_compares_only_measurements_of_the_same_sizes() -> None:
    core_readings = add_measurement(CoreReadings(), measured(TIGHT, PEAK), TIGHT)
    wider = replace(TIGHT, num_replicas=2, replica_cpus=2.0, store_cpus=2.0)
    core_readings = add_measurement(core_readings, measured(wider, PEAK), wider)
    assert core_readings.sizes == (2, 1)
    assert [len(readings) for readings in core_readings.readings.values()] == [1, 1]


def test_estimates_learn_sizes_of_jobs_that_are_in_doubt() -> None:
    estimates = Estimates(ALL)
    tight = view(0, TIGHT)
    estimates.update(snapshot([tight], (measured(TIGHT, PEAK),)))
    grant = estimates.jobs[0].grant
    assert grant is not None
    assert grant.trying
    assert len(estimates.models.window("made")) == 1


def test_estimates_of_slow_measurements_leave_speeds_of_a_kind_alone() -> None:
    estimates = Estimates(ALL)
    ample = replace(TIGHT, replica_cpus=4.0, store_cpus=4.0)
    for sizes in (ample, replace(TIGHT, replica_cpus=HEADROOM, store_cpus=HEADROOM)):
        here = view(0, sizes, ample)
        estimates.update(snapshot([here], (measured(sizes, 2.0),)))
    kind = estimates.kinds["made"]
    at = kind.index_of(1, 1)
    assert at is not None
    assert kind.seconds[at] == pytest.approx(1.0)
    # What it lacked it gets back.
    assert estimates.cores(view(0, TIGHT, ample), kind)[0][at] >= 2.0


def test_knowledge_of_a_doubted_size_ends_with_the_first_measurement_that_is_not() -> None:
    knowledge = KindModels(fit_presage)
    slow, fast = (replace(measured(TIGHT, PEAK), step_sec=sec) for sec in (3.0, 1.0))
    knowledge.update(snapshot([view(0, TIGHT)], (slow,)), {0})
    assert knowledge.window("made").medians().tolist() == [3.0]
    knowledge.update(snapshot([view(0, TIGHT)], (fast,)))
    assert knowledge.window("made").medians().tolist() == [1.0]


def test_knowledge_is_fitted_again_however_often_one_size_was_measured() -> None:
    knowledge = KindModels(fit_presage)
    versions: list[int] = []
    for _ in range(8 * MAX_PER_CELL):
        knowledge.update(snapshot([view(0, TIGHT)], (measured(TIGHT, PEAK),)))
        versions.append(knowledge.versions["made"])
    assert versions[-1] > versions[2 * MAX_PER_CELL] > versions[MAX_PER_CELL]
    assert versions[-1] < 40


MEMORY = {
    "memory that is not needed": (0.2 * GIB, 0, (0.22, 1.0)),
    "more, while it is not urgent": (0.95 * GIB, 0, (1.0, 1.0)),
    "after it ran out": (1.0 * GIB, 1, (1.5, 1.1)),
}


@pytest.mark.parametrize(("peak", "killed", "wanted"), MEMORY.values(), ids=MEMORY.keys())
def test_memory_of_a_job_is_what_its_parts_say(
    peak: float, killed: int, wanted: tuple[float, float]
) -> None:
    for parts, share in zip((ALL, OFF), wanted, strict=True):
        estimates = Estimates(parts)
        here = replace(view(0, TIGHT), num_oom=killed)
        estimates.update(snapshot([here], peak=peak))
        assert estimates.memory(here)[0] == pytest.approx(share * GIB, rel=0.01)


def test_fit_that_leaves_no_time_at_some_sizes_does_not_trust_them() -> None:
    # Three sizes of which the fewest replicas were fastest: only terms of more replicas are left.
    measured_sec = {(2, 9): [0.354], (3, 3): [0.98, 0.99], (3, 1): [0.633]}
    window = Window()
    for (replicas, stores), seconds in measured_sec.items():
        setting = make_setting(np.array([replicas]), np.array([stores]), 128.0)
        for sec in seconds:
            window = observe(window, setting, [sec], 0.0)
    found = fit_presage(window, KIND.allowed, 128.0)
    replicas, stores = allowed_sizes(KIND.allowed)
    assert np.isnan(found[replicas == 1]).all()
    assert found[(replicas == 2) & (stores == 9)] == pytest.approx([0.354])
