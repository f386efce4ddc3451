"""The log: what is read is what was written, and a scheduler that is cut off anywhere goes on."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.__main__ import main
from scheduler.controller.events import (
    Drained,
    Ended,
    Event,
    LoadKnown,
    Moved,
    Preempted,
    Read,
    Resized,
    RunnerSet,
    SlotsRead,
    SlotsUnread,
    Started,
    Stepped,
    Tick,
)
from scheduler.controller.handle import handle
from scheduler.controller.log import (
    EVENT_TYPES,
    LOG,
    Log,
    event_from_json,
    event_to_json,
    read_log,
    recover,
    replay,
    to_decision,
)
from scheduler.controller.state import Action, State
from scheduler.model.history import BuildRecord, History
from schemas.errors import SchemaError
from tests.scheduler.controller.world import BUDGET, World, run, submitted
from tests.scheduler.made import make_run

EVENTS: list[Event] = [
    BUDGET,
    RunnerSet(time_sec=0.0, name="flink", largest=4),
    RunnerSet(time_sec=0.0, name="flink", address="http://a:1", free=3, own=1, total=8),
    SlotsRead(time_sec=0.5, free=3, own=1, total=8),
    SlotsUnread(time_sec=0.7, detail="refused"),
    submitted("first"),
    Drained(time_sec=1.0, job="first"),
    Started(time_sec=1.0, job="first", process="segment-0.1"),
    Ended(time_sec=1.5, job="first", process="segment-0.1", outcome="done", num_samples=7),
    Preempted(time_sec=2.0, job="first", process="lead-0.1", grace_sec=30.0),
    Read(time_sec=2.0, job="first", process="lead-0.1", position=3, resident_bytes=4, rate=0.5),
    Resized(time_sec=2.0, job="first", process="lead-0.1", resized=True),
    Stepped(
        time_sec=3.0, job="first", next_step=2, num_samples=9, num_replicas=1, seconds=(0.1, 0.2)
    ),
    LoadKnown(time_sec=3.0, job="first", num_steps=4, slots=((1, 2), (3, 4)), touched_rows=(3, 9)),
    Moved(time_sec=3.0, job="first", slots=1, target=0, moved=True),
    Tick(time_sec=4.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_of_gives_back_what_body_of_was_given(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_events_that_are_tried_are_all_kinds() -> None:
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())


def test_event_of_gives_back_a_history() -> None:
    history = History(
        (BuildRecord(10, 1.0, 5.0),),
        (make_run([(1, 256, 0.5)]),),
    )
    event = replace(submitted("first"), history=history)
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


class Logged:
    """A scheduler that writes a log, and is cut off after so many bytes of it."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __call__(self, state: State, event: Event) -> tuple[State, Sequence[Action]]:
        state, actions = handle(state, event)
        self.log.append(event, [to_decision(action, state.now_sec) for action in actions])
        return state, actions


class CutOffError(Exception):
    """The scheduler is killed."""


def run_logged(path: Path, seed: int, num_bytes: int | None = None) -> tuple[World, bool]:
    """Run two jobs with a log, of which at most so many bytes reach the disk."""
    jobs = [submitted("first", 3), submitted("second", 2, "  priority: 1", 3.0)]
    world = World(jobs)
    room = num_bytes

    class Cut(Log):
        def _write(self, content: bytes) -> None:
            nonlocal room
            if room is None:
                super()._write(content)
                return
            super()._write(content[:room])
            if len(content) > room:
                raise CutOffError
            room -= len(content)

    try:
        with Cut(path) as log:
            rng = np.random.default_rng(seed)
            run(world, State(), Logged(log), rng, [BUDGET, *jobs], num_wild=20)
    except CutOffError:
        return world, False
    return world, True


def what_became(world: World, state: State, now: float) -> list[Event]:
    """Return what a driver sees of processes after it was away."""
    found: list[Event] = []
    for job in state.jobs.values():
        for process in job.processes.values():
            if (job.name, process.name) in world.children:
                continue
            is_built = process.pool == "segment" and world.built[job.name, process.number]
            is_done = is_built or (process.pool == "lead" and world.finished[job.name])
            outcome = "done" if is_done else "lost"
            found.append(Ended(time_sec=now, job=job.name, process=process.name, outcome=outcome))
    return found


