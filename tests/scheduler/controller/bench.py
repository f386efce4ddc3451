"""A controller that tests send events to, and labels of its actions."""

from collections.abc import Sequence

from presage.scheduler.controller.events import (
    BudgetSet,
    Ended,
    Event,
    Read,
    Started,
    Stepped,
    Tick,
)
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.state import Action, JobState, State
from tests.scheduler.controller.world import MIB, check_logged, submitted

FREQUENT = (Read, Stepped, Tick)
"""Events after each tenth of which alone the state is encoded and decoded."""


class Bench:
    """A controller that gets events at chosen times; starts are confirmed at once."""

    def __init__(self, *events: Event) -> None:
        self.state = State()
        self._num_events = 0
        self.now = 0.0
        self.done: list[Action] = []
        for event in events:
            self.send(event)

    @property
    def job(self) -> JobState:
        return next(iter(self.state.jobs.values()))

    def send(self, event: Event) -> list[Action]:
        """Handle an event; return its actions, and those after the confirmed starts."""
        self.now = max(self.now, event.time_sec)
        old = self.state
        self.state, actions = handle(old, event)
        self._num_events += 1
        if not isinstance(event, FREQUENT) or self._num_events % 10 == 0:
            check_logged(self.state)
        found = list(actions)
        for action in actions:
            if action.verb == "start":
                who = {"job": action.job, "process": action.process}
                found += self.send(Started(time_sec=self.now, **who))
        self.done += found
        return found

    def at(
        self, kind: type[Event], process: str = "", after: float = 0.0, **fields
    ) -> list[Action]:
        """Handle an event of the first job, some seconds later."""
        who = {"process": process} if process else {}
        if kind not in (Tick, BudgetSet):
            who["job"] = self.job.name
        return self.send(kind(time_sec=self.now + after, **who, **fields))

    def built(self, number: int, seconds: float = 5.0, attempt: int = 1) -> list[Action]:
        """Commit a segment."""
        name = f"segment-{number}.{attempt}"
        samples = self.job.snapshot.facts.num_samples // self.job.num_segments
        return self.at(Ended, name, seconds, outcome="done", num_samples=samples, work_sec=seconds)

    def stepped(self, count: int, seconds: float, replicas: int = 1) -> list[Action]:
        """Commit steps of this duration."""
        step = self.job.next_step + count
        return self.at(
            Stepped,
            "",
            count * seconds,
            next_step=step,
            num_samples=step * 256,
            num_replicas=replicas,
            seconds=(seconds,) * min(count, 32),
        )

    def ticks(self, count: int, every: float = 1.0) -> list[Action]:
        """Run so many ticks."""
        return [action for _ in range(count) for action in self.at(Tick, after=every)]


def labels(actions: Sequence[Action]) -> list[str]:
    return [f"{action.verb} {action.process}".strip() for action in actions]


GROWS = submitted("first", 200, "  training: {replica: {memory: 1200MiB}}")
"""A job whose trainer may run out of memory."""


def grow_until(bench: Bench, wanted: str) -> tuple[int, list[Action]]:
    """Let the coordinator grow until an action; return its limit before, and all actions."""
    bench.built(0)
    limit = bench.job.replica_memory
    actions: list[Action] = []
    for step in range(20, 700, 10):
        bench.stepped(10, 0.2)
        resident = 950 * MIB + step * MIB // 2
        assert resident < limit, "it would have been killed"
        bench.at(Read, "coordinator-0.1", position=step, resident_bytes=resident)
        actions += bench.ticks(1, 0.1)
        if wanted in labels(actions):
            break
    return limit, actions
