"""A run that follows a real pipeline, each in its own process, and what may happen to both."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from presage.pipelines.cli import main
from presage.schemas.config.job import load_job
from presage.schemas.dataset.manifest import find_root, read_dataset
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.layout import MANIFEST
from presage.schemas.storage.location import Location
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain
from presage.trainer.run.compare import compare_runs
from presage.trainer.run.folder import verify_run
from tests.conftest import REPOSITORY
from tests.pipelines.appending import changed
from tests.pipelines.logs import IN_PROCESS, age, write_log
from tests.trainer.make_dataset import change_root
from tests.trainer.paused import paused_at
from tests.trainer.processes import num_steps, run_until, start_training, train_to_end, wait_for_end

LOGS = (300, 200, 260, 180, 240)
"""Rows of the log of each segment; its number is the seed."""
TRAIN = (
    "batch_samples: 32, embedding_dim: 8, model: {bottom_layers: [16], top_layers: [16]}, "
    "cache: {lookahead: 4}, checkpoint: {every_steps: 3}, follow: {poll: 50ms}"
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The log of each segment."""
    folder = tmp_path_factory.mktemp("logs")
    for seed, num_rows in enumerate(LOGS):
        write_log(folder / str(seed), num_rows, seed)
    return [folder / str(seed) for seed in range(len(LOGS))]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of pipeline and run."""
    text = ("train: {batch_samples: 32}", f"train: {{{TRAIN}}}")
    return changed(tmp_path_factory.mktemp("job"), text)


def pipeline(job: Path, logs: list[Path], dataset: Path) -> subprocess.Popen[str]:
    """Start one process that builds the first segment and appends the others."""
    first, *others = map(str, logs)
    to = ("--dataset", str(dataset))
    commands = [["build", str(job), "--input", first, "--output", str(dataset)]]
    commands += [["append", str(job), "--input", log, *to] for log in others]
    commands[-1].append("--final")
    script = "import sys; from presage.pipelines.__main__ import main\n"
    script += f"for command in {commands!r}: main(command) and sys.exit(1)"
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_follower_of_a_real_pipeline_killed_and_resumed_has_the_bits_of_one_on_the_whole(
    job: Path, logs: list[Path], tmp_path: Path
) -> None:
    dataset, run, killed = (tmp_path / name for name in ("dataset", "run", "killed"))
    cached = ("--embedding", "cached", "--follow")
    follower = start_training(job, dataset, run, *cached)  # before there is a dataset
    builder = pipeline(job, logs, dataset)
    run_until(builder, lambda: find_root(dataset) is not None)
    victim = start_training(job, dataset, killed, *cached, module=paused_at(tmp_path / "pipe", 7))
    run_until(victim, lambda: num_steps(killed) == 8)
    victim.send_signal(signal.SIGKILL)
    assert wait_for_end(victim)[0] == -signal.SIGKILL
    resumed = start_training(job, dataset, killed, *cached, "--resume")
    assert builder.wait() == 0
    for process in (follower, resumed):
        status, stderr = wait_for_end(process)
        assert status == 0, stderr
    assert read_dataset(dataset).sealed
    train_to_end(job, dataset, tmp_path / "whole")
    for one in (run, killed):
        assert compare_runs(one, tmp_path / "whole").difference is None
        assert verify_run(one).problems == ()
    assert num_steps(run) > 20
    assert len(open_dataset(dataset).segments) == len(LOGS)


@pytest.fixture
def dataset(job: Path, logs: list[Path], tmp_path: Path) -> Path:
    """A dataset of one segment."""
    to = tmp_path / "dataset"
    assert main(["build", str(job), "--input", str(logs[0]), "--output", str(to), IN_PROCESS]) == 0
    return to


def append(job: Path, log: Path, dataset: Path, *more: str) -> int:
    """Append a log."""
    words = ["append", str(job), "--input", str(log), "--dataset", str(dataset)]
    return main([*words, IN_PROCESS, *more])


def following(job: Path, dataset: Path) -> FollowedDataset:
    """Return what a run reads a dataset by."""
    how = TrainOptions(follow=True, embedding="cached")
    return FollowedDataset(Location.parse(dataset), load_job(job), how, Drain())


@pytest.mark.slow
def test_what_a_run_reads_outlasts_vacuum(
    job: Path, logs: list[Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = following(job, dataset)
    span = run.wait_for(0)
    (part,) = span.dataset.index_for(span.order).parts
    kept = [Path(span.dataset.segments[0].directory), Path(part.directory)]
    assert append(job, logs[1], dataset) == 0
    change_root(dataset, lambda root: replace(root, segments=root.segments[1:], indexes=()))
    vacuum = ["vacuum", str(dataset), "--json"]
    age(dataset)
    capsys.readouterr()
    assert main(vacuum) == 0
    assert all((directory / MANIFEST).exists() for directory in kept)
    removed = json.loads(capsys.readouterr().out)
    assert removed["segments"] == []
    assert len(removed["indexes"]) == 1, "the part of the second segment"
    del run
    assert main(vacuum) == 0
    assert json.loads(capsys.readouterr().out)["segments"] == [kept[0].name]
    assert not any(directory.exists() for directory in kept)


@pytest.mark.slow
def test_rewriting_is_refused_while_a_run_reads(
    job: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = following(job, dataset)
    run.wait_for(0)
    capsys.readouterr()
    assert main(["erase", str(dataset), "--rewrite"]) == 1
    message = (
        rf"error: dataset is in use by run \S+:{os.getpid()} in {re.escape(str(dataset))}/_leases; "
        "stop it, or try again when it has ended\n"
    )
    assert re.fullmatch(message, capsys.readouterr().err)
    del run
    assert main(["erase", str(dataset), "--rewrite"]) == 0


@pytest.mark.slow
def test_finished_dataset_takes_no_segment_until_it_is_opened_again(
    job: Path, logs: list[Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not read_dataset(dataset).sealed
    assert append(job, logs[1], dataset, "--final") == 0
    assert read_dataset(dataset).sealed
    assert append(job, logs[1], dataset, "--final") == 0  # already there, and so is the mark
    capsys.readouterr()
    assert append(job, logs[2], dataset) == 1
    message = (
        f"error: dataset is sealed after 2 segments in {dataset}; "
        f"run python -m presage.pipelines unseal {dataset}, or build a new dataset"
    )
    assert capsys.readouterr().err.splitlines()[-1] == message
    reindex = ["oracle", str(dataset), "--reindex", "--batch-samples", "64", "--epochs", "1"]
    assert main(reindex) == 0
    assert read_dataset(dataset).sealed
    before = open_dataset(dataset).manifest
    capsys.readouterr()
    assert main(["unseal", str(dataset), "--json"]) == 0
    assert capsys.readouterr().out == '{"num_segments": 2, "sealed": false}\n'
    after = open_dataset(dataset).manifest
    assert (after.segments, after.indexes) == (before.segments, before.indexes)
    assert append(job, logs[2], dataset) == 0
    assert main(["seal", str(dataset)]) == 0
    assert read_dataset(dataset).sealed
    assert main(["verify", str(dataset)]) == 0


def test_seal_of_no_dataset_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seal", str(tmp_path)]) == 1
    assert re.match(r"error: there is no dataset", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
