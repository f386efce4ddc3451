"""How many workers segment jobs get on a cluster, and what is said of it."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.controller.events import Ended, Event, RunnerSet, SlotsRead, SlotsUnread, Tick
from scheduler.controller.handle import handle
from scheduler.controller.reconcile import is_settled
from scheduler.controller.state import (
    SLOTS_VALID_SEC,
    Action,
    Runner,
    State,
    bound_workers,
    update_runner,
)
from tests.scheduler.controller.bench import Bench, said
from tests.scheduler.controller.world import BUDGET, World, run, submitted

FLINK = RunnerSet(time_sec=0.0, name="flink", largest=4)
WIDE = "  preprocessing: {min_workers: 4, max_workers: 4}"


def slots(free: int, total: int = 8, own: int = 0, at: float = 0.0) -> SlotsRead:
    return SlotsRead(time_sec=at, free=free, own=own, total=total)


def seen(*events: Event) -> Runner:
    runner = Runner()
    for event in events:
        runner = update_runner(runner, event)
    return runner


SILENT = SlotsUnread(time_sec=100.0, detail="refused")
BOUNDS = {
    "no cluster": ((), 6, 0, 6, ""),
    "a file that allows less": (
        (RunnerSet(time_sec=0.0, name="dataflow", largest=2),),
        6,
        9,
        2,
        "the runner's file allows 2 workers",
    ),
    "a file that allows enough": ((RunnerSet(time_sec=0.0, name="dataflow"),), 6, 9, 6, ""),
    "some slots are free": ((FLINK, slots(3)), 4, 0, 3, "3 of 8 slots are free"),
    "one slot is free": ((FLINK, slots(1)), 4, 0, 1, "1 of 8 slots is free"),
    "all slots are free": (
        (FLINK, slots(8)),
        6,
        0,
        4,
        "8 of 8 slots are free, the runner's file allows 4 workers",
    ),
    "own jobs hold what they were given": (
        (FLINK, slots(3, own=2)),
        4,
        2,
        3,
        "3 of 8 slots are free",
    ),
    "an own job has not taken its slots yet": (
        (FLINK, slots(5)),
        4,
        4,
        1,
        "1 of 8 slots is free",
    ),
    "own jobs took slots between two questions": (
        (FLINK, slots(8, own=4)),
        4,
        4,
        4,
        "4 of 8 slots are free",
    ),
    "more is booked than there is": ((FLINK, slots(0, 2)), 4, 4, 0, "0 of 2 slots are free"),
    "it fell silent": (
        (FLINK, slots(3), SILENT, SlotsUnread(time_sec=150.0, detail="still")),
        4,
        0,
        3,
        "3 of 8 slots are free (the cluster has not answered for 200 s)",
    ),
    "it answers again": ((FLINK, slots(3), SILENT, slots(2)), 4, 0, 2, "2 of 8 slots are free"),
    "it never answered": (
        (FLINK, SILENT),
        4,
        0,
        1,
        "the cluster does not answer, so one worker at a time",
    ),
    "another cluster is set, with what it said": (
        (FLINK, SILENT, replace(FLINK, free=2, own=1, total=4)),
        4,
        0,
        3,
        "3 of 4 slots are free",
    ),
    "another place is set": ((FLINK, slots(1), RunnerSet(time_sec=0.0, name="local")), 4, 0, 4, ""),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bound_of_the_next_segment_job_when(name: str) -> None:
    events, wanted, booked, workers, reason = BOUNDS[name]
    found = bound_workers(seen(*events), wanted, booked, 300.0)
    assert (found.workers, found.reason) == (workers, reason)


def test_bound_of_a_cluster_that_is_silent_for_long_is_one_worker_in_all() -> None:
    runner = seen(FLINK, slots(3), SILENT)
    assert bound_workers(runner, 4, 0, 100.0 + SLOTS_VALID_SEC).workers == 3
    assert bound_workers(runner, 4, 0, 101.0 + SLOTS_VALID_SEC).workers == 1
    assert bound_workers(runner, 4, 1, 101.0 + SLOTS_VALID_SEC).workers == 0


def test_handle_gives_each_next_segment_job_what_is_free_and_says_so() -> None:
    bench = Bench(BUDGET, FLINK, slots(8))
    started = [a for a in bench.tell(submitted("first", 3, WIDE)) if a.verb == "start"]
    bench.tell(slots(1, own=2))  # others hold 5
    started += [a for a in bench.built(0) if a.process.startswith("segment")]
    assert [a.reason for a in started] == [
        "segment 0 of 3 is to be built by 2 workers: 8 of 8 slots are free",
        "segment 1 of 3 is to be built by 2 workers: 3 of 8 slots are free",
        "segment 2 of 3 is to be built by 1 worker: 1 of 8 slots is free",
    ]
    assert [a.values["workers"] for a in started] == [2, 2, 1]
    assert (started[1].values["free_slots"], started[1].values["total_slots"]) == (3, 8)
    segments = bench.job.of_pool("segment")
    assert [(p.workers, p.cpus) for p in segments] == [(2, 2.0), (1, 1.0)]


def test_handle_plans_no_more_workers_than_the_cluster_has_slots() -> None:
    wide = submitted("first", 3, "  preprocessing: {min_workers: 4, max_workers: 6}")
    free, small = Bench(BUDGET), Bench(BUDGET, FLINK, slots(3, total=3))
    for bench in (free, small):
        bench.tell(wide)
    workers = [
        sizes.segment_jobs * sizes.workers_per_job
        for sizes in (free.job.sizes, small.job.sizes)
        if sizes is not None
    ]
    assert workers[0] >= 4
    assert workers[1] == 3


@pytest.mark.parametrize(("num_segments", "largest"), [(1, 2), (2, 1), (3, 1), (3, 2)])
def test_handle_plans_no_more_workers_of_one_job_than_it_may_have(
    num_segments: int, largest: int
) -> None:
    dataflow = RunnerSet(time_sec=0.0, name="dataflow", largest=largest)
    bench = Bench(BUDGET, dataflow, submitted("first", num_segments, WIDE))
    sizes = bench.job.sizes
    assert sizes is not None
    jobs = min(4 // largest, num_segments)  # 4 workers are wanted
    assert (sizes.segment_jobs, sizes.workers_per_job) == (jobs, largest)


def test_handle_waits_for_a_slot_says_it_once_and_goes_on() -> None:
    bench = Bench(BUDGET, FLINK, slots(0))
    waits = bench.tell(submitted("first", 2, WIDE))
    assert [(a.verb, a.reason) for a in waits[1:]] == [
        ("wait", "segment 0 of 2 waits for a slot: 0 of 8 slots are free")
    ]
    assert bench.ticks(3) == []
    assert said(bench.tell(slots(2))) == ["start segment-0.1"]
    assert bench.job.processes["segment-0.1"].workers == 2
    bench.tell(slots(0))  # others took them meanwhile
    assert [a.reason for a in bench.built(0) if a.verb == "wait"] == [
        "segment 1 of 2 waits for a slot: 0 of 8 slots are free"
    ]


def test_is_settled_when_there_is_no_slot_for_more() -> None:
    bench = Bench(BUDGET, FLINK, slots(1))
    bench.tell(submitted("first", 3, WIDE))
    assert said(bench.built(0)) == ["start coordinator-0.1", "start segment-1.1", "wait"]
    assert len(bench.job.of_pool("segment")) == 1
    assert is_settled(bench.job)
    assert said(bench.tell(slots(1, own=1))) == ["start segment-2.1"]
    assert is_settled(bench.job)


def test_handle_makes_room_for_the_segment_that_later_ones_wait_for() -> None:
    bench = Bench(BUDGET, FLINK, slots(4, total=4))
    bench.tell(submitted("first", 4, WIDE))
    bench.built(0)
    assert [p.number for p in bench.job.of_pool("segment")] == [1, 2, 3]
    bench.tell(slots(0, total=4, own=3))
    bench.at(Ended, "segment-1.1", 1.0, outcome="lost", detail="signal 9")
    taken = bench.tell(slots(0, total=4, own=2, at=bench.now))  # by somebody else
    assert said(taken) == ["wait", "stop segment-3.1"]
    assert said(bench.at(Tick, after=2.0)) == []
    bench.at(Ended, "segment-3.1", outcome="left")
    assert bench.job.of_pool("segment")[0].name == "segment-1.2"


def test_handle_leaves_later_segments_alone_when_slots_have_come_free() -> None:
    bench = Bench(BUDGET, FLINK, slots(2, total=4))
    bench.tell(submitted("first", 4, WIDE))
    assert "wait" in said(bench.built(0))
    assert [p.number for p in bench.job.of_pool("segment")] == [1, 2]
    assert bench.job.waits_for_slots
    lost = bench.at(Ended, "segment-1.1", 0.1, outcome="lost", detail="signal 9")
    assert said(lost) == ["replace segment-1.1"]  # its slot is free; it is built again soon
    assert not bench.job.waits_for_slots
    assert said(bench.at(Tick, after=0.1)) == []
    assert [p.name for p in bench.job.of_pool("segment")] == ["segment-2.1"]
    assert said(bench.at(Tick, after=2.0))[0] == "start segment-1.2"


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_handle_ends_every_job_on_a_cluster_whose_slots_come_and_go(seed: int) -> None:
    jobs = [submitted("first", 4), submitted("second", 3, WIDE, 10.0)]
    rng, total = np.random.default_rng(seed), 6
    world = World(jobs)

    def tell(state: State, event: Event) -> tuple[State, Sequence[Action]]:
        state, actions = handle(state, event)
        found = list(actions)
        if rng.random() < 0.5:
            now = event.time_sec
            own = sum(p.workers for j in state.jobs.values() for p in j.of_pool("segment"))
            calm = world.now > 300.0
            others = 0 if calm else int(rng.integers(0, total + 1))
            free = max(0, total - others - own)
            read = SlotsRead(time_sec=now, free=free, own=min(own, total), total=total)
            told = SlotsUnread(time_sec=now, detail="") if rng.random() < 0.1 else read
            state, more = handle(state, told)
            found += more
        for action in found:
            if action.verb == "start" and action.process.startswith("segment"):
                check_start(state, action, total)
        return state, found

    state = run(world, State(), tell, rng, [BUDGET, FLINK, slots(3, 6), *jobs])
    assert {job.phase for job in state.jobs.values()} == {"finished"}
    assert set(world.built.values()) == {1}


def check_start(state: State, action: Action, total: int) -> None:
    """A job is started with a worker at least, never with more than there are slots."""
    assert 1 <= action.values["workers"] <= total
    assert re.search(r"slots? (is|are) free|does not answer", action.reason)
    if "free_slots" in action.values:
        assert action.values["workers"] <= action.values["free_slots"]
    booked = sum(p.workers for j in state.jobs.values() for p in j.of_pool("segment"))
    assert booked <= total
