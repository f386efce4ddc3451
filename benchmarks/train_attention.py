"""The attention model on our deduplicated batches, and on expanded ones over FBGEMM's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks.train_peer import FusedTables, by_table
from benchmarks.train_sides import (
    Timing,
    batches,
    in_turns,
    milliseconds,
    ours_of,
    parity,
    pass_over,
    peer_of,
    ratios,
    shown,
)
from schemas.config.train import ModelConfig, TrainConfig
from schemas.dataset import Dataset
from trainer.data.collate import Batch, features_of_tables
from trainer.data.decode import BatchSpec, spec_of
from trainer.embedding.module import TableSpec
from trainer.models import attention

STEPS = 4
"""Of a round: a step of the expanded side takes seconds."""
READ = {
    "mind": ("history", "item"),
    "kuairand": ("watch_seq", "video_id"),
    "demo": ("clicked_items", "item_id"),
}
"""The history of each log, and the feature that queries it."""


class FusedSequences(nn.Module):
    """Pooled and unpooled look-ups of FBGEMM's fused kernel, one bag per sample."""

    def __init__(self, spec: BatchSpec, config: TrainConfig) -> None:
        """Make the tables: the history's gives rows, the others give sums.

        Args:
            spec: features and tables.
            config: its model names the history.
        """
        super().__init__()
        self._dim = config.embedding_dim
        history = spec.table_of[cast(str, config.model.history)]
        tables = [
            TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
            for name, features in features_of_tables(spec).items()
        ]
        self._rows = FusedTables([t for t in tables if t.name == history], config, pooled=False)
        self._sums = FusedTables([t for t in tables if t.name != history], config)
        self._read: tuple[torch.Tensor, KeyedJaggedTensor] | None = None

    def cut(self, sparse: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Return the bags of the history's table and those of the others, as the kernels want."""
        return by_table(sparse, self._rows.features), by_table(sparse, self._sums.features)

    def forward(self, sparse: Any) -> KeyedTensor:
        """Return the sums of all bags.

        Args:
            sparse: what `cut` returns.
        """
        of_rows, of_sums = sparse
        rows = self._rows.rows(of_rows)
        self._read = rows, of_rows
        # One bag after the other, feature by feature: (num_features * num_samples, dim).
        summed = nn.functional.embedding_bag(
            torch.arange(len(rows)), rows, of_rows.offsets(), mode="sum", include_last_offset=True
        )
        wide = summed.view(len(self._rows.features), -1, self._dim).transpose(0, 1).flatten(1)
        keys = [*self._rows.features, *self._sums.features]
        values = torch.cat([wide, self._sums(of_sums).values()], dim=1)
        return KeyedTensor(keys, [self._dim] * len(keys), values)

    def sequence(self, sparse: Any, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of each sample's bag of a feature, and their offsets."""
        assert self._read is not None, "rows are read by the call before"
        rows, bags = self._read
        at = bags.keys().index(feature) * bags.stride()
        offsets = bags.offsets()[at : at + bags.stride() + 1]
        return rows[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]


def measure_attention(
    name: str, dataset: Dataset, config: TrainConfig, timing: Timing
) -> dict[str, Any]:
    """Time both sides in turns on one dataset.

    Args:
        name: of its log.
        dataset: with its samples.
        config: train section of the DLRM's benchmark; the model is replaced.
        timing: rounds and clock.
    """
    history, target = READ[name]
    model = ModelConfig(
        name="attention",
        history=history,
        target=target,
        bottom_layers=config.model.bottom_layers,
        top_layers=config.model.top_layers,
    )
    config = replace(config, model=model)
    spec = spec_of(dataset, config.dtype)
    ours, plain = (batches(dataset, config, expanded=e, count=STEPS) for e in (False, True))
    step, timer = ours_of(spec, config, ours)
    tables = FusedSequences(spec, config)
    expanded = attention.build(config, spec.sparse, len(spec.dense), tables)
    fed = _fed(plain, tables)
    peer = peer_of(expanded, config, plain, lambda number: expanded(fed[number]))
    sides = {"torchrec": peer, "ours": step}
    worst = parity(sides, "torchrec", len(ours))
    timer.finish()
    seconds = in_turns({n: pass_over(s, len(ours)) for n, s in sides.items()}, timing)
    num_steps = (timing.rounds + 1) * len(ours)
    return {
        "num_steps": len(ours),
        "parity": worst,
        "milliseconds": milliseconds(seconds),
        "phases_ms": {n: round(s / num_steps * 1e3, 2) for n, s in timer.finish()[1].items() if s},
        "unique_histories": len(ours[0].groups[group].offsets) - 1
        if (group := ours[0].group_of[history]) is not None
        else ours[0].num_samples,
        **shown(ratios(seconds, "torchrec", "ours")),
    }


def _fed(given: Sequence[Batch], tables: FusedSequences) -> list[Batch]:
    """Return batches whose bags are cut for the kernels, before the clock starts."""
    return [replace(batch, sparse=cast(Any, tables.cut(batch.sparse))) for batch in given]
