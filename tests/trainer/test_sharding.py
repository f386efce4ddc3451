"""Hints of a table become what TorchRec's own planner takes."""

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from presage.schemas.dataset.hints import TableHints
from presage.trainer.embedding.collections import OracleCacheStatistics, planner_constraints

HINTS = {
    "products": TableHints(
        feature_names=("item", "history"),
        pooling_factors=(1.0, 12.5),
        num_poolings=(0.8, 0.1),
        batch_sizes=(512, 512),
        num_rows=100_000,
        num_unique_rows=20_000,
        unique_rows_per_step=900.0,
        hot_rows=((0.01, 0.5),),
        lru_misses=((0.0, 1.0), (0.1, 0.25), (0.2, 0.0)),
    ),
    "people": TableHints(
        feature_names=("user",),
        pooling_factors=(1.0,),
        num_poolings=(0.1,),
        batch_sizes=(512,),
        num_rows=5_000,
        num_unique_rows=400,
        unique_rows_per_step=50.0,
        hot_rows=(),
        lru_misses=((0.0, 1.0),),
    ),
}


def test_planner_of_torchrec_plans_with_the_constraints() -> None:
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=16,
            num_embeddings=hints.num_rows,
            feature_names=list(hints.feature_names),
        )
        for name, hints in HINTS.items()
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        batch_size=512,
        constraints=planner_constraints(HINTS),
    )
    plan = planner.plan(model, [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    assert set(plan.get_plan_for_module("0") or {}) == set(HINTS)  # type: ignore[arg-type]


def test_constraints_are_those_of_the_hints() -> None:
    found = planner_constraints(HINTS)["products"]
    assert found.pooling_factors == [1.0, 12.5]
    assert found.num_poolings == [0.8, 0.1]
    assert found.feature_names == ["item", "history"]
    assert found.cache_params is not None
    assert found.cache_params.stats is not None
    assert found.cache_params.stats.expected_lookups == 900.0


def test_cache_statistics_follow_the_curve() -> None:
    products, people = (OracleCacheStatistics(HINTS[name]) for name in ("products", "people"))
    rates = [products.expected_miss_rate(share) for share in (0.0, 0.05, 0.1, 0.2, 0.9, 1.0)]
    assert rates == pytest.approx([1.0, 0.625, 0.25, 0.0, 0.0, 0.0])
    assert products.cacheability == pytest.approx(0.1 * 0.625 + 0.1 * 0.125)
    assert people.expected_miss_rate(0.5) == 1.0
    assert 0 <= products.cacheability < people.cacheability <= 1
