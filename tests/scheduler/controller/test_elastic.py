"""Stores become more and fewer: slots move first, and no store leaves that has some."""

from dataclasses import replace

import numpy as np
import pytest

from presage.scheduler.controller.budget import candidate_sizes
from presage.scheduler.controller.events import BudgetSet, Ended, LoadKnown, Moved
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.slots import (
    MAX_LOAD_RATIO,
    NUM_RANGES,
    RETRY_SEC,
    initial_owners,
    plan_emptying,
    plan_levelling,
    redistribute,
    store_loads,
)
from presage.scheduler.controller.state import Action
from presage.schemas.errors import PlanError
from tests.scheduler.controller.bench import Bench, labels
from tests.scheduler.controller.world import BUDGET, check_laws, submitted

STORES = """\
  preprocessing: {max_workers: 2}
  training:
    replica: {memory: 945MiB}
    store: {memory: 80MiB}
    max_stores: 4
"""


AMPLE = replace(BUDGET, cpus=16.0)


def bench_of(budget: BudgetSet = AMPLE) -> Bench:
    """Return a machine whose job trains over three stores."""
    job = submitted("first", 40, STORES)
    bench = Bench(budget, replace(job, facts=replace(job.facts, window_rows=1000)))
    bench.built(0)
    assert bench.job.stores == (0, 1, 2)
    bench.stepped(8, 1.0)
    return bench


def set_num_stores(bench: Bench, num_stores: int) -> list[Action]:
    """Let the job want so many stores; return what follows."""
    job = bench.job
    assert job.sizes is not None
    job = replace(job, sizes=replace(job.sizes, num_stores=num_stores))
    bench.state = replace(bench.state, jobs={job.name: job})
    return bench.ticks(1)


def moves_of(actions: list[Action]) -> list[Action]:
    return [action for action in actions if action.verb == "migrate"]


def end_move(bench: Bench, action: Action, *, done: bool = True) -> list[Action]:
    """Confirm a move."""
    return bench.at(Moved, moved=done)


def settle(bench: Bench) -> list[Action]:
    """Confirm moves and leavings until nothing happens any more; return all that did."""
    done: list[Action] = []
    for _ in range(40):
        found = bench.ticks(1)
        if was_moving := bool(bench.job.moving):
            found += end_move(bench, moves_of(bench.done)[-1])
        for process in list(bench.job.of_pool("store")):
            if process.status == "leaving":
                assert process.number not in bench.job.owners, "it has slots"
                found += bench.at(Ended, process.name, outcome="left")
        check_laws(bench.state)
        if not found and not was_moving:
            return done
        done += found
    raise AssertionError("it must come to rest")


def test_a_store_more_begins_without_slots_and_gets_some_of_the_busiest() -> None:
    bench = bench_of()
    found = set_num_stores(bench, 4)
    assert [a for a in labels(found) if a.startswith("start")] == ["start store-3.1"]
    done = settle(bench)
    assert bench.job.stores == (0, 1, 2, 3)
    assert {a.values["target"] for a in moves_of(done)} == {3.0}
    counts = [bench.job.owners.count(store) for store in range(4)]
    assert sum(counts) == NUM_RANGES
    assert max(counts) <= 5
    assert min(counts) >= 1


def test_a_store_that_is_too_many_gives_all_its_slots_away_and_leaves_after_that() -> None:
    bench = bench_of()
    done = set_num_stores(bench, 1) + settle(bench)
    assert bench.job.stores == (0,)
    assert set(bench.job.owners) == {0}
    kinds = [(a.verb, a.process or int(a.values["source"])) for a in done if a.verb != "scale"]
    assert kinds.index(("migrate", 2)) < kinds.index(("drain", "store-2.1"))
    assert kinds.index(("drain", "store-2.1")) < kinds.index(("drain", "store-1.1"))
    assert [p.name for p in bench.job.of_pool("store")] == ["store-0.1"]
    assert all(a.values["whole"] in (0.0, 1.0) for a in moves_of(done))


def test_a_number_is_never_given_again() -> None:
    bench = bench_of()
    set_num_stores(bench, 2)
    settle(bench)
    found = set_num_stores(bench, 3)
    assert "start store-3.1" in labels(found)
    settle(bench)
    assert bench.job.stores == (0, 1, 3)


@pytest.mark.slow
def test_a_move_that_failed_is_tried_again_later_and_slots_stay_where_they_were() -> None:
    bench = bench_of()
    (move,) = moves_of(set_num_stores(bench, 2))
    before = bench.job.owners
    end_move(bench, move, done=False)
    assert bench.job.owners == before
    assert not moves_of(bench.ticks(int(RETRY_SEC) - 1))
    (repeated,) = moves_of(bench.ticks(2))
    assert repeated.values == move.values
    assert not moves_of(bench.ticks(100)), "one at a time"
    end_move(bench, repeated, done=False)
    assert not moves_of(bench.ticks(2 * int(RETRY_SEC) - 1)), "later each time"
    (third,) = moves_of(bench.ticks(2))
    end_move(bench, third)
    assert moves_of(bench.ticks(1)), "at once when one did not fail"


