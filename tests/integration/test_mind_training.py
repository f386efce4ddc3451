"""Training on MIND: deduplicated, expanded and cached runs of each model tell the same story."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.commands import main as pipelines_main
from schemas.events import SUMMARY, read_summary
from trainer.__main__ import main as trainer_main

MODELS = {
    "dlrm": "{name: dlrm, bottom_layers: [16], top_layers: [32]}",
    "dcn": "{name: dcn, bottom_layers: [16], top_layers: [32], cross_rank: 8}",
    "deepfm": "{name: deepfm, bottom_layers: [16], top_layers: [32]}",
    "wide_deep": "{name: wide_deep, top_layers: [32]}",
    "attention": "{name: attention, history: history, target: item, top_layers: [32]}",
}


@pytest.fixture(scope="module")
def dataset(shared_data: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MIND dataset."""
    path = tmp_path_factory.mktemp("mind") / "dataset"
    job = repository / "schemas" / "mind" / "job.yaml"
    arguments = ["build", str(job), "--input", str(shared_data / "mind"), "--output", str(path)]
    assert pipelines_main([*arguments, "--json"]) == 0
    return path


def job_of(repository: Path, directory: Path, model: str, dtype: str) -> Path:
    """Write the shipped job with a small model in some precision."""
    text = (repository / "schemas" / "mind" / "job.yaml").read_text()
    data, _ = text.split("\ntrain:\n")
    path = directory / f"{model}-{dtype}.yaml"
    train = f"train: {{model: {MODELS[model]}, embedding_dim: 16, dtype: {dtype},"
    train += " batch_samples: 1024}\n"
    path.write_text(f"{data}\n{train}")
    return path


def losses_of(job: Path, dataset: Path, run: Path, *options: str) -> np.ndarray:
    """Train and return the loss of each step."""
    arguments = ["train", str(job), "--dataset", str(dataset), "--output", str(run)]
    assert trainer_main([*arguments, *options, "--json"]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_with_and_without_deduplication_agree_over_a_float64_run(
    model: str, dataset: Path, repository: Path, tmp_path: Path
) -> None:
    job = job_of(repository, tmp_path, model, "float64")
    dedup = losses_of(job, dataset, tmp_path / "dedup")
    expanded = losses_of(job, dataset, tmp_path / "expanded", "--expanded")
    assert len(dedup) > 40
    np.testing.assert_allclose(dedup, expanded, rtol=1e-10, atol=0)
    assert len(set(dedup.tolist())) == len(dedup)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_float32_losses_agree_for_twenty_steps_and_runs_are_worth_the_same(
    model: str, dataset: Path, repository: Path, tmp_path: Path
) -> None:
    job = job_of(repository, tmp_path, model, "float32")
    dedup = losses_of(job, dataset, tmp_path / "dedup")
    expanded = losses_of(job, dataset, tmp_path / "expanded", "--expanded")
    np.testing.assert_allclose(dedup[:20], expanded[:20], rtol=1e-5, atol=0)
    ne, other = (read_summary(tmp_path / run / SUMMARY).ne for run in ("dedup", "expanded"))
    assert ne is not None
    assert ne == pytest.approx(other, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_cached_has_the_losses_of_plain_for_ever(
    model: str, dataset: Path, repository: Path, tmp_path: Path
) -> None:
    job = job_of(repository, tmp_path, model, "float32")
    plain = losses_of(job, dataset, tmp_path / "plain")
    cached = losses_of(job, dataset, tmp_path / "cached", "--embedding", "cached")
    assert cached.tolist() == plain.tolist()
    assert trainer_main(["verify", str(tmp_path / "cached")]) == 0
