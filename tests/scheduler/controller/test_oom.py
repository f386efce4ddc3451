"""A process that grows until its limit kills it, unless the controller raises the limit before."""

import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.controller.events import Ended, Read, Tick
from scheduler.controller.state import Action
from tests.scheduler.controller.bench import Bench, said
from tests.scheduler.controller.world import BUDGET, MIB, submitted

GROWER = Path(__file__).parents[1] / "grower.py"
NUM_STEPS = 200
STEP_SEC = 2.0
OTHER_BYTES = 1000 * MIB
"""What a trainer holds beside what grows."""
SCHEDULE = "  training: {replica: {memory: 1100MiB}}\n  preprocessing: {max_workers: 1}"


class Grown:
    """One attempt: a real process whose memory is read after each of its steps."""

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._child = subprocess.Popen(
            [sys.executable, str(GROWER), "30", "512", str(NUM_STEPS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> int | None:
        """Let it make a step; return its memory, None when it is killed, as a kernel does."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        resident = OTHER_BYTES + int(self._child.stdout.readline().split()[1])
        if resident > self._limit_bytes:
            self.end()
            return None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return resident

    def end(self) -> None:
        """Kill it."""
        self._child.kill()
        self._child.communicate()


def train(*, looks: bool) -> tuple[list[str], int]:
    """Train on one replica that grows; return how its attempts ended and the steps that it made."""
    job = submitted("first", NUM_STEPS // 4, SCHEDULE)
    bench = Bench(BUDGET, job)
    bench.built(0, 10.0)
    endings: list[str] = []
    while True:
        coordinator = bench.job.of_pool("coordinator")[0]
        grown = Grown(coordinator.memory_bytes)
        for step in range(NUM_STEPS):
            resident = grown.step()
            if resident is None:
                bench.at(Ended, coordinator.name, outcome="lost", detail="signal 9")
                return [*endings, "killed"], step
            after: list[Action] = bench.stepped(max(0, step + 1 - bench.job.next_step), STEP_SEC)
            bench.at(Read, coordinator.name, position=step, resident_bytes=resident)
            after += bench.at(Tick) if looks else []
            if f"drain {coordinator.name}" in said(after):
                break
        else:
            grown.end()
            bench.at(Ended, coordinator.name, outcome="done")
            return [*endings, bench.job.phase], NUM_STEPS
        grown.end()
        endings.append("drained")
        bench.at(Ended, coordinator.name, outcome="left")


@pytest.mark.slow
@pytest.mark.parametrize("looks", [True, False], ids=["watched", "not watched"])
def test_handle_of_a_process_that_would_be_killed_gives_it_more_before(looks: bool) -> None:
    endings, num_steps = train(looks=looks)
    if looks:
        assert endings == ["drained", "finished"]
        assert num_steps == NUM_STEPS
    else:
        assert endings == ["killed"]
        assert num_steps < NUM_STEPS