def test_the_coordinator_does_not_wait_for_a_store_that_has_no_slots() -> None:
    bench = bench_of()
    found = set_num_stores(bench, 4)
    assert "start store-3.1" in labels(found)
    bench.at(Ended, "store-3.1", outcome="lost")
    assert "start coordinator-0.2" in labels(
        [*bench.at(Ended, "coordinator-0.1", outcome="lost"), *bench.ticks(1, 2.0)]
    )
    bench.at(Ended, "store-1.1", outcome="lost")
    bench.at(Ended, "coordinator-0.2", outcome="lost")
    assert not [a for a in labels(bench.ticks(1, 0.1)) if a.startswith("start coordinator")]


def test_where_all_has_ended_only_the_stores_that_are_wanted_begin_again() -> None:
    bench = bench_of()
    for name in list(bench.job.processes):
        job = bench.job
        bench.state, _ = handle(
            bench.state, Ended(time_sec=bench.now, job=job.name, process=name, outcome="lost")
        )
    found = set_num_stores(bench, 2) + bench.ticks(3, 2.0)
    stores = [a for a in labels(found) if a.startswith("start store")]
    assert stores == ["start store-0.2", "start store-1.2"]
    assert bench.job.stores == (0, 1)
    assert set(bench.job.owners) == {0, 1}


def test_load_that_is_known_ahead_says_what_a_new_store_gets() -> None:
    bench = bench_of()
    ample = replace(bench.job, store_memory=200 << 20)  # any store could hold all rows
    bench.state = replace(bench.state, jobs={ample.name: ample})
    hot = (100, 100, 100, *(10,) * 13)
    bench.at(LoadKnown, num_steps=160, slots=(hot,), touched_rows=(1,))
    set_num_stores(bench, 4)
    settle(bench)
    loads = store_loads(bench.job.owners, [float(c) for c in hot], bench.job.stores)
    assert max(loads.values()) <= 130.0


@pytest.mark.parametrize("seed", range(30))
def test_moves_of_random_loads_end_and_empty_what_is_too_many(seed: int) -> None:
    rng = np.random.default_rng(seed)
    owners = list(initial_owners(range(int(rng.integers(1, 9)))))
    counts = [float(c) for c in rng.pareto(1.0, NUM_RANGES)]
    staying = sorted(rng.choice(10, int(rng.integers(1, 8)), replace=False).tolist())
    surplus = {owner for owner in owners if owner not in staying}
    for _ in range(len(surplus) * len(staying)):
        if (move := plan_emptying(owners, counts, staying)) is None:
            break
        assert {owners[n] for n in move.ranges} == {move.source}
        for number in move.ranges:
            owners[number] = move.target
    assert set(owners) <= set(staying)
    heaviest = [max(store_loads(owners, counts, staying).values())]
    for _ in range(60):
        if (move := plan_levelling(owners, counts, staying)) is None:
            break
        for number in move.ranges:
            owners[number] = move.target
        heaviest.append(max(store_loads(owners, counts, staying).values()))
    else:
        raise AssertionError("levelling must end")
    assert heaviest == sorted(heaviest, reverse=True)
    loads = store_loads(owners, counts, staying)
    mean = sum(counts) / len(loads)
    if max(loads.values()) > MAX_LOAD_RATIO * mean and len(loads) > 1:  # no single range helps much
        busiest = max(loads, key=lambda store: loads[store])
        mine = [counts[n] for n in range(NUM_RANGES) if owners[n] == busiest]
        least = min(loads.values())
        best = min(max(loads[busiest] - c, least + c) for c in mine)
        assert len(mine) == 1 or best > 0.9 * loads[busiest]
    dealt = redistribute(owners, staying[:1])
    assert set(dealt) == {staying[0]}


def test_a_job_whose_rows_lie_in_stores_is_not_planned_without_any() -> None:
    bench = bench_of()
    small = replace(bench.state, budget=replace(bench.state.budget, cpus=2.0))
    job = replace(bench.job, replica_memory=8 << 30)  # which would hold all rows
    with pytest.raises(PlanError, match=r"^budget does not hold the smallest pools with a store"):
        candidate_sizes(job, small)
    ample = replace(small, budget=replace(small.budget, cpus=16.0))
    assert all(sizes.num_stores for sizes in candidate_sizes(job, ample)[0])
