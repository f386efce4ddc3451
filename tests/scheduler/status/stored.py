"""A job with stores whose load is known."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from presage.scheduler.controller.events import Event, LoadKnown, Moved, Read
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.journal import Journal, record
from presage.scheduler.controller.log import Log, to_decision
from presage.scheduler.controller.slots import NUM_RANGES
from presage.scheduler.controller.state import Action, JobState, State
from presage.scheduler.status.view import View, view_of
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, MIB, submitted

STORES = """\
  training:
    replica: {memory: 945MiB}
    store: {memory: 80MiB}
    max_stores: 4
"""
PERIODS, NUM_STEPS = 4, 160


class Stored(Bench):
    """A machine with one job and three stores, and what is shown of it."""

    def __init__(self, seed: int, heat: int = 0) -> None:
        """Begin, with a load that nobody could guess.

        Args:
            seed: of the load.
            heat: accesses that range 0 has besides, from the third of four periods on.
        """
        self.journal = Journal()
        self.events: list[Event] = []
        job = submitted("first", 40, STORES)
        super().__init__(BUDGET, replace(job, facts=replace(job.facts, window_rows=1000)))
        self.built(0)
        counts = np.random.default_rng(seed).integers(50, 100, (PERIODS, NUM_RANGES))
        counts[2:, 0] += heat
        self.slots = tuple(map(tuple, counts.tolist()))

    def send(self, event: Event) -> list[Action]:
        """Return what follows, which the journal has then."""
        before, kept = self.state, self.journal
        after, actions = handle(before, event)
        decisions = [to_decision(action, after.now_sec) for action in actions]
        self.journal = record(kept, before, event, after, decisions)
        self.events.append(event)
        return super().send(event)

    def load_known(self) -> None:
        """Let the oracle tell."""
        self.at(LoadKnown, num_steps=NUM_STEPS, slots=self.slots, touched_rows=(1, 2, 3, 4))

    def begins_to_move(self) -> tuple[int, int, int]:
        """Train until hot ranges are on their way; return one, its store and the new one."""
        self.load_known()
        self.stepped(32, 1.0)  # in 60 s the load of step 80 and later is there
        (move,) = [a for a in self.ticks(1) if a.verb == "migrate"]
        return self.job.moving[0], int(move.values["source"]), int(move.values["target"])

    def moves(self) -> None:
        """Let a move come to its end."""
        self.at(Moved, moved=True)

    def read(self, number: int, busy: float) -> None:
        """Read a store."""
        self.at(
            Read, f"store-{number}.1", 1.0, position=1, resident_bytes=60 * MIB, busy_cores=busy
        )

    def write_log(self, path: Path) -> None:
        """Write the log of all that was told."""
        with Log(path) as log:
            for event in self.events:
                log.handle(event)

    def with_facts(self, **fields) -> State:
        """Return the state with other facts of the job."""
        job: JobState = replace(self.job, **fields)
        return replace(self.state, jobs={job.name: job})

    def view(self, **fields) -> View:
        """Return what is shown, with other facts of the job."""
        return view_of(self.with_facts(**fields), self.journal)
