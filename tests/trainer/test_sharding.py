"""Hints of a table become what TorchRec's own planner takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from presage.schemas.dataset.hints import TableHints, write_hints
from presage.schemas.errors import SchemaError
from presage.trainer.embedding.planner import OracleCacheStatistics, planner_constraints

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


TABLES = [
    EmbeddingBagConfig(
        name=f"{name}_rows",
        embedding_dim=16,
        num_embeddings=hints.num_rows,
        feature_names=list(hints.feature_names),
    )
    for name, hints in HINTS.items()
]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(EmbeddingBagCollection(tables=TABLES, device=torch.device("meta")))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planner_of_torchrec_plans_with_the_constraints(device: str) -> None:
    constraints = planner_constraints(HINTS, TABLES, world_size=2, max_miss_rate=0.1)
    if device == "cuda":
        for constraint in constraints.values():
            constraint.compute_kernels = ["fused_uvm_caching"]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device=device),
        batch_size=256,
        constraints=constraints,
    )
    plan: Any = planner.plan(model(), [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    sharding = plan.get_plan_for_module("0")
    assert set(sharding) == {table.name for table in TABLES}
    if device == "cuda":
        products = sharding["products_rows"]
        assert products.compute_kernel == "fused_uvm_caching"
        assert products.cache_params.load_factor == pytest.approx(0.16)


def test_estimates_of_torchrec_follow_the_load_factors() -> None:
    found: list[tuple[float, float]] = []
    for miss_rate in (0.5, 0.05):
        constraints = planner_constraints(HINTS, TABLES, max_miss_rate=miss_rate)
        for constraint in constraints.values():
            constraint.compute_kernels = ["fused_uvm_caching"]
            constraint.sharding_types = ["table_wise"]
        topology = Topology(world_size=2, compute_device="cuda")
        enumerator = EmbeddingEnumerator(topology, batch_size=512, constraints=constraints)
        options = enumerator.enumerate(model(), [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
        (products,) = (option for option in options if option.name == "products_rows")
        (shard,) = products.shards
        assert shard.storage is not None
        assert shard.perf is not None
        found.append((shard.storage.hbm, shard.perf.prefetch_compute))
    (small_bytes, many_misses), (large_bytes, few_misses) = found
    rows = (0.18 - 0.2 / 3) * 100_000  # between the load factors
    row_bytes = 4 * 16 + 16  # with TorchRec's own 16 of a cached row
    assert large_bytes - small_bytes == pytest.approx(rows * row_bytes, rel=1e-3)
    assert few_misses == pytest.approx(0.1 * many_misses)


def test_constraints_are_those_of_the_hints(tmp_path: Path) -> None:
    write_hints(tmp_path / "hints.json", HINTS)
    table = EmbeddingBagConfig(
        name="any", embedding_dim=4, num_embeddings=200_000, feature_names=["history"]
    )
    (found,) = planner_constraints(tmp_path / "hints.json", [table], world_size=3).values()
    assert found.pooling_factors == [12.5]
    assert found.num_poolings == [0.1]
    assert found.batch_sizes == [171]
    assert found.feature_names == ["history"]
    assert found.cache_params is not None
    assert found.cache_params.load_factor is None
    assert found.cache_params.stats is not None
    assert found.cache_params.stats.expected_lookups == 900.0
    assert found.cache_params.stats.expected_miss_rate(0.05) == pytest.approx(0.25)


def statistics_of(name: str) -> OracleCacheStatistics:
    return OracleCacheStatistics(HINTS[name], HINTS[name].num_rows)


def test_cache_statistics_follow_the_curve() -> None:
    products, people = map(statistics_of, ("products", "people"))
    rates = [products.expected_miss_rate(share) for share in (0.0, 0.05, 0.1, 0.2, 0.9, 1.0)]
    assert rates == pytest.approx([1.0, 0.625, 0.25, 0.0, 0.0, 0.0])
    assert products.cacheability == pytest.approx(0.1 * 0.625 + 0.1 * 0.125)
    assert people.expected_miss_rate(0.5) == 1.0
    assert 0 <= products.cacheability < people.cacheability <= 1


def test_load_factor_is_the_smallest_that_reaches_the_miss_rate() -> None:
    products, people = map(statistics_of, ("products", "people"))
    for rate in (0.0, 0.1, 0.25, 0.7, 0.99):
        factor = products.load_factor(rate)
        assert products.expected_miss_rate(factor) == pytest.approx(rate)
        assert products.expected_miss_rate(0.99 * factor) > rate
    assert products.load_factor(1.0) == 1 / 100_000  # TorchRec refuses 0
    assert people.load_factor(0.1) == 1 / 5_000  # no cache helps
    small = OracleCacheStatistics(HINTS["products"], 10_000)  # fewer than are used again
    assert small.load_factor(0.0) == 0.9999


def test_constraints_of_wrong_arguments_are_refused() -> None:
    def table(*features: str) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name="t", embedding_dim=4, num_embeddings=9, feature_names=list(features)
            )
        ]

    with pytest.raises(
        SchemaError, match="hints lack feature 'itme' of table 't'; did you mean 'it"
    ):
        planner_constraints(HINTS, table("user", "itme"))
    with pytest.raises(
        SchemaError, match="must be of one table of the hints, got people, products"
    ):
        planner_constraints(HINTS, table("item", "user"))
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        planner_constraints(HINTS, [], world_size=0)
    with pytest.raises(ValueError, match=r"max_miss_rate must be in \[0, 1\], got 5; pass a share"):
        planner_constraints(HINTS, [], max_miss_rate=5)
