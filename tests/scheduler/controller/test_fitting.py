"""Cores that no step needs are booked no more; those that a step needs are given back."""

from dataclasses import dataclass, replace

import pytest

from presage.scheduler.controller.budget import allocate
from presage.scheduler.controller.cores import MAX_READINGS, MIN_CPUS
from presage.scheduler.controller.events import BudgetSet, Drained, Ended, Read, Resized
from presage.scheduler.controller.handle import CORES_REDUCED
from presage.scheduler.controller.predictions import remaining_work
from presage.scheduler.controller.reconcile import RESIZE_RETRY_SEC, is_settled
from presage.scheduler.controller.state import (
    CORE_TICKS,
    Action,
    UsageWindow,
    booked_resources,
    job_of_document,
)
from presage.scheduler.model.elasticity import GROWTH, HEADROOM, NEED_MARGIN, CoreReadings
from presage.scheduler.model.predict import training_setting
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, GIB, check_laws, check_waiting, submitted

LARGE = """\
  training: {replica: {cpus: 4}, max_replicas: 1, max_stores: 0}
  preprocessing: {max_workers: 1}
"""
SMALL = """\
  training: {replica: {cpus: 4}, max_replicas: 1, max_stores: 0}
  preprocessing: {max_workers: 1}
"""


@dataclass
class Trainer:
    """A trainer that computes in bursts.

    Attributes:
        bench: where its job is the first.
        work_sec: core seconds of a step.
        need: cores of its bursts.
        limits: whether what is booked is a limit.
    """

    bench: Bench
    work_sec: float
    need: float
    limits: bool = True

    def train(self, num_ticks: int) -> list[Action]:
        """Let it train, with a look each 5 s."""
        found: list[Action] = []
        for _ in range(num_ticks):
            (coordinator,) = self.bench.job.of_pool("coordinator")
            cpus = coordinator.cpus if self.limits else 1e9
            step_sec = max(1.0, self.need / cpus)
            found += self.bench.stepped(2, step_sec)
            busy = self.work_sec / step_sec
            found += self.bench.at(Read, coordinator.name, position=self.bench.job.next_step,
                                   resident_bytes=GIB, busy_cores=busy)  # fmt: skip
            found += self.bench.ticks(1, 5.0)
            check_laws(self.bench.state)
            check_waiting(self.bench.state)
        return found


def started_bench(budget: BudgetSet = BUDGET, schedule: str = LARGE) -> Bench:
    """Return a job that trains alone."""
    bench = Bench(budget, submitted("first", 400, schedule))
    bench.built(0)
    return bench


def fits(actions: list[Action]) -> list[Action]:
    return [action for action in actions if action.verb == "fit cores"]


def cpus_of(bench: Bench) -> float:
    (coordinator,) = bench.job.of_pool("coordinator")
    return coordinator.cpus


def test_look_at_cores_that_nothing_needs_books_fewer_and_ends_nobody() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=1.0, need=1.2)
    before = bench.state.used[0]
    assert fits(trainer.train(CORE_TICKS)) == [], "not long enough"
    found = trainer.train(2)
    (fit,) = fits(found)
    assert fit.reason.startswith("1.00 of 4.00 cores of a trainer are busy, it gets 1.30: more do")
    assert [a for a in found if a.verb in ("drain", "stop", "resize", "replace")] == []
    assert cpus_of(bench) == fit.values["replica_cpus"] == HEADROOM
    assert bench.state.used[0] == pytest.approx(before - 4.0 + HEADROOM)
    assert fits(trainer.train(5 * CORE_TICKS)) == [], "it is slower with none of them"
    assert cpus_of(bench) == HEADROOM


@pytest.mark.slow
def test_look_at_longer_steps_gives_back_the_cores_that_bursts_need() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=1.0, need=3.0)
    found = trainer.train(8 * CORE_TICKS)
    first, *others = fits(found)
    assert first.values["replica_cpus"] == HEADROOM
    assert others, "steps became more than twice as long"
    assert 3.0 <= cpus_of(bench) <= 1.2 * NEED_MARGIN * 3.0
    assert fits(trainer.train(6 * CORE_TICKS)) == [], "once is enough"


