"""Events that a driver sends when it starts, and their order."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from presage.scheduler.controller.events import Drained, Ended, Tick
from presage.scheduler.controller.journal import Journal
from presage.scheduler.controller.log import LOG, Log, read_log, snapshot_lines
from presage.scheduler.controller.state import State
from presage.scheduler.drivers.children import Children, ThisMachine
from presage.scheduler.drivers.driver import Driver, DriverOptions
from presage.scheduler.drivers.job_files import SegmentRunner
from presage.schemas.config.job import parse_job
from presage.schemas.errors import SchemaError, StorageError
from presage.schemas.storage.location import Location
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, submitted
from tests.scheduler.drivers.test_children import until
from tests.scheduler.small_job import damage, paths_of

WIDE = "  preprocessing: {min_workers: 4, max_workers: 4}"


def test_begin_does_nothing_where_segment_jobs_cannot_run(tmp_path: Path) -> None:
    class Silent(SegmentRunner):
        def check(self) -> None:
            raise SchemaError("cluster must answer, got nothing; start it")

    options = DriverOptions(output=tmp_path, runner=Silent())
    with Log(tmp_path / LOG) as log:
        driver = Driver(options, ThisMachine(), log, {})
        with pytest.raises(SchemaError, match="cluster must answer"):
            driver.begin([], 3.0, BUDGET.memory_bytes)
    assert read_log(tmp_path / LOG) == []


def test_begin_again_takes_a_job_whose_sizes_were_settled_and_refuses_another_file(
    tmp_path: Path,
) -> None:
    job = submitted("first", 4, WIDE)
    declared = parse_job(job.document, "first").schedule
    half = replace(declared.training.replica, cpus=declared.training.replica.cpus / 2)
    settled = replace(declared, training=replace(declared.training, replica=half))
    state = Bench(BUDGET, replace(job, schedule=settled)).state
    (tmp_path / "first.yaml").write_text(job.document)
    (tmp_path / "schema.pbtxt").touch()
    paths = paths_of(tmp_path / "first", tmp_path / "first.yaml", 4)
    (tmp_path / LOG).write_bytes(snapshot_lines(state, Journal(), 0))
    with Log(tmp_path / LOG) as log:
        driver = Driver(DriverOptions(output=tmp_path), ThisMachine(), log, {"first": paths})
        driver.begin([job], BUDGET.cpus, BUDGET.memory_bytes)
        assert driver.state.jobs["first"].phase == "running"
        assert paths.job_file.read_bytes() == job.document.encode()
        other = replace(job, document=job.document.replace("name: first", "name: other"))
        with pytest.raises(SchemaError, match=r"job file changed .* in .*first\.yaml"):
            driver.begin([other], BUDGET.cpus, BUDGET.memory_bytes)


def test_nothing_is_decided_about_processes_while_the_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    options = DriverOptions(output=tmp_path, progress=messages.append)
    paths = paths_of(tmp_path / "first", None, 4, storage=f"memory://{tmp_path.name}/first")
    state = Bench(BUDGET, submitted("first", 4, WIDE)).state
    assert "segment-0.1" in state.jobs["first"].processes

    def fail(_: Location) -> None:
        raise StorageError("store cannot be reached")

    (tmp_path / LOG).write_bytes(snapshot_lines(state, Journal(), 0))
    with Log(tmp_path / LOG) as log:
        driver = Driver(options, ThisMachine(), log, {"first": paths})
        with monkeypatch.context() as patch:
            patch.setattr("presage.scheduler.drivers.observations.find_root", fail)
            patch.setattr("presage.scheduler.drivers.driver.SILENT_POLL_SEC", 0.0)
            driver.poll()
            driver.poll()
        assert messages == ["first: files cannot be reached: store cannot be reached"]
        assert not [e for e in read_log(tmp_path / LOG) if isinstance(e.event, Ended)]
        driver.poll()
    assert messages[-1] == "first: files can be reached again"
    (ended,) = [e.event for e in read_log(tmp_path / LOG) if isinstance(e.event, Ended)]
    assert (ended.process, ended.outcome) == ("segment-0.1", "lost")


def driver_of(
    folder: Path, log: Log, messages: list[str] | None = None
) -> tuple[Driver, dict[str, Children]]:
    """Return a driver of the jobs of a log, and their processes of this machine."""
    paths = {name: paths_of(folder / name, None, 4) for name in log.state.jobs}
    progress = (messages if messages is not None else []).append
    options = DriverOptions(output=folder, progress=progress, poll_sec=0.0)
    children = {name: Children(one.processes, os.environ) for name, one in paths.items()}
    return Driver(options, ThisMachine(), log, paths), children


def test_damaged_dataset_fails_its_job_and_no_other(tmp_path: Path) -> None:
    bench = Bench(BUDGET, submitted("first", 4), submitted("second", 4))
    (tmp_path / LOG).write_bytes(snapshot_lines(bench.state, Journal(), 0))
    damage(paths_of(tmp_path / "first"))
    with Log(tmp_path / LOG) as log:
        driver, _ = driver_of(tmp_path, log)
        driver.poll()
    ended = {e.event.job: e.event for e in read_log(tmp_path / LOG) if isinstance(e.event, Ended)}
    assert {job: event.outcome for job, event in ended.items()} == {
        "first": "failed",
        "second": "lost",
    }
    assert ended["first"].detail.startswith("manifest must be JSON with a checksum in ")


def test_run_that_cannot_be_read_fails_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, messages = Bench(BUDGET, submitted("first", 4), submitted("second", 4)), list[str]()
    (tmp_path / LOG).write_bytes(snapshot_lines(bench.state, Journal(), 0))

    def fail(directory: Location) -> None:
        if "first" in str(directory):
            raise PermissionError(13, "denied")

    monkeypatch.setattr("presage.scheduler.drivers.observations.find_root", fail)
    with Log(tmp_path / LOG) as log:
        driver, _ = driver_of(tmp_path, log, messages)
        driver.poll()
    ended = [e.event.job for e in read_log(tmp_path / LOG) if isinstance(e.event, Ended)]
    assert ended == ["second"]
    assert "first: files cannot be reached: [Errno 13] denied" in messages


STUBBORN = ["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]


@pytest.mark.parametrize("ignores", [False, True], ids=["leaves", "ignores the request"])
def test_leaving_process_ends_though_its_first_stop_request_was_lost(
    ignores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(BUDGET, submitted("first", 4))
    bench.at(Drained)
    (tmp_path / LOG).write_bytes(snapshot_lines(bench.state, Journal(), 0))
    with Log(tmp_path / LOG) as log:
        driver, children = driver_of(tmp_path, log)
        children["first"].start("segment-0.1", STUBBORN if ignores else ["sleep", "600"])
        if ignores:
            monkeypatch.setattr("presage.scheduler.drivers.driver.KILL_SEC", -1e9)
            until(lambda: children["first"].output("segment-0.1"))

        def is_done() -> bool:
            driver.poll()
            children["first"].is_alive("segment-0.1")  # reaps it
            return driver.is_done

        until(is_done)
        assert driver.state.jobs["first"].phase == "drained"


def test_clock_that_is_set_back_stops_neither_polls_nor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, polled = SimpleNamespace(wall=1000.0, since=0.0), list[str]()
    times = SimpleNamespace(time=lambda: clock.wall, monotonic=lambda: clock.since)
    monkeypatch.setattr("presage.scheduler.drivers.driver.time", times)
    state = replace(Bench(BUDGET, submitted("first", 4)).state, now_sec=1200.0)
    (tmp_path / LOG).write_bytes(snapshot_lines(state, Journal(), 0))
    with Log(tmp_path / LOG) as log:
        driver, _ = driver_of(tmp_path, log)
        monkeypatch.setattr(driver, "_poll_job", polled.append)
        for _ in range(3):
            driver.poll()
            clock.wall, clock.since = clock.wall - 60.0, clock.since + 100.0
    assert len(polled) == 3
    ticks = [e.event.time_sec for e in read_log(tmp_path / LOG) if isinstance(e.event, Tick)]
    assert ticks == [1200.0, 1300.0, 1400.0]


def measure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_polls: int
) -> tuple[State, list[Tick], list[int]]:
    """Poll two jobs; return the state afterwards, the ticks, and the files that they synced."""
    syncs: list[int] = []
    bench = Bench(BUDGET, submitted("first", 4, WIDE), submitted("second", 4))
    paths = {name: paths_of(folder / name, None, 4) for name in bench.state.jobs}
    (folder / LOG).write_bytes(snapshot_lines(bench.state, Journal(), 0))
    with Log(folder / LOG) as log:
        driver = Driver(DriverOptions(output=folder), ThisMachine(), log, paths)
        monkeypatch.setattr(driver, "_poll_job", lambda _: None)
        monkeypatch.setattr(driver, "_interval", lambda _: 0.0)
        monkeypatch.setattr(driver, "_tick_interval", lambda _: 0.0)
        monkeypatch.setattr(Children, "resident_bytes", lambda _, name: len(name))
        monkeypatch.setattr(Children, "busy_cores", lambda _, name: 1 / 3)
        monkeypatch.setattr(os, "fsync", syncs.append)
        for _ in range(num_polls):
            driver.poll()
    ticks = [entry.event for entry in read_log(folder / LOG)]
    return log.state, [tick for tick in ticks if isinstance(tick, Tick)], syncs


def test_readings_of_a_tick_are_one_event_and_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, (tick,), syncs = measure(tmp_path, monkeypatch, 1)
    read = {(r.job, r.process): (r.resident_bytes, r.busy_cores) for r in tick.readings}
    names = [(job.name, process) for job in state.jobs.values() for process in job.processes]
    assert read == {(job, process): (len(process), 0.3333) for job, process in names}
    assert len(read) > 1
    assert len(syncs) == 1
    for job in state.jobs.values():
        assert all(process.readings for process in job.processes.values())


def test_jobs_beyond_the_most_of_a_tick_take_turns_in_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.scheduler.drivers.driver.MAX_MEASURED", 1)
    _, ticks, _ = measure(tmp_path, monkeypatch, 3)
    measured = [{reading.job for reading in tick.readings} for tick in ticks]
    assert measured == [{"first"}, {"second"}, {"first"}]
