"""Memory that is not needed: the next processes get less, and nobody is replaced for nothing."""

from dataclasses import replace

import pytest

from presage.scheduler.controller.events import BudgetSet, Ended, Read, Resized
from presage.scheduler.controller.predictions import SPARE_TICKS
from presage.scheduler.controller.reconcile import RESIZE_RETRY_SEC
from presage.scheduler.controller.state import Action
from presage.scheduler.planner.correction import MIN_GAIN
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, GIB, MIB, check_laws, submitted

LARGE = """\
  training: {replica: {memory: 6GiB}, max_replicas: 1, max_stores: 0}
  preprocessing: {max_workers: 1}
"""
SMALL = """\
  training: {max_replicas: 1, max_stores: 0}
  preprocessing: {worker: {memory: 3GiB}, max_workers: 1}
"""


def train(bench: Bench, num_ticks: int, resident: int = 1200 * MIB) -> list[Action]:
    """Let the coordinator of the first job train with steady memory, a look after each window."""
    found: list[Action] = []
    for _ in range(num_ticks):
        found += bench.stepped(2, 0.5)
        coordinator = next(p.name for p in bench.job.of_pool("coordinator"))
        position = bench.job.next_step
        noise = position % 3 * MIB
        found += bench.at(Read, coordinator, position=position, resident_bytes=resident + noise)
        found += bench.ticks(1, 5.0)
    return found


def started_bench(budget: BudgetSet = BUDGET, num_segments: int = 1) -> Bench:
    """Return a job that trains with far more memory than it needs."""
    bench = Bench(budget, submitted("first", num_segments, LARGE))
    bench.built(0)
    return bench


def test_look_at_memory_that_is_not_needed_gives_the_next_process_less_and_ends_nobody() -> None:
    bench = started_bench()
    assert not [a for a in train(bench, SPARE_TICKS) if a.verb == "give back"], "not long enough"
    found = train(bench, SPARE_TICKS)
    (returned,) = [a for a in found if a.verb == "give back"]
    assert returned.reason.startswith(
        f"training is forecast to need less than its {6 * GIB:,} bytes for "
    )
    assert [a for a in found if a.verb in ("drain", "stop", "resize")] == []
    (coordinator,) = bench.job.of_pool("coordinator")
    assert coordinator.memory_bytes == 6 * GIB
    assert 1200 * MIB < bench.job.replica_memory < (1 - MIN_GAIN) * 6 * GIB
    bench.at(Ended, coordinator.name, outcome="lost")
    bench.ticks(5, 5.0)
    (coordinator,) = bench.job.of_pool("coordinator")
    assert coordinator.memory_bytes == bench.job.replica_memory == returned.values["memory_bytes"]


def test_look_at_memory_that_grows_gives_nothing_back() -> None:
    bench = started_bench(num_segments=400)
    for part in range(3 * SPARE_TICKS):
        found = train(bench, 1, 1200 * MIB + part * 40 * MIB)
        assert not [a for a in found if a.verb == "give back"]


def test_look_at_memory_that_is_nearly_needed_gives_nothing_back() -> None:
    found = train(started_bench(), 3 * SPARE_TICKS, 5100 * MIB)
    assert not [a for a in found if a.verb == "give back"]


@pytest.mark.slow
def test_memory_is_given_back_to_a_job_that_waits_for_it() -> None:
    bench = started_bench(replace(BUDGET, memory_bytes=int(8.5 * GIB)))
    waits = bench.send(submitted("second", 400, SMALL, bench.now))
    assert [(a.job, a.verb) for a in waits] == [("second", "wait")]
    found = train(bench, 2 * SPARE_TICKS)
    assert ("second", "admit") in [(a.job, a.verb) for a in found]
    # 2.5 GiB are free and 3 are needed, so a trainer that has more than it needs leaves.
    (drain,) = [a for a in found if a.verb == "drain"]
    assert (drain.job, drain.process) == ("first", "coordinator-0.1")
    assert "bytes more than its successor gets, and others need them" in drain.reason
    check_laws(bench.state)
    started = bench.at(Ended, "coordinator-0.1", outcome="left")
    assert sorted((a.job, a.process) for a in started) == [
        ("first", "coordinator-0.2"),
        ("second", "segment-0.1"),
    ]
    check_laws(bench.state)
    assert not [a for a in bench.ticks(3) if a.verb == "drain"]


@pytest.mark.slow
def test_a_trainer_leaves_for_memory_only_while_nobody_leaves_anyway() -> None:
    bench = started_bench(replace(BUDGET, memory_bytes=int(8.5 * GIB)))
    train(bench, 2 * SPARE_TICKS)
    first = bench.send(submitted("second", 400, SMALL, bench.now))
    assert [a.process for a in first if a.verb == "drain"] == ["coordinator-0.1"]
    assert not [a for a in bench.ticks(3, 5.0) if a.verb == "drain"]


PODS = replace(BUDGET, resizes=True)


def test_a_trainer_whose_memory_is_a_limit_has_less_as_it_runs_once_its_node_has_taken_it() -> None:
    bench = started_bench(PODS)
    found = train(bench, 2 * SPARE_TICKS)
    (returned,) = [a for a in found if a.verb == "give back"]
    (resize,) = [a for a in found if a.verb == "resize" and "memory_bytes" in a.values]
    assert resize.values == returned.values
    (coordinator,) = bench.job.of_pool("coordinator")
    assert coordinator.memory_bytes == resize.values["memory_bytes"]
    assert coordinator.held_memory == 6 * GIB, "nobody else may have it yet"
    booked = bench.state.used[1]
    bench.at(Resized, "coordinator-0.1", resized=True)
    assert booked - bench.state.used[1] == 6 * GIB - coordinator.memory_bytes
    assert not [a for a in found if a.verb in ("drain", "stop")]


