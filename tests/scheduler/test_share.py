"""Plans of several jobs under one budget: never beyond it, nearly the best, by priority."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.scheduler.model.pools import GIB
from presage.scheduler.model.predict import fit_models
from presage.scheduler.model.throughput import Floats
from presage.scheduler.planner.candidates import find_candidates, predict_candidates, preference
from presage.scheduler.planner.policy import plan
from presage.scheduler.planner.share import (
    MAX_JOBS,
    RESTART_SEC,
    RUNNING_FACTOR,
    WAITING,
    Options,
    choose_greedily,
    job_options,
    share_budget,
    urgencies,
)
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig
from tests.scheduler.small_job import snapshot

BUDGET = BudgetConfig(cpus=32.0, memory=64 * GIB)


def make(cpus: Sequence[float], gain: Sequence[float], priority: int = 0) -> Options:
    """Return plans whose memory is as large a share of the budget as their cores."""
    cores = np.array(cpus, float)
    return Options(priority=priority, cpus=cores, memory_bytes=cores * 2 * GIB, gain=np.array(gain))


def random_job(rng: np.random.Generator, most: int = 5) -> Options:
    size = int(rng.integers(1, most + 1))
    gain = np.sort(rng.uniform(0.05, 1.0, size))
    return Options(
        priority=int(rng.integers(0, 3)),
        cpus=np.sort(rng.integers(1, 20, size)).astype(float),
        memory_bytes=np.sort(rng.integers(1, 40, size) * GIB).astype(np.float64),
        gain=gain / gain[-1],
    )


def worth(jobs: Sequence[Options], chosen: Sequence[int]) -> float:
    found = [job.worth[c] for job, c in zip(jobs, chosen, strict=True) if c != WAITING]
    return float(sum(found))


def used(jobs: Sequence[Options], chosen: Sequence[int]) -> np.ndarray:
    shares = [j.shares(BUDGET)[c] for j, c in zip(jobs, chosen, strict=True) if c != WAITING]
    return np.sum(shares, axis=0) if shares else np.zeros(2)


def brute_force(jobs: Sequence[Options], running: Sequence[bool]) -> float:
    """Return the largest worth when these jobs run, of all combinations."""
    plans = [range(len(j.gain)) if r else [WAITING] for j, r in zip(jobs, running, strict=True)]
    allowed = (c for c in itertools.product(*plans) if (used(jobs, c) <= 1 + 1e-9).all())
    return max(worth(jobs, chosen) for chosen in allowed)


@pytest.mark.slow
def test_share_of_few_jobs_is_nearly_always_the_best_of_all_combinations() -> None:
    found: list[float] = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        jobs = [random_job(rng) for _ in range(int(rng.integers(1, 5)))]
        chosen = share_budget(jobs, BUDGET)
        best = brute_force(jobs, [plan != WAITING for plan in chosen])
        found.append(worth(jobs, chosen) / best if best else 1.0)
    assert min(found) >= 0.9
    assert np.mean(found) >= 0.999
    assert np.mean(np.array(found) > 1 - 1e-9) >= 0.97


@given(st.integers(0, 10**6), st.integers(1, MAX_JOBS + 8))
def test_share_never_exceeds_the_budget_and_leaves_out_only_what_does_not_fit(
    seed: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    jobs = [random_job(rng) for _ in range(count)]
    chosen = share_budget(jobs, BUDGET)
    assert (used(jobs, chosen) <= 1 + 1e-9).all()
    smallest = [job.shares(BUDGET)[job.shares(BUDGET).max(axis=1).argmin()] for job in jobs]
    free = np.ones(2)
    for i in sorted(range(count), key=lambda i: -jobs[i].priority):
        fits = bool((smallest[i] <= free + 1e-9).all())
        assert (chosen[i] != WAITING) == fits
        free = free - smallest[i] * fits


def test_share_with_room_for_all_gives_each_its_own_choice() -> None:
    jobs = [make([1, 2, 4], [0.3, 0.6, 1.0]), make([3, 5], [0.9, 1.0]), make([2], [1.0])]
    assert share_budget(jobs, BUDGET) == (2, 1, 0)


def test_share_of_equal_jobs_favours_the_higher_priority() -> None:
    plans = [4, 12, 20], [0.3, 0.7, 1.0]
    low, high = make(*plans), make(*plans, priority=2)
    assert share_budget([low, high], BUDGET) == (1, 2)
    assert share_budget([high, low], BUDGET) == (2, 1)


def test_share_of_equal_jobs_favours_the_more_urgent_below_priority() -> None:
    plans = [4, 12, 20], [0.3, 0.7, 1.0]
    calm, urgent = make(*plans), replace(make(*plans), urgency=3.0)
    assert share_budget([calm, urgent], BUDGET) == (1, 2)
    assert share_budget([urgent, calm], BUDGET) == (2, 1)
    # Where only one fits the urgent one goes first, but never before a higher priority.
    only = make([20], [1.0])
    assert share_budget([only, replace(only, urgency=3.0)], BUDGET) == (WAITING, 0)
    first = replace(only, priority=1)
    assert share_budget([replace(only, urgency=100.0), first], BUDGET) == (WAITING, 0)


LEFT = st.lists(st.floats(1.0, 1e8), min_size=1, max_size=12)


@given(LEFT, st.integers(0, 11))
def test_urgency_is_the_inverse_of_what_is_left_beside_the_others(
    free: list[float], place: int
) -> None:
    seconds, none = np.array(free), np.zeros(len(free), bool)
    weights = urgencies(seconds, none)
    started = seconds + RESTART_SEC
    np.testing.assert_allclose(weights * started, np.median(started))
    # A job that runs need not start.
    runs = np.arange(len(free)) == place
    weights = urgencies(seconds, runs) / np.where(runs, RUNNING_FACTOR, 1.0)
    started = np.where(runs, seconds, started)
    np.testing.assert_allclose(weights * started, np.median(started))


def test_urgency_of_what_nobody_knows_is_that_of_most() -> None:
    none = np.zeros(3, bool)
    assert urgencies(np.array([10.0, np.nan, 10.0]), none).tolist() == [1.0, 1.0, 1.0]
    assert urgencies(np.array([np.nan] * 3), none).tolist() == [1.0, 1.0, 1.0]
    assert urgencies(np.array([0.0, 1.0, 1.0]), none).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("free", "shorter", "first"), [(1000.0, 0.9, 0), (1000.0, 0.7, 1), (100.0, 0.7, 0)]
)
def test_share_ends_a_job_that_runs_only_for_one_that_ends_much_earlier(
    free: float, shorter: float, first: int
) -> None:
    only = make([20], [1.0])
    weights = urgencies(np.array([free, free * shorter]), np.array([True, False]))
    jobs = [replace(only, urgency=float(urgency)) for urgency in weights]
    assert share_budget(jobs, BUDGET).index(0) == first


def test_share_without_room_lets_the_lower_priority_wait() -> None:
    jobs = [make([20], [1.0]), make([20, 30], [0.5, 1.0], priority=1)]
    assert share_budget(jobs, BUDGET) == (WAITING, 1)


def test_share_takes_back_what_another_job_makes_more_of() -> None:
    """One upgrade looks best for what it takes, but leaves no room for the two that beat it."""
    jobs = [make([1, 18], [0.1, 1.0]), make([1, 31], [0.001, 1.0], priority=1)]
    assert worth(jobs, share_budget(jobs, BUDGET)) == pytest.approx(brute_force(jobs, [True, True]))
    assert share_budget(jobs, BUDGET) == (0, 1)


def test_share_of_no_job_is_empty() -> None:
    assert share_budget([], BUDGET) == ()


def test_options_end_at_the_own_choice_and_a_job_alone_gets_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = ScheduleConfig()
    measured = snapshot(tmp_path_factory.mktemp("job"), config)
    models = fit_models(measured, config)
    grid = find_candidates(measured, config, models)
    found = predict_candidates(grid, measured, config, models)
    preferred = int(preference(grid, found, config)[0])
    places, job = job_options(found, config, preferred)
    assert places[-1] == preferred
    assert (np.diff(job.gain) > 0).all()
    assert job.gain[-1] == 1.0
    assert (np.diff(found.cost_per_hour[places]) > 0).all()
    own = places[share_budget([job], config.budget)[0]]
    assert int(grid.num_replicas[own]) == plan(measured, config).chosen.num_replicas
    assert own == preferred
    two = share_budget([job, job], config.budget)
    assert sum(job.cpus[i] for i in two) <= config.budget.cpus


LARGE_BUDGET = replace(BudgetConfig(), cpus=100.0, memory=400 * GIB)


def jobs(count: int, seed: int) -> list[Options]:
    """Return jobs some of whose faster plans take less of one resource."""
    rng = np.random.default_rng((seed, count))
    found: list[Options] = []
    for _ in range(count):
        plans = int(rng.integers(1, 8))
        cpus, memory = np.sort(rng.uniform(1.0, 20.0, (2, plans)), axis=1)
        if rng.random() < 0.3:
            memory = np.array(rng.permutation(memory), np.float64)
        gain = np.sort(rng.uniform(0.05, 1.0, plans))
        found.append(
            Options(
                priority=int(rng.integers(0, 3)),
                urgency=float(rng.choice([1.0, 0.5, 1.0 / rng.exponential(1e4)])),
                cpus=cpus,
                memory_bytes=4.0 * GIB * memory,
                gain=gain / gain[-1],
            )
        )
    return found


def _admit(jobs: Sequence[Options], shares: Sequence[Floats]) -> list[int]:
    """Give each job its smallest plan, by priority, then urgency, then the earliest first."""
    chosen = [WAITING] * len(jobs)
    free = np.ones(2)
    for job in sorted(range(len(jobs)), key=lambda i: (-jobs[i].priority, -jobs[i].urgency)):
        smallest = int(shares[job].max(axis=1).argmin())
        if _fits(shares[job][smallest], free):
            chosen[job] = smallest
            free = free - shares[job][smallest]
    return chosen


def _upgrade(
    jobs: Sequence[Options], shares: Sequence[Floats], admitted: Sequence[int]
) -> list[int]:
    """Make the change that gains most for what it takes, as long as one fits.

    What does not fit is not looked at again: what is left only shrinks, unless a change
    takes more of one resource and less of the other.
    """
    chosen, free = list(admitted), _left(shares, admitted)
    width = max((len(share) for share in shares), default=0)
    ratios = np.full((len(jobs), width), -1.0)
    worths = [job.worth for job in jobs]
    for job in range(len(jobs)):
        ratios[job, : len(shares[job])] = _ratios(worths[job], shares[job], chosen[job])
    while ratios.size:
        job, plan = divmod(int(ratios.argmax()), width)
        if ratios[job, plan] < 0:
            break
        used = shares[job][plan] - shares[job][chosen[job]]
        if not _fits(used, free):
            ratios[job, plan] = -1.0
            continue
        chosen[job], free = plan, free - used
        again = range(len(jobs)) if used.min() < 0 else (job,)
        for one in again:
            ratios[one, : len(shares[one])] = _ratios(worths[one], shares[one], chosen[one])
    return chosen


def _ratios(worth: Floats, shares: Floats, plan: int) -> Floats:
    """Return (n,) what each plan gains for what it takes beside this one; -1 where nothing."""
    if plan == WAITING:
        return np.full(len(shares), -1.0)
    gained, used = _change(worth, plan), _change(shares, plan)
    return np.where(gained > 0, gained / np.maximum(used.max(axis=1), 1e-12), -1.0)


def _change(values: Floats, plan: int) -> Floats:
    return values - values[plan]


def _left(shares: Sequence[Floats], chosen: Sequence[int]) -> Floats:
    used = [shares[job][plan] for job, plan in enumerate(chosen) if plan != WAITING]
    return np.ones(2) - np.array(used, np.float64).reshape(-1, 2).sum(axis=0)


def _fits(used: Floats, free: Floats) -> np.ndarray:
    return np.asarray((used <= free + 1e-9).all(axis=-1))


def one_by_one(jobs: Sequence[Options], budget: BudgetConfig) -> list[int]:
    """Return what `upgraded` is to return."""
    shares = [job.shares(budget) for job in jobs]
    return _upgrade(jobs, shares, _admit(jobs, shares))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("room", [0.1, 1.0, 4.0, 50.0])
def test_all_at_once_is_one_by_one(count: int, room: float) -> None:
    budget = replace(
        LARGE_BUDGET, cpus=room * LARGE_BUDGET.cpus, memory=int(room * LARGE_BUDGET.memory)
    )
    for seed in range(15):
        asked = jobs(count, seed)
        assert choose_greedily(asked, budget) == one_by_one(asked, budget)


def test_share_of_equals_takes_the_first_ones() -> None:
    asked = [Options(cpus=np.array([30.0]), memory_bytes=np.array([1.0]), gain=np.ones(1))] * 5
    assert (
        choose_greedily(asked, LARGE_BUDGET) == [0, 0, 0, -1, -1] == one_by_one(asked, LARGE_BUDGET)
    )
