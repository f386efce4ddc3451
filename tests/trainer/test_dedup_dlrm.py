"""DLRM with each part computed once per unique tuple, against TorchRec's as it is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schemas.config.job import load_job
from schemas.dataset import open_dataset
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import reader_of, row_gradients
from trainer.components import build_components
from trainer.data.collate import Batch, single_microbatch
from trainer.data.decode import spec_of
from trainer.data.lookup import inverse_of
from trainer.data.shared import find_shared_features
from trainer.embedding.module import Embedding
from trainer.models.torchrec_models import DlrmModel, top_columns
from trainer.step import loss_of


def plain_and_dedup(
    dataset: Path, folder: Path, pooling: str = "mean"
) -> tuple[DlrmModel, DlrmModel, Embedding]:
    """Return both models over one embedding and the same parameters, in float64."""
    job = load_job(write_job(folder, dtype="float64"))
    model = replace(job.train.model, name="dlrm", top_layers=(16, 8), dedup_compute=False)
    config = replace(job.train, model=model, pooling=pooling)  # type: ignore[arg-type]
    spec = spec_of(open_dataset(dataset), "float64")
    components = build_components(spec, config)
    assert isinstance(components.model, DlrmModel)
    return (
        components.model,
        DlrmModel(components.model.dlrm, dedup=True),
        components.embedding,
    )


def results(model: torch.nn.Module, embedding: Embedding, batch: Batch) -> dict[str, torch.Tensor]:
    """Return logits and the gradient of everything that is trained."""
    model.zero_grad()
    embedding.open(single_microbatch(batch))
    logits = model(batch)
    loss_of(logits, batch).backward()
    found = {"logits": logits.detach()}
    found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {f"rows of {t}": g for t, g in row_gradients(embedding, batch).items()}


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("step", [0, 8, 31])
def test_dedup_dlrm_has_the_logits_and_gradients_of_torchrecs(
    pooling: str, step: int, dataset: Path, tmp_path: Path
) -> None:
    plain, dedup, embedding = plain_and_dedup(dataset, tmp_path / "job", pooling)
    job = write_job(tmp_path / "j", dtype="float64")
    batch = reader_of(job, dataset, find_shared=True).read(step)
    assert batch.shared is not None
    wanted, found = results(plain, embedding, batch), results(dedup, embedding, batch)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_dedup_dlrm_of_an_expanded_batch_is_torchrecs(dataset: Path, tmp_path: Path) -> None:
    plain, dedup, embedding = plain_and_dedup(dataset, tmp_path / "job")
    job = write_job(tmp_path / "j", dtype="float64")
    batch = reader_of(job, dataset, expanded=True, find_shared=True).read(0)
    assert batch.shared is None
    wanted, found = results(plain, embedding, batch), results(dedup, embedding, batch)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def regrouped(batch: Batch, numbers: list[torch.Tensor]) -> Batch:
    """Return the batch with other tuples: each sample's, by group."""
    groups = {
        group: inverse_of(indices.numpy(), int(indices.max()) + 1)
        for group, indices in zip(batch.groups, numbers, strict=True)
    }
    return replace(batch, groups=groups)


def test_rows_are_combinations_of_tuples_and_stand_for_their_samples(
    dataset: Path, tmp_path: Path
) -> None:
    plain = reader_of(write_job(tmp_path / "j", dtype="float64"), dataset).read(0)
    samples = torch.arange(plain.num_samples)
    batch = regrouped(plain, [samples // 8 % 5, samples // 2 % 7])  # hardly more pairs than tuples
    features = tuple(batch.group_of)
    shared = find_shared_features(batch.groups, batch.group_of, batch.dense)
    assert shared is not None
    assert len(shared.tuples) == len(batch.groups) == 2
    for group, tuples in shared.tuples.items():
        assert tuples is not None
        assert torch.equal(tuples.indices[shared.rows.indices], batch.groups[group].indices)
    pairs = {tuple(p) for p in torch.stack([i.indices for i in batch.groups.values()], 1).tolist()}
    assert shared.num_rows == len(pairs)
    assert set(shared.shared_features) == {f for f in features if batch.group_of[f] is not None}


def test_groups_that_cross_are_not_put_together(dataset: Path, tmp_path: Path) -> None:
    plain = reader_of(write_job(tmp_path / "j", dtype="float64"), dataset).read(0)
    samples = torch.arange(plain.num_samples)
    batch = regrouped(plain, [samples % 8, samples % 9])  # 64 samples, 64 pairs
    shared = find_shared_features(batch.groups, batch.group_of, batch.dense)
    assert shared is not None
    assert len(shared.tuples) == 1
    assert shared.shared_dense is None


def test_every_column_of_the_first_layer_is_filled_once() -> None:
    columns = top_columns((0, 2, 4), (1, 3), dim=8)
    filled = torch.cat([columns.rows, columns.own])
    assert sorted(filled.tolist()) == list(range(8 + 10))
