"""The actions of the controller for each event, and their reasons."""

import re
from dataclasses import replace

from presage.scheduler.controller.events import (
    BudgetSet,
    Drained,
    Ended,
    LoadKnown,
    Moved,
    Preempted,
    Tick,
)
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.state import Action
from presage.scheduler.planner.correction import COOL_DOWN_SEC, NUM_TICKS
from tests.scheduler.controller.bench import GROWS, Bench, grow_until, labels
from tests.scheduler.controller.world import BUDGET, GIB, submitted

ALONE = "  preprocessing: {max_workers: 1}"


def test_handle_of_a_job_builds_the_first_segment_alone_then_trains_beside_the_next() -> None:
    bench = Bench(BUDGET)
    first = bench.send(submitted("first", 3, ALONE))
    assert labels(first) == ["admit", "start segment-0.1"]
    assert first[0].reason.startswith("1 segment job x 1 worker, 1 replica and 0 stores: ")
    assert first[0].values["predicted_sec"] > 0
    assert labels(bench.built(0)) == ["start coordinator-0.1", "start segment-1.1"]
    assert labels(bench.built(1)) == ["start segment-2.1"]
    assert labels(bench.built(2)) == []
    assert labels(bench.stepped(12, 0.5)) == []
    finish = bench.at(Ended, "coordinator-0.1", 1.0, outcome="done")
    assert labels(finish) == ["finish"]
    assert (
        finish[0].reason == "3,072 samples of 3 segments are trained, 22 s after it was submitted"
    )
    assert not bench.job.processes


def test_handle_of_a_killed_process_starts_it_again_later_and_later() -> None:
    bench = Bench(BUDGET, submitted("first"))
    for attempt, wait in enumerate([1.0, 2.0, 4.0, 8.0], start=1):
        lost = bench.at(Ended, f"segment-0.{attempt}", 1.0, outcome="lost", detail="signal 9")
        assert labels(lost) == [f"replace segment-0.{attempt}"]
        assert lost[0].reason == f"it was lost: signal 9; restart in {wait:g} s"
        assert labels(bench.ticks(1, wait - 0.1)) == []
        assert labels(bench.ticks(1, 0.2)) == [f"start segment-0.{attempt + 1}"]


def test_handle_of_a_process_that_says_again_and_again_that_it_cannot_fails_the_job() -> None:
    bench = Bench(BUDGET, submitted("first"))
    for attempt in (1, 2):
        bench.at(Ended, f"segment-0.{attempt}", outcome="failed", detail="error: no files")
        bench.ticks(1, 60.0)
    last = bench.at(Ended, "segment-0.3", outcome="failed", detail="error: no files")
    assert labels(last) == ["fail segment-0.3"]
    assert last[0].reason == "segment-0 failed 3 times: error: no files"
    assert bench.job.phase == "failed"
    assert not bench.ticks(10, 60.0)


def test_handle_of_measured_steps_scales_training_up_calmly_and_settles() -> None:
    schedule = f"{ALONE}\n  deadline: 10m\n  training: {{max_replicas: 4}}"
    job = submitted("first", 3, schedule)
    samples = 1200 * 256
    facts = replace(job.facts, num_samples=samples, num_train_samples=samples)
    bench = Bench(BUDGET, replace(job, facts=facts))
    assert bench.job.sizes is not None
    assert bench.job.sizes.num_replicas == 1
    for number in range(3):
        bench.built(number, 10.0)
    # Steps take a second, far more than was assumed: one replica would be late.
    changes: list[Action] = []
    for _ in range(60):
        changes += [*bench.stepped(2, 1.0), *bench.ticks(1)]
    scale = next(action for action in changes if action.verb == "scale")
    assert scale.values["num_replicas"] > 1
    assert f"% saved in {NUM_TICKS} ticks; " in scale.reason
    assert scale.values["predicted_sec"] < scale.values["predicted_sec_before"]
    assert bench.job.has_replicas
    # The lone trainer saves and leaves; a coordinator with replicas takes over.
    assert "drain coordinator-0.1" in labels(changes)
    after = bench.at(Ended, "coordinator-0.1", 1.0, outcome="left")
    number = int(scale.values["num_replicas"])
    assert labels(after)[:1] == ["start coordinator-0.2"]
    assert [text for text in labels(after) if "replica" in text] == [
        f"start replica-{i}.1" for i in range(number)
    ]


def test_handle_of_a_job_that_needs_no_more_segment_jobs_starts_none() -> None:
    bench = Bench(BUDGET, submitted("first", 4, "  preprocessing: {min_workers: 3}"))
    assert labels(bench.built(0)).count("start coordinator-0.1") == 1
    live = [p.name for p in bench.job.of_pool("segment")]
    assert live == ["segment-1.1", "segment-2.1", "segment-3.1"]
    assert labels(bench.built(1)) == []


