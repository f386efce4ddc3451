"""Deduplicated training against expanded training: the same run, for every model.

Both sum the same numbers in another order. In float64 that stays below 1e-10 over a run. In float32
with means losses stay within 1e-5 for 20 steps; sums over long bags amplify rounding, so there
the first loss is compared, then one step at a time from a common state, and the metrics of a whole
run.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from presage.trainer.checkpoint.load import load_checkpoint, verify_checkpoint
from presage.trainer.data.collate import single_microbatch
from presage.trainer.models.torchrec_models import DlrmModel
from presage.trainer.step import loss_of
from tests.shared import in_pairs
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import checkpoint_at, losses_of, parts_of, reader_of, row_gradients, run_job

MODELS = {
    "dlrm": "{top_layers: [16]}",
    "dcn": "{name: dcn, cross_rank: 4, top_layers: [16]}",
    "deepfm": "{name: deepfm, top_layers: [16]}",
    "wide_deep": "{name: wide_deep, top_layers: [16]}",
    "attention": "{name: attention, history: clicked, target: item, top_layers: [16], "
    "num_heads: 2}",
}
POOLINGS = ("mean", "sum")
OPTIMIZERS = dict(zip(MODELS, ("adagrad", "adam", "sgd", "rowwise_adagrad", "adam"), strict=True))


def train_both(job: Path, dataset: Path, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Train with and without deduplication.

    Returns:
        (losses, normalised entropy and calibration), the deduplicated run first in each.
    """
    summaries = [run_job(job, dataset, folder / "unique")]
    summaries.append(run_job(job, dataset, folder / "expanded", expanded=True))
    losses = np.array([losses_of(folder / name) for name in ("unique", "expanded")])
    return losses, np.array([(each.ne, each.calibration) for each in summaries], float)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "pooling"), in_pairs(MODELS, POOLINGS))
def test_float64_run_has_the_losses_of_expanded(
    model: str, pooling: str, dataset: Path, tmp_path: Path
) -> None:
    changes = {"model": MODELS[model], "pooling": pooling, "optimizer": OPTIMIZERS[model]}
    job = write_job(tmp_path / "job", dtype="float64", **changes)
    losses, metrics = train_both(job, dataset, tmp_path)
    assert len(losses[0]) == len(set(losses[0])) == 32
    np.testing.assert_allclose(*losses, rtol=1e-10, atol=0)
    np.testing.assert_allclose(*metrics, rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "pooling"), in_pairs(MODELS, POOLINGS[::-1]))
def test_float32_run_has_the_losses_gradients_and_metrics_of_expanded(
    model: str, pooling: str, dataset: Path, tmp_path: Path
) -> None:
    changes = {"model": MODELS[model], "pooling": pooling, "every_steps": "5"}
    job = write_job(tmp_path / "job", dtype="float32", **changes)
    losses, metrics = train_both(job, dataset, tmp_path)
    first, rtol = (20, 1e-5) if pooling == "mean" else (1, 1e-6)
    np.testing.assert_allclose(*losses[:, :first], rtol=rtol, atol=0)
    np.testing.assert_allclose(*metrics, rtol=0, atol=1e-3)
    assert metrics[0, 0] < 1.1, "it learned something"
    for step in (5, 15, 30):
        checkpoint = checkpoint_at(tmp_path / "unique", step)
        unique, expanded = (
            gradients_at(step, job, dataset, checkpoint, model, expanded=expanded)
            for expanded in (False, True)
        )
        assert unique.keys() == expanded.keys()
        assert unique["loss"].item() == pytest.approx(expanded["loss"].item(), rel=1e-6)
        for name, gradient in unique.items():
            scale = max(float(expanded[name].abs().max()), 1e-3)
            torch.testing.assert_close(
                gradient, expanded[name], rtol=1e-5, atol=1e-5 * scale, msg=name
            )


def gradients_at(
    step: int, job: Path, dataset: Path, checkpoint: Path, model: str, *, expanded: bool
) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients of parameters and rows, of a step from a checkpoint."""
    parts = parts_of(job, dataset)
    manifest = verify_checkpoint(checkpoint)
    load_checkpoint(checkpoint, manifest, parts, with_optimizer=False)
    batch = reader_of(job, dataset, expanded=expanded, find_shared=True).read(step)
    assert (batch.shared is None) == (not batch.groups) == expanded
    assert isinstance(parts.model, DlrmModel) == (model == "dlrm")
    parts.embedding.open(single_microbatch(batch))
    loss = loss_of(parts.model(batch), batch)
    loss.backward()
    gradients = {"loss": loss.detach(), **row_gradients(parts.embedding, batch)}
    for name, parameter in parts.model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad
    return gradients