def test_look_gives_no_more_cores_than_the_file_does_where_they_are_no_limits() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=5.0, need=6.0)
    assert fits(trainer.train(6 * CORE_TICKS)) == []
    assert cpus_of(bench) == 4.0


@pytest.mark.slow
def test_look_gives_more_cores_than_the_file_does_where_they_are_limits() -> None:
    bench = started_bench(replace(BUDGET, resizes=True))
    trainer = Trainer(bench, work_sec=5.0, need=6.0)
    found: list[Action] = []
    for _ in range(8 * CORE_TICKS):
        found += trainer.train(1)
        for process in bench.job.processes.values():
            if process.is_changing:
                bench.at(Resized, process.name, resized=True)
    assert "more may shorten steps" in fits(found)[0].reason
    assert 6.0 <= cpus_of(bench) <= 7.0, "8 cores, one of them for the segment job"
    assert fits(trainer.train(4 * CORE_TICKS)) == []


def test_look_gives_no_trainer_more_cores_than_threads() -> None:
    bench = started_bench(replace(BUDGET, resizes=True))
    document = bench.job.document.replace("train:\n", "train:\n  num_threads: 4\n")
    job = job_of_document(document, "first", None)
    snapshot = replace(bench.job.snapshot, job=job)
    job = replace(bench.job, document=document, snapshot=snapshot)
    bench.state = replace(bench.state, jobs={"first": job})
    assert fits(Trainer(bench, work_sec=5.0, need=6.0).train(3 * CORE_TICKS)) == []


def test_look_gives_an_idle_process_some_cores() -> None:
    bench = started_bench()
    Trainer(bench, work_sec=0.01, need=0.01).train(2 * CORE_TICKS)
    assert cpus_of(bench) == MIN_CPUS


def test_look_without_readings_of_cores_changes_nothing() -> None:
    bench = started_bench()
    for _ in range(3 * CORE_TICKS):
        assert fits(bench.stepped(2, 1.0) + bench.ticks(1, 5.0)) == []


def test_cores_that_are_limits_are_changed_in_place() -> None:
    bench = started_bench(replace(BUDGET, resizes=True))
    trainer = Trainer(bench, work_sec=1.0, need=1.2)
    found = trainer.train(CORE_TICKS + 2)
    (resize,) = [a for a in found if a.verb == "resize"]
    assert (resize.process, resize.values) == ("coordinator-0.1", {"cpus": HEADROOM})
    assert resize.reason == "it gets 1.30 cores instead of 4.00"
    assert bench.job.processes["coordinator-0.1"].is_changing
    assert not is_settled(bench.job)
    assert bench.at(Resized, "coordinator-0.1", resized=True) == []
    assert not bench.job.processes["coordinator-0.1"].is_changing
    assert cpus_of(bench) == HEADROOM


def of_cores(actions: list[Action]) -> list[Action]:
    """Return actions without those of memory."""
    return [a for a in actions if a.verb != "resize" or "cpus" in a.values]


@pytest.mark.slow
def test_process_whose_cores_cannot_be_changed_keeps_them_and_is_asked_again_later() -> None:
    bench = started_bench(replace(BUDGET, resizes=True))
    trainer = Trainer(bench, work_sec=1.0, need=1.2)
    trainer.train(CORE_TICKS + 2)
    bench.at(Resized, "coordinator-0.1", resized=False)
    assert cpus_of(bench) == 4.0
    assert bench.job.replica_cpus == HEADROOM, "of the next one"
    found = trainer.train(2 * CORE_TICKS)
    assert [a for a in of_cores(found) if a.verb in ("resize", "drain", "fit cores")] == []
    found = of_cores(trainer.train(int(RESIZE_RETRY_SEC / 5)))
    assert [a.process for a in found if a.verb == "resize"] == ["coordinator-0.1"]