def test_handle_of_a_preempted_trainer_hands_it_back_and_starts_another() -> None:
    bench = Bench(BUDGET, submitted("first", 3, ALONE))
    bench.built(0)
    notice = bench.at(Preempted, "coordinator-0.1", 1.0, grace_sec=30.0)
    assert labels(notice) == ["hand back coordinator-0.1", "drain coordinator-0.1"]
    assert notice[0].reason == "it is preempted in 30 s; it leaves without losing work"
    assert labels(bench.at(Ended, "coordinator-0.1", 5.0, outcome="left")) == [
        "start coordinator-0.2"
    ]


def test_handle_of_a_preempted_segment_job_leaves_it_when_it_is_done_in_time() -> None:
    bench = Bench(BUDGET, submitted("first", 8, ALONE))
    for number in range(7):
        bench.built(number, 10.0)
    in_time = bench.at(Preempted, "segment-7.1", 8.0, grace_sec=60.0)
    assert labels(in_time) == ["hand back segment-7.1"]
    assert "it is done in" in in_time[0].reason
    late = bench.at(Preempted, "segment-7.1", 0.5, grace_sec=0.1)
    assert labels(late) == ["hand back segment-7.1", "stop segment-7.1"]
    assert late[0].reason == "it is preempted in 0.1 s; the segment is built again from its start"


def test_handle_of_a_segment_job_that_takes_far_too_long_replaces_it_once() -> None:
    bench = Bench(BUDGET, submitted("first", 8, ALONE))
    for number in range(7):
        bench.built(number, 10.0)
    late = [action for action in bench.ticks(30, 5.0) if action.process == "segment-7.1"]
    assert labels(late) == ["replace segment-7.1", "stop segment-7.1"]
    assert re.search("at most .* s were predicted", late[0].reason)
    assert labels(bench.at(Ended, "segment-7.1", outcome="left")) == ["start segment-7.2"]
    assert not [a for a in bench.ticks(60, 5.0) if a.process.startswith("segment")]


def test_handle_stops_a_later_segment_job_that_waits_for_one_that_has_no_room() -> None:
    bench = Bench(
        BUDGET, submitted("first", 4, "  preprocessing: {min_workers: 2, max_workers: 2}")
    )
    bench.built(0)
    sizes = replace(bench.job.sizes, segment_jobs=1)  # type: ignore[type-var]
    assert len(bench.job.of_pool("segment")) == 2
    state = bench.state
    bench.state = replace(state, jobs={"first": replace(bench.job, sizes=sizes)})
    lost = bench.at(Ended, "segment-1.1", 5.0, outcome="lost")
    assert labels(lost) == ["replace segment-1.1", "stop segment-2.1"]
    assert lost[1].reason == "segment 1 is to be built first: later ones wait for it"
    bench.ticks(1, 5.0)
    assert labels(bench.at(Ended, "segment-2.1", outcome="left")) == ["start segment-1.2"]


GROUP = "  training: {min_replicas: 3, max_replicas: 3}"


def test_handle_of_a_lost_coordinator_ends_its_replicas_before_another_begins() -> None:
    bench = Bench(BUDGET, submitted("first", 3, GROUP))
    bench.built(0)
    lost = bench.at(Ended, "coordinator-0.1", outcome="lost")
    assert labels(lost)[1:] == [f"stop replica-{i}.1" for i in range(3)]
    bench.ticks(1, 5.0)
    gone = [bench.at(Ended, f"replica-{number}.1", outcome="lost") for number in range(3)]
    assert labels(gone[-1])[:2] == ["start coordinator-0.2", "start replica-0.2"]


def test_handle_of_a_drained_group_keeps_the_coordinator_until_its_replicas_have_saved() -> None:
    bench = Bench(BUDGET, submitted("first", 3, GROUP))
    bench.built(0)
    drained = bench.at(Drained)
    assert [text for text in labels(drained) if text.startswith("drain")] == [
        f"drain replica-{i}.1" for i in range(3)
    ]
    for name in [p.name for p in bench.job.of_pool("segment")]:
        bench.at(Ended, name, outcome="left")
    stopped = [bench.at(Ended, f"replica-{i}.1", outcome="left") for i in range(3)]
    assert [labels(actions) for actions in stopped] == [[], [], ["drain coordinator-0.1"]]
    bench.at(Ended, "coordinator-0.1", outcome="left")
    assert bench.job.phase == "drained"


STORES = """\
  training:
    replica: {memory: 945MiB}
    store: {memory: 80MiB}
    max_stores: 4
"""


