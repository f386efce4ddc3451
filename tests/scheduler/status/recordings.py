"""Simulated worlds, and the logs of their schedulers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from presage.scheduler.controller.events import Event, Submitted
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.journal import Journal, record
from presage.scheduler.controller.log import Log, to_decision
from presage.scheduler.controller.state import Action, State
from presage.scheduler.status.view import View, view_of
from tests.scheduler.controller.world import BUDGET, World, run, submitted

JOBS = (
    submitted("first", 3),
    submitted("second", 2, "  priority: 2\n  training: {min_replicas: 2}", 10.0),
    submitted("third", 2, "  preprocessing: {min_workers: 4}\n  priority: 1", 20.0),
)
SEEDS = (1, 3)


class Recording:
    """A scheduler of which everything is kept."""

    def __init__(self) -> None:
        self.events: list[tuple[State, Event, State, Sequence[Action]]] = []
        self.journals = [Journal()]

    def __call__(self, before: State, event: Event) -> tuple[State, Sequence[Action]]:
        after, actions = handle(before, event)
        decisions = [to_decision(action, after.now_sec) for action in actions]
        self.journals.append(record(self.journals[-1], before, event, after, decisions))
        self.events.append((before, event, after, actions))
        return after, actions

    def state(self, most: int | None = None) -> State:
        """Return the state after so many events, all when None."""
        events = self.events[:most]
        return events[-1][2] if events else State()

    def view(self, most: int | None = None) -> View:
        """Return the view after so many events, all when None."""
        return view_of(self.state(most), self.journals[: None if most is None else most + 1][-1])

    def write_log(self, path: Path, most: int | None = None) -> None:
        """Write the log of so many events."""
        with Log(path) as log:
            for _, event, _, _ in self.events[:most]:
                log.handle(event)


def archive_after(num_events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a log be archived once it has more events than these: each one takes a second."""
    seconds = count()
    monkeypatch.setattr("presage.scheduler.controller.log.time.thread_time", lambda: next(seconds))
    monkeypatch.setattr("presage.scheduler.controller.log.MAX_HANDLE_SEC", num_events)


@cache
def record_jobs(seed: int) -> Recording:
    """Let three jobs run to their end in a world in which processes die."""
    return _record(seed, JOBS)


@cache
def record_job_named(name: str) -> Recording:
    """Let one job run by a name, whatever it is."""
    return _record(5, (replace(submitted("calm"), job=name),))


def _record(seed: int, jobs: Sequence[Submitted]) -> Recording:
    recording = Recording()
    run(World(jobs), State(), recording, np.random.default_rng(seed), [BUDGET, *jobs])
    return recording
