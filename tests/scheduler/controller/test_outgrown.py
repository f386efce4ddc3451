"""What was killed for memory begins again with more, as far as the budget has it."""

from dataclasses import replace

import pytest

from presage.scheduler.controller.events import BudgetSet, Drained, Ended, Read, Tick
from presage.scheduler.controller.predictions import forecast_memory
from presage.scheduler.controller.state import JobState
from presage.scheduler.planner.correction import MEMORY_HEADROOM, OOM_GROWTH, memory_after_oom
from tests.scheduler.controller.bench import GROWS, Bench, labels
from tests.scheduler.controller.world import BUDGET, GIB, MIB, check_laws, check_waiting, submitted

ALONE = "  training: {max_replicas: 1}\n  preprocessing: {max_workers: 2}"
STORES = """\
  training:
    replica: {memory: 945MiB}
    store: {memory: 80MiB}
    max_stores: 4
"""


def killed(bench: Bench, name: str) -> str:
    """Let a process be killed for memory, and wait until another one may begin."""
    (action, *_) = bench.at(Ended, name, 1.0, outcome="oom", detail="OOMKilled")
    assert labels([action])[0] in (f"replace {name}", f"fail {name}")
    bench.at(Tick, after=100.0)
    check_laws(bench.state)
    return action.reason


def test_after_oom_is_half_as_much_more_or_what_is_foreseen_and_never_less() -> None:
    assert memory_after_oom(100, 0, 1000) == OOM_GROWTH * 100
    assert memory_after_oom(100, 400, 1000) == MEMORY_HEADROOM * 400
    assert memory_after_oom(100, 400, 300) == 300
    assert memory_after_oom(100, 400, 20) == 100


def test_handle_of_a_trainer_killed_for_memory_starts_one_with_half_as_much_more() -> None:
    bench = Bench(BUDGET, GROWS)
    bench.built(0)
    had = bench.job.processes["coordinator-0.1"].memory_bytes
    reason = killed(bench, "coordinator-0.1")
    given = bench.job.processes["coordinator-0.2"].memory_bytes
    assert given == int(1.5 * had)
    assert reason == (
        f"it was killed for memory with {had:,} bytes, and gets {given:,} from now on; "
        "restart in 1 s"
    )


def test_handle_of_a_trainer_that_was_to_need_far_more_gives_what_was_foreseen() -> None:
    bench = Bench(BUDGET, GROWS)
    bench.built(0)
    for step in range(10, 200, 10):
        bench.stepped(10, 0.2)
        resident = 600 * MIB + 3 * step * MIB
        bench.at(Read, "coordinator-0.1", position=step, resident_bytes=resident)
    process = bench.job.processes["coordinator-0.1"]
    needed = forecast_memory(bench.job, process, bench.job.num_steps).needed_bytes
    assert needed > 2 * process.memory_bytes
    killed(bench, "coordinator-0.1")
    assert bench.job.processes["coordinator-0.2"].memory_bytes == int(MEMORY_HEADROOM * needed)


def test_handle_of_a_segment_job_killed_for_memory_gives_more_to_each_worker() -> None:
    bench = Bench(BUDGET, submitted("first", 6, ALONE))
    had = bench.job.worker_memory
    reason = killed(bench, "segment-0.1")
    assert "killed for memory with workers of" in reason
    process = bench.job.processes["segment-0.2"]
    assert process.memory_bytes == process.workers * int(1.5 * had)
    assert bench.job.replica_memory == 2 * GIB, "trainers did not lack any"


def test_handle_of_a_store_killed_for_memory_starts_it_again_with_more() -> None:
    job = submitted("first", 40, STORES)
    bench = Bench(BUDGET, replace(job, facts=replace(job.facts, window_rows=1000)))
    bench.built(0)
    assert killed(bench, "store-1.1").startswith("it was killed for memory with 83,886,080")
    stores = {p.name: p.memory_bytes for p in bench.job.of_pool("store")}
    assert stores["store-1.2"] == 120 * MIB
    assert stores["store-0.1"] == 80 * MIB, "what runs goes on"