def test_handle_of_a_hot_range_that_the_oracle_knows_of_moves_it_before_it_is_hot() -> None:
    job = submitted("first", 40, STORES)
    bench = Bench(BUDGET, replace(job, facts=replace(job.facts, window_rows=1000)))
    bench.built(0)
    assert bench.job.num_stores == 3
    flat, hot = (10,) * 16, (100, 100, *(10,) * 14)
    slots = (flat, flat, hot, hot)
    bench.at(LoadKnown, num_steps=160, slots=slots, touched_rows=(1, 2, 3, 4))
    assert labels(bench.stepped(8, 1.0)) == []
    assert not [a for a in bench.ticks(1) if a.verb == "migrate"]
    bench.stepped(24, 1.0)  # step 32: in 60 s the load of step 80 and later is there
    moves = [a for a in bench.ticks(1) if a.verb == "migrate"]
    assert len(moves) == 1
    assert moves[0].values["source"] == 0.0
    assert "store 0 will have" in moves[0].reason
    assert "according to the oracle" in moves[0].reason
    slot, target = bench.job.moving[0], int(moves[0].values["target"])
    assert not [a for a in bench.ticks(3) if a.verb == "migrate"]
    bench.at(Moved, moved=True)
    assert bench.job.owners[slot] == target


def test_handle_of_growing_memory_gives_more_before_the_limit_is_met() -> None:
    bench = Bench(BUDGET, GROWS)
    limit, actions = grow_until(bench, "drain coordinator-0.1")
    give = next(action for action in actions if action.verb == "give memory")
    assert give.values["memory_bytes"] > limit
    assert f"training may reach its {limit:,} bytes at step" in give.reason
    stopped = bench.at(Ended, "coordinator-0.1", outcome="left")
    assert labels(stopped) == ["start coordinator-0.2"]
    assert stopped[0].values["memory_bytes"] == give.values["memory_bytes"]


def test_handle_of_jobs_that_share_a_budget_gives_to_the_important_one_and_says_who_waits() -> None:
    small = BudgetSet(time_sec=0.0, cpus=2.0, memory_bytes=8 * GIB)
    bench = Bench(small)
    assert labels(bench.send(submitted("first", 3))) == ["admit", "start segment-0.1"]
    bench.built(0)
    second = bench.send(submitted("second", 3, "  priority: 1", bench.now))
    assert [(a.job, a.verb) for a in second] == [
        ("second", "admit"),
        ("first", "wait"),
        ("first", "stop"),
        ("first", "drain"),
    ]
    assert second[1].reason.startswith("preempted by jobs of higher priority, or of the same")
    shortage = bench.state.jobs["second"].shortage
    assert shortage.startswith("segment-0 needs 1 core and ")
    assert "; only 0 cores and " in shortage
    first = bench.state.jobs["first"]
    found = [a for name in sorted(first.processes) for a in bench.at(Ended, name, outcome="left")]
    assert [(a.job, a.verb, a.process) for a in found] == [("second", "start", "segment-0.1")]
    assert bench.state.jobs["second"].shortage == ""
    third = bench.send(submitted("third", 3, "  priority: -1", bench.now))
    assert [(a.job, a.verb) for a in third] == [("third", "wait")]
    drained = bench.send(Drained(time_sec=bench.now, job="second"))
    assert ("first", "admit") in [(a.job, a.verb) for a in drained]
    # One core is free; the other one is held until the process of the second job has ended.
    assert [a.process for a in drained if a.verb == "start"] == ["coordinator-0.2"]
    found = bench.send(
        Ended(time_sec=bench.now, job="second", process="segment-0.1", outcome="left")
    )
    assert ("first", "start") in [(a.job, a.verb) for a in found]
    assert bench.state.jobs["second"].phase == "drained"


def test_handle_of_a_job_that_cannot_fit_fails_it_with_the_budget_that_would_do() -> None:
    bench = Bench(BudgetSet(time_sec=0.0, cpus=1.0, memory_bytes=GIB))
    (failed,) = bench.send(submitted("first"))
    assert failed.verb == "fail"
    assert failed.reason.startswith("budget does not hold the smallest pools: cpus=1 and ")


def test_handle_after_a_change_leaves_the_job_alone_for_a_while() -> None:
    bench = Bench(BUDGET, submitted("first", 200, "  deadline: 5m"))
    bench.built(0)
    assert bench.job.correction.in_flight is None  # admitted, and everything runs
    ended_sec = bench.job.correction.ended_sec
    bench.stepped(8, 1.0)
    changes = [a for a in bench.ticks(10) if a.verb == "scale"]
    assert bench.now < ended_sec + COOL_DOWN_SEC
    assert changes == []
    assert re.fullmatch(r"the last change ended \d+ s ago", bench.job.verdict)


def test_handle_of_time_that_goes_back_takes_the_latest() -> None:
    bench = Bench(BUDGET, Tick(time_sec=100.0))
    assert handle(bench.state, Tick(time_sec=50.0))[0].now_sec == 100.0
