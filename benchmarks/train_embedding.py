"""Look-ups alone: forward, backward from a given gradient, and update, without a model.

Ours are those of our DLRM on deduplicated batches: a vector for each row and each sample of the
batch's sides, whose gradients the model hands back already summed over the samples of a row. `wide`
hands every sample its own vectors, as a model that is left as it is asks for. TorchRec's are
FBGEMM's fused kernel on repeated bags.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.train_peer import FusedTables, by_table, tables_of
from benchmarks.train_sides import (
    PARITY_STEPS,
    Timing,
    batches,
    in_turns,
    milliseconds,
    pass_over,
    ratios,
    shown,
)
from schemas.config.train import TrainConfig
from schemas.dataset import Dataset
from trainer.components import Components, build_components
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.microbatches import single_microbatch
from trainer.data.shared_features import SharedFeatures
from trainer.embedding.module import Embedding
from trainer.step import PhaseTimer

GRADIENT_SCALE = 1e-3
SEED = 11


@dataclass(frozen=True, slots=True)
class Given:
    """The gradient that comes back from the same imagined model on each side.

    Attributes:
        by_feature: (num_samples, dim) of each sample's vectors.
    """

    by_feature: Mapping[str, torch.Tensor]

    def wide(self, features: Sequence[str]) -> torch.Tensor:
        """Return (num_samples, num_features * dim)."""
        return torch.cat([self.by_feature[f] for f in features], dim=1)

    def pool_shared(self, sides: SharedFeatures) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what comes back for rows, summed over their samples, and for samples."""
        own = self._stacked(sides.per_sample_features)
        wide = self._stacked(sides.shared_features)
        rows = wide.new_zeros(sides.num_rows, *wide.shape[1:])
        return rows.index_add_(0, sides.rows.indices, wide), own

    def _stacked(self, features: Sequence[str]) -> torch.Tensor:
        some = next(iter(self.by_feature.values()))
        none = some.new_empty(len(some), 0, some.shape[1])
        return torch.cat([none, *(self.by_feature[f][:, None] for f in features)], dim=1)


def given_for(features: Sequence[str], num_samples: int, dim: int) -> Given:
    """Draw a gradient, the same for all steps of all sides."""
    rng = torch.Generator().manual_seed(SEED)
    return Given(
        {f: torch.randn(num_samples, dim, generator=rng) * GRADIENT_SCALE for f in features}
    )


def measure_embedding(dataset: Dataset, config: TrainConfig, timing: Timing) -> dict[str, Any]:
    """Time look-ups of all sides in turns on one dataset.

    Args:
        dataset: with its samples.
        config: train section of the DLRM's benchmark.
        timing: rounds and clock.
    """
    spec = spec_of(dataset, config.dtype)
    ours, plain = (batches(dataset, config, expanded=e) for e in (False, True))
    tables = tables_of(spec, config)
    given = given_for(tables.features, ours[0].num_samples, config.embedding_dim)
    dedup, wide = (build_components(spec, config) for _ in range(2))
    timer = PhaseTimer(time.perf_counter)
    sides = {
        "torchrec": _peer_steps(tables, plain, given),
        "wide": _wide_steps(wide.embedding, ours, given),
        "dedup": _sided_steps(dedup.embedding, ours, given, timer),
    }
    for number in range(min(PARITY_STEPS, len(ours))):
        for step in sides.values():
            step(number)
    worst = max(rows_apart(tables, components, ours[:PARITY_STEPS]) for components in (dedup, wide))
    timer.finish()
    seconds = in_turns({n: pass_over(s, len(ours)) for n, s in sides.items()}, timing)
    num_steps = (timing.rounds + 1) * len(ours)
    return {
        "num_steps": len(ours),
        "num_lookups": {"torchrec": _lookups(plain), "ours": _lookups(ours)},
        "parity": worst,
        "milliseconds": milliseconds(seconds),
        "phases_ms": {n: round(s / num_steps * 1e3, 2) for n, s in timer.finish()[1].items() if s},
        "wide": shown(ratios(seconds, "torchrec", "wide")),
        "dedup": shown(ratios(seconds, "torchrec", "dedup")),
    }


def _peer_steps(tables: FusedTables, plain: Sequence[Batch], given: Given) -> Any:
    fed = [by_table(batch.sparse, tables.features) for batch in plain]
    back = given.wide(tables.features)

    def step(number: int) -> float:
        tables(fed[number]).values().backward(back)
        return 0.0

    return step


def _wide_steps(embedding: Embedding, ours: Sequence[Batch], given: Given) -> Any:
    back = given.wide(ours[0].layout.keys)

    def step(number: int) -> float:
        batch = ours[number]
        embedding.open(single_microbatch(batch))
        embedding(batch.sparse).values().backward(back)
        embedding.update_from_backward()
        return 0.0

    return step


def _sided_steps(
    embedding: Embedding, ours: Sequence[Batch], given: Given, timer: PhaseTimer
) -> Any:
    """Return steps as the deduplicating DLRM makes them: wide where samples share nothing."""
    backs = [
        (given.wide(batch.layout.keys),)
        if batch.shared is None
        else given.pool_shared(batch.shared)
        for batch in ours
    ]

    def step(number: int) -> float:
        batch = ours[number]
        with timer("fetch"):
            embedding.open(single_microbatch(batch))
        with timer("forward"):
            if batch.shared is None:
                vectors = (embedding(batch.sparse).values(),)
            else:
                vectors = embedding.pool_shared(batch.sparse)
        with timer("backward"):
            torch.autograd.backward(vectors, backs[number])
        with timer("update"):
            embedding.update_from_backward()
        return 0.0

    return step


def rows_apart(tables: FusedTables, components: Components, given: Sequence[Batch]) -> float:
    """Return how far rows of both sides are apart, as a share of the largest number in them.

    Args:
        tables: of the peer.
        components: ours, with rows in memory.
        given: batches whose rows are compared.
    """
    worst = 0.0
    theirs = tables.weights()
    for batch in given:
        for table, lookup in batch.lookups.items():
            (records,) = components.store.fetch(0, {table: lookup.rows}).values()
            mine = torch.from_numpy(records.values)
            other = theirs[table][torch.from_numpy(lookup.rows)]
            worst = max(worst, float((mine - other).abs().max() / other.abs().max()))
    return worst


def _lookups(given: Sequence[Batch]) -> int:
    """Return the look-ups of a step."""
    return sum(len(t.positions) for b in given for t in b.lookups.values()) // len(given)
