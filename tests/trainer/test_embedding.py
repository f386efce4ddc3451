"""The embedding of a step against torch's own modules and optimizers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from presage.schemas.config.job import load_job
from presage.schemas.config.train import SparseOptimizerConfig
from presage.trainer.data.collate import CollatedBatch, single_microbatch
from presage.trainer.data.lookup import take_unsorted
from presage.trainer.embedding.kernels.interface import rule_at, state_width
from presage.trainer.embedding.kernels.torch_ops import update_rows
from presage.trainer.embedding.module import Embedding
from presage.trainer.stores.store import Store
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import parts_of, reader_of, row_gradients

NUM_ITEMS = 300


def weights_of(store: Store, num_rows: int) -> torch.Tensor:
    """Return a whole table, rows never trained included."""
    return torch.from_numpy(store.fetch(0, {"items": np.arange(num_rows)})["items"].values)


def reference_pooled(batch: CollatedBatch, feature: str, table: nn.EmbeddingBag) -> torch.Tensor:
    jagged = batch.sparse[feature]
    bags = table(jagged.values(), jagged.offsets()[:-1])
    return bags[batch.inverse_of(feature)]


def train_both(
    batch: CollatedBatch, embedding: Embedding, table: nn.EmbeddingBag, target: torch.Tensor
) -> None:
    embedding.open(single_microbatch(batch))
    pooled = embedding(batch.sparse).to_dict()
    features = ("clicked", "item", "viewed")
    for feature in features:
        torch.testing.assert_close(pooled[feature], reference_pooled(batch, feature, table))
    torch.stack([(pooled[f] * target).sin().sum() for f in features]).sum().backward()
    expected = [reference_pooled(batch, f, table) for f in features]
    torch.stack([(e * target).sin().sum() for e in expected]).sum().backward()
    embedding.update_from_backward()


REFERENCES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


@pytest.mark.parametrize("optimizer", REFERENCES)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("expanded", [False, True])
def test_embedding_trains_like_embedding_bag(
    optimizer: str, pooling: str, expanded: bool, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", pooling=pooling, optimizer=optimizer)
    config = load_job(job).train
    parts, reader = parts_of(job, dataset), reader_of(job, dataset, expanded=expanded)
    first = weights_of(parts.store, NUM_ITEMS)
    table = nn.EmbeddingBag(NUM_ITEMS, 8, mode=pooling, _weight=first.clone())
    eps = {"eps": config.sparse_optimizer.eps} if optimizer == "adagrad" else {}
    reference = REFERENCES[optimizer](table.parameters(), lr=0.05, **eps)
    target = torch.linspace(-1, 2, 8, dtype=torch.float64)
    for step in range(6):
        reference.zero_grad()
        train_both(reader.read(step), parts.embedding, table, target)
        reference.step()
    trained = weights_of(parts.store, NUM_ITEMS)
    assert (trained != first).any()
    torch.testing.assert_close(trained, table.weight.detach(), rtol=1e-7, atol=1e-9)


def test_sequence_gives_the_rows_of_each_unique_list(dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    parts, batch = parts_of(job, dataset), reader_of(job, dataset).read(3)
    parts.embedding.open(single_microbatch(batch))
    values, offsets = parts.embedding.sequence(batch.sparse, "viewed")
    every = weights_of(parts.store, NUM_ITEMS).requires_grad_()
    jagged = batch.sparse["viewed"]
    assert torch.equal(offsets, jagged.offsets())
    assert torch.equal(values, every[jagged.values()])
    scale = torch.arange(values.numel(), dtype=torch.float64).view_as(values)
    (values * scale).sum().backward()
    (every[jagged.values()] * scale).sum().backward()
    rows = batch.lookups["items"].rows
    gradient = row_gradients(parts.embedding, batch)["items"]
    assert every.grad is not None
    torch.testing.assert_close(gradient, every.grad[torch.from_numpy(rows)])


def test_backward_of_look_ups_is_their_derivative() -> None:
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4, 2, 2, 4])
    assert torch.autograd.gradcheck(lambda w: take_unsorted(w, indices), (weight,))


def test_update_rows_rowwise_adagrad_divides_by_the_root_of_summed_mean_squares() -> None:
    config = SparseOptimizerConfig(name="rowwise_adagrad", learning_rate=0.1, eps=1e-8)
    values = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    state = torch.zeros(1, state_width(config, 2), dtype=torch.float64)
    for gradient in ([3.0, 4.0], [0.0, 2.0]):
        gradients = torch.tensor([gradient], dtype=torch.float64)
        update_rows(rule_at(config, 0), values, state, gradients)
    # s = (9 + 16) / 2 = 12.5, then 12.5 + 4 / 2 = 14.5
    assert state.item() == pytest.approx(14.5)
    assert values[0, 0].item() == pytest.approx(1 - 0.1 * 3 / 12.5**0.5)
    assert values[0, 1].item() == pytest.approx(2 - 0.1 * 4 / 12.5**0.5 - 0.1 * 2 / 14.5**0.5)
