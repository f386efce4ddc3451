"""Our collections and batches in a training loop of one's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from tests.trainer.make_dataset import write_job
from tests.trainer.runs import reader_of
from tests.trainer.test_collections import config_of, score
from trainer.embedding.collections import EmbeddingBagCollection, rows_of

JOB_TABLES = {"users": ["user"], "articles": ["viewed", "clicked", "item"], "pages": ["page"]}


def job_tables() -> list[EmbeddingBagConfig]:
    sizes = {"users": 2**63 - 1, "articles": 300, "pages": 12}
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=sizes[name],
            embedding_dim=8,
            feature_names=features,
            pooling=PoolingType.MEAN,
        )
        for name, features in JOB_TABLES.items()
    ]


def test_batches_of_the_reader_train_alike_with_and_without_what_it_found(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    found: dict[str, list[torch.Tensor]] = {}
    for case in ("unique", "expanded", "by hand"):
        collection = EmbeddingBagCollection(job_tables(), optimizer=config_of("sgd"))
        reader = reader_of(job, dataset, expanded=case == "expanded")
        kept: list[torch.Tensor] = []
        for step in range(4):
            sparse: Any = reader.read(step).sparse_features
            if case == "by hand":
                sparse.batch = None
            with monkeypatch.context() as patch:
                if case == "unique":
                    patch.setattr("trainer.data.collate.table_lookups", None)  # must not be called
                values = collection(sparse).values()
            kept.append(values.detach())
            score(values).backward()
        found[case] = kept
    for other in ("by hand", "expanded"):
        for step in range(4):
            torch.testing.assert_close(
                found["unique"][step], found[other][step], rtol=1e-4, atol=1e-6
            )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "values": lambda sparse: sparse.values().remainder_(7),
    "a view of values": lambda sparse: sparse["viewed"].values().remainder_(7),
    "lengths": lambda sparse: sparse.lengths()[:2].copy_(sparse.lengths()[:2].flip(0)),
    "inverse indices": lambda sparse: sparse.inverse_indices()[1].zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_tensors_that_are_changed_in_place_are_looked_up_as_they_are(
    change: Callable[[Any], Any], dataset: Path, tmp_path: Path
) -> None:
    reader = reader_of(write_job(tmp_path / "job", dtype="float32"), dataset)
    found: list[torch.Tensor] = []
    for by_hand in (False, True):
        sparse: Any = reader.read(0).sparse_features
        change(sparse)
        if by_hand:
            sparse.batch = None
        collection = EmbeddingBagCollection(job_tables(), optimizer=config_of("sgd"))
        values = collection(sparse).values()
        score(values).backward()
        found += [values.detach(), rows_of(collection, "articles", torch.arange(300))]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_tensors_made_in_inference_mode_are_looked_up(dataset: Path, tmp_path: Path) -> None:
    with torch.inference_mode():
        reader = reader_of(write_job(tmp_path / "job", dtype="float32"), dataset)
        sparse: Any = reader.read(0).sparse_features
        collection = EmbeddingBagCollection(job_tables())
        assert len(collection(sparse).values())
