"""Columns of histories as features of a loader: lists of a batch, and rows that are planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

import presage
from presage.batch import Batch
from presage.pipelines.cli import main
from presage.schemas.errors import SchemaError
from presage.trainer.embedding.collections import EmbeddingBagCollection
from tests.pipelines.history_days import build_days, write_days
from tests.shared import make_once

FEATURES = ["item", "plays.item", "shown.item"]
HISTORIES: dict[str, int | None] = {"plays": 7, "shown": 3}


def _days(folder: Path) -> None:
    days = write_days(folder / "log", num_days=3, before="time", texts=False, delay=4000, seed=3)
    build_days(days, folder / "dataset")
    options = [f"--history={name}={length}" for name, length in HISTORIES.items()]
    assert main(["oracle", str(folder / "dataset"), "--reindex", "--json", *options]) == 0


def loader_of(**options: Any) -> presage.DataLoader:
    """Return a loader of the days with columns of histories as features."""
    dataset = make_once(_days) / "dataset"
    options = {"batch_samples": 32, "histories": HISTORIES, "features": FEATURES} | options
    return presage.DataLoader(dataset, **options)


def lists_of(batch: Batch, feature: str) -> list[list[int]]:
    """Return the list of each sample."""
    sparse = batch.sparse_features
    bags = [each.tolist() for each in sparse[feature].to_dense()]
    if (indices := sparse.inverse_indices_or_none()) is None:
        return bags
    return [bags[i] for i in indices[1][sparse.keys().index(feature)].tolist()]


@pytest.mark.parametrize("deduplicated", [True, False])
def test_list_of_a_sample_has_the_events_that_it_sees(deduplicated: bool) -> None:
    plain = loader_of(features=["item"], deduplicated=deduplicated, keep=["id"])
    num_shared = 0
    for batch, expected in zip(
        loader_of(deduplicated=deduplicated, keep=["id"]), plain, strict=True
    ):
        assert torch.equal(batch.kept["id"], expected.kept["id"])
        assert list(batch.histories["plays"].values) == ["kind"]
        for name in HISTORIES:
            history, other = batch.histories[name], expected.histories[name]
            assert torch.equal(history.lengths, other.lengths)
            copies = other.materialize(["item"])["item"].to_dense()
            assert lists_of(batch, f"{name}.item") == [each.tolist() for each in copies]
            for pair in zip(history.tensors[-5:], other.tensors[-5:], strict=True):
                assert torch.equal(*pair), "events are the same, each once"
        num_shared += batch.num_samples - len(batch.sparse_features["plays.item"].lengths())
    assert (num_shared > 0) == deduplicated


def test_window_may_begin_at_a_multiple_of_a_step() -> None:
    exact = loader_of(features=None)
    stepped = loader_of(features=None, histories={"plays": (7, 4), "shown": 3})
    lengths: set[int] = set()
    for batch, other in zip(exact, stepped, strict=True):
        more = other.histories["plays"].lengths - batch.histories["plays"].lengths
        assert (more[batch.histories["plays"].lengths < 7] == 0).all()
        assert torch.equal(batch.histories["shown"].ends, other.histories["shown"].ends)
        lengths |= set(more.tolist())
    assert lengths == {0, 1, 2, 3}


def test_rows_behind_a_planned_cache_have_the_bits_of_rows_in_memory(tmp_path: Path) -> None:
    losses_of: list[list[float]] = []
    kinds: tuple[Literal["memory", "log"], ...] = ("memory", "log")
    for store in kinds:
        loader = loader_of(lookups=True)
        with presage.open_rows(
            loader, store, tmp_path / store, lookahead=1, prefetch_steps=1
        ) as rows:
            config = EmbeddingBagConfig(
                name="items",
                embedding_dim=8,
                num_embeddings=1000,
                feature_names=FEATURES,
                pooling=PoolingType.SUM,
            )
            table = EmbeddingBagCollection([config], seed=0, source=rows)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
            losses: list[float] = []
            for batch in loader:
                rows.advance(batch)
                loss = (table(batch.sparse_features).values().sum(1) - batch.labels).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        losses_of.append(losses)
    assert losses_of[0] == losses_of[1]
    assert len(set(losses_of[0])) == len(loader_of())


def test_masks_name_the_rows_of_the_batches_around() -> None:
    batches = list(loader_of(overlap_steps=1))
    rows = [set(batch.sparse_features.values().tolist()) for batch in batches]
    for step, batch in enumerate(batches):
        values = batch.sparse_features.values().tolist()
        following = rows[step + 1] if step + 1 < len(rows) else set[int]()
        assert batch.overlaps_next is not None
        assert batch.overlaps_next.tolist() == [row in following for row in values]


def test_slots_are_planned_for_the_rows_of_events(tmp_path: Path) -> None:
    loader = loader_of()
    slots = presage.PlannedSlots(loader, cache_rows={"items": 180}, directory=tmp_path)
    [config] = slots.embedding_bag_configs(8)
    assert config.feature_names == FEATURES


def test_what_cannot_be_a_feature_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"no sparse or dense feature is called 'plays\.kinds'"):
        loader_of(features=["item", "plays.kinds"])
    with pytest.raises(ValueError, match=r"must be a number of events, as features has 'plays"):
        loader_of(histories={"plays": None, "shown": 3})
    with pytest.raises(SchemaError, match=r"history plays=9:1.*--history plays=9:1"):
        loader_of(histories={"plays": 9, "shown": 3}, overlap_steps=1)