def test_cores_are_free_for_others_only_when_the_node_has_taken_them() -> None:
    bench = started_bench(replace(BUDGET, resizes=True))
    bench.send(submitted("second", 800, SMALL, bench.now))
    Trainer(bench, work_sec=1.0, need=1.2).train(CORE_TICKS + 2)
    assert bench.state.jobs["second"].sizes is not None
    who = {"job": "second", "process": "segment-0.1"}
    done = Ended(time_sec=bench.now, outcome="done", num_samples=1024, work_sec=5.0, **who)
    assert not [a for a in bench.send(done) if a.process == "coordinator-0.1"], (
        "not 4 and 4 and 1 of 8"
    )
    check_laws(bench.state)
    bench.at(Resized, "coordinator-0.1", resized=False)
    check_laws(bench.state)
    assert cpus_of(bench) == 4.0


def test_cores_begin_anew_with_a_file_that_says_others() -> None:
    bench = started_bench()
    Trainer(bench, work_sec=1.0, need=1.2).train(CORE_TICKS + 2)
    bench.at(Drained)
    for process in list(bench.job.processes):
        bench.at(Ended, process, outcome="left")
    bench.send(submitted("first", 400, LARGE.replace("4", "2"), bench.now))
    assert cpus_of(bench) == 2.0
    assert not bench.job.cores.readings


@pytest.mark.slow
def test_look_at_a_trainer_that_waits_for_data_takes_nothing_away() -> None:
    bench = started_bench()
    (coordinator,) = bench.job.of_pool("coordinator")
    for position in range(100):
        bench.at(Read, coordinator.name, position=position, resident_bytes=GIB, busy_cores=0.02)
        assert fits(bench.ticks(1, 5.0)) == []
    assert fits(Trainer(bench, work_sec=3.0, need=3.9).train(2 * CORE_TICKS)) == []


def test_look_at_an_idle_store_or_trainer_does_not_fail() -> None:
    bench = started_bench()
    (coordinator,) = bench.job.of_pool("coordinator")
    for position in range(2 * CORE_TICKS):
        bench.stepped(2, 1.0)
        bench.at(Read, coordinator.name, position=position, resident_bytes=GIB, busy_cores=0.0)
        bench.ticks(1, 5.0)
    assert cpus_of(bench) == MIN_CPUS


@pytest.mark.slow
def test_look_never_forgets_what_fewer_cores_did() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=1.0, need=3.0)
    trainer.train(8 * CORE_TICKS)
    assert fits(trainer.train(40 * CORE_TICKS)) == []
    assert len(bench.job.cores.latest()) <= 4 * MAX_READINGS


@pytest.mark.slow
def test_cores_of_a_file_that_are_no_thousandths_are_never_exceeded() -> None:
    bench = started_bench(schedule=LARGE.replace("cpus: 4", "cpus: 1.6667"))
    Trainer(bench, work_sec=1.0, need=1.6).train(8 * CORE_TICKS)
    assert bench.job.replica_cpus <= 1.6667


def test_processes_at_new_sizes_get_more_before_they_get_fewer() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=1.0, need=1.2)
    trainer.train(CORE_TICKS + 3)
    job = replace(
        bench.job, cores=CoreReadings(), usage=UsageWindow()
    )  # as at sizes where nothing was read
    bench.state = replace(bench.state, jobs={"first": job})
    trainer.work_sec, trainer.need = 0.5, 0.6
    (first, *_) = fits(trainer.train(3 * CORE_TICKS))
    assert first.values["replica_cpus"] == pytest.approx(GROWTH * HEADROOM, rel=0.01)
    assert cpus_of(bench) == pytest.approx(HEADROOM * 0.5, rel=0.01)