@pytest.mark.slow
@given(seed=st.integers(0, 2**16), share=st.floats(0, 1))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scheduler_that_is_cut_off_at_any_byte_ends_with_the_same_pools(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    run_logged(folder / "whole.jsonl", seed)
    size = (folder / "whole.jsonl").stat().st_size
    path = folder / LOG
    world, finished = run_logged(path, seed, int(share * size))
    found = recover(path)
    with Log(path) as log:
        log.append(None, found.missing)
        for action in found.actions:
            world.carry_out(action)
        events = what_became(world, found.state, world.now)
        known = [job for job in world.jobs if job.job not in found.state.jobs]
        budget = [] if found.num_events else [BUDGET]
        rng = np.random.default_rng(seed + 1)
        if not finished or events:
            state = run(world, found.state, Logged(log), rng, [*budget, *known, *events])
        else:
            state = found.state
    assert {name: job.phase for name, job in state.jobs.items()} == {
        "first": "finished",
        "second": "finished",
    }
    assert not any(job.processes for job in state.jobs.values())
    assert set(world.built.values()) == {1}
    assert len(world.built) == 5
    assert world.finished == {"first": 1, "second": 1}
    assert recover(path).state == state


@pytest.mark.slow
def test_recover_at_every_line_and_every_byte_of_the_last_one_gives_the_state_of_what_is_whole(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole.jsonl"
    run_logged(whole, 4)
    lines = whole.read_bytes().splitlines(keepends=True)[:60]
    states: list[State] = []
    state = State()
    for line in lines:
        body = json.loads(line)
        if "event" in body:
            state, _ = handle(state, event_from_json(body))
        states.append(state)
    cut = tmp_path / LOG
    cuts = [sum(map(len, lines[:n])) for n in range(1, len(lines) + 1)]
    last = next(n for n in reversed(range(len(lines))) if b'"decision"' in lines[n])
    cuts += range(cuts[last - 1], cuts[last])
    content = b"".join(lines)
    seen: dict[bytes, State] = {}
    for at in cuts:
        cut.write_bytes(content[:at])
        with Log(cut):
            kept = cut.read_bytes()
        assert content.startswith(kept)
        assert kept == b"" or kept.endswith(b"\n")
        if kept not in seen:
            seen[kept] = recover(cut).state
        assert seen[kept] == states[kept.count(b"\n") - 1]


@pytest.mark.slow
def test_replay_of_decisions_that_were_changed_says_where(tmp_path: Path) -> None:
    path = tmp_path / LOG
    run_logged(path, 1)
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"action":"start"' in line)
    changed = lines[place].replace('"process":"segment-0.1"', '"process":"segment-0.9"')
    path.write_text("\n".join([*lines[:place], changed, *lines[place + 1 :], ""]))
    found = replay(read_log(path))
    assert found.difference is not None
    assert found.difference.startswith(f"line {place + 1}: 'start' of ")
    assert " segment-0.9 (segment 0 of " in found.difference
    with pytest.raises(
        SchemaError, match=f"{re.escape('log leads to another decision')}.*line {place + 1}"
    ):
        recover(path)


BAD: dict[str, tuple[list[str], str]] = {
    "a line in the middle that is none": (
        ['{"event":"Ticked","time_sec":1.0}', "{", '{"event":"Ticked","time_sec":2.0}'],
        "line is not an event or a decision: '{' (JSONDecodeError",
    ),
    "a whole last line of another kind": (
        ['{"event":"Ticked","time_sec":1.0}', '{"event":"Slept","time_sec":2.0}', ""],
        "last line is not an event or a decision in LOG:2; restore the file",
    ),
    "a decision first": (
        ['{"decision":{"time_sec":1.0,"job":"a","action":"start","reason":"r"}}', ""],
        "log does not start with an event in LOG:1; restore the file",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_read_log_of_what_is_none_is_refused(name: str, tmp_path: Path) -> None:
    lines, message = BAD[name]
    path = tmp_path / LOG
    path.write_text("\n".join(lines))
    with pytest.raises(SchemaError, match=re.escape(message.replace("LOG", str(path)))):
        read_log(path)


def test_append_syncs_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / LOG

    def fsync(_: Any) -> None:
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    with Log(path) as log:
        log.append(Tick(time_sec=1.0), [])
    assert synced[-1] == b'{"event":"Ticked","time_sec":1.0}\n'


@pytest.mark.slow
def test_replay_command_says_that_decisions_are_the_same_or_where_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / LOG
    run_logged(path, 2)
    assert main(["replay", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    num_events = sum("event" in json.loads(line) for line in path.read_text().splitlines())
    assert told[0].startswith(f"{num_events} events lead to the same ")
    assert told[1].startswith("first: finished, 3 of 3 segments built, 12 steps trained, 0 segment")
    path.write_text(path.read_text().replace('"action":"finish"', '"action":"fail"', 1))
    assert main(["replay", str(path)]) == 1
    assert ": 'fail' of " in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: log cannot be read: ")


def test_replay_of_reasons_in_other_words_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / LOG
    run_logged(path, 1)
    entries = read_log(path)
    reworded = [
        replace(e, decisions=tuple(replace(d, reason="in other words") for d in e.decisions))
        for e in entries
    ]
    assert replay(reworded).difference is None
