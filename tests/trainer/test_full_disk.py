"""A full disk is refused by name wherever a run writes, which continues when there is room."""

import os
import re
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.errors import SchemaError
from presage.trainer.elastic.launcher import start_replica
from presage.trainer.stores.local import MappedTable, mmap_store
from presage.trainer.stores.store import Records, TableLayout
from tests.trainer.make_dataset import write_job
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_equal, checkpoint_at, losses_of, run_job
from tests.trainer.stores import as_records, largest_file

LAYOUT = TableLayout(table="items", dim=4, state_width=1, dtype="float32", seed=0)


def records_of(rows: np.ndarray) -> Records:
    state = rows[:, None].astype(np.float32)
    return as_records(np.repeat(state, 4, axis=1), state)


def test_mapped_files_on_a_full_disk_lose_nothing_and_take_the_rows_when_there_is_room(
    tmp_path: Path,
) -> None:
    store, first, more = (
        mmap_store({"items": LAYOUT}, tmp_path).tables["items"],
        np.arange(900),
        np.arange(900, 3000),
    )
    store.write(first, records_of(first))
    message = (
        "no room on disk for the rows of a table: File too large in "
        f"{tmp_path / 'items'}; free 61440 bytes and continue with --resume"
    )
    with largest_file(20_000), pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        store.write(more, records_of(more))
    assert (store.fetch(first).state[:, 0] == first).all()
    with largest_file(20_000), pytest.raises(SchemaError, match=r"^no room on disk"):
        store.write(more, records_of(more))
    store.write(more, records_of(more))
    for rows in (first, more):
        assert (store.fetch(rows).state[:, 0] == rows).all()


def test_mapped_files_take_their_room_from_the_disk_before_they_are_written(tmp_path: Path) -> None:
    store, rows = MappedTable(LAYOUT, tmp_path), np.arange(10)
    store.write(rows, records_of(rows))
    found = os.fstat(store._file._file.fileno())  # pyright: ignore
    assert found.st_size == 1024 * 20
    assert found.st_blocks * 512 >= found.st_size  # no hole, that a full disk could not fill


@pytest.mark.slow
def test_checkpoint_on_a_full_disk_leaves_the_one_before_and_the_run_continues(
    reference: Path, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32")  # beside training: test_checkpoint_agents.py
    run = tmp_path / "run"
    run_job(job, dataset, run, steps=5)
    folder = checkpoint_at(run, 10)
    message = (
        f"no room on disk for a checkpoint: File too large in {folder}; free some and continue "
        "with --resume, earlier checkpoints are complete"
    )
    with largest_file(6_000), pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, dataset, run, resume=True, steps=10)
    assert [path.name for path in folder.parent.iterdir()] == ["00000005"]
    assert len(losses_of(run)) == 10
    run_job(job, dataset, run, resume=True)
    assert_equal(run, reference)


@pytest.mark.slow
def test_line_of_a_step_on_a_full_disk_is_refused_by_name_and_the_run_continues(
    reference: Path, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    run = tmp_path / "run"
    run_job(job, dataset, run, steps=3)
    message = (
        f"no room on disk for the line of a step: File too large in {run / 'metrics.jsonl'}; free "
        "some and continue with --resume"
    )
    with largest_file(2_000), pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, dataset, run, resume=True)
    run_job(job, dataset, run, resume=True)
    assert_equal(run, reference)


@pytest.mark.slow
def test_replicas_on_a_full_disk_end_with_the_file_and_the_way_out(tmp_path: Path) -> None:
    job, run = write_job(tmp_path / "job", dtype="float32"), tmp_path / "run"

    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        process = start_replica(arguments)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2_000, 2_000))
        return process

    message = (
        r"^replica \d failed: no room on disk for the line of a step: File too large in "
        rf"{run}/(metrics|ledger)\.jsonl; free some and continue with --resume$"
    )
    with pytest.raises(SchemaError, match=message):
        run_replicas(job, run, launch={"start": start})