def test_trial_of_more_cores_takes_only_what_is_free() -> None:
    """The first of two jobs got fewer cores than those of its file, and the second has the rest."""
    bench = started_bench()
    bench.send(submitted("second", 800, SMALL.replace("cpus: 4", "cpus: 0.5"), bench.now))
    (coordinator,) = bench.job.of_pool("coordinator")
    job = bench.job.with_process(replace(coordinator, cpus=2.9))
    jobs = {**bench.state.jobs, "first": replace(job, replica_cpus=2.9)}
    cpus = sum(booked_resources(job, job.sizes)[0] for job in jobs.values())
    budget = replace(bench.state.budget, cpus=cpus)
    bench.state = replace(bench.state, jobs=jobs, budget=budget)
    assert fits(Trainer(bench, work_sec=2.0, need=2.1).train(CORE_TICKS + 3)) == []
    assert cpus_of(bench) == 2.9


FITTED = {
    "other replicas and enough cores": (2, 8.0, 4.0),
    "other replicas and too few cores": (2, 4.5, HEADROOM),
    "the same replicas": (1, 8.0, HEADROOM),
}


@pytest.mark.parametrize(("replicas", "cpus", "expected"), FITTED.values(), ids=FITTED.keys())
def test_processes_at_new_sizes_begin_with_the_cores_of_the_file_if_these_fit(
    replicas: int, cpus: float, expected: float
) -> None:
    bench = started_bench()
    sizes = bench.job.sizes
    assert sizes is not None
    job = replace(bench.job, replica_cpus=HEADROOM, sizes=replace(sizes, num_replicas=replicas))
    state, _ = allocate(
        replace(bench.state, jobs={"first": job}, budget=replace(bench.state.budget, cpus=cpus))
    )
    assert state.jobs["first"].sizes == sizes
    assert state.jobs["first"].replica_cpus == expected


def test_cores_that_nothing_needs_go_to_a_job_that_waits_for_them() -> None:
    bench = started_bench()
    waits = bench.send(submitted("second", 800, SMALL, bench.now))
    assert [(a.job, a.verb) for a in waits] == [("second", "wait")]
    found = Trainer(bench, work_sec=1.0, need=1.2).train(CORE_TICKS + 3)
    assert ("second", "admit") in [(a.job, a.verb) for a in found]


def test_cores_that_are_needed_again_and_that_others_have_are_shared_anew() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=1.0, need=3.0)
    bench.send(submitted("second", 800, SMALL, bench.now))
    trainer.train(CORE_TICKS + 3)
    assert cpus_of(bench) == HEADROOM
    assert bench.state.jobs["second"].sizes is not None
    found = trainer.train(CORE_TICKS + 3)
    assert [a.job for a in fits(found)] == ["first"]
    assert ("second", "wait") in [(a.job, a.verb) for a in found]
    assert bench.job.replica_cpus > 3.0
    for process in list(bench.state.jobs["second"].processes):
        event = Ended(time_sec=bench.now, job="second", process=process, outcome="left")
        bench.send(event)
    assert cpus_of(bench) == bench.job.replica_cpus


def test_predictions_go_on_by_the_cores_at_which_steps_were_measured() -> None:
    bench = started_bench()
    Trainer(bench, work_sec=1.0, need=1.2).train(CORE_TICKS + 3)
    remaining = remaining_work(bench.job, bench.state, bench.state.budget)
    assert bench.job.sizes is not None
    setting = training_setting(remaining.snapshot, remaining.config, bench.job.sizes.grid)
    assert setting.replica_cpus == 4.0


def test_nothing_is_learned_of_steps_that_lack_cores() -> None:
    bench = started_bench()
    trainer = Trainer(bench, work_sec=1.0, need=3.0)
    trainer.train(2 * CORE_TICKS)
    assert cpus_of(bench) == HEADROOM, "its steps are 2.3 times as long"
    remaining = remaining_work(bench.job, bench.state, bench.state.budget)
    assert bench.job.sizes is not None
    setting = training_setting(remaining.snapshot, remaining.config, bench.job.sizes.grid)
    assert remaining.models.training.seconds(setting)[0] == pytest.approx(1.0, rel=0.05)
    for number in range(1, 4):
        bench.built(number)
    bench.ticks(1)
    assert bench.job.verdict == CORES_REDUCED
