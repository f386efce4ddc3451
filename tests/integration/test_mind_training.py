"""Training on MIND: deduplicated, expanded and cached runs of each model tell the same story."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.run.records import SUMMARY, read_summary
from presage.trainer.__main__ import main as trainer_main
from tests import real_logs
from tests.shared import with_long

pytestmark = pytest.mark.nightly

MODELS = {
    "dlrm": "{name: dlrm, bottom_layers: [16], top_layers: [32]}",
    "dcn": "{name: dcn, bottom_layers: [16], top_layers: [32], cross_rank: 8}",
    "deepfm": "{name: deepfm, bottom_layers: [16], top_layers: [32]}",
    "wide_deep": "{name: wide_deep, top_layers: [32]}",
    "attention": "{name: attention, history: history, target: item, top_layers: [32]}",
}
WHOLE = ("dlrm",)
"""Models that train the whole log; the others train 20 steps."""


@pytest.fixture(scope="module")
def dataset(shared_data: Path) -> Path:
    """The MIND dataset."""
    return real_logs.built("mind", shared_data)[0]


def job_of(repository: Path, directory: Path, model: str, dtype: str) -> Path:
    """Write the shipped job with a small model in some precision."""
    text = (repository / "schemas" / "mind" / "job.yaml").read_text()
    data, _ = text.split("\ntrain:\n")
    path = directory / f"{model}-{dtype}.yaml"
    train = f"train: {{model: {MODELS[model]}, embedding_dim: 16, dtype: {dtype},"
    train += " batch_samples: 1024}\n"
    path.write_text(f"{data}\n{train}")
    return path


@pytest.fixture(scope="module")
def train(
    dataset: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a function that trains a model in some precision with options, each once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def trained(model: str, dtype: str, *options: str) -> Path:
        run = folder / "-".join([model, dtype, *options])
        job = job_of(repository, folder, model, dtype)
        words = ["train", str(job), "--dataset", str(dataset), "--output", str(run), "--json"]
        if model not in WHOLE:
            words += ["--steps", "20"]
        assert trainer_main([*words, *options]) == 0
        return run

    return trained


def losses_of(run: Path) -> np.ndarray:
    """Return the loss of each step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@pytest.mark.parametrize("model", with_long(MODELS, "attention"))
def test_losses_with_and_without_deduplication_agree(
    model: str, train: Callable[..., Path]
) -> None:
    """Float64 to rounding over the run; float32, which drifts apart, over its first steps."""
    dedup = losses_of(train(model, "float64"))
    expanded = losses_of(train(model, "float64", "--expanded"))
    assert len(dedup) > 40 or model not in WHOLE
    np.testing.assert_allclose(dedup, expanded, rtol=1e-10, atol=0)
    assert len(set(dedup.tolist())) == len(dedup)
    runs = train(model, "float32"), train(model, "float32", "--expanded")
    np.testing.assert_allclose(*(losses_of(run)[:20] for run in runs), rtol=1e-5, atol=0)
    ne, other = (read_summary(run / SUMMARY).ne for run in runs)
    assert ne is not None
    assert ne == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_cached_has_the_losses_of_plain(model: str, train: Callable[..., Path]) -> None:
    cached = train(model, "float32", "--embedding", "cached")
    assert losses_of(cached).tolist() == losses_of(train(model, "float32")).tolist()
    if model in WHOLE:
        assert trainer_main(["verify", str(cached)]) == 0