@pytest.mark.slow
def test_a_trainer_whose_node_refuses_keeps_what_it_had_and_is_asked_again_later() -> None:
    bench = started_bench(PODS)
    train(bench, 2 * SPARE_TICKS)
    bench.at(Resized, "coordinator-0.1", resized=False)
    (coordinator,) = bench.job.of_pool("coordinator")
    assert (coordinator.memory_bytes, coordinator.held_memory, coordinator.fixed) == (
        6 * GIB,
        6 * GIB,
        False,
    )
    # A look is 6 s apart from the next one.
    found = train(bench, int(RESIZE_RETRY_SEC / 6) - 2)
    assert not [a for a in found if a.verb == "resize" and "memory_bytes" in a.values]
    found = train(bench, 4)
    assert [a.process for a in found if "memory_bytes" in a.values] == ["coordinator-0.1"]


def test_a_trainer_that_gave_memory_back_gets_more_again_before_it_lacks_it() -> None:
    bench = started_bench(PODS, num_segments=400)
    train(bench, 2 * SPARE_TICKS)
    bench.at(Resized, "coordinator-0.1", resized=True)
    (coordinator,) = bench.job.of_pool("coordinator")
    limit, resident = coordinator.memory_bytes, 1200 * MIB
    found: list[Action] = []
    while not [a for a in found if a.verb == "give memory"]:
        resident += 10 * MIB
        assert resident < limit, "it would have been killed"
        found += train(bench, 1, resident)
    (more,) = [a for a in found if a.verb == "resize"]
    assert more.values["memory_bytes"] > limit
    assert not [a for a in found if a.verb in ("drain", "stop", "give back")]
    check_laws(bench.state)


def test_memory_of_a_running_trainer_is_not_for_others_before_it_is_confirmed() -> None:
    bench = started_bench(replace(PODS, memory_bytes=int(8.5 * GIB)))
    bench.send(submitted("second", 400, SMALL, bench.now))
    found = train(bench, 2 * SPARE_TICKS)
    assert ("second", "admit") in [(a.job, a.verb) for a in found]
    assert not [a for a in found if a.job == "second" and a.verb == "start"]
    assert not [a for a in found if a.verb == "drain"], "nobody leaves for what is on its way"
    started = bench.at(Resized, "coordinator-0.1", resized=True)
    assert [(a.job, a.process) for a in started] == [("second", "segment-0.1")]
    check_laws(bench.state)


def build_segments(bench: Bench, number: int, num_ticks: int, resident: int) -> list[Action]:
    """Let a segment job run with steady memory."""
    found: list[Action] = []
    for look in range(num_ticks):
        who = f"segment-{number}.1"
        noise = look % 3 * MIB
        found += bench.at(Read, who, position=5 * look, resident_bytes=resident + noise)
        found += bench.ticks(1, 5.0)
    return found


def test_segment_jobs_give_back_no_more_than_the_largest_left_over() -> None:
    schedule = "  preprocessing: {worker: {memory: 6GiB}, max_workers: 1}"
    bench = Bench(BUDGET, submitted("first", 6, schedule))
    found = build_segments(bench, 0, 2 * SPARE_TICKS, 900 * MIB)
    assert not [a for a in found if a.verb == "give back"], "its end is not known"
    build_segments(bench, 0, 1, 1800 * MIB)
    bench.built(0)
    found = build_segments(bench, 1, 2 * SPARE_TICKS, 900 * MIB)
    (returned,) = [a for a in found if a.verb == "give back" and "preprocessing" in a.reason]
    assert returned.values["memory_bytes"] >= 1800 * MIB


@pytest.mark.slow
def test_less_memory_is_not_asked_for_again_once_it_has_been_outgrown() -> None:
    bench = started_bench(PODS, num_segments=400)
    train(bench, 2 * SPARE_TICKS)
    (coordinator,) = bench.job.of_pool("coordinator")
    asked = coordinator.memory_bytes
    bench.at(Resized, "coordinator-0.1", resized=False)
    for look in range(int(RESIZE_RETRY_SEC / 6) + 4):
        found = train(bench, 1, min(1200 + 60 * look, 2500) * MIB)
        given = [a.values["memory_bytes"] for a in found if a.verb == "resize"]
        assert all(memory > 2500 * MIB for memory in given), f"it asked for {asked} again"


def test_what_a_trainer_has_until_its_node_says_else_is_free_for_no_segment_job() -> None:
    schedule = """\
  training: {replica: {memory: 6GiB}, max_replicas: 1, max_stores: 0}
  preprocessing: {worker: {memory: 1300MiB}, max_workers: 1}
"""
    budget = replace(PODS, memory_bytes=6 * GIB + 1500 * MIB)
    bench = Bench(budget, submitted("first", 400, schedule))
    bench.built(0, 3600.0)
    grown, given = 0, list[Action]()
    for look in range(120):
        bench.stepped(2, 0.5)
        position = bench.job.next_step
        noise = position % 3 * MIB
        bench.at(Read, "coordinator-0.1", position=position, resident_bytes=1200 * MIB + noise)
        (coordinator,) = bench.job.of_pool("coordinator")
        grown += 6 * MIB * (coordinator.memory_before is not None)
        resident = 1130 * MIB + grown + look % 3 * MIB
        bench.at(Read, "segment-1.1", position=6 * look, resident_bytes=resident)
        found = bench.ticks(1, 5.0)
        assert not [a for a in found if a.verb == "stop"]
        given += [a for a in found if a.verb == "resize" and a.process == "segment-1.1"]
        check_laws(bench.state)
        if given:
            break
    assert given[0].values["memory_bytes"] <= 1500 * MIB
