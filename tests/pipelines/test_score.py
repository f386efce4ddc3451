"""Scores of a dataset are those of the trainer's evaluation, whoever computes them."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.beam.score import (
    SCORE,
    SCORES,
    ScoreRowGroups,
    chosen_samples,
    row_groups_of,
)
from presage.pipelines.cli import main
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.scoring import load_model
from presage.schemas.storage.location import Location
from presage.trainer.evaluation.evaluate import evaluate_run
from presage.trainer.serve.export import export_run
from tests.pipelines.logs import bytes_of
from tests.trainer.exact_metrics import auc, normalized_entropy
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, checkpoint_at, run_job
from tests.trainer.served import evaluation_logits, evaluation_table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, a run, its export, and scores of the evaluation split and of all."""
    folder = tmp_path_factory.mktemp("score")
    job = write_job(folder / "job", weights=", clicked_weights")
    make_dataset(folder / "dataset", job, SEGMENTS)
    run_job(job, folder / "dataset", folder / "run", steps=10)
    export_run(folder / "run", folder / "model")
    assert run_score(folder, "scores", "--split", "evaluation") == 0
    assert run_score(folder, "all") == 0
    return folder


def run_score(folder: Path, output: str, *words: str, model: str = "model") -> int:
    paths = ["--dataset", str(folder / "dataset"), "--output", str(folder / output)]
    return main(["score", str(folder / model), *paths, "--json", *words])


def scores_of(folder: Path) -> pa.Table:
    files = sorted((folder / SCORES).iterdir())
    return pa.concat_tables([pq.read_table(file) for file in files])


def test_metrics_of_the_scores_are_those_of_evaluate(folder: Path) -> None:
    found = scores_of(folder / "scores")
    assert found.column_names == ["session", "clicked_flag", "sample_weight", SCORE]
    labels, weights, scores = (found[n].to_numpy() for n in found.column_names[1:])
    scored = (labels.astype(np.float64), np.log(scores / (1 - scores)), weights.astype(np.float64))
    wanted = evaluate_run(
        folder / "job" / "job.yaml", Location.parse(folder / "dataset"), folder / "run"
    )
    assert len(scores) == wanted.num_samples == 80
    assert auc(*scored) == pytest.approx(wanted.auc, rel=1e-12)
    assert normalized_entropy(*scored) == pytest.approx(wanted.ne, rel=1e-12)


def test_scores_are_those_of_the_samples_in_stored_order(folder: Path) -> None:
    found, table = scores_of(folder / "scores"), evaluation_table(folder / "dataset")
    assert found["session"].equals(table["session"])
    assert found["clicked_flag"].equals(table["clicked_flag"])
    job, checkpoint = folder / "job" / "job.yaml", checkpoint_at(folder / "run", 10)
    logits = evaluation_logits(job, folder / "dataset", checkpoint, expanded=True)
    wanted = 1 / (1 + np.exp(-np.concatenate(logits)))
    assert found[SCORE].to_numpy() == pytest.approx(wanted, rel=1e-12)
    assert load_model(folder / "model").score(table) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "mode", [pytest.param("multi_threading", marks=pytest.mark.nightly), "multi_processing"]
)
def test_two_workers_write_the_same_bytes_as_one(mode: str, folder: Path) -> None:
    options = ["--direct_num_workers=2", f"--direct_running_mode={mode}"]
    assert run_score(folder, mode, *options) == 0
    written = bytes_of(folder / mode)
    assert len(written) > 10
    assert written == bytes_of(folder / "all")


def test_all_samples_are_scored_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_score(folder, "train", "--split", "train") == 0
    summary = json.loads(capsys.readouterr().out)
    found = [scores_of(folder / name) for name in ("all", "train", "scores")]
    assert [t.num_rows for t in found] == [1063, 983, 80]
    assert summary["num_samples"] == 983
    assert sorted(found[0][SCORE].to_pylist()) == pytest.approx(
        sorted([*found[1][SCORE].to_pylist(), *found[2][SCORE].to_pylist()]), rel=1e-12
    )
    manifest = json.loads((folder / "all" / MANIFEST).read_text())
    assert manifest["model"]["train_step"] == 10
    assert sum(f["num_samples"] for f in manifest["files"].values()) == 1063


def test_scores_of_single_segments_are_those_of_all(folder: Path) -> None:
    dataset = open_dataset(folder / "dataset")
    found: list[pa.Table] = []
    for reference in dataset.manifest.segments:
        output = f"segment-{reference.id}"
        assert run_score(folder, output, "--segments", reference.id) == 0
        found.append(scores_of(folder / output))
        manifest = json.loads((folder / output / MANIFEST).read_text())
        assert manifest["dataset"] == [reference.manifest_sha256]
    assert [table.num_rows for table in found] == [813, 250]
    assert pa.concat_tables(found).equals(scores_of(folder / "all"))


def test_segment_that_was_replaced_is_not_read(folder: Path) -> None:
    location = Location.parse(folder)
    stage = ScoreRowGroups(folder / "model", location / "dataset", ("0" * 64,), location / "x")
    message = "a segment was replaced while the dataset was scored in "
    with pytest.raises(SchemaError, match=re.escape(message)):
        stage.setup()


def test_chosen_samples_of_each_split_are_its_own(folder: Path) -> None:
    dataset = open_dataset(folder / "dataset")
    counts = {
        split: sum(
            int(chosen_samples(dataset.segments[s], part, group, split).sum())
            for _, s, part, group in row_groups_of(dataset, split)
        )
        for split in ("all", "train", "evaluation")
    }
    assert counts == {"all": 1063, "train": 983, "evaluation": 80}


def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(output: str, *words: str, model: str = "model") -> str:
        assert run_score(folder, output, *words, model=model) == 1
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert re.fullmatch(r"error: model is missing in .*export", refused("x", model="no"))
    data = bytearray((folder / "model").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "changed").write_bytes(data)
    assert "must have sha256" in refused("x", model="changed")
    assert refused("scores").startswith("error: output has files")
    assert "dataset has no segment" in refused("x", "--segments", "2026-01-01")
    assert refused("x", "--nonsense=1").startswith("error: unknown option")
