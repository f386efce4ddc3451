"""Our collections and batches in a training loop of one's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from tests.trainer.make_dataset import write_job
from tests.trainer.runs import reader_of
from tests.trainer.test_collections import config_of, score
from trainer.embedding.collections import EmbeddingBagCollection

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
