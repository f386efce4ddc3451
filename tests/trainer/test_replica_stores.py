"""Replicas in front of stores that they share: the bits of one process, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from presage.schemas.run.records import EXIT_LOST_ROWS, RunSummary, StepMetric
from presage.trainer.checkpoint.manager import CHECKPOINT_LOG
from presage.trainer.elastic.launcher import LocalReplicas, start_replica
from presage.trainer.stores.factory import STORE
from presage.trainer.stores.remote.ownership import ShardControl
from presage.trainer.stores.remote.wal import read_entries
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import PATIENCE, with_keys
from tests.trainer.replica_runs import run_replicas, steps_by_life
from tests.trainer.runs import assert_equal, bits_of, checkpoint_at, plain_run, steps_of
from tests.trainer.stores import kill_stores, log_files

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
EVERY = 12
"""Steps between checkpoints."""
SLOW = Faults().pause(0, 0.1).pause(1, 0.1)
"""So that what is to happen at a step happens before the last one, on whatever machine."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    job = write_job(folder, dtype="float32", lookahead="2", every_steps=str(EVERY))
    return with_keys(job, "stores: {timeout: 60s}")


def train(
    job: Path,
    run: Path,
    faults: Faults | None = None,
    *,
    embedding: str = "cached",
    buffer_bytes: int = 1 << 14,
    count: int = 2,
    **options: Any,
) -> RunSummary:
    """Train on two stores."""
    launch = {"count": count, "buffer_bytes": buffer_bytes}
    return run_replicas(job, run, faults, embedding=embedding, stores=2, launch=launch, **options)


@pytest.mark.parametrize(
    ("count", "embedding", "buffer_bytes"),
    [(2, "cached", 1 << 14), (3, "cached", 1 << 30), (2, "uncached", 1 << 9)],
)
def test_replicas_that_share_stores_have_the_bits_of_one_process(
    count: int, embedding: str, buffer_bytes: int, job: Path, tmp_path: Path
) -> None:
    run, reference = tmp_path / "run", plain_run(dtype="float32", every_steps=str(EVERY))
    train(job, run, count=count, embedding=embedding, buffer_bytes=buffer_bytes)
    assert_equal(run, reference)
    assert (run / CHECKPOINT_LOG).is_file(), "they were copied beside training"
    assert steps_of(run) == [12, 24, 32]
    for step in steps_of(run):
        assert bits_of(checkpoint_at(run, step)) == bits_of(checkpoint_at(reference, step))
    stores = sorted((run / STORE).glob("store-*"))
    assert len(stores) == 2
    for store in stores:
        files = log_files(store)
        assert files[0].name != "base-00000001.bin", "a checkpoint has shortened the log"
        controls = [entry for entry in read_entries(files) if isinstance(entry, ShardControl)]
        cached = embedding == "cached"  # rows come to the stores at the end
        assert cached or controls[0].sequence, "it begins with rows that were there, each once"


FAULTS = {
    "the writer, before the exchange": Faults().kill(0, 7, "computed"),
    "the writer, before the lines are written": Faults().kill(0, 5, "committed"),
    "both, one after the other": Faults().kill(0, 3).kill(1, 25, "exchanged"),
    "one is stopped": Faults().stop(1, 8, 5.0),
}


@pytest.mark.parametrize("what", with_long(FAULTS, "both, one after the other", "one is stopped"))
def test_faults_change_no_bit(what: str, job: Path, reference: Path, tmp_path: Path) -> None:
    train(job, tmp_path / "run", FAULTS[what])
    assert_equal(tmp_path / "run", reference)


@pytest.mark.parametrize(
    "after", with_long(["a checkpoint", "rows have come to the stores"], "a checkpoint")
)
def test_run_rolls_back_where_all_die_at_once(
    after: str, job: Path, reference: Path, tmp_path: Path
) -> None:
    run, attempts, killed = tmp_path / "run", list[LocalReplicas](), list[int]()
    to_stores = after.startswith("rows")

    def kill_all(metric: StepMetric, _: int) -> None:
        if not killed and (metric.step >= 6 if to_stores else steps_of(run)):
            killed.extend(attempts[-1].pids.values())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    summary = train(
        job,
        run,
        SLOW,
        buffer_bytes=1 << 9 if to_stores else 1 << 30,
        embedding="uncached" if to_stores else "cached",
        on_step=kill_all,
        on_start=attempts.append,
    )
    assert summary.num_rollbacks == 1
    assert_equal(run, reference)


def test_replica_that_was_killed_computes_microbatches_again(
    job: Path, reference: Path, tmp_path: Path
) -> None:
    train(job, tmp_path / "run", Faults().kill(1, 3).pause(0, 0.25))
    assert_equal(tmp_path / "run", reference)
    lives = [name for name in steps_by_life(tmp_path / "run") if name.startswith("001")]
    assert len(lives) >= 2, "it joined from the state of the other and computed microbatches"


@pytest.mark.parametrize("forget", [False, True])
def test_store_that_is_killed_costs_no_step_unless_it_loses_its_rows(
    forget: bool, job: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    at_step = {15: lambda: kill_stores(run, 0, forget=forget)}
    summary = train(job, run, SLOW, at_step=at_step)
    assert summary.num_rollbacks == forget
    assert forget or summary.recomputed_steps == 0
    assert_equal(run, reference)


def test_replicas_started_by_hand_end_with_a_status_when_rows_are_lost(
    job: Path, reference: Path, tmp_path: Path
) -> None:
    run, replicas, killed = tmp_path / "run", list[subprocess.Popen[bytes]](), list[int]()

    def start(_: object) -> None:
        for number in ("0", "1"):
            replicas.append(SLOW.start(["replica", str(run), "--number", number]))

    def kill_all(metric: StepMetric, _: int) -> None:
        if not killed and metric.step > EVERY and steps_of(run):
            killed.extend(replica.pid for replica in replicas)
            for replica in replicas:
                replica.kill()
                replica.wait()
            replicas.append(start_replica(["replica", str(run), "--number", "0"]))

    summary = train(job, run, count=0, on_step=kill_all, on_start=start)
    assert summary.num_rollbacks == 1
    assert [replica.wait(PATIENCE) for replica in replicas] == [-9, -9, EXIT_LOST_ROWS, 0, 0]
    assert_equal(run, reference)
