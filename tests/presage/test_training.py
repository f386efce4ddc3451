"""Training loops that are not ours on the batches of `DataLoader`: TorchRec's and plain Torch's."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import presage
from presage.batch import Batch
from tests.trainer.runs import small_dataset

TABLES = {"article_rows": (300, ["clicked", "item", "viewed"]), "page_rows": (12, ["page"])}
FEATURES = ["clicked", "item", "viewed", "page", "price", "age"]
CPU = torch.device("cpu")


def loader(**options: Any) -> presage.DataLoader:
    options = {"batch_samples": 64, "shuffle": True, "features": FEATURES, **options}
    return presage.DataLoader(small_dataset(), **options)


WITH_MASKS: dict[str, Any] = {"epochs": 2, "seed": 5, "overlap_steps": 1}


class Ranker(nn.Module):
    """A small model that returns what TorchRec's pipelines want: the loss, and anything else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=8,
                feature_names=features,
                pooling=PoolingType.MEAN,
            )
            for name, (rows, features) in TABLES.items()
        ]
        self.rows = EmbeddingBagCollection(tables=tables, device=CPU)
        self.top = nn.Sequential(nn.Linear(4 * 8 + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.rows(batch.sparse_features).values()
        logits = self.top(torch.cat([pooled, batch.dense_features], dim=1)).squeeze(1)
        losses = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return batch.mean_loss(losses), logits


def test_tables_of_torchrec_are_those_of_the_job() -> None:
    batches = loader(features=["clicked", "item", "price"])
    (articles,) = batches.embedding_bag_configs(embedding_dim=8)
    job = presage.Dataset(small_dataset()).opened.job.data
    name = job.table_of_feature["item"]
    assert articles.name == f"{name}_rows"
    assert articles.num_embeddings == job.tables[name].num_rows
    assert sorted(articles.feature_names) == ["clicked", "item"]
    batch = next(iter(batches))
    pooled = EmbeddingBagCollection(tables=[articles], device=CPU)(batch.sparse_features)
    assert pooled.values().shape == (len(batch.labels), 2 * 8)


def test_printed_batch_has_shapes_and_padding() -> None:
    batch = next(iter(loader(features=["item", "price"])))
    first, labels, *_ = str(batch).splitlines()
    assert first == "batch of 64 samples, epoch 0, step 0"
    assert labels.split() == ["labels", "float32", "(64,)"]
    assert str(replace(batch, num_padding=3)).startswith("batch of 61 samples and 3 of padding,")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    address = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def losses_of(pipeline: Any, **options: Any) -> torch.Tensor:
    batches, losses = iter(loader(**options)), []
    while True:
        try:
            losses.append(pipeline.progress(batches)[0].detach())
        except StopIteration:
            return torch.stack(losses)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("sharded", [False, True])
def test_pipelines_of_torchrec_train_as_a_plain_loop(sharded: bool, alone: None) -> None:
    found: list[torch.Tensor] = []
    for kind in (TrainPipelineBase, TrainPipelineSparseDist):
        # TorchRec's CPU kernel of replicated tables refuses deduplicated batches.
        for deduplicated in (False,) if sharded else (False, True):
            model: nn.Module = Ranker()
            if sharded:
                model = DistributedModelParallel(model, device=CPU)
            pipeline: Any = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)
            found.append(losses_of(pipeline, deduplicated=deduplicated))
    for losses in found:
        assert losses.shape == (16,)
        torch.testing.assert_close(losses, found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("equal_batches", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sums_over_ranks_are_loss_and_gradient_of_the_global_batch(
    world_size: int, equal_batches: bool
) -> None:
    options = {"world_size": world_size, "equal_batches": equal_batches}
    loaders = [loader(rank=rank, **options) for rank in range(world_size)]
    model, sums = Ranker(), Ranker()
    for whole, *parts in list(zip(loader(), *loaders, strict=True))[-6:]:  # short ones, too
        loss, _ = model(whole)
        model.zero_grad()
        loss.backward()
        sums.zero_grad()
        losses = [sums(part)[0] for part in parts]
        for part in losses:
            part.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(torch.stack(losses).sum(), loss, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(sums.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, KeyedJaggedTensor):
            yield from (
                value.values(),
                value.lengths(),
                value.offsets(),
                value.inverse_indices()[1],
            )


def test_batches_move_between_devices() -> None:
    batch = next(iter(loader(**WITH_MASKS)))
    assert isinstance(batch, Pipelineable)
    assert batch.to("cpu").sparse_features is batch.sparse_features  # with its look-ups
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert [t.shape for t in tensors_of(moved)] == [t.shape for t in tensors_of(batch)]
    assert len(list(tensors_of(batch))) == 10
    assert (moved.epoch, moved.step, moved.global_weight) == (0, 0, batch.global_weight)


@pytest.mark.gpu
def test_batches_reach_a_gpu_from_pinned_memory() -> None:
    batch, device = next(iter(loader(**WITH_MASKS))), torch.device("cuda")
    pinned = batch.pin_memory()
    assert all(tensor.is_pinned() for tensor in tensors_of(pinned))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = pinned.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    moved.record_stream(torch.cuda.current_stream())
    for ours, theirs in zip(tensors_of(moved), tensors_of(batch), strict=True):
        assert torch.equal(ours.cpu(), theirs)
