"""Rows of erased ids: in no byte of a run, which trains on; erased samples weigh nothing."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.tombstones import encode_tombstones, merge_tombstones
from presage.schemas.errors import SchemaError
from presage.schemas.layout import tombstones_path
from presage.schemas.rows import rows_of_ids
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.files import complete_checkpoints, read_checkpoint_manifest
from presage.trainer.checkpoint.load import verify_checkpoint
from presage.trainer.run import erase as erasure
from tests.id_search import files_with_id
from tests.schemas.reference import hash_text
from tests.trainer.make_dataset import change_root, write_job
from tests.trainer.runs import reader_of, rows_in, run_job, small_dataset


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and a run of several checkpoints, which no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    memory = folder / "memory"
    memory.mkdir()
    settings = {"every_steps": "5", "checkpoint": f", copy_to: {memory}"}
    job = write_job(folder / "job", dtype="float32", **settings)
    run_job(job, dataset, folder / "run", embedding="cached")
    return folder


def copied(trained: Path, folder: Path) -> Path:
    """Return a copy of the run."""
    return Path(shutil.copytree(trained / "run", folder / "run"))


def table_and_ids(trained: Path) -> tuple[str, list[int]]:
    """Return a hashed table and some ids that have rows in the newest checkpoint."""
    job = load_job(trained / "run" / "job.yaml")
    name = next(n for n, t in job.data.tables.items() if t.rows == "hash")
    rows, ids = (
        rows_of(complete_checkpoints(trained / "run" / CHECKPOINTS)[-1], name),
        np.arange(2000),
    )
    found = ids[np.isin(rows_of_ids(ids, name, job.data.tables[name]), rows)]
    return name, found[:3].tolist()


def rows_of(checkpoint: Path, table: str) -> np.ndarray:
    """Return the rows of a table that a checkpoint has."""
    return rows_in(checkpoint)[f"{table}/rows.npy"]


def row_of(trained: Path, table: str, value: int) -> int:
    """Return the row that an id looks up."""
    config = load_job(trained / "run" / "job.yaml").data.tables[table]
    return int(rows_of_ids(np.array([value]), table, config)[0])


def erase_of(run: Path, ids: list[int], table: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """Run the command and return what it prints."""
    path = run.parent / "ids.txt"
    path.write_text("".join(f"{i}\n" for i in ids))
    assert main(["erase", str(run), "--ids", str(path), "--table", table, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_erased_rows_are_in_no_checkpoint_and_the_others_are_as_they_were(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (table, ids) = copied(trained, tmp_path), table_and_ids(trained)
    gone = np.unique([row_of(trained, table, i) for i in ids])
    before = {f.name: rows_of(f, table) for f in complete_checkpoints(run / CHECKPOINTS)}
    assert len(before) > 1
    found = erase_of(run, ids, table, capsys)
    assert found["num_rows"] == len(gone)
    after = {f.name: rows_of(f, table) for f in complete_checkpoints(run / CHECKPOINTS)}
    assert after.keys() == before.keys()
    for name, rows in before.items():
        assert np.array_equal(after[name], np.setdiff1d(rows, gone))
        assert verify_checkpoint(run / CHECKPOINTS / name).train_step == int(name)
    for row in gone.tolist():
        assert any(np.isin(row, rows) for rows in before.values())
        places = files_with_id(run / CHECKPOINTS, row)
        assert [p for p in places if p.endswith(".npy") and f"/{table}" in p] == []
    assert not (run / "store").exists()
    again = erase_of(run, ids, table, capsys)
    assert again["checkpoints"] == {}


@pytest.mark.slow
def test_row_of_a_large_number_is_in_no_byte_of_what_is_written(
    trained: Path, tmp_path: Path
) -> None:
    run, (table, _) = copied(trained, tmp_path), table_and_ids(trained)
    big, checkpoints = 7_305_946_128, run / CHECKPOINTS
    part = read_checkpoint_manifest(complete_checkpoints(checkpoints)[-1]).parts[table][0]
    rows = np.load(checkpoints / part / "rows.npy")
    rows[-1] = big
    np.save(checkpoints / part / "rows.npy", rows)
    assert files_with_id(run, big)
    new, count = erasure.rewrite_part(checkpoints, part, np.array([big]))
    assert count == 1
    assert files_with_id(checkpoints / new, big) == []


@pytest.mark.slow
def test_run_continues_after_rows_were_erased(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (table, ids) = tmp_path / "run", table_and_ids(trained)
    job, dataset = trained / "job" / "job.yaml", small_dataset()
    run_job(job, dataset, run, embedding="cached", steps=12)
    erase_of(run, ids, table, capsys)
    summary = run_job(job, dataset, run, embedding="cached", resume=True)
    assert summary.num_steps == 32


@pytest.mark.slow
def test_damaged_part_is_not_given_a_new_checksum(trained: Path, tmp_path: Path) -> None:
    run, (table, _) = copied(trained, tmp_path), table_and_ids(trained)
    newest = complete_checkpoints(run / CHECKPOINTS)[-1]
    part = read_checkpoint_manifest(newest).parts[table][-1]
    path = run / CHECKPOINTS / part / "records.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SchemaError, match="file must have sha256"):
        erasure.erase_rows(run, np.arange(2000), table)


@pytest.mark.slow
def test_run_that_is_trained_is_refused(trained: Path, tmp_path: Path) -> None:
    run, (table, ids) = copied(trained, tmp_path), table_and_ids(trained)
    code = "import time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, "trainer", "train", "--output", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            with pytest.raises(
                SchemaError,
                match=re.escape(f"run is in use by process {other.pid}"),
            ):
                erasure.erase_rows(run, np.array(ids), table)
        finally:
            other.kill()


def test_unknown_table_and_ids_that_are_none_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="--table is no table of the run: 'x'"):
        erasure.erase_rows(trained / "run", np.array([1]), "x")
    (tmp_path / "ids.txt").write_text("12\nx\n")
    with pytest.raises(SchemaError, match="ids must be 64-bit integers, one per line"):
        erasure.read_ids(tmp_path / "ids.txt")


def test_erase_reads_texts_where_features_of_the_table_are_texts(
    trained: Path, tmp_path: Path
) -> None:
    run = copied(trained, tmp_path)
    schema = run / "schema.pbtxt"
    schema.write_text(schema.read_text().replace('"user" type: INT', '"user" type: BYTES'))
    (tmp_path / "ids.txt").write_text("12\nK\N{LATIN SMALL LETTER O WITH DIAERESIS}ln \n")
    arguments = [str(run), "--ids", str(tmp_path / "ids.txt"), "--table", "users"]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(erasure, "erase_rows", lambda *given: found.append(given) or {})
        assert main(["erase", *arguments, "--json"]) == 0
    ((_, ids, table),) = found
    texts = ["12", "K\N{LATIN SMALL LETTER O WITH DIAERESIS}ln"]
    assert (ids.tolist(), table) == ([hash_text(text) for text in texts], "users")


def with_erased(positions: list[int], target: Path) -> tuple[Path, int]:
    """Copy the dataset with all samples of some blocks of its first segment erased.

    Returns:
        (the copy, the number of erased samples).
    """
    shutil.copytree(small_dataset(), target)
    opened = open_dataset(target)
    segment = opened.segments[0]
    counts = segment.column("num_samples")
    rows = [
        {
            "segment": segment.id,
            "block": int(segment.block_ids[p]),
            "sample_index": i,
            "file_row": 0,
            "reason": "session",
            "erased_at": datetime(2026, 1, 1),
        }
        for p in positions
        for i in range(int(counts[p]))
    ]
    table = merge_tombstones([])
    table = merge_tombstones([pa.Table.from_pylist(rows, schema=table.schema)])
    data, sha256 = encode_tombstones(table)
    path = target / tombstones_path(sha256)
    path.parent.mkdir()
    path.write_bytes(data)
    change_root(target, lambda root: replace(root, tombstones_sha256=sha256))
    return target, len(rows)


def test_erased_samples_have_weight_0_and_all_else_is_as_it_was(
    trained: Path, tmp_path: Path
) -> None:
    job = trained / "job" / "job.yaml"
    first = reader_of(job, small_dataset()).read(0).step.positions[:1].tolist()
    dataset, count = with_erased(first, tmp_path / "dataset")
    before, after = (reader_of(job, d).read(0) for d in (small_dataset(), dataset))
    assert count > 0
    assert int((before.weights != after.weights).sum()) == count
    assert after.weights[:count].tolist() == [0.0] * count
    assert np.array_equal(before.labels.numpy(), after.labels.numpy())
    assert np.array_equal(before.sparse.values().numpy(), after.sparse.values().numpy())


@pytest.mark.parametrize("fast", [False, True], ids=["leaf by leaf", "whole steps"])
def test_step_whose_samples_are_all_erased_has_loss_0(
    trained: Path, tmp_path: Path, fast: bool
) -> None:
    job = trained / "job" / "job.yaml"
    step = reader_of(job, small_dataset()).read(0).step
    assert step.segment == 0
    dataset, _ = with_erased(step.positions.tolist(), tmp_path / "dataset")
    summary = run_job(job, dataset, tmp_path / "run", steps=2, fast=fast)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert summary.num_steps == len(losses) == 2
    assert losses[0] == 0.0 < losses[1]
