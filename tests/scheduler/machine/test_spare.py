"""Memory that is not needed: the next processes get less, and nobody is replaced for nothing."""

from dataclasses import replace

from scheduler.correction import ENOUGH
from scheduler.machine.events import FIRST_RULES, BudgetSet, Ended, Read
from scheduler.machine.spare import SPARE_LOOKS
from scheduler.machine.state import Action
from tests.scheduler.machine.bench import Bench
from tests.scheduler.machine.world import BUDGET, GIB, MIB, check_laws, submitted

LARGE = """\
  training: {replica: {memory: 6GiB}, max_replicas: 1, max_stores: 0}
  preprocessing: {max_workers: 1}
"""
SMALL = """\
  training: {max_replicas: 1, max_stores: 0}
  preprocessing: {worker: {memory: 3GiB}, max_workers: 1}
"""


def trains(bench: Bench, num_looks: int, resident: int = 1200 * MIB) -> list[Action]:
    """Let the lead of the first job train with steady memory, a look after each window."""
    found: list[Action] = []
    for _ in range(num_looks):
        found += bench.stepped(2, 0.5)
        lead = next(p.name for p in bench.job.of_pool("lead"))
        position = bench.job.next_step
        noise = position % 3 * MIB
        found += bench.at(Read, lead, position=position, resident_bytes=resident + noise)
        found += bench.looks(1, 5.0)
    return found


def begun(budget: BudgetSet = BUDGET, num_segments: int = 1) -> Bench:
    """Return a job that trains with far more memory than it needs."""
    bench = Bench(budget, submitted("first", num_segments, LARGE))
    bench.built(0)
    return bench


def test_look_at_memory_that_is_not_needed_gives_the_next_process_less_and_ends_nobody() -> None:
    bench = begun()
    assert not [a for a in trains(bench, SPARE_LOOKS) if a.verb == "give back"], "not long enough"
    found = trains(bench, SPARE_LOOKS)
    (back,) = [a for a in found if a.verb == "give back"]
    assert back.reason.startswith(f"training is to need less than its {6 * GIB:,} bytes, ")
    assert [a for a in found if a.verb in ("drain", "stop", "resize")] == []
    (lead,) = bench.job.of_pool("lead")
    assert lead.memory_bytes == 6 * GIB
    assert 1200 * MIB < bench.job.replica_memory < (1 - ENOUGH) * 6 * GIB
    bench.at(Ended, lead.name, outcome="lost")
    bench.looks(5, 5.0)
    (lead,) = bench.job.of_pool("lead")
    assert lead.memory_bytes == bench.job.replica_memory == back.values["memory_bytes"]


def test_look_at_memory_that_grows_gives_nothing_back() -> None:
    bench = begun(num_segments=400)
    for part in range(3 * SPARE_LOOKS):
        found = trains(bench, 1, 1200 * MIB + part * 40 * MIB)
        assert not [a for a in found if a.verb == "give back"]


def test_look_at_memory_that_is_nearly_needed_gives_nothing_back() -> None:
    found = trains(begun(), 3 * SPARE_LOOKS, 5100 * MIB)
    assert not [a for a in found if a.verb == "give back"]


def test_look_of_the_first_rules_gives_nothing_back() -> None:
    found = trains(begun(replace(BUDGET, rules=FIRST_RULES)), 3 * SPARE_LOOKS)
    assert not [a for a in found if a.verb == "give back"]


def test_memory_is_given_back_to_a_job_that_waits_for_it() -> None:
    bench = begun(replace(BUDGET, memory_bytes=int(8.5 * GIB)))
    waits = bench.tell(submitted("second", 400, SMALL, bench.now))
    assert [(a.job, a.verb) for a in waits] == [("second", "wait")]
    found = trains(bench, 2 * SPARE_LOOKS)
    assert ("second", "admit") in [(a.job, a.verb) for a in found]
    # 2.5 GiB are free and 3 are needed, so a trainer that has more than it needs leaves.
    (drain,) = [a for a in found if a.verb == "drain"]
    assert (drain.job, drain.process) == ("first", "lead-0.1")
    assert "bytes more than its next one gets, and others need them" in drain.reason
    check_laws(bench.state)
    started = bench.at(Ended, "lead-0.1", outcome="left")
    assert sorted((a.job, a.process) for a in started) == [
        ("first", "lead-0.2"),
        ("second", "segment-0.1"),
    ]
    check_laws(bench.state)
    assert not [a for a in bench.looks(3) if a.verb == "drain"]


def test_a_trainer_leaves_for_memory_only_while_nobody_leaves_anyway() -> None:
    bench = begun(replace(BUDGET, memory_bytes=int(8.5 * GIB)))
    trains(bench, 2 * SPARE_LOOKS)
    first = bench.tell(submitted("second", 400, SMALL, bench.now))
    assert [a.process for a in first if a.verb == "drain"] == ["lead-0.1"]
    assert not [a for a in bench.looks(3, 5.0) if a.verb == "drain"]
