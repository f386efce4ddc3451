"""Models with shared parts computed once, against TorchRec's modules, and what is shared."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM_DCN

from presage.schemas.config.train import ModelConfig, TrainConfig
from presage.trainer.data.collate import CollatedBatch, single_microbatch
from presage.trainer.data.lookup import inverse_of
from presage.trainer.data.shared import find_shared_features
from presage.trainer.embedding.module import Embedding
from presage.trainer.models import torchrec_models
from presage.trainer.models.shared_compute import dense_vectors, first_layer
from presage.trainer.models.torchrec_models import top_columns
from presage.trainer.step import loss_of
from tests.trainer.make_dataset import write_job
from tests.trainer.model_samples import (
    CONFIG,
    DIM,
    FEATURES,
    NUM_DENSE,
    PlainTables,
    Samples,
    batch_of,
    gradients,
    random_samples,
)
from tests.trainer.runs import parts_of, reader_of, row_gradients

ONE = ModelConfig(name="deepfm", bottom_layers=(6,), top_layers=(5,))
DEEP = ModelConfig(name="dcn", bottom_layers=(6, 7), top_layers=(16, 4), cross_layers=3)
INVERSE = [1, 0, 2, 1, 1, 3]


def samples_of(dense: str) -> Samples:
    """Draw samples whose dense features follow the tuple, or do not."""
    samples = random_samples([0, 3, 9, 2], INVERSE)
    return replace(samples, dense=samples.dense[INVERSE]) if dense == "by tuple" else samples


def assert_same(
    ours: tuple[nn.Module, torch.Tensor], theirs: tuple[nn.Module, torch.Tensor], prefix: str
) -> None:
    """Compare logits and the gradient of every parameter, by name."""
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-12)
    found, wanted = gradients(*ours), gradients(*theirs)
    assert {n.removeprefix(prefix) for n in found} == wanted.keys()
    for name, gradient in found.items():
        expected = wanted[name.removeprefix(prefix)]
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("dense", ["by tuple", "by sample"])
@pytest.mark.parametrize("layers", [1, 3])
def test_dcn_of_a_deduplicated_batch_equals_torchrecs_on_a_plain_one(
    layers: int, dense: str
) -> None:
    config = replace(CONFIG, model=replace(DEEP, cross_layers=layers, cross_rank=5))
    model = torchrec_models.build_dcn(config, NUM_DENSE, PlainTables())
    for bias in model.dcn.inter_arch.crossnet.bias:  # type: ignore[union-attr]
        nn.init.normal_(bias)  # type: ignore[arg-type]
    tables: Any = PlainTables()
    theirs = DLRM_DCN(tables, NUM_DENSE, [6, 7, DIM], [16, 4, 1], layers, 5).double()
    theirs.load_state_dict(model.dcn.state_dict())
    samples = samples_of(dense)
    plain = batch_of(samples, expanded=True)
    expected = (theirs, theirs(plain.dense, plain.sparse).squeeze(1))
    for batch in (batch_of(samples), plain):
        assert_same((model, model(batch)), expected, "dcn.")


@pytest.mark.parametrize("dense", ["by tuple", "by sample"])
def test_deepfm_of_a_deduplicated_batch_equals_torchrecs_on_a_plain_one(dense: str) -> None:
    model = torchrec_models.build_deepfm(replace(CONFIG, model=ONE), NUM_DENSE, PlainTables())
    tables: Any = PlainTables()
    theirs = SimpleDeepFMNN(NUM_DENSE, tables, 6, 5).double()
    theirs.load_state_dict(model.deepfm.state_dict())
    samples = samples_of(dense)
    plain = batch_of(samples, expanded=True)
    expected = (theirs, theirs(plain.dense, plain.sparse).squeeze(1))
    for batch in (batch_of(samples), plain):
        assert_same((model, torch.sigmoid(model(batch))), expected, "deepfm.")


class PlainWideDeep(nn.Module):
    """The same model sample by sample, on another's parameters."""

    def __init__(self, model: torchrec_models.WideDeepModel, num_dense: int) -> None:
        super().__init__()
        self.wide, self.deep, self.embedding = model.wide, model.deep, model.embedding
        self.num_dense = num_dense

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        pooled = self.embedding(batch.sparse).to_dict()
        logits: list[torch.Tensor] = []
        for sample in range(batch.num_samples):
            dense = batch.dense[sample]
            rows = [pooled[f][sample] for f in FEATURES]
            x = torch.cat([dense, *(row[1:] for row in rows)])
            logit = sum(row[0] for row in rows) + self.deep(x)
            if self.wide is not None:
                logit = logit + nn.functional.linear(dense, self.wide.weight, self.wide.bias)
            logits.append(logit)
        return torch.cat(logits)


