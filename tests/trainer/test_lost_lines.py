"""Lines of steps that are gone behind a checkpoint: a run continues from one that they reach."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import (
    CHECKPOINTS,
    LEDGER,
    METRICS,
    LedgerEntry,
    StepMetric,
    to_line,
)
from presage.schemas.storage.locks import lock_file
from presage.trainer.checkpoint.files import NewCheckpoint, complete_checkpoints
from presage.trainer.run.folder import verify_run
from presage.trainer.run.ledger import LogWriter, truncate_logs
from presage.trainer.run.setup import resumable_checkpoint
from tests.trainer.daily import DATES, make_days
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import SEGMENTS, assert_equal, checkpoint_at, run_job
from tests.trainer.stores import largest_file

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), dtype="float32", every_steps="4")


@pytest.fixture(scope="module")
def stopped_run(job: Path, dataset: Path) -> Path:
    run_job(job, dataset, job.parent / "stopped", steps=12)
    return job.parent / "stopped"


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of a run with checkpoints of steps 4, 8 and 12, and the lines of 12 steps."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def without_last(path: Path, count: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-count]))


DAMAGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "5 metrics": (lambda run: without_last(run / METRICS, 5), 7, METRICS),
    "5 ledger lines": (lambda run: without_last(run / LEDGER, 5), 7, LEDGER),
    "a torn last line": (lambda run: os.truncate(run / METRICS, size(run / METRICS) - 9), 11, ""),
    "zeros after a power cut": (lambda run: zeros(run / LEDGER, 9), 9, LEDGER),
    "a line in the middle": (lambda run: drop(run / METRICS, 6), 6, METRICS),
    "the whole ledger": (lambda run: (run / LEDGER).unlink(), 0, LEDGER),
}
"""What happens to the lines of 12 steps, the steps that are left from 0 on, and the file."""


def size(path: Path) -> int:
    return path.stat().st_size


def zeros(path: Path, first: int) -> None:
    """Replace the bytes of lines from one on by zeros, as a file system may after a power cut."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:first]) + bytes(sum(map(len, lines[first:]))))


def drop(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))


