"""Store processes and their directories die while a run trains: its bits stay the same."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import read_summary
from presage.trainer.run.ledger import LogWriter
from presage.trainer.stores.factory import STORE
from presage.trainer.stores.remote.connection import read_access, resolve_address
from presage.trainer.stores.remote.processes import TOKEN, migrate_slots
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import suspend, with_keys
from tests.trainer.runs import assert_equal, reference_run, run_job, small_dataset
from tests.trainer.stores import kill_stores, log_bytes, log_files, stores_of

pytestmark = pytest.mark.slow
EVERY = 6
"""Steps between checkpoints."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    job = write_job(folder, dtype="float32", every_steps=str(EVERY), lookahead="2")
    return with_keys(job, "stores: {timeout: 60s}")


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Callable[[Path], None]]]:
    """What to do after the commit of a step, once."""
    actions: dict[int, Callable[[Path], None]] = {}
    write = LogWriter.write

    def write_and_act(log: LogWriter) -> None:
        write(log)
        action = actions.pop(log.written, None)
        if action is not None:
            action(log._run)

    monkeypatch.setattr(LogWriter, "write", write_and_act)
    yield actions
    assert not actions, "everything happened"


def test_stores_killed_at_any_moment_cost_no_committed_step(
    job: Path, tmp_path: Path, at_step: dict[int, Callable[[Path], None]]
) -> None:
    def kill_twice(run: Path) -> None:
        kill_stores(run, 0)
        # the next one while it is started, replays its log, or serves its first calls
        threading.Timer(0.7, kill_stores, (run, 0)).start()

    run = tmp_path / "run"
    at_step |= {
        2: lambda run: kill_stores(run, 0),
        7: lambda run: kill_stores(run, 0, 1),
        12: kill_twice,
    }
    at_step[13] = lambda run: threading.Timer(0.01, kill_stores, (run, 1)).start()
    summary = run_job(job, small_dataset(), run, embedding="cached", stores=2)
    assert (summary.num_rollbacks, summary.recomputed_steps) == (0, 0)
    assert stores_of(run) == {}, "they end with the run"
    assert_equal(run, reference_run())


@pytest.mark.parametrize(
    "embedding", ["cached", pytest.param("uncached", marks=pytest.mark.nightly)]
)
def test_store_that_dies_with_its_directory_takes_the_run_back_to_its_checkpoint(
    embedding: str, job: Path, tmp_path: Path, at_step: dict[int, Callable[[Path], None]]
) -> None:
    run = tmp_path / "run"
    at_step |= {
        2: lambda run: kill_stores(run, 0, forget=True),
        10: lambda run: kill_stores(run, 1, forget=True),
    }
    summary = run_job(job, small_dataset(), run, embedding=embedding, stores=2)
    assert summary.num_rollbacks == 2
    # from the kill to the next call of that store, which a whole cached step may go without
    assert 3 <= summary.recomputed_steps <= 2 * EVERY + 4
    assert read_summary(run / "summary.json").recomputed_steps == summary.recomputed_steps
    assert_equal(run, reference_run())


def test_store_that_returns_in_an_older_state_takes_the_run_back_to_its_checkpoint(
    job: Path, tmp_path: Path, at_step: dict[int, Callable[[Path], None]]
) -> None:
    run = tmp_path / "run"

    def keep_copy(run: Path) -> None:
        shutil.copytree(run / "store" / "store-000", tmp_path / "older")

    def put_back(run: Path) -> None:
        folder = run / "store" / "store-000"
        suspend(stores_of(run)[0])
        assert log_bytes(folder) > log_bytes(tmp_path / "older")
        for path in log_files(folder):
            path.unlink()
        for path in log_files(tmp_path / "older"):
            shutil.copy(path, folder)  # before another store reads it
        kill_stores(run, 0)

    at_step |= {7: keep_copy, 10: put_back}
    summary = run_job(job, small_dataset(), run, embedding="uncached", stores=2)
    assert summary.num_rollbacks == 1
    assert_equal(run, reference_run())


@pytest.mark.parametrize("killed", [pytest.param(None, marks=pytest.mark.nightly), 0, 1])
def test_slots_that_move_cost_no_committed_step_whoever_is_killed(
    killed: int | None, job: Path, tmp_path: Path, at_step: dict[int, Callable[[Path], None]]
) -> None:
    run, moved = tmp_path / "run", list[dict[str, Any]]()

    def move(run: Path) -> None:
        folder = run / STORE
        source, target = (
            resolve_address(f"file://{folder}/store-{number:03d}/address") for number in (0, 1)
        )
        access = read_access(folder / TOKEN)

        def move_and_wait() -> None:
            with suppress(SchemaError):
                moved.append(migrate_slots([source], target, ((0, 1024),), access))

        moving = threading.Thread(target=move_and_wait)
        moving.start()
        if killed is None:
            moving.join()
        else:
            threading.Timer(0.2, kill_stores, (run, killed)).start()

    at_step[4] = move
    summary = run_job(job, small_dataset(), run, embedding="cached", stores=2)
    assert (summary.num_rollbacks, summary.recomputed_steps) == (0, 0)
    assert killed is not None or moved[0]["num_slots"] == 1024
    assert_equal(run, reference_run())
