"""What our policy learns: doubt about cores, cells that only the doubted have, and refits."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler.cells import LATEST
from scheduler.simulator.draw import GIB, PEAK
from scheduler.simulator.estimates import Estimates, fit_ours
from scheduler.simulator.knowledge import MIN_CELLS, SAMPLED, Knowledge
from scheduler.simulator.parts import ALL, LIVE
from scheduler.simulator.short import CPU_HEADROOM, FASTER, MORE, SHORT, Cores, judge
from scheduler.simulator.tables import Table
from scheduler.simulator.views import Capacity, JobView, Measured, Readings, Sizes, Snapshot
from tests.scheduler.simulator.made import table

TIGHT = Sizes(1, 1, PEAK, PEAK, GIB, GIB)
KIND = table(replicas=8, stores=16)


def measured(sizes: Sizes, need: float, job: int = 0, noise: float = 1.0) -> Measured:
    """Return what a job that needs so many cores for its mean of 1 measures at its sizes."""
    kept = min(1.0, sizes.replica_cpus / need, sizes.store_cpus / need)
    busy = kept * need / PEAK
    speed = kept * sizes.num_replicas
    return Measured(job, "made", sizes.num_replicas, sizes.num_stores, noise / speed, busy, busy)


def view(job: int, current: Sizes | None, request: Sizes = TIGHT) -> JobView:
    return JobView(job, "made", 0, request, current, 0.0, 1e6, 0.5, 0, 1)


def snapshot(
    views: list[JobView], found: tuple[Measured, ...] = (), peak: float = GIB, kind: Table = KIND
) -> Snapshot:
    steps = np.arange(0.0, 501.0)
    readings = Readings(steps, np.full(501, peak), np.linspace(0.0, 1.0, 1001), 1.0)
    return Snapshot(
        0.0,
        Capacity(1e6, 1e18),
        tuple(views),
        found,
        {"made": kind.allowed},
        {"made": 1.0},
        lambda _job: readings,
    )


def more(sizes: Sizes, known: Cores) -> Sizes:
    assert known.busy is not None
    cpus = [CPU_HEADROOM * part for part in known.busy]
    return replace(sizes, replica_cpus=cpus[0], store_cpus=cpus[1])


def test_judge_of_a_job_with_what_it_needs_tries_more_once_and_never_again() -> None:
    first = judge(Cores(), measured(TIGHT, PEAK), TIGHT)
    assert first.tried is not None
    tried = more(TIGHT, first)
    assert tried.cpus == pytest.approx(MORE * TIGHT.cpus)
    second = judge(first, measured(tried, PEAK), tried)
    assert (second.tried, second.enough, second.lacked) == (None, True, False)
    assert second.busy == pytest.approx((1.0, 1.0))
    again = judge(second, measured(TIGHT, PEAK), TIGHT)
    assert again.tried is None
    assert again.trusts_request


def test_judge_of_a_job_that_lacks_cores_gives_more_until_it_gets_no_faster() -> None:
    need, sizes, known = 3.0 * PEAK, TIGHT, Cores()
    for _ in range(20):
        known = judge(known, measured(sizes, need), sizes)
        if known.tried is None:
            break
        sizes = more(sizes, known)
    assert known.tried is None
    assert known.lacked
    assert sizes.replica_cpus >= need / FASTER
    assert not known.trusts_request


def test_judge_compares_only_the_same_sizes_with_more_cores() -> None:
    first = judge(Cores(), measured(TIGHT, PEAK), TIGHT)
    same = judge(first, measured(TIGHT, PEAK, noise=0.9), TIGHT)
    assert not same.enough
    assert not same.lacked
    wider = replace(more(TIGHT, first), num_replicas=2)
    assert not judge(first, measured(wider, PEAK), wider).enough


def test_judge_of_a_job_with_room_has_no_doubt() -> None:
    roomy = replace(TIGHT, replica_cpus=1.01 / SHORT, store_cpus=1.01 / SHORT)
    known = judge(Cores(), measured(roomy, 1.0), roomy)
    assert known.tried is None
    assert not known.enough


def sampled(first: int = 0) -> list[tuple[JobView, Measured]]:
    """Return jobs at the sizes that are measured first, each with exactly what it needs."""
    found: list[tuple[JobView, Measured]] = []
    for job, (replicas, stores) in enumerate(SAMPLED, first):
        sizes = replace(TIGHT, num_replicas=replicas, num_stores=stores)
        found.append((view(job, sizes), measured(sizes, PEAK, job)))
    return found


def test_estimates_learn_sizes_of_jobs_that_are_in_doubt() -> None:
    estimates = Estimates(ALL)
    pairs = sampled()
    estimates.take_in(snapshot([v for v, _ in pairs], tuple(m for _, m in pairs)))
    assert all(needs.cores.tried is not None for needs in estimates.needs.values())
    assert len(estimates.knowledge.window("made")) == len(SAMPLED) >= MIN_CELLS
    new = view(99, None)
    assert estimates.sample(new, KIND.allowed) is None
    assert Estimates(ALL).sample(new, KIND.allowed) is not None
    assert Estimates(LIVE).sample(new, KIND.allowed) is None
    cores = estimates.cores(pairs[0][0], estimates.kinds["made"])
    at = estimates.kinds["made"].place(1, 1)
    assert cores[0][at] == pytest.approx(MORE * PEAK)


def test_estimates_give_a_measured_job_no_more_than_its_request_unless_it_lacked_cores() -> None:
    estimates = Estimates(ALL)
    pairs = sampled()
    estimates.take_in(snapshot([v for v, _ in pairs], tuple(m for _, m in pairs)))
    kind = estimates.kinds["made"]
    at = kind.place(1, 1)
    assert at is not None
    first = pairs[0][0]
    needs = estimates.needs[first.job]
    for lacked, wanted in ((False, PEAK), (True, CPU_HEADROOM)):
        needs.cores = Cores(busy=(1.0, 1.0), at=(1, 1), enough=True, lacked=lacked)
        assert estimates.cores(first, kind)[0][at] == pytest.approx(wanted)


def test_knowledge_of_a_doubted_size_ends_with_the_first_measurement_that_is_not() -> None:
    knowledge = Knowledge(fit_ours)
    slow, fast = (replace(measured(TIGHT, PEAK), step_sec=sec) for sec in (3.0, 1.0))
    knowledge.take_in(snapshot([view(0, TIGHT)], (slow,)), {0})
    assert knowledge.window("made").medians().tolist() == [3.0]
    knowledge.take_in(snapshot([view(0, TIGHT)], (fast,)))
    assert knowledge.window("made").medians().tolist() == [1.0]
    assert len(knowledge.cores("made", 1)) == 1
    assert len(knowledge.cores("made", 2)) == 2


def test_knowledge_is_fitted_again_however_often_one_size_was_measured() -> None:
    knowledge = Knowledge(fit_ours)
    versions: list[int] = []
    for _ in range(8 * LATEST):
        knowledge.take_in(snapshot([view(0, TIGHT)], (measured(TIGHT, PEAK),)))
        versions.append(knowledge.versions["made"])
    assert versions[-1] > versions[2 * LATEST] > versions[LATEST]
    assert versions[-1] < 40


MEMORY = {
    "memory that is not needed": (0.2 * GIB, 0, (0.22, 1.0)),
    "more, while it is not urgent": (0.95 * GIB, 0, (1.045, 1.0)),
    "after it ran out": (1.0 * GIB, 1, (1.5, 1.1)),
}


@pytest.mark.parametrize(("peak", "killed", "wanted"), MEMORY.values(), ids=MEMORY.keys())
def test_memory_of_a_job_is_what_its_parts_say(
    peak: float, killed: int, wanted: tuple[float, float]
) -> None:
    for parts, share in zip((ALL, LIVE), wanted, strict=True):
        estimates = Estimates(parts)
        here = replace(view(0, TIGHT), num_oom=killed)
        estimates.take_in(snapshot([here], peak=peak))
        assert estimates.memory(here)[0] == pytest.approx(share * GIB, rel=0.01)
