"""The log: what is read is what was written, and a scheduler that is cut off anywhere goes on."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from presage.scheduler.__main__ import main
from presage.scheduler.controller.events import (
    Drained,
    Ended,
    Event,
    LoadKnown,
    Moved,
    Preempted,
    Read,
    Resized,
    Started,
    Stepped,
    Tick,
)
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.log import (
    EVENT_TYPES,
    LOG,
    Log,
    event_from_json,
    event_to_json,
    logs_of,
    read_log,
    recover,
)
from presage.scheduler.controller.replay import replay
from presage.scheduler.controller.state import Action, State
from presage.scheduler.model.past_runs import BuildRecord, History
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError
from tests.scheduler.controller.world import BUDGET, World, run, submitted
from tests.scheduler.small_job import make_run
from tests.scheduler.status.recordings import SEEDS, archive_after, record_jobs
from tests.shared import error_of, output_of, printed_by

EVENTS: list[Event] = [
    BUDGET,
    submitted("first"),
    Drained(time_sec=1.0, job="first"),
    Started(time_sec=1.0, job="first", process="segment-0.1"),
    Ended(time_sec=1.5, job="first", process="segment-0.1", outcome="done", num_samples=7),
    Preempted(time_sec=2.0, job="first", process="coordinator-0.1", grace_sec=30.0),
    Read(time_sec=2.0, job="first", process="coordinator-0.1", position=3, resident_bytes=4),
    Resized(time_sec=2.0, job="first", process="coordinator-0.1", resized=True),
    Stepped(
        time_sec=3.0, job="first", next_step=2, num_samples=9, num_replicas=1, seconds=(0.1, 0.2)
    ),
    LoadKnown(time_sec=3.0, job="first", num_steps=4, slots=((1, 2), (3, 4)), touched_rows=(3, 9)),
    Moved(time_sec=3.0, job="first", moved=True),
    Tick(
        time_sec=4.0,
        steps=(
            Stepped(
                time_sec=3.9, job="a", next_step=2, num_samples=9, num_replicas=1, seconds=(0.1,)
            ),
        ),
        readings=(
            Read(time_sec=4.0, job="a", process="b", position=3, resident_bytes=4),
            Read(time_sec=4.0, job="a", process="c", position=3, resident_bytes=5),
            Read(time_sec=4.0, job="d", process="b", position=4, resident_bytes=6, busy_cores=2.0),
        ),
    ),
]


def test_event_of_each_kind_is_the_same_after_it_was_written_and_read() -> None:
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())
    history = History((BuildRecord(10, 1.0, 5.0),), (make_run([(1, 256, 0.5)]),))
    for event in (*EVENTS, replace(submitted("first"), history=history)):
        assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_tick_has_only_the_values_of_its_readings() -> None:
    tick = Tick(
        time_sec=4.0,
        readings=(
            Read(time_sec=4.0, job="a", process="b", position=3, resident_bytes=4, busy_cores=2.0),
        ),
    )
    body = event_to_json(tick)
    assert body["readings"] == {"a": [("b", 3, 4, 2.0)]}
    assert event_from_json(json.loads(json.dumps(body))) == tick


class Logged:
    """A scheduler that writes a log, and is cut off after so many bytes of it."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __call__(self, state: State, event: Event) -> tuple[State, Sequence[Action]]:
        _, actions = handle(state, event)
        self.log.handle(event)
        return self.log.state, actions


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


def events_after_restart(world: World, state: State, now: float) -> list[Event]:
    """Return what a driver sees of processes after it was away."""
    found: list[Event] = []
    for job in state.jobs.values():
        for process in job.processes.values():
            if (job.name, process.name) in world.children:
                continue
            is_built = process.pool == "segment" and world.built[job.name, process.number]
            is_done = is_built or (process.pool == "coordinator" and world.finished[job.name])
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
    content = (folder / "whole.jsonl").read_bytes()
    path = folder / LOG
    events = b"".join(content.splitlines(keepends=True)[2:])
    world, finished = run_logged(path, seed, int(share * len(events)))
    with Log(path) as log:
        found = recover(path)
        for one in found.decisions:
            verb: Any = one.action
            world.carry_out(Action(verb=verb, job=one.job, process=one.process, reason=one.reason))
        events = events_after_restart(world, found.state, world.now)
        running = [job for job in world.jobs if job.job not in found.state.jobs]
        budget = [] if found.journal.num_events else [BUDGET]
        rng = np.random.default_rng(seed + 1)
        if not finished or events:
            state = run(world, found.state, Logged(log), rng, [*budget, *running, *events])
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


