"""More memory for a process that runs: in place where that can be, else by another one."""

from dataclasses import replace

from presage.scheduler.controller.events import Ended, Resized, Started
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.reconcile import is_settled, reconcile
from presage.scheduler.controller.state import State
from tests.scheduler.controller.bench import GROWS, Bench, grow_until, labels
from tests.scheduler.controller.world import BUDGET, submitted


def test_handle_gives_a_running_process_more_memory_where_that_can_be() -> None:
    bench = Bench(replace(BUDGET, resizes=True), GROWS)
    limit, actions = grow_until(bench, "resize coordinator-0.1")
    resize = next(action for action in actions if action.verb == "resize")
    assert "drain coordinator-0.1" not in labels(actions)
    grown = bench.job.processes["coordinator-0.1"]
    assert grown.memory_bytes == resize.values["memory_bytes"] > limit
    assert grown.memory_before == limit
    assert not is_settled(bench.job)
    assert bench.at(Resized, "coordinator-0.1", resized=True) == []
    assert bench.job.processes["coordinator-0.1"].memory_before is None
    assert is_settled(bench.job)
    assert bench.at(Resized, "coordinator-0.1", resized=False) == [], "news of what is over"


def test_handle_replaces_a_process_whose_memory_cannot_be_changed() -> None:
    bench = Bench(replace(BUDGET, resizes=True), GROWS)
    limit, actions = grow_until(bench, "resize coordinator-0.1")
    wanted = next(action for action in actions if action.verb == "resize").values["memory_bytes"]
    assert labels(bench.at(Resized, "coordinator-0.1", resized=False)) == ["drain coordinator-0.1"]
    assert bench.job.processes["coordinator-0.1"].memory_bytes == limit
    stopped = bench.at(Ended, "coordinator-0.1", outcome="left")
    assert labels(stopped) == ["start coordinator-0.2"]
    assert stopped[0].values["memory_bytes"] == wanted


def test_handle_books_no_more_memory_than_there_is_for_a_process_that_runs() -> None:
    bench = Bench(replace(BUDGET, resizes=True), GROWS)
    bench.built(0)
    (coordinator,) = bench.job.of_pool("coordinator")
    free = bench.state.budget.memory - bench.state.used[1]
    job = replace(bench.job, replica_memory=coordinator.memory_bytes + free + 1)
    _, actions = reconcile(replace(bench.state, jobs={"first": job}))
    assert labels(actions) == ["drain coordinator-0.1"]
    job = replace(bench.job, replica_memory=coordinator.memory_bytes + free)
    state, actions = reconcile(replace(bench.state, jobs={"first": job}))
    assert labels(actions) == ["resize coordinator-0.1"]
    assert state.used[1] == state.budget.memory


def test_handle_counts_the_time_of_a_process_from_when_it_runs() -> None:
    state, _ = handle(handle(State(), BUDGET)[0], submitted("first", 3))
    state, _ = handle(state, Started(time_sec=500.0, job="first", process="segment-0.1"))
    assert state.jobs["first"].processes["segment-0.1"].began_sec == 500.0
    state, _ = handle(state, Started(time_sec=600.0, job="first", process="segment-0.1"))
    assert state.jobs["first"].processes["segment-0.1"].began_sec == 500.0, "told again"
