"""Which job goes first under one budget, and which is left as it is."""

from dataclasses import replace
from typing import Any

import pytest

from presage.scheduler.controller.events import BudgetSet
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import GIB, check_waiting, submitted
from tests.scheduler.small_job import FACTS

ONE = BudgetSet(time_sec=0.0, cpus=2.0, memory_bytes=8 * GIB)
"""Room for one job."""


def verbs(budget: BudgetSet, second: int, priority: int = 0) -> list[tuple[str, str]]:
    """Return what is done of the jobs when another one comes beside one of 40 segments."""
    bench = Bench(budget, submitted("first", 40))
    found = bench.send(submitted("second", second, f"  priority: {priority}"))
    return sorted((a.job, a.verb) for a in found if a.verb in ("admit", "wait"))


def test_handle_of_a_job_with_much_less_left_lets_it_go_first_and_says_so() -> None:
    bench = Bench(ONE, submitted("first", 40))
    bench.built(0)
    found = bench.send(submitted("second", 2, time_sec=bench.now))
    waits = next(a for a in found if (a.job, a.verb) == ("first", "wait"))
    assert waits.reason.startswith(
        "preempted by jobs of higher priority, or of the same with less time left, within 2 cores"
    )
    assert ("second", "admit") in [(a.job, a.verb) for a in found]


def test_handle_of_a_job_with_a_little_less_left_keeps_the_one_that_runs() -> None:
    assert verbs(ONE, 36) == [("second", "wait")]
    assert verbs(ONE, 20) == [("first", "wait"), ("second", "admit")]


def test_handle_of_less_left_never_passes_a_higher_priority() -> None:
    assert verbs(ONE, 2, priority=-1) == [("second", "wait")]
    assert verbs(ONE, 400, priority=1) == [("first", "wait"), ("second", "admit")]


def test_handle_that_began_a_shorter_job_does_not_go_back_to_the_longer_one() -> None:
    bench = Bench(ONE, submitted("first", 40))
    bench.built(0)
    bench.send(submitted("second", 20, time_sec=bench.now))
    assert bench.state.jobs["second"].phase == "running"
    third = bench.send(submitted("third", 60, time_sec=bench.now))
    assert [(a.job, a.verb) for a in third if a.verb in ("admit", "wait")] == [("third", "wait")]


@pytest.mark.parametrize(("segments", "changes"), [(40, False), (400, True)])
def test_handle_resizes_no_job_for_another_that_ends_before_it_would_pay(
    segments: int, changes: bool
) -> None:
    bench = Bench(BudgetSet(time_sec=0.0, cpus=8.0, memory_bytes=32 * GIB))
    bench.send(submitted("first", segments))
    sizes = bench.state.jobs["first"].sizes
    bench.send(submitted("second", 2, time_sec=bench.now))
    assert (bench.state.jobs["first"].sizes != sizes) == changes
    assert (bench.state.jobs["second"].sizes is not None) == changes


def test_handle_of_a_job_that_ends_soon_rather_shrinks_it_than_queues_it() -> None:
    bench = Bench(replace(ONE, cpus=5.0, memory_bytes=16 * GIB), submitted("first", 3))
    more = submitted("second", 2, "  priority: 1\n  training: {min_replicas: 2}", bench.now)
    found = [(a.job, a.verb) for a in bench.send(more) if not a.process]
    assert found == [("second", "admit"), ("first", "scale")]
    check_waiting(bench.state)


LEAN = "  preprocessing: {max_workers: 1}\n  training: {max_replicas: 1, max_stores: 0}"


def test_handle_of_a_build_that_ended_gives_its_cores_to_a_job_that_waits() -> None:
    bench = Bench(replace(ONE, cpus=3.0), submitted("first", 1, LEAN))
    waits = bench.send(submitted("second", 1, LEAN, bench.now))
    assert [(a.job, a.verb) for a in waits] == [("second", "wait")]
    found = bench.built(0)
    assert [(a.job, a.verb, a.process) for a in found] == [
        ("second", "admit", ""),
        ("first", "start", "coordinator-0.1"),
        ("second", "start", "segment-0.1"),
    ]
    check_waiting(bench.state)
    (action,) = [a for a in bench.send(submitted("third", 1, LEAN, bench.now)) if a.verb == "wait"]
    assert action.job == "third", "no cores are left"


LARGE = BudgetSet(time_sec=0.0, cpus=16.0, memory_bytes=64 * GIB)


def sizes(budget: BudgetSet, schedule: str = "  priority: 0") -> Any:
    """Return what a lone job of a million samples is given."""
    return Bench(budget, replace(submitted("first", 2, schedule), facts=FACTS)).job.sizes


def test_handle_prefers_the_exponent_of_the_budget_over_that_of_the_job() -> None:
    own = "  budget: {time_cost_exponent: 1}"
    assert sizes(LARGE, own) == sizes(replace(LARGE, time_cost_exponent=1.0))
    assert sizes(replace(LARGE, time_cost_exponent=30.0), own) == sizes(
        replace(LARGE, time_cost_exponent=30.0)
    )
    assert sizes(replace(LARGE, time_cost_exponent=30.0), own) != sizes(LARGE, own)