def test_handle_of_two_killed_at_once_grows_once() -> None:
    three = "  training: {min_replicas: 3}\n  preprocessing: {max_workers: 1}"
    bench = Bench(BUDGET, submitted("first", 6, three))
    bench.built(0)
    had = bench.job.replica_memory
    for number in (0, 1):
        bench.at(Ended, f"replica-{number}.1", outcome="oom")
    assert bench.job.replica_memory == int(1.5 * had)


def test_handle_gives_no_more_than_the_budget_has_and_gives_up_after_three_times() -> None:
    bench = Bench(replace(BUDGET, memory_bytes=8 * GIB), submitted("first", 1, ALONE))
    bench.built(0)
    given: list[int] = []
    reasons: list[str] = []
    while bench.job.phase == "running":
        (coordinator,) = bench.job.of_pool("coordinator")
        given.append(coordinator.memory_bytes)
        reasons.append(killed(bench, coordinator.name))
        assert len(given) < 10
    assert given == [2 * GIB, 3 * GIB, int(4.5 * GIB), int(6.75 * GIB), *[8 * GIB] * 3]
    assert reasons[-1] == (
        f"coordinator-0 failed 3 times: it was killed for memory with {8 * GIB:,} bytes, "
        "and the budget has no more"
    )
    assert bench.job.phase == "failed"


def test_handle_shares_anew_where_more_memory_than_the_share_of_a_job_is_needed() -> None:
    """Of two jobs each with half of the memory one needs more: both go on, within the budget."""
    bench = Bench(BudgetSet(time_sec=0.0, cpus=8.0, memory_bytes=10 * GIB))
    for name in ("first", "second"):
        bench.send(submitted(name, 6, ALONE, bench.now))
    bench.built(0)
    for _ in range(3):
        leads = bench.job.of_pool("coordinator")
        if leads:
            killed(bench, leads[0].name)
            check_waiting(bench.state)
    assert [a.job for a in bench.done if a.verb in ("scale", "wait")], "it is divided anew"
    jobs: list[JobState] = list(bench.state.jobs.values())
    assert "failed" not in [job.phase for job in jobs]
    # Whoever waits does so for memory, and goes on when the other one ends.
    assert "running" in [job.phase for job in jobs]


@pytest.mark.parametrize("outcome", ["lost", "failed"])
def test_handle_of_another_end_gives_no_more_memory(outcome: str) -> None:
    bench = Bench(BUDGET, GROWS)
    bench.built(0)
    had = bench.job.replica_memory
    bench.at(Ended, "coordinator-0.1", outcome=outcome)
    bench.at(Tick, after=100.0)
    assert bench.job.of_pool("coordinator")[0].memory_bytes == had


def test_handle_of_a_coordinator_that_computes_nothing_grows_no_replica() -> None:
    bench = Bench(BUDGET, submitted("first", 6, "  training: {min_replicas: 2}"))
    bench.built(0)
    coordinator = bench.job.of_pool("coordinator")[0]
    assert coordinator.memory_bytes == 0
    had = bench.job.replica_memory
    bench.at(Ended, coordinator.name, outcome="oom")
    assert bench.job.replica_memory == had


RESUMED = {
    "the same file": (ALONE, 3.0),
    "a file with more": (ALONE.replace("training: {", "training: {replica: {memory: 6GiB}, "), 6.0),
    "a file with less": (ALONE.replace("training: {", "training: {replica: {memory: 1GiB}, "), 1.0),
}


@pytest.mark.parametrize(("schedule", "gib"), RESUMED.values(), ids=RESUMED)
def test_handle_of_a_job_that_is_run_again_takes_the_memory_of_a_new_file_else_the_learned(
    schedule: str, gib: float
) -> None:
    bench = Bench(BUDGET, submitted("first", 1, ALONE))
    bench.built(0)
    killed(bench, "coordinator-0.1")
    bench.at(Drained)
    bench.at(Ended, "coordinator-0.2", outcome="left")
    bench.send(submitted("first", 1, schedule, bench.now))
    assert bench.job.processes["coordinator-0.3"].memory_bytes == gib * GIB
