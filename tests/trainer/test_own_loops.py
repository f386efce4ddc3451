"""Our collections and batches in a training loop of one's own, also with weights of entries."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.trainer.data.collate import single_microbatch
from presage.trainer.data.decode import spec_of
from presage.trainer.embedding.collections import EmbeddingBagCollection, rows_of
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, losses_of, parts_of, reader_of, row_gradients, run_job
from tests.trainer.test_collections import config_of, score

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


def test_batches_train_alike_with_and_without_the_look_ups_of_the_reader(
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
                    patch.setattr(
                        "presage.trainer.data.kjt_lookups.table_lookups", None
                    )  # must not be called
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


WEIGHTS = ", clicked_weights"


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weighted")
    job = write_job(folder / "job", weights=WEIGHTS)
    return make_dataset(folder / "dataset", job, SEGMENTS)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_weighted_bags_and_their_gradients_are_torchs(
    pooling: str, expanded: bool, weighted: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", weights=WEIGHTS, pooling=pooling)
    parts, batch = (parts_of(job, weighted), reader_of(job, weighted, expanded=expanded).read(3))
    parts.embedding.open(single_microbatch(batch))
    pooled = parts.embedding(batch.sparse).to_dict()
    every = parts.store.fetch(0, {"items": np.arange(300)})["items"].values
    table = torch.from_numpy(every).requires_grad_()
    expected: list[torch.Tensor] = []
    features = ("clicked", "item", "viewed")
    for feature in features:
        jagged = batch.sparse[feature]
        assert (jagged.weights() != 1).any() == (feature == "clicked")
        bags = F.embedding_bag(
            jagged.values(),
            table,
            jagged.offsets(),
            mode="sum",
            per_sample_weights=jagged.weights(),
            include_last_offset=True,
        )
        if pooling == "mean":
            bags = bags / jagged.lengths().clamp(min=1)[:, None]
        expected.append(bags[batch.inverse_of(feature)])
        torch.testing.assert_close(pooled[feature], expected[-1], rtol=1e-12, atol=1e-12)
    torch.stack([pooled[f] for f in features]).sin().sum().backward()
    torch.stack(expected).sin().sum().backward()
    rows = batch.lookups["items"].rows
    gradient = row_gradients(parts.embedding, batch)["items"]
    assert table.grad is not None
    torch.testing.assert_close(gradient, table.grad[torch.from_numpy(rows)], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_weighted_run_deduplicated_has_the_losses_of_expanded(
    weighted: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", weights=WEIGHTS, epochs="1")
    for name in ("unique", "expanded"):
        run_job(job, weighted, tmp_path / name, expanded=name == "expanded")
    unique, expanded = losses_of(tmp_path / "unique"), losses_of(tmp_path / "expanded")
    np.testing.assert_allclose(unique, expanded, rtol=1e-10)


def test_weighted_collection_uses_the_look_ups_of_the_reader(
    weighted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job", weights=WEIGHTS, dtype="float32")
    collection = EmbeddingBagCollection(job_tables(), is_weighted=True)
    unweighted = EmbeddingBagCollection(job_tables())
    sparse = reader_of(job, weighted).read(0).sparse
    plain = unweighted(sparse)["clicked"]
    with monkeypatch.context() as patch:
        patch.setattr("presage.trainer.data.kjt_lookups.table_lookups", None)
        found = collection(sparse)["clicked"]
    assert not torch.equal(found, plain)
    sparse.found = None  # type: ignore[attr-defined]
    torch.testing.assert_close(collection(sparse)["clicked"], found)


REFUSED = {
    "of another type": (
        ('name: "clicked_weights" type: FLOAT', 'name: "clicked_weights" type: INT'),
        "weights of list entries must be a FLOAT list of role kept, got 'clicked_weights' of type "
        "INT and role kept; declare it so, or rename it",
    ),
    "no list": (
        (
            'type: FLOAT value_count { min: 0 } annotation { tag: "kept" }',
            'type: FLOAT annotation { tag: "kept" }',
        ),
        "weights of list entries must be a FLOAT list of role kept, got 'clicked_weights' of type "
        "FLOAT and role kept; declare it so, or rename it",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_weights_that_do_not_fit_are_refused(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", weights=WEIGHTS)
    schema = job.parent / "schema.pbtxt"
    assert change[0] in schema.read_text()
    schema.write_text(schema.read_text().replace(*change))
    dataset = make_dataset(tmp_path / "dataset", job, [[(64, 0)]])
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        spec_of(open_dataset(dataset), load_job(job).train.dtype)
