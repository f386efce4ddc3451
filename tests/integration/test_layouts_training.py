"""What the trainer reads does not depend on how the groups are stored."""

from pathlib import Path

import pytest
import torch

from presage.schemas.dataset.opened import open_dataset
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.decode import spec_of
from presage.trainer.data.reader import Reader
from tests.pipelines.shifting import STORAGES, built_in_every_layout


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One log, built in every layout."""
    return built_in_every_layout(tmp_path_factory.mktemp("layouts"))


def batches(path: Path, expanded: bool) -> list[CollatedBatch]:
    dataset = open_dataset(path)
    order = dataset.order(32, 1, "none", 0)
    reader = Reader(dataset, order, spec_of(dataset, "float32"), expanded=expanded)
    return [*(reader.read(s) for s in range(order.num_steps)), *reader.evaluation_batches()]


@pytest.mark.slow
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("name", [n for n in STORAGES if n != "plain"])
def test_batches_are_the_same_in_every_layout(
    datasets: dict[str, Path], name: str, expanded: bool
) -> None:
    pairs = zip(
        batches(datasets["plain"], expanded), batches(datasets[name], expanded), strict=True
    )
    count = 0
    for one, other in pairs:
        count += one.num_samples
        for part in ("labels", "weights", "dense"):
            assert torch.equal(getattr(one, part), getattr(other, part))
        assert one.sparse.keys() == other.sparse.keys()
        if name == "auto" and not expanded:  # which stores the items per sample
            continue
        for part in ("values", "lengths", "offsets"):
            assert torch.equal(getattr(one.sparse, part)(), getattr(other.sparse, part)())
        for group, inverse in one.groups.items():
            assert torch.equal(inverse.indices, other.groups[group].indices)
    assert count == 2000