def live(path: Path, events: Sequence[tuple[State, Event, State, Sequence[Action]]]) -> Log:
    """Write a log, and return it closed."""
    with Log(path) as log:
        for _, event, _, _ in events:
            log.archive_if_long()
            log.handle(event)
    return log


@pytest.mark.slow
@given(seed=st.sampled_from(SEEDS), limit=st.sampled_from([0, 20]), data=st.data())
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_state_of_snapshot_and_tail_is_that_of_all_events(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: int, data: st.DataObject
) -> None:
    recording, path = record_jobs(seed), tmp_path_factory.mktemp("log") / LOG
    number = 0
    with pytest.MonkeyPatch.context() as patch:
        archive_after(limit, patch)
        while number < len(recording.events):  # a scheduler that is restarted now and then
            end = data.draw(st.integers(number + 1, len(recording.events)))
            live(path, recording.events[number:end])
            number = end
            found = recover(path)
            assert found.state == recording.state(number)
            assert list(found.state.jobs) == list(recording.state(number).jobs)
            assert found.journal == recording.journals[number]
            assert [d.reason for d in found.decisions] in (
                [],  # after a snapshot
                [action.reason for action in recording.events[number - 1][3]],
            )
    entries = read_log(path)
    assert [entry.event for entry in entries] == [event for _, event, _, _ in recording.events]
    assert len(logs_of(path)) > (0 if limit else 2)


