"""Replicas in front of stores that they share: the bits of one process, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.run_log import CHECKPOINTS, EXIT_LOST_ROWS, LEDGER, RunSummary, StepMetric
from schemas.storage import Location
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import PATIENCE
from tests.trainer.runs import SEGMENTS, assert_equal, rows_in, run_job
from tests.trainer.stores import kill_stores, log_files
from trainer.checkpoint.manager import CHECKPOINT_LOG
from trainer.checkpoint.manifest import DENSE_FILE, complete_checkpoints
from trainer.elastic.launcher import LaunchOptions, LocalReplicas, start_replica, train_replicas
from trainer.options import TrainOptions
from trainer.run import read_ledger
from trainer.stores.factory import STORE
from trainer.stores.remote.ownership import ShardControl
from trainer.stores.remote.wal import read_entries

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(300)]
EVERY = 12
"""Steps between checkpoints."""
SLOWLY = Faults().pause(0, 0.1).pause(1, 0.1)
"""So that what is to happen at a step happens before the last one, on whatever machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job, and a run of one process."""
    folder = tmp_path_factory.mktemp("sharing")
    job = write_job(folder / "job", dtype="float32", lookahead="2", every_steps=str(EVERY))
    with job.open("a") as file:
        file.write("  stores: {timeout: 60s}\n")
    make_dataset(folder / "dataset", job, SEGMENTS)
    run_job(job, folder / "dataset", folder / "alone")
    return folder


def together(
    folder: Path,
    run: Path,
    *,
    count: int = 2,
    embedding: str = "cached",
    faults: Faults | None = None,
    buffer_bytes: int = 1 << 14,
    at_step: dict[int, Callable[[], None]] | None = None,
    on_step: Callable[[StepMetric, int], None] = lambda *_: None,
    on_start: Callable[[LocalReplicas], None] = lambda _: None,
) -> RunSummary:
    launch = LaunchOptions(
        count=count,
        heartbeat_sec=2.0,
        start=(faults or Faults()).start,
        buffer_bytes=buffer_bytes,
    )
    wanted = dict(at_step or {})

    def act(metric: StepMetric, num_steps: int) -> None:
        on_step(metric, num_steps)
        if metric.step in wanted:
            wanted.pop(metric.step)()

    job, dataset = folder / "job" / "job.yaml", folder / "dataset"
    options = TrainOptions(embedding=embedding, stores=2)
    return train_replicas(
        job, Location.parse(dataset), run, options, launch, act, on_start=on_start
    )


@pytest.mark.parametrize(
    ("count", "embedding", "buffer_bytes"),
    [(2, "cached", 1 << 14), (3, "cached", 1 << 30), (2, "uncached", 1 << 9)],
)
def test_replicas_that_share_stores_have_the_bits_of_one_process(
    count: int, embedding: str, buffer_bytes: int, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    together(folder, run, count=count, embedding=embedding, buffer_bytes=buffer_bytes)
    assert_equal(run, folder / "alone")
    assert (run / CHECKPOINT_LOG).is_file(), "they were copied beside training"
    assert_checkpoints_as_alone(folder, run)
    stores = sorted((run / STORE).glob("store-*"))
    assert len(stores) == 2
    for store in stores:
        files = log_files(store)
        assert files[0].name != "base-00000001.bin", "a checkpoint has shortened the log"
        controls = [entry for entry in read_entries(files) if isinstance(entry, ShardControl)]
        cached = embedding == "cached"  # rows come to the stores at the end
        assert cached or controls[0].sequence, "it begins with rows that were there, each once"


def assert_checkpoints_as_alone(folder: Path, run: Path) -> None:
    """Assert that each checkpoint has all rows and dense parameters of its step."""
    found = complete_checkpoints(run / CHECKPOINTS)
    assert [int(checkpoint.name) for checkpoint in found] == [12, 24, 32]
    for checkpoint in found:
        alone = folder / "alone" / CHECKPOINTS / checkpoint.name
        assert (checkpoint / DENSE_FILE).read_bytes() == (alone / DENSE_FILE).read_bytes()
        rows, wanted = rows_in(checkpoint), rows_in(alone)
        assert {name: array.tobytes() for name, array in rows.items()} == {
            name: array.tobytes() for name, array in wanted.items()
        }


FAULTS = {
    "who writes, before the exchange": Faults().kill(0, 7, "computed"),
    "who writes, before the lines are written": Faults().kill(0, 5, "committed"),
    "both, one after the other": Faults().kill(0, 3).kill(1, 25, "exchanged"),
    "one is held": Faults().stop(1, 8, 5.0),
}


@pytest.mark.parametrize("what", with_long(FAULTS, "both, one after the other", "one is held"))
def test_faults_do_not_show(what: str, folder: Path, tmp_path: Path) -> None:
    together(folder, tmp_path / "run", faults=FAULTS[what])
    assert_equal(tmp_path / "run", folder / "alone")


@pytest.mark.parametrize(
    "after", with_long(["a checkpoint", "rows have come to the stores"], "a checkpoint")
)
def test_where_all_die_at_once_the_run_goes_back(after: str, folder: Path, tmp_path: Path) -> None:
    run, attempts, killed = tmp_path / "run", list[LocalReplicas](), list[int]()
    to_stores = after.startswith("rows")

    def kill_all(metric: StepMetric, _: int) -> None:
        ripe = metric.step >= 6 if to_stores else complete_checkpoints(run / CHECKPOINTS)
        if not killed and ripe:
            killed.extend(attempts[-1].pids.values())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    summary = together(
        folder,
        run,
        faults=SLOWLY,
        buffer_bytes=1 << 9 if to_stores else 1 << 30,
        embedding="uncached" if to_stores else "cached",
        on_step=kill_all,
        on_start=attempts.append,
    )
    assert summary.num_rollbacks == 1
    assert_equal(run, folder / "alone")


def test_one_that_was_killed_computes_leaves_again(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    together(folder, run, faults=Faults().kill(1, 3).pause(0, 0.25))
    assert_equal(run, folder / "alone")
    lives = {e.replica for e in read_ledger(run / LEDGER) if e.replica.startswith("001")}
    assert len(lives) >= 2, "it joined from the state of the other and computed leaves"


def test_a_store_that_is_killed_costs_no_step(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = together(folder, run, faults=SLOWLY, at_step={7: lambda: kill_stores(run, 0)})
    assert (summary.num_rollbacks, summary.recomputed_steps) == (0, 0)
    assert_equal(run, folder / "alone")


def test_a_store_that_loses_its_rows_takes_all_replicas_back(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    at_step = {15: lambda: kill_stores(run, 0, forget=True)}
    summary = together(folder, run, faults=SLOWLY, at_step=at_step)
    assert summary.num_rollbacks == 1
    assert_equal(run, folder / "alone")


def test_replicas_started_by_hand_tell_that_rows_are_lost(folder: Path, tmp_path: Path) -> None:
    run, started, killed = tmp_path / "run", list[subprocess.Popen[bytes]](), list[int]()

    def start(_: object) -> None:
        for number in ("0", "1"):
            started.append(SLOWLY.start(["replica", str(run), "--number", number]))

    def kill_all(metric: StepMetric, _: int) -> None:
        if not killed and metric.step > EVERY and complete_checkpoints(run / CHECKPOINTS):
            killed.extend(replica.pid for replica in started)
            for replica in started:
                replica.kill()
                replica.wait()
            started.append(start_replica(["replica", str(run), "--number", "0"]))

    summary = together(folder, run, count=0, on_step=kill_all, on_start=start)
    assert summary.num_rollbacks == 1
    assert [replica.wait(PATIENCE) for replica in started] == [-9, -9, EXIT_LOST_ROWS, 0, 0]
    assert_equal(run, folder / "alone")


def test_replicas_without_stores_are_told_to_share_some(folder: Path, tmp_path: Path) -> None:
    launch, options = LaunchOptions(count=2), TrainOptions(embedding="cached")
    job, dataset = folder / "job" / "job.yaml", folder / "dataset"
    with pytest.raises(
        ValueError, match="need store processes to share rows outside memory; use --stores"
    ):
        train_replicas(
            job, Location.parse(dataset), tmp_path / "run", options, launch, lambda *_: None
        )