@pytest.mark.parametrize("what", [w for w in DAMAGE if DAMAGE[w][1] >= 4])
def test_resume_takes_the_newest_checkpoint_that_the_lines_reach(
    what: str, stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, left, file = DAMAGE[what]
    damage(stopped)
    first = left // 4 * 4
    assert resumable_checkpoint(stopped) == checkpoint_at(stopped, first)
    message = (
        f"lines of steps are missing: {stopped / (file or METRICS)} has those of the first {left} "
        f"steps, the newest checkpoint is of step 12. Training continues from the checkpoint of "
        f"step {first}; steps {first} to 11 are trained again."
    )
    assert message in caplog.messages
    ahead = [f"{step:08d}.ahead" for step in (8, 12) if step > first]
    assert [path.name for path in sorted((stopped / CHECKPOINTS).glob("*.ahead"))] == ahead
    truncate_logs(stopped, first)
    for name in (METRICS, LEDGER):
        assert sorted({*steps_in(stopped / name)}) == list(range(first))


def test_run_resumed_behind_its_newest_checkpoint_is_whole(
    job: Path, dataset: Path, stopped: Path, reference: Path
) -> None:
    without_last(stopped / LEDGER, 5)
    run_job(job, dataset, stopped, resume=True)
    assert_equal(stopped, reference)
    assert [path.name for path in sorted((stopped / CHECKPOINTS).glob("*.ahead"))] == []


def test_resumed_replicas_are_whole_too(
    job: Path, stopped: Path, reference: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_last(stopped / LEDGER, 5)
    run_replicas(job, stopped, resume=True)
    assert "Training continues from the checkpoint of step 4" in caplog.text
    assert_equal(stopped, reference)


def test_resumed_run_that_follows_its_dataset_is_whole_too(
    job: Path, reference: Path, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENTS, sealed=True)
    run_job(job, dataset, tmp_path / "run", follow=True, steps=12)
    without_last(tmp_path / "run" / LEDGER, 5)
    run_job(job, dataset, tmp_path / "run", follow=True, resume=True)
    assert_equal(tmp_path / "run", reference)


@pytest.mark.parametrize("what", [w for w in DAMAGE if DAMAGE[w][1] < 4])
def test_lines_that_reach_no_checkpoint_are_refused_and_the_advice_works(
    what: str, job: Path, dataset: Path, stopped: Path, reference: Path
) -> None:
    damage, left, file = DAMAGE[what]
    damage(stopped)
    message = (
        f"lines of steps {left} to 3 are missing, before the checkpoint of step 4 "
        f"in {stopped / file}; restore the file from a copy, or remove "
        f"{stopped / CHECKPOINTS} and use --resume to train again from step 0"
    )
    before = sorted(p.name for p in complete_checkpoints(stopped / CHECKPOINTS))
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, dataset, stopped, resume=True)
    assert sorted(p.name for p in complete_checkpoints(stopped / CHECKPOINTS)) == before
    shutil.rmtree(stopped / CHECKPOINTS)
    run_job(job, dataset, stopped, resume=True)
    assert_equal(stopped, reference)


def test_resume_without_a_checkpoint_logs_what_is_trained_again(
    job: Path, dataset: Path, stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(stopped / CHECKPOINTS)
    run_job(job, dataset, stopped, resume=True, steps=1)
    assert f"{stopped} has no checkpoint: its 12 steps are trained again" in caplog.text


def test_damaged_checkpoint_that_the_lines_reach_leaves_the_newer_ones(
    job: Path, dataset: Path, stopped: Path, reference: Path
) -> None:
    without_last(stopped / METRICS, 2)
    (dense,) = checkpoint_at(stopped, 8).glob("dense*")
    dense.write_bytes(b"x")
    with pytest.raises(SchemaError, match="remove this checkpoint to use the one before it"):
        run_job(job, dataset, stopped, resume=True)
    assert [p.name for p in complete_checkpoints(stopped / CHECKPOINTS)][-1] == f"{12:08d}"
    shutil.rmtree(checkpoint_at(stopped, 8))
    run_job(job, dataset, stopped, resume=True)
    assert_equal(stopped, reference)


def test_run_that_was_started_from_another_never_begins_from_nothing(tmp_path: Path) -> None:
    job, dataset = make_days(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    run_job(job, dataset, first, segments=(DATES[0],))
    run_job(job, dataset, second, start_from=first, segments=(DATES[1],))
    without_last(second / METRICS, 1)
    run_job(job, dataset, second, resume=True)
    assert verify_run(second).problems == ()
    without_last(second / METRICS, 1)
    shutil.rmtree(checkpoint_at(second, 0))  # as `keep` does in a longer run
    message = (
        f"lines of steps 3 to 3 are missing, before the checkpoint of step 4 in "
        f"{second / METRICS}; restore the file from a copy, or begin again in another folder with "
        f"--start-from {first}"
    )
    for _ in range(2):
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            run_job(job, dataset, second, resume=True)
    shutil.rmtree(second / CHECKPOINTS)
    with pytest.raises(SchemaError, match=r"checkpoint that the run started from is missing"):
        run_job(job, dataset, second, resume=True)
    run_job(job, dataset, tmp_path / "again", start_from=first, segments=(DATES[1],))
    assert verify_run(tmp_path / "again").problems == ()


def test_lines_reach_the_device_before_the_checkpoint_that_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (METRICS, LEDGER):
        (tmp_path / name).write_text("{}\n")
    happened: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(file: int) -> None:
        sync(file)
        happened.append(Path(f"/proc/self/fd/{file}").resolve().name)

    def renamed(path: Path, target: Path) -> Path:
        happened.append(f"to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with NewCheckpoint(tmp_path / CHECKPOINTS, 3) as writing:
        writing.finish({}, {}, {}, keep=1)
    done = happened.index(f"to {3:08d}")
    for name in (METRICS, LEDGER, tmp_path.name):
        assert name in happened[:done]


def lines_of(step: int, num_blocks: int = 1) -> tuple[StepMetric, list[LedgerEntry]]:
    metric = StepMetric(
        step=step, loss=0.5, num_samples=4, num_replicas=1, samples_per_sec=1.0, phases={}
    )
    blocks = tuple(range(num_blocks))
    entry = LedgerEntry(step=step, epoch=0, segment="s", replica="a", blocks=blocks, num_samples=4)
    return metric, [entry]


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_all(writer: LogWriter, steps: range, num_blocks: int = 1) -> None:
    for step in steps:
        writer.remember(*lines_of(step, num_blocks))
        writer.write()


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    for name in (METRICS, LEDGER):
        (tmp_path / name).touch()
    return tmp_path


def test_replica_s_line_that_is_written_in_parts_is_whole(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:7]))
    write_all(LogWriter(empty), range(3))
    for name in (METRICS, LEDGER):
        assert steps_in(empty / name) == [0, 1, 2]


def test_replica_s_line_that_ends_with_the_disk_is_refused_and_written_again(empty: Path) -> None:
    writer = LogWriter(empty)
    write_all(writer, range(1), num_blocks=100)
    room = (empty / LEDGER).stat().st_size + 10
    with largest_file(room), pytest.raises(SchemaError, match=r"^no room on disk for the line"):
        write_all(writer, range(1, 2), num_blocks=100)
    writer.write()
    for name in (METRICS, LEDGER):
        assert steps_in(empty / name) == [0, 1]


def test_next_writer_does_not_wait_for_ever_for_one_that_is_stopped(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.trainer.run.ledger.LOCK_SEC", 0.05)
    writer = LogWriter(empty)
    with (empty / METRICS).open("rb") as stopped:
        assert lock_file(stopped)
        with pytest.raises(SchemaError, match=r"^log of the run is locked by its former writer"):
            write_all(writer, range(1))
    writer.write()
    assert steps_in(empty / METRICS) == [0]


@pytest.mark.parametrize("end", ["", "\n"])
def test_next_writer_drops_a_line_of_many_blocks_that_has_no_metric(end: str, empty: Path) -> None:
    write_all(LogWriter(empty), range(2))
    longer_than_a_block = to_line(lines_of(2, num_blocks=30_000)[1][0])
    with (empty / LEDGER).open("a") as file:
        file.write(f"{longer_than_a_block}{end}")
    write_all(LogWriter(empty), range(2, 4))
    for name in (METRICS, LEDGER):
        assert steps_in(empty / name) == [0, 1, 2, 3]


def test_replica_that_dies_before_its_last_lines_leaves_them_to_the_next(
    job: Path, reference: Path, tmp_path: Path
) -> None:
    faults = Faults().kill(0, 31, "committed")
    run_replicas(job, tmp_path / "run", faults)
    assert_equal(tmp_path / "run", reference)