@pytest.mark.slow
def test_log_that_is_cut_at_any_byte_has_the_state_of_its_complete_lines(tmp_path: Path) -> None:
    recording, whole, cut = record_jobs(1), tmp_path / "whole.jsonl", tmp_path / LOG
    live(whole, recording.events[:30])
    lines = whole.read_bytes().splitlines(keepends=True)
    content, ends = b"".join(lines), np.cumsum([len(line) for line in lines]).tolist()
    longest = max(range(21, 32), key=lambda n: len(lines[n]))
    start, end = ends[longest - 1], ends[longest]
    places = [*ends[1::5], *range(start, end, (end - start) // 12), *range(end - 3, end + 1)]
    for at in places:
        cut.write_bytes(content[:at])
        with Log(cut) as log:
            number = sum(end <= at for end in ends) - 2
            assert log.state == recording.state(number)
            assert cut.read_bytes() == content[: ends[number + 1]]
            if number < 30:
                log.handle(recording.events[number][1])
        assert recover(cut).state == recording.state(min(30, number + 1))
    cut.write_bytes(content[: ends[1] - 2])
    with pytest.raises(SchemaError, match=r"^snapshot is incomplete in .*; restore the file"):
        Log(cut).__enter__()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("is_done", [False, True])
def test_scheduler_that_is_killed_while_it_archives_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_done: bool
) -> None:
    """It is killed before or after the archived file is written, or that with the snapshot."""
    recording, path = record_jobs(1), tmp_path / LOG
    remaining = number

    def replace_or_die(file: Path, data: bytes) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining or is_done:
            replace_bytes(file, data)
        if not remaining:
            raise CutOffError

    live(path, recording.events[:20])
    archive_after(0, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("presage.scheduler.controller.log.replace_bytes", replace_or_die)
        with pytest.raises(CutOffError):
            live(path, recording.events[20:])
    assert recover(path).state == recording.state(20)
    events = [event for _, event, _, _ in recording.events]
    assert [entry.event for entry in read_log(path)] == events[:20]
    live(path, recording.events[20:22])
    assert recover(path).state == recording.state(22)
    assert [entry.event for entry in read_log(path)] == events[:22]


@pytest.mark.slow
def test_archived_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, path = record_jobs(1), tmp_path / LOG
    archive_after(5, monkeypatch)
    monkeypatch.setattr("presage.scheduler.controller.log.ARCHIVE_BYTES", 30_000)
    live(path, recording.events)
    archived = logs_of(path)[:-1]
    assert 1 < len(archived) < len(recording.events) // 4
    assert sum(file.stat().st_size for file in archived) <= 30_000
    entries = read_log(path)
    assert [entry.event for entry in entries] == [e for _, e, _, _ in recording.events][
        -len(entries) :
    ]
    assert replay(path).differences == ()
    assert recover(path).state == recording.state()


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> int:
    """Change the first decision with a prediction; return its line."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for number, line in enumerate(lines, start=1):
        for decision in line.get("decisions", ()):
            if "predicted_sec" in decision.get("values", {}):
                change(decision)
                path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
                return number
    raise AssertionError("a decision has a prediction")


@pytest.mark.slow
def test_log_whose_number_differs_in_its_last_bit_is_recovered_and_replay_tells_its_size(
    tmp_path: Path,
) -> None:
    recording, path = record_jobs(1), tmp_path / LOG
    live(path, recording.events[:40])
    numbers: list[float] = []

    def next_float(decision: dict[str, Any]) -> None:
        numbers.append(decision["values"]["predicted_sec"])
        decision["values"]["predicted_sec"] = float(np.nextafter(numbers[0], np.inf))

    line = changed(path, next_float)
    with Log(path) as log:
        assert log.state == recording.state(40)
    found = replay(path)
    assert found.others == []
    (difference,) = found.differences
    assert 0 < difference.size < 3e-16
    before = float(np.nextafter(numbers[0], np.inf))
    assert f"predicted_sec={before!r}, now {numbers[0]!r} (" in difference.describe()
    printed = output_of(main, ["replay", str(path)]).splitlines()
    assert re.match(
        r"40 events lead to the same \d+ decisions, 1 more differ by at most ", printed[0]
    )
    assert printed[1].startswith(f"{LOG}:{line}: 'admit' of ")


@pytest.mark.slow
def test_replay_of_decisions_that_were_changed_says_where(tmp_path: Path) -> None:
    recording, path = record_jobs(1), tmp_path / LOG
    live(path, recording.events[:40])
    line = changed(path, lambda decision: decision.update(action="wait"))
    (difference,) = replay(path).differences
    assert difference.describe().startswith(f"{LOG}:{line}: 'wait' of ")
    assert ", now 'admit' of " in difference.describe()
    printed, errors = printed_by(main, ["replay", str(path), "--json"], 1)
    assert json.loads(printed)["num_others"] == 1
    assert f"1 decision of the log would be another today, the first at {LOG}:{line}" in errors
    with Log(path) as log:  # which goes on from what was decided
        assert log.state == recording.state(40)


TICK = '{"event":"Tick","time_sec":1.0}'
SNAPSHOT = '{"snapshot":{"format":1,"num_events":0,"state":{}}}\n{"journal":{}}'
BAD: dict[str, tuple[list[str], str]] = {
    "a line in the middle that is none": (
        [SNAPSHOT, TICK, "{", TICK, ""],
        "line is no event: b'{\\n' (JSONDecodeError",
    ),
    "a whole last line of another kind": (
        [SNAPSHOT, '{"event":"Slept","time_sec":2.0}', ""],
        'line is no event: b\'{"event":"Slept","time_sec":2.0}\\n\' (KeyError(\'Slept\')) in LOG:3',
    ),
    "a log of another format": (
        [SNAPSHOT.replace("1", "2"), ""],
        "log has format 2, not 1 in LOG:1; use the release that wrote it",
    ),
    "a first line of another kind": (['{"a":1}', "", ""], 'line is no snapshot: b\'{"a":1}'),
}


@pytest.mark.parametrize("name", BAD)
def test_log_of_what_is_none_is_refused(name: str, tmp_path: Path) -> None:
    lines, message = BAD[name]
    path = tmp_path / LOG
    path.write_text("\n".join(lines))
    for read in (recover, read_log, lambda path: Log(path).__enter__()):
        with pytest.raises(SchemaError, match=re.escape(message.replace("LOG", str(path)))):
            read(path)


def test_append_syncs_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / LOG

    def fsync(_: Any) -> None:
        synced.append(path.read_bytes())

    with Log(path) as log:
        monkeypatch.setattr(os, "fsync", fsync)
        log.handle(Tick(time_sec=1.0))
    line = b'{"event":"Tick","time_sec":1.0}\n'
    assert synced[-1].endswith(b"\n" + line)


@pytest.mark.slow
def test_replay_command_says_that_decisions_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / LOG
    run_logged(path, 2)
    printed = output_of(main, ["replay", str(path)]).splitlines()
    num_events = path.read_bytes().count(b'{"event":')
    assert printed[0].startswith(f"{num_events} events lead to the same ")
    assert printed[1].startswith(
        "first: finished, 3 of 3 segments built, 12 steps trained, 0 segment"
    )
    assert error_of(main, ["replay", str(tmp_path / "none")]).startswith(
        "error: log cannot be read: "
    )


def test_replay_of_reasons_in_other_words_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / LOG
    live(path, record_jobs(1).events[:40])
    changed(path, lambda decision: decision.update(reason="in other words"))
    assert replay(path).differences == ()
