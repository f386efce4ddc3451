"""Store processes and their directories die while a run trains: what it leaves stays the same."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.run_log import read_summary
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import hold, wait_for
from tests.trainer.runs import SEGMENTS, run_job
from tests.trainer.stores import kill_stores, stores_of
from trainer.diff import compare_runs
from trainer.run_log import LogWriter
from trainer.stores.remote.client import RemoteStore, open_remote_store

EVERY = 6
"""Steps between checkpoints."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_with(tmp_path_factory.mktemp("deaths") / "job", 1)


@pytest.fixture(scope="module")
def copied_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_with(tmp_path_factory.mktemp("copied") / "job", 2)


@pytest.fixture(scope="module")
def dataset(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("deaths_of") / "dataset", job, SEGMENTS)


@pytest.fixture(scope="module")
def undisturbed(job: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    run_job(job, dataset, run)
    return run


def job_with(folder: Path, replicas: int) -> Path:
    job = write_job(folder, dtype="float32", every_steps=str(EVERY), lookahead="2")
    with job.open("a") as file:
        file.write(f"  stores: {{replicas: {replicas}, timeout: 60s}}\n")
    return job


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Callable[[Path], None]]]:
    """What happens after a step was committed, once each."""
    wanted: dict[int, Callable[[Path], None]] = {}
    write = LogWriter.write

    def write_and_act(log: LogWriter) -> None:
        write(log)
        action = wanted.pop(log.written, None)
        if action is not None:
            action(log._run)

    monkeypatch.setattr(LogWriter, "write", write_and_act)
    yield wanted
    assert not wanted, "everything happened"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[RemoteStore]:
    """The stores of runs, as they are opened."""
    found: list[RemoteStore] = []

    def open_and_tell(*arguments: Any, **options: Any) -> RemoteStore:
        store = open_remote_store(*arguments, **options)
        found.append(store)
        return store

    monkeypatch.setattr("trainer.stores.factory.open_remote_store", open_and_tell)
    return found


def assert_equal(one: Path, other: Path) -> None:
    assert compare_runs(one, other).difference is None


@pytest.mark.slow
def test_stores_killed_at_any_moment_cost_no_committed_step(
    job: Path,
    dataset: Path,
    undisturbed: Path,
    tmp_path: Path,
    at_step: dict[int, Callable[[Path], None]],
) -> None:
    def shortly_again(run: Path) -> None:
        kill_stores(run, 0)
        # the next one while it is started, or replays, or meets its first calls
        threading.Timer(0.7, kill_stores, (run, 0)).start()

    run = tmp_path / "run"
    at_step |= {
        2: lambda run: kill_stores(run, 0),
        7: lambda run: kill_stores(run, 0, 1),
        12: shortly_again,
    }
    at_step[13] = lambda run: threading.Timer(0.01, kill_stores, (run, 1)).start()
    summary = run_job(job, dataset, run, embedding="cached", stores=2)
    assert (summary.num_rollbacks, summary.recomputed_steps) == (0, 0)
    assert_equal(undisturbed, run)


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["cached", "uncached"])
def test_store_that_dies_with_its_directory_takes_the_run_back_to_its_checkpoint(
    embedding: str,
    job: Path,
    dataset: Path,
    undisturbed: Path,
    tmp_path: Path,
    at_step: dict[int, Callable[[Path], None]],
) -> None:
    run = tmp_path / "run"
    at_step |= {
        2: lambda run: kill_stores(run, 0, forget=True),
        10: lambda run: kill_stores(run, 1, forget=True),
    }
    summary = run_job(job, dataset, run, embedding=embedding, stores=2)
    assert summary.num_rollbacks == 2
    # from the kill to the next call of that store, which a whole cached step may go without
    assert 3 <= summary.recomputed_steps <= 2 * EVERY + 4
    assert read_summary(run / "summary.json").recomputed_steps == summary.recomputed_steps
    assert_equal(undisturbed, run)


@pytest.mark.slow
def test_store_that_comes_back_in_an_older_state_is_not_believed(
    job: Path,
    dataset: Path,
    undisturbed: Path,
    tmp_path: Path,
    at_step: dict[int, Callable[[Path], None]],
) -> None:
    run = tmp_path / "run"

    def keep_copy(run: Path) -> None:
        shutil.copytree(run / "store" / "store-000", tmp_path / "older")

    def put_back(run: Path) -> None:
        folder = run / "store" / "store-000"
        newest = max(folder.glob("log-*.bin"))
        (old,) = (tmp_path / "older").glob("log-*.bin")
        assert newest.stat().st_size > old.stat().st_size
        hold(stores_of(run)[0])
        shutil.copy(old, newest)  # before another store reads it
        kill_stores(run, 0)

    at_step |= {7: keep_copy, 10: put_back}
    summary = run_job(job, dataset, run, embedding="uncached", stores=2)
    assert summary.num_rollbacks == 1
    assert_equal(undisturbed, run)


@pytest.mark.slow
def test_node_that_dies_costs_nothing_where_slots_have_copies(
    copied_job: Path,
    dataset: Path,
    undisturbed: Path,
    tmp_path: Path,
    at_step: dict[int, Callable[[Path], None]],
    groups: list[RemoteStore],
) -> None:
    run = tmp_path / "run"

    def next_when_filled(run: Path) -> None:
        (members,) = (group.members for group in groups)
        assert members.slot_map.epoch > 0, "training went on with one copy"
        wait_for(lambda: (members.slot_map.num_copies == 2).all())
        kill_stores(run, 1, forget=True)

    at_step |= {2: lambda run: kill_stores(run, 0, forget=True), 9: next_when_filled}
    summary = run_job(copied_job, dataset, run, embedding="cached", stores=2)
    assert (summary.num_rollbacks, summary.recomputed_steps) == (0, 0)
    assert_equal(undisturbed, run)
