"""Checkpoints of replicas, whoever dies while one is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.forked import forked_child
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, checkpoint_at, run_job
from trainer.compare import compare_runs
from trainer.flash.manifest import CHECKPOINTS, complete, read_checkpoint_manifest, verify_files
from trainer.ledger import verify_run
from trainer.replicas.faults import Faults
from trainer.replicas.launch import LaunchOptions, train_together
from trainer.training import TrainOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job, and a run of one process."""
    folder = tmp_path_factory.mktemp("saves")
    job = write_job(folder / "job", dtype="float32", every_steps="4")
    make_dataset(folder / "dataset", job, SEGMENTS)
    run_job(job, folder / "dataset", folder / "alone")
    return folder


def together(folder: Path, run: Path, faults: Faults | None = None, **options: object) -> None:
    launch = LaunchOptions(
        count=2, heartbeat_sec=2.0, faults=faults or Faults(), start=forked_child
    )
    given = TrainOptions(**options)  # type: ignore[arg-type]
    paths = (folder / "job" / "job.yaml", folder / "dataset", run)
    train_together(*paths, given, launch, lambda *_: None)


def assert_whole(folder: Path, run: Path) -> list[str]:
    """Assert that a run has the bits of one process, and return its checkpoints, all whole."""
    assert compare_runs(folder / "alone", run).difference is None
    assert verify_run(run).problems == ()
    found = complete(run / CHECKPOINTS)
    for checkpoint in found:
        verify_files(checkpoint, read_checkpoint_manifest(checkpoint))
    return [checkpoint.name for checkpoint in found]


FAULTS = {
    "nobody dies": Faults(),
    "the writer, before it saves": Faults().kill(0, 7, "committed"),
    "the writer, behind a checkpoint": Faults().kill(0, 8, "start"),
    "both, one after the other": Faults().kill(0, 8, "start").kill(1, 20, "committed"),
    "who joined later becomes the writer": Faults().kill(1, 3).kill(0, 22, "start"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", FAULTS)
def test_checkpoints_are_whole_whoever_dies_and_any_run_goes_on_from_them(
    what: str, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    together(folder, run, FAULTS[what])
    names = assert_whole(folder, run)
    assert names[-1] == f"{32:08d}"
    assert all(int(name) % 4 == 0 for name in names)
    for name in names[1:]:
        shutil.rmtree(run / CHECKPOINTS / name)  # as if all had died there
    run_job(folder / "job" / "job.yaml", folder / "dataset", run, resume=True)
    assert_whole(folder, run)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("embedding", ["plain", "cached"])
def test_replicas_go_on_from_one_process_and_one_process_from_replicas(
    embedding: str, folder: Path, tmp_path: Path
) -> None:
    run, job = tmp_path / "run", folder / "job" / "job.yaml"
    run_job(job, folder / "dataset", run, steps=6, embedding=embedding)
    together(folder, run, steps=14, resume=True)
    assert checkpoint_at(run, 14).is_dir()
    run_job(job, folder / "dataset", run, resume=True, embedding=embedding)
    assert_whole(folder, run)