@pytest.mark.parametrize("dense", ["by tuple", "by sample", "none"])
@pytest.mark.parametrize("top", [(), (16, 4)])
def test_wide_deep_of_a_deduplicated_batch_equals_its_formula(
    top: tuple[int, ...], dense: str
) -> None:
    samples = samples_of(dense)
    num_dense = 0 if dense == "none" else NUM_DENSE
    samples = replace(samples, dense=samples.dense[:, :num_dense])
    config = replace(CONFIG, model=ModelConfig(name="wide_deep", top_layers=top))
    model = torchrec_models.build_wide_deep(config, FEATURES, num_dense, PlainTables())
    plain = batch_of(samples, expanded=True)
    theirs = PlainWideDeep(model, num_dense)
    for batch in (batch_of(samples), plain):
        assert_same((model, model(batch)), (theirs, theirs(plain)), "")


def test_dense_features_are_fed_once_per_tuple_where_it_decides_them() -> None:
    by_tuple, by_sample = batch_of(samples_of("by tuple")), batch_of(samples_of("by sample"))
    part = dense_vectors(by_tuple, by_tuple.dense)
    assert part.name == "user"
    assert len(part.flat) == 4
    assert dense_vectors(by_sample, by_sample.dense).name is None


def results(model: Any, embedding: Embedding, batch: CollatedBatch) -> dict[str, torch.Tensor]:
    """Return logits and the gradient of everything that is trained."""
    model.zero_grad()
    embedding.open(single_microbatch(batch))
    logits = model(batch)
    loss_of(logits, batch).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    gradients |= {f"rows of {t}": g for t, g in row_gradients(embedding, batch).items()}
    return {"logits": logits.detach(), **gradients}


MODELS = {
    "dlrm": "{top_layers: [16, 8]}",
    "dcn": "{name: dcn, cross_rank: 4}",
    "deepfm": "{name: deepfm}",
    "deepfm of one layer": "{name: deepfm, bottom_layers: [8], top_layers: [8]}",
    "deepfm without bottom layers": "{name: deepfm, bottom_layers: []}",
    "wide and deep": "{name: wide_deep, top_layers: [16, 8]}",
}


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_shared_parts_leave_logits_and_gradients_of_real_batches(
    model: str, pooling: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", model=model, pooling=pooling)
    components = parts_of(job, dataset)
    trained: Any = components.model
    for step, expanded in itertools.product((0, 8, 31), (False, True)):
        batch = reader_of(job, dataset, expanded=expanded, find_shared=True).read(step)
        assert (batch.shared is None) == expanded
        trained.dedup = True
        found = results(trained, components.embedding, batch)
        trained.dedup = False
        expected = results(trained, components.embedding, batch)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            rtol, atol = (0.0, 0.0) if expanded else (1e-10, 1e-12)
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def test_first_layer_of_an_mlp_and_the_rest_are_the_whole() -> None:
    model = torchrec_models.build_deepfm(replace(CONFIG, model=DEEP), NUM_DENSE, PlainTables())
    layers: Any = model.deepfm.inter_arch.deep_fm.dense_module
    first, rest = first_layer(layers)
    x = torch.randn(3, first.in_features, dtype=torch.float64)
    assert torch.equal(rest(first(x)), layers(x))


@pytest.mark.parametrize("name", ["dlrm", "dcn", "deepfm"])
def test_model_without_top_layers_is_refused(name: Any) -> None:
    config = replace(CONFIG, model=ModelConfig(name=name, top_layers=()))
    message = f"top_layers must not be empty for {name}; add a width"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(torchrec_models, f"build_{name}")(config, NUM_DENSE, PlainTables())


def test_wide_deep_with_rows_of_one_number_is_refused() -> None:
    message = (
        "embedding_dim must be at least 2 for wide_deep, got 1; raise it: the first number of a "
        "row is the weight of the wide part"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig(model=ModelConfig(name="wide_deep"), embedding_dim=1)


def regrouped(batch: CollatedBatch, numbers: list[torch.Tensor]) -> CollatedBatch:
    """Return the batch with other tuples: each sample's, by group."""
    groups = {
        group: inverse_of(indices.numpy(), int(indices.max()) + 1)
        for group, indices in zip(batch.groups, numbers, strict=True)
    }
    return replace(batch, groups=groups)


def test_rows_are_combinations_of_tuples_and_stand_for_their_samples(
    dataset: Path, tmp_path: Path
) -> None:
    plain = reader_of(write_job(tmp_path / "job"), dataset).read(0)
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
    plain = reader_of(write_job(tmp_path / "job"), dataset).read(0)
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
