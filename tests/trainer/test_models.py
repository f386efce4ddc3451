"""DLRM against TorchRec's own, and what holds for every model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from presage.schemas.config.train import ModelConfig, TrainConfig
from presage.trainer.models import attention, torchrec_models
from presage.trainer.models.torchrec_models import build_dlrm
from tests.trainer.model_samples import (
    CONFIG,
    DIM,
    FEATURES,
    NUM_DENSE,
    PlainTables,
    assert_equal_models,
    batch_of,
    gradients,
    random_samples,
)


def collection() -> EmbeddingBagCollection:
    """TorchRec's own tables."""
    torch.manual_seed(3)
    return EmbeddingBagCollection(PlainTables().embedding_bag_configs())


DLRM_CONFIG = replace(CONFIG, model=ModelConfig(bottom_layers=(6,), top_layers=(16, 4)))


def test_dlrm_of_a_deduplicated_batch_equals_torchrec_on_a_plain_one() -> None:
    samples = random_samples([0, 3, 9], [1, 0, 2, 1, 1])
    samples = replace(samples, dense=samples.dense.float())
    model = build_dlrm(replace(DLRM_CONFIG, dtype="float32"), NUM_DENSE, collection())
    theirs = DLRM(collection(), NUM_DENSE, [6, DIM], [16, 4, 1])
    theirs.load_state_dict(model.dlrm.state_dict())
    plain = batch_of(samples, expanded=True)
    expected = theirs(plain.dense, plain.sparse).squeeze(1)
    for batch in (batch_of(samples), plain):
        logits = model(batch)
        assert logits.shape == (5,)
        torch.testing.assert_close(logits, expected)
        for name, gradient in gradients(model, logits).items():
            theirs_of = gradients(theirs, theirs(plain.dense, plain.sparse).squeeze(1))
            torch.testing.assert_close(gradient, theirs_of[name.removeprefix("dlrm.")])


def test_dlrm_deduplicated_equals_expanded() -> None:
    samples = random_samples([0, 3, 9], [1, 0, 2, 1, 1])
    model = build_dlrm(DLRM_CONFIG, NUM_DENSE, PlainTables())
    expanded = model(batch_of(samples, expanded=True))
    assert expanded.dtype == torch.float64
    assert_equal_models((model, model(batch_of(samples))), (model, expanded))


def test_dlrm_without_dense_features_learns_one_vector_for_all_samples() -> None:
    samples = random_samples([2, 6], [0, 1, 1], num_dense=0)
    model = build_dlrm(DLRM_CONFIG, 0, PlainTables())
    vectors: list[Any] = []
    model.dlrm.get_submodule("dense_arch").register_forward_hook(
        lambda _, args, out: vectors.append(out)
    )
    logits = model(batch_of(samples))
    assert vectors[0].shape == (3, DIM)
    assert torch.equal(vectors[0], vectors[0][:1].expand(3, DIM))
    learned = gradients(model, logits)["dlrm.dense_arch.model._mlp.0._linear.weight"]
    assert learned.abs().sum() > 0


def build_either(name: str, config: TrainConfig) -> nn.Module:
    """Build a model by its name."""
    if name == "attention":
        return attention.build(config, FEATURES, NUM_DENSE, PlainTables())
    if name == "wide_deep":
        return torchrec_models.build_wide_deep(config, FEATURES, NUM_DENSE, PlainTables())
    return getattr(torchrec_models, f"build_{name}")(config, NUM_DENSE, PlainTables())


NAMES = ["dlrm", "dcn", "deepfm", "wide_deep", "attention"]


def dense_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters but those of the tables, by name."""
    return {n: p.detach() for n, p in model.named_parameters() if ".tables." not in f".{n}"}


@pytest.mark.parametrize("name", NAMES)
def test_build_draws_dense_parameters_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    first = dense_parameters(build_either(name, CONFIG))
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn), "the global generator must not move"
    torch.testing.assert_close(dense_parameters(build_either(name, CONFIG)), first, rtol=0, atol=0)
    other = dense_parameters(build_either(name, replace(CONFIG, seed=8)))
    assert all(not torch.equal(other[n], p) for n, p in first.items() if p.dim() > 1)


@pytest.mark.parametrize("name", NAMES)
def test_build_gives_each_precision_the_same_parameters(name: str) -> None:
    single = dense_parameters(build_either(name, replace(CONFIG, dtype="float32")))
    double = dense_parameters(build_either(name, CONFIG))
    for parameter, p in single.items():
        assert p.dtype == torch.float32
        assert double[parameter].dtype == torch.float64
        assert torch.equal(p.double(), double[parameter])


@pytest.mark.parametrize("name", NAMES)
def test_build_leaves_the_precision_of_the_embedding_alone(name: str) -> None:
    model = build_either(name, replace(CONFIG, dtype="float32"))
    tables = [p for n, p in model.named_parameters() if ".tables." in n]
    assert {p.dtype for p in tables} == {torch.float64}
