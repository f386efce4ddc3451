"""A process that grows until its limit kills it, unless the controller raises the limit before."""

import pytest

from presage.scheduler.controller.events import Ended, Read, Tick
from presage.scheduler.controller.state import Action
from tests.scheduler.controller.bench import Bench, labels
from tests.scheduler.controller.world import BUDGET, MIB, submitted

NUM_STEPS = 200
STEP_SEC = 2.0
START_BYTES, STEP_BYTES = 1040 * MIB, MIB // 2
"""What a trainer holds before its first step, and how much more after each."""
SCHEDULE = "  training: {replica: {memory: 1100MiB}}\n  preprocessing: {max_workers: 1}"


def train(*, watched: bool) -> tuple[list[str], int]:
    """Train on one replica that grows; return how its attempts ended and the steps that it made."""
    job = submitted("first", NUM_STEPS // 4, SCHEDULE)
    bench = Bench(BUDGET, job)
    bench.built(0, 10.0)
    endings: list[str] = []
    while True:
        coordinator = bench.job.of_pool("coordinator")[0]
        for step in range(NUM_STEPS):
            resident = START_BYTES + step * STEP_BYTES
            if resident > coordinator.memory_bytes:
                bench.at(Ended, coordinator.name, outcome="lost", detail="signal 9")
                return [*endings, "killed"], step
            after: list[Action] = bench.stepped(max(0, step + 1 - bench.job.next_step), STEP_SEC)
            bench.at(Read, coordinator.name, position=step, resident_bytes=resident)
            after += bench.at(Tick) if watched else []
            if f"drain {coordinator.name}" in labels(after):
                break
        else:
            bench.at(Ended, coordinator.name, outcome="done")
            return [*endings, bench.job.phase], NUM_STEPS
        endings.append("drained")
        bench.at(Ended, coordinator.name, outcome="left")


@pytest.mark.slow
def test_coordinator_that_grows_to_its_limit_gets_more_memory_before_it_is_killed() -> None:
    assert train(watched=True) == (["drained", "finished"], NUM_STEPS)
    endings, num_steps = train(watched=False)
    assert endings == ["killed"]
    assert num_steps < NUM_STEPS
