"""Deduplicated training against expanded training: the same run, for every model.

Both sum the same numbers in another order. In float64 that stays below 1e-10 over a run. In float32
with means losses stay within 1e-5 for 20 steps; sums over long bags amplify rounding, so there
the first loss is compared, then one step at a time from a common state, and what a whole run is
worth.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.trainer.make_dataset import write_job
from tests.trainer.runs import checkpoint_at, losses_of, parts_of, reader_of, row_gradients, run_job
from trainer.checkpoint.load import load_checkpoint, verify_checkpoint
from trainer.data.collate import single_microbatch
from trainer.models.torchrec_models import DlrmModel
from trainer.step import loss_of

MODELS = {
    "dlrm": "{top_layers: [16]}",
    "dcn": "{name: dcn, cross_rank: 4, top_layers: [16]}",
    "deepfm": "{name: deepfm, top_layers: [16]}",
    "wide_deep": "{name: wide_deep, top_layers: [16]}",
    "attention": "{name: attention, history: clicked, target: item, top_layers: [16], "
    "num_heads: 2}",
}
POOLINGS = ("mean", "sum")


class Trained(NamedTuple):
    """A whole run: its loss by step, and normalised entropy and calibration at its end."""

    losses: np.ndarray
    worth: tuple[float, float]


Runs = Callable[..., tuple[Trained, Trained]]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the deduplicated and the expanded run of a job; each is trained once."""
    found: dict[tuple[str, ...], tuple[Trained, Trained]] = {}

    def trained(model: str, **changes: str) -> tuple[Trained, Trained]:
        key = (model, *changes.values())
        if key not in found:
            folder = tmp_path_factory.mktemp("run")
            job = write_job(folder / "job", model=MODELS[model], **changes)
            both: list[Trained] = []
            for name in ("unique", "expanded"):
                run = folder / name
                summary = run_job(job, dataset, run, expanded=name == "expanded")
                assert summary.ne is not None
                assert summary.calibration is not None
                both.append(Trained(losses_of(run), (summary.ne, summary.calibration)))
            found[key] = both[0], both[1]
        return found[key]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_float64_run_has_the_losses_of_expanded(model: str, pooling: str, runs: Runs) -> None:
    unique, expanded = runs(model, dtype="float64", pooling=pooling)
    assert len(unique.losses) == len(set(unique.losses)) == 32
    np.testing.assert_allclose(unique.losses, expanded.losses, rtol=1e-10, atol=0)
    np.testing.assert_allclose(unique.worth, expanded.worth, rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_float64_run_with_another_optimizer_has_the_losses_of_expanded(
    optimizer: str, runs: Runs
) -> None:
    unique, expanded = runs("dlrm", optimizer=optimizer)
    np.testing.assert_allclose(unique.losses, expanded.losses, rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_float32_run_with_means_has_the_first_losses_of_expanded(model: str, runs: Runs) -> None:
    unique, expanded = runs(model, dtype="float32", pooling="mean")
    np.testing.assert_allclose(unique.losses[:20], expanded.losses[:20], rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_float32_run_with_sums_has_the_first_loss_of_expanded(model: str, runs: Runs) -> None:
    unique, expanded = runs(model, dtype="float32", pooling="sum")
    assert unique.losses[0] == pytest.approx(expanded.losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_float32_run_is_worth_what_expanded_is(model: str, pooling: str, runs: Runs) -> None:
    unique, expanded = runs(model, dtype="float32", pooling=pooling)
    np.testing.assert_allclose(unique.worth, expanded.worth, rtol=0, atol=1e-3)
    assert unique.worth[0] < 1.1, "it learned something"


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_one_float32_step_from_a_later_state_has_the_gradients_of_expanded(
    model: str, pooling: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(
        tmp_path / "job", dtype="float32", model=MODELS[model], pooling=pooling, every_steps="5"
    )
    run_job(job, dataset, tmp_path / "run")
    for step in (5, 15, 30):
        found = []
        for expanded in (False, True):
            parts = parts_of(job, dataset)
            checkpoint = checkpoint_at(tmp_path / "run", step)
            manifest = verify_checkpoint(checkpoint)
            load_checkpoint(checkpoint, manifest, parts, with_optimizer=False)
            batch = reader_of(job, dataset, expanded=expanded, find_shared=True).read(step)
            assert (batch.shared is None) == (not batch.groups) == expanded
            assert isinstance(parts.model, DlrmModel) == (model == "dlrm")
            parts.embedding.open(single_microbatch(batch))
            loss = loss_of(parts.model(batch), batch)
            loss.backward()
            dense = {name: p.grad for name, p in parts.model.named_parameters()}
            rows = row_gradients(parts.embedding, batch)
            found.append((loss.item(), {**dense, **rows}))
        (loss_a, unique), (loss_b, expanded_) = found
        assert loss_a == pytest.approx(loss_b, rel=1e-6)
        assert unique.keys() == expanded_.keys()
        for name, gradient in unique.items():
            scale = max(float(expanded_[name].abs().max()), 1e-3)
            torch.testing.assert_close(
                gradient, expanded_[name], rtol=1e-5, atol=1e-5 * scale, msg=name
            )
