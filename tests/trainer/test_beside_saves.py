"""Checkpoints of one replica, in this process: when they are copied, and when all is written."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.run_next_uses import SharedNextUses
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.files import step_of_newest
from presage.trainer.checkpoint.manager import CHECKPOINT_LOG
from presage.trainer.checkpoint.save import save_checkpoint
from presage.trainer.checkpoint.snapshot import SnapshotMemory, memory_path
from presage.trainer.components import build_components, order_of
from presage.trainer.data.decode import spec_of
from presage.trainer.elastic.peer_state import MemoryRows
from presage.trainer.options import TrainOptions
from presage.trainer.run.checkpoints import RunCheckpoints
from presage.trainer.run.run_context import RunContext
from presage.trainer.steps import Horizon, Span, StepReader
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import agents_of_run, is_gone, wait_for
from tests.trainer.runs import rows_in, steps_of

TABLE = "items"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset and its job."""
    folder = tmp_path_factory.mktemp("beside")
    memory = folder / "memory"
    memory.mkdir()
    job = write_job(folder / "job", every_steps="4", checkpoint=f", copy_to: {memory}")
    make_dataset(folder / "dataset", job, [[(100, 0)]])
    return folder


class OneReplica:
    """Rows of a replica, and what saves them."""

    def __init__(self, folder: Path, run: Path) -> None:
        """Begin at step 0."""
        run.mkdir(exist_ok=True)
        job_path = folder / "job" / "job.yaml"
        job, dataset = load_job(job_path), open_dataset(folder / "dataset")
        order, spec = order_of(job, dataset), spec_of(dataset, job.train.dtype)
        components = build_components(spec, job.train)
        self.rows = MemoryRows(components.store, components.embedding, run)
        end = order.num_steps
        horizon = Horizon(end_step=end, known_end=end, is_final=True)
        self.span = Span(dataset, order, horizon, SharedNextUses(dataset, order))
        options = TrainOptions()
        tables = components.store.layouts
        reader = StepReader(job.train, options, self.span, tables, is_replica=True)
        context = RunContext(run, job, options, components, self.rows, reader, 0)
        self.run = run
        self.memory = memory_path(folder / "memory", run)
        self.whole: list[int] = []

        def save_whole(context: RunContext, train_step: int) -> None:
            self.whole.append(train_step)
            save_checkpoint(run, train_step, components, keep=20)

        self.saves = RunCheckpoints(context, 1 << 20, save_whole)

    def train(self, steps: range, *, writes: bool) -> None:
        """Change row `step` in each step, and row 0 in all."""
        for step in steps:
            rows = {TABLE: np.array([0, 1 + step])}
            gathered = self.rows.source.gather(step, rows)[TABLE]
            gathered.records.values[gathered.positions] = step
            self.rows.source.release(step, rows)
            self.saves.save_if_due(step + 1, step_of_newest(self.run), writes=writes)

    def assert_saved(self, train_step: int) -> None:
        """Assert that a checkpoint has all rows as they were before a step."""
        wait_for(lambda: train_step in steps_of(self.run))
        found = rows_in(self.run / CHECKPOINTS / f"{train_step:08d}")
        assert found[f"{TABLE}/rows.npy"].tolist() == list(range(train_step + 1))
        values = found[f"{TABLE}/values.npy"][:, 0].tolist()
        assert values == [train_step - 1, *range(train_step)]


def copied_of(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / CHECKPOINT_LOG).read_text().splitlines()]
    return [line["train_step"] for line in lines if line["num_bytes"]]


@pytest.mark.slow
def test_everything_is_saved_while_another_process_holds_the_memory_and_beside_training_later(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = OneReplica(folder, tmp_path / "run")
    other = SnapshotMemory(replica.memory)
    other.create(1)
    with caplog.at_level(logging.WARNING):
        replica.train(range(0, 10), writes=True)
    assert replica.whole == [4, 8]
    assert caplog.text.count("checkpoint is saved while training waits, ") == 1
    assert "train_step=4: another process still trains the run after " in caplog.text
    other.remove()
    replica.train(range(10, 17), writes=True)
    assert replica.whole == [4, 8]
    assert replica.saves.finish(17) is False
    replica.saves.close()
    assert copied_of(replica.run) == [12, 16, 17]
    for step in (4, 8, 12, 16, 17):
        replica.assert_saved(step)
    assert not replica.memory.exists()


def test_former_writer_releases_the_memory_to_the_next_one(folder: Path, tmp_path: Path) -> None:
    first, second = OneReplica(folder, tmp_path / "run"), OneReplica(folder, tmp_path / "run")
    first.train(range(0, 9), writes=True)
    second.train(range(0, 9), writes=False)
    [agent] = agents_of_run(tmp_path / "run")
    for replica in (first, second):
        replica.train(range(9, 10), writes=replica is second)
    wait_for(lambda: is_gone(agent) and not first.memory.exists())
    second.train(range(10, 14), writes=True)
    assert (first.whole, second.whole) == ([], [])
    second.saves.close()
    for step in (4, 8, 12):
        second.assert_saved(step)
    first.saves.close()
    assert not first.memory.exists()


def test_replica_that_joined_after_the_newest_checkpoint_saves_everything_once(
    folder: Path, tmp_path: Path
) -> None:
    first, second = OneReplica(folder, tmp_path / "run"), OneReplica(folder, tmp_path / "run")
    first.train(range(0, 6), writes=True)
    first.assert_saved(4)  # its agent is up, and ends at once
    first.saves.close()
    while (arrays := first.rows.state_before(6)) is None:
        pass  # rows are copied by a thread
    second.rows.load({n: array.copy() for n, array in arrays.items()}, 6, second.span)
    second.train(range(6, 13), writes=True)
    second.saves.close()
    assert second.whole == [8]
    assert copied_of(first.run) == [4, 12]
    for step in (4, 8, 12):
        second.assert_saved(step)


@pytest.mark.slow
def test_a_stale_writer_changes_nothing(folder: Path, tmp_path: Path) -> None:
    first, second = OneReplica(folder, tmp_path / "run"), OneReplica(folder, tmp_path / "run")
    first.train(range(0, 7), writes=True)
    second.train(range(0, 7), writes=False)
    first.assert_saved(4)
    second.train(range(7, 14), writes=True)  # the first one is held, with the place
    assert second.whole == [8, 12]
    first.train(range(7, 8), writes=True)  # it goes on with its step, and copies
    first.saves.close()
    assert steps_of(first.run) == [4, 8, 12]
    second.train(range(14, 16), writes=True)
    second.saves.close()
    assert second.whole == [8, 12]
    for step in (4, 8, 12, 16):
        second.assert_saved(step)


@pytest.mark.slow
def test_a_writer_builds_on_what_another_has_completed(folder: Path, tmp_path: Path) -> None:
    first, second = OneReplica(folder, tmp_path / "run"), OneReplica(folder, tmp_path / "run")
    first.train(range(0, 5), writes=True)
    first.assert_saved(4)
    second.train(range(0, 6), writes=False)
    assert second.saves.finish(6) is True
    first.train(range(5, 8), writes=True)
    first.saves.close()
    second.saves.close()
    first.assert_saved(8)
    manifest = json.loads((first.run / CHECKPOINTS / "00000008" / "MANIFEST.json").read_text())
    assert manifest["parts"][TABLE][-1] in ("00000006/items", "00000008/items")
