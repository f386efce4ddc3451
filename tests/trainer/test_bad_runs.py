"""Wrong values, runs and folders are refused in one line."""

import os
import re
import shutil
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pytest

from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB, MANIFEST, SCHEMA, part_path
from presage.schemas.run.records import CHECKPOINTS, METRICS, RUN_FILE, SUMMARY, StepMetric
from presage.schemas.storage.location import Location
from presage.schemas.storage.locks import LOCK
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.files import NewCheckpoint, complete_checkpoints
from presage.trainer.data.decode import SAMPLES, BlockCounts, decode, spec_of
from presage.trainer.options import TrainOptions
from presage.trainer.run.folder import verify_run
from presage.trainer.stores.remote.wal import ShardLog
from presage.trainer.train import train
from tests.foreign import add_foreign, assert_untouched
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import run_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), epochs="1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, job: Path) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset", job, [[(128, 0)]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, job: Path, dataset: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_job(job, dataset, folder)
    return folder


@pytest.mark.parametrize(
    ("column", "value", "bounds"),
    [
        ("clicked_flag", 5.0, "0.0 to 1.0"),
        ("clicked_flag", float("nan"), "0.0 to 1.0"),
        ("sample_weight", -1.0, "0.0 to inf"),
        ("price", float("-inf"), "-inf to inf"),
        ("age", float("nan"), "-inf to inf"),
    ],
)
def test_decode_refuses_numbers_without_a_loss(
    column: str, value: float, bounds: str, dataset: Path
) -> None:
    opened = open_dataset(dataset)
    segment = opened.segments[0]
    spec = spec_of(opened, "float64")
    chosen = segment.column("row_group") == 0
    uniques = {group: segment.num_unique(group)[chosen] for group in spec.groups}
    sizes = segment.column("num_samples")[chosen]
    counts = BlockCounts(blocks=segment.block_ids[chosen], samples=sizes, uniques=uniques)

    def read(owner: str, columns: list[str]) -> pa.Table:
        path = part_path(0, "samples") if owner == SAMPLES else part_path(0, "groups", owner)
        table = segment.file(path).read_row_group(0, columns)
        if column not in columns:
            return table
        odd = np.where(np.arange(table.num_rows) == 3, value, 0.5)
        return table.set_column(columns.index(column), column, pa.array(odd))

    message = (
        f"column {column!r} must hold finite numbers from {bounds}, got {value}; "
        "declare a domain or correct it in the job's SQL"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        decode(spec, counts, read)


def test_train_names_the_step_whose_loss_is_not_finite(
    job: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.trainer.step.MicrobatchCompute.update", lambda *_: float("nan"))
    with pytest.raises(SchemaError, match=r"^loss must be finite, got nan at step 0; lower the "):
        run_job(job, dataset, tmp_path / "run")


def test_train_without_a_sparse_feature_is_refused(dataset: Path) -> None:
    opened = open_dataset(dataset)
    features = type(opened.features)(
        tuple(f for f in opened.features.features if f.role != "sparse")
    )
    poorer = type(opened)(**{**vars(opened), "features": features})
    message = "schema has no sparse feature; tag one"
    with pytest.raises(SchemaError, match=f"^{message}$"):
        spec_of(poorer, "float32")


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"segments": 3}'])
def test_torn_identity_is_refused_by_name(
    text: str, job: Path, dataset: Path, run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / RUN_FILE).write_text(text)
    message = f"identity is not JSON with dataset and train in {copy / RUN_FILE}; restore it"
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, dataset, copy, resume=True)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"train_step": 2, "files": 3}'])
def test_torn_checkpoint_is_refused_by_name(
    text: str, job: Path, dataset: Path, run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    manifest = copy / CHECKPOINTS / "00000002" / MANIFEST
    manifest.write_text(text)
    message = (
        f"manifest must be JSON with a checksum in {manifest}; restore it or train again, as no "
        "checkpoint before it is complete"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, dataset, copy, resume=True)


def test_train_into_a_file_is_one_line(
    job: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("taken")
    arguments = ["--dataset", str(dataset), "--output", str(tmp_path / "run")]
    assert main(["train", str(job), *arguments]) == 1
    error = f"error: [Errno 17] File exists: '{tmp_path / 'run'}'"
    assert capsys.readouterr().err.strip() == error


def test_batch_size_other_than_that_of_the_index_is_logged_or_refused(
    job: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = job.read_text().partition("train:")
    other = write_job(tmp_path / "job", epochs="1")
    other.write_text(
        "".join((*text[:2], text[2].replace("batch_samples: 64", "batch_samples: 32")))
    )
    message = (
        "dataset has no index for batch_samples=32, epochs=1, shuffle=blocks, seed=5, closest: "
        f"batch_samples=64 in {dataset}; run python -m presage.pipelines oracle {dataset} "
        "--reindex --batch-samples 32 --epochs 1 --shuffle blocks --seed 5"
    )
    given = ["train", str(other), "--dataset", str(dataset), "--steps", "1", "--output"]
    assert main([*given, str(tmp_path / "cached"), "--embedding", "cached"]) == 1
    assert capsys.readouterr().err.strip() == f"error: {message}"
    assert main([*given, str(tmp_path / "plain")]) == 0
    without = f"training without an index, which --embedding plain allows: {message}"
    assert without in capsys.readouterr().err.splitlines()
    assert main(["train", str(job), *given[2:], str(tmp_path / "same")]) == 0
    assert "without an index" not in capsys.readouterr().err


def test_second_process_is_refused_in_a_folder_that_one_trains(
    job: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, refused = tmp_path / "run", list[str]()
    arguments = ["train", str(job), "--dataset", str(dataset), "--output", str(run)]

    def start_others(metric: StepMetric, num_steps: int) -> None:
        for more in ([], ["--resume"], ["--replicas", "2", "--resume"], ["--start-from", str(run)]):
            assert main([*arguments, *more, "--restarts", "0"]) == 1
            refused.append(capsys.readouterr().err)
        ids = tmp_path / "ids"
        ids.write_text("1")
        assert main(["erase", str(run), "--table", "items", "--ids", str(ids)]) == 1
        refused.append(capsys.readouterr().err)

    options = TrainOptions(steps=1)
    train(job, Location.parse(dataset), run, options, clock=perf_counter, on_step=start_others)
    assert len(set(refused)) == 1
    holder = rf"error: run is in use: pid {os.getpid()} on \S+ since .* in {run}; wait for .*\n"
    assert re.fullmatch(holder, refused[0])
    assert not (run / LOCK).exists()
    run_job(job, dataset, run, resume=True)
    assert verify_run(run).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("files", ["mmap", "log"])
def test_files_of_others_in_a_run_folder_stay(files: str, dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="1", every_steps="1", files=files)
    run = tmp_path / "run"
    run.mkdir()
    added = add_foreign(run)
    run_job(job, dataset, run, steps=1, embedding="cached")
    added |= add_foreign(run)
    run_job(job, dataset, run, embedding="cached", resume=True)
    added |= add_foreign(run)
    checkpoints = complete_checkpoints(run / CHECKPOINTS)
    assert [int(folder.name) for folder in checkpoints] == [1, 2]
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    (run / METRICS).write_bytes(lines[0])  # the newest checkpoint is set aside, and saved again
    added = {path: data for path, data in added.items() if checkpoints[-1] not in path.parents}
    run_job(job, dataset, run, embedding="cached", resume=True)
    assert_untouched(added)
    assert verify_run(run).problems == ()
    ids = tmp_path / "ids"
    ids.write_text("1")
    assert main(["erase", str(run), "--table", "items", "--ids", str(ids)]) == 0
    for step in (3, 4, 5):
        with NewCheckpoint(run / CHECKPOINTS, step) as checkpoint:
            checkpoint.finish({}, {}, {}, keep=1)
    assert [int(folder.name) for folder in complete_checkpoints(run / CHECKPOINTS)] == [5]
    assert_untouched(added)
    assert not (run / CHECKPOINTS / "00000001" / MANIFEST).exists()


def test_store_process_leaves_files_of_others(tmp_path: Path) -> None:
    added = add_foreign(tmp_path)
    for name in ("base-mine.bin", "log-mine.bin", "base-old.partial"):
        (tmp_path / name).write_bytes(b"mine")
        added[tmp_path / name] = b"mine"
    for _ in range(2):
        log = ShardLog(tmp_path, sync=False)
        assert list(log.load()) == []
        number = log.begin_log()
        log.write_base(number, [])
        log.close()
    assert_untouched(added)


@pytest.mark.parametrize("name", [JOB, SCHEMA, METRICS, SUMMARY])
def test_run_replaces_no_file_of_another_kind(
    name: str, job: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(SchemaError, match=rf"^output folder has another {name}, .* in {tmp_path}"):
        run_job(job, dataset, tmp_path)
    assert (tmp_path / name).read_text() == "mine"
