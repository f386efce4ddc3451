"""Stores that come and go where something dies, lacks room, or does not tell what it did."""

from collections import Counter
from dataclasses import replace

from presage.scheduler.controller.events import Ended, LoadKnown, Moved
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.slots import RETRY_SEC, max_ranges, plan_levelling
from presage.scheduler.controller.state import State
from presage.scheduler.planner.correction import Change, Correction
from tests.scheduler.controller.bench import Bench, labels
from tests.scheduler.controller.test_elastic import (
    AMPLE,
    STORES,
    bench_of,
    end_move,
    moves_of,
    set_num_stores,
    settle,
)
from tests.scheduler.controller.world import submitted


def with_drained(state: State, cpus: float) -> State:
    """Return a state with another job, of which a process that leaves holds cores."""
    job = next(iter(state.jobs.values()))
    holds = replace(next(iter(job.processes.values())), status="leaving", cpus=cpus)
    processes = {holds.name: holds}
    return state.with_job(
        replace(job, name="other", phase="draining", sizes=None, processes=processes)
    )


def test_stores_cut_before_training_serve_every_slot() -> None:
    """All is gone before the trainer has opened its stores, and the job comes back with fewer."""
    job = submitted("first", 40, STORES)
    bench = Bench(AMPLE, replace(job, facts=replace(job.facts, window_rows=1000)))
    bench.built(0)
    for name in list(bench.job.processes):
        bench.state, _ = handle(
            bench.state, Ended(time_sec=bench.now, job="first", process=name, outcome="lost")
        )
    set_num_stores(bench, 2)
    bench.ticks(3, 2.0)
    assert len(bench.job.stores) == 2
    assert set(bench.job.owners) == set(bench.job.stores)


def test_stores_cut_before_any_began_let_the_coordinator_begin() -> None:
    """There is room for no store at first, and fewer are wanted by the time that there is."""
    job = submitted("first", 40, STORES)
    bench = Bench(AMPLE, replace(job, facts=replace(job.facts, window_rows=1000)))
    bench.state = with_drained(bench.state, AMPLE.cpus)
    bench.built(0)
    assert not bench.job.of_pool("store")
    set_num_stores(bench, 1)  # the other job is gone
    bench.ticks(5, 2.0)
    assert bench.job.of_pool("coordinator")


def test_a_move_that_failed_is_repeated_before_its_target_leaves() -> None:
    bench = bench_of()
    set_num_stores(bench, 4)
    (move,) = moves_of(bench.done)[-1:] or moves_of(bench.ticks(1))
    assert move.values["target"] == 3.0
    bench.at(Moved, moved=False)
    before = bench.job.owners
    found = set_num_stores(bench, 3) + bench.ticks(5)
    assert moves_of(found) == []
    assert "drain store-3.1" not in labels(found), "nobody knows that it has no slots"
    found = bench.ticks(int(RETRY_SEC))
    (repeated,) = moves_of(found)
    assert repeated.values == move.values
    (undone,) = moves_of(end_move(bench, repeated) + bench.ticks(1))
    assert (undone.values["source"], undone.values["whole"]) == (3.0, 1.0)
    assert "drain store-3.1" in labels(end_move(bench, undone) + bench.ticks(1))
    assert Counter(bench.job.owners).keys() == Counter(before).keys()


def test_stores_that_are_too_many_do_not_hold_the_room_that_the_coordinator_needs() -> None:
    """The budget becomes smaller, and the coordinator is gone before slots have moved."""
    text = STORES.replace("80MiB", "400MiB")
    job = submitted("first", 3, text)
    bench = Bench(AMPLE, replace(job, facts=replace(job.facts, window_rows=1000)))
    bench.built(0)
    bench.stepped(8, 1.0)
    bench.built(1)
    bench.built(2)
    set_num_stores(bench, 4)
    settle(bench)
    bench.send(replace(AMPLE, time_sec=bench.now, cpus=3.0))
    bench.at(Ended, "coordinator-0.1", outcome="lost")
    bench.ticks(5)
    for process in list(bench.job.of_pool("store")):
        if process.status == "leaving":
            bench.at(Ended, process.name, outcome="left")
    bench.ticks(5)
    assert "coordinator-0.2" in bench.job.processes
    assert set(bench.job.owners) == set(bench.job.stores)


def test_a_store_whose_slots_are_not_known_is_emptied_before_it_leaves() -> None:
    bench = bench_of()
    set_num_stores(bench, 4)
    assert moves_of(bench.done) or moves_of(bench.ticks(1))
    bench.at(Moved, moved=False)
    bench.state = replace(
        bench.state, jobs={"first": replace(bench.job, stores=(0, 3, 1, 2), processes={})}
    )
    set_num_stores(bench, 2)
    assert bench.job.stores == (0, 3)
    assert set(bench.job.owners) == {0, 3}


HOT_ALONE = (300, 300, *(10,) * 14)


def test_no_store_gets_more_ranges_than_it_has_memory_for() -> None:
    bench = bench_of()
    most = max_ranges(bench.job, 3)
    assert most == 7, "little more than a third, as three stores are needed"
    bench.at(LoadKnown, num_steps=160, slots=(HOT_ALONE,), touched_rows=(1,))
    settle(bench)
    assert max(Counter(bench.job.owners).values()) <= most
    set_num_stores(bench, 4)
    settle(bench)
    set_num_stores(bench, 3)
    settle(bench)
    assert max(Counter(bench.job.owners).values()) <= most


def test_a_new_store_gets_ranges_where_the_busiest_store_has_but_one() -> None:
    owners = (0, 1, *(2,) * 14)
    move = plan_levelling(owners, [float(c) for c in HOT_ALONE], (0, 1, 2, 3))
    assert move is not None
    assert (move.source, move.target, len(move.ranges)) == (2, 3, 7)


def test_a_change_to_more_stores_is_on_its_way_until_there_is_room_for_them() -> None:
    bench = bench_of()
    job = bench.job
    assert job.sizes is not None
    sizes = replace(job.sizes, num_stores=4)
    flying = replace(job, sizes=sizes, correction=Correction(in_flight=Change(sizes=sizes)))
    state = with_drained(bench.state, AMPLE.cpus - bench.state.used[0])
    bench.state = replace(state, jobs={**state.jobs, job.name: flying})
    bench.ticks(2)
    assert bench.job.correction.in_flight is not None
    bench.state = replace(bench.state, jobs={job.name: bench.job})
    settle(bench)
    assert bench.job.correction.in_flight is None
