"""Training benchmarks besides the pooled models: attention, lookups alone, reading from Parquet.

Attention trains our model on our deduplicated batches, and on expanded ones over FBGEMM's tables.

Lookups alone are forward, backward from a given gradient, and update, without a model. Ours are
those of our DLRM on deduplicated batches: a vector for each shared row and each sample, with
gradients already summed over the samples of a row. `wide` returns every sample's own vectors, as an
unchanged model requires. The peer is FBGEMM's fused kernel on repeated bags.

Reading trains from our dataset, against the same samples in one plain file, which holds TorchRec's
input: a row per sample in training order, lists repeated for every sample, ids already mapped to
table rows (ours are mapped when they are read), zstd, row groups of 65,536. Both sides prefetch in
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks.train_sides import (
    PARITY_STEPS,
    FusedTables,
    Timing,
    alternate,
    dlrm_of,
    fused_tables,
    milliseconds,
    our_step,
    parity,
    pass_over,
    peer_step,
    ratios,
    read_batches,
    reader_of,
    sort_by_table,
    summarize,
)
from schemas.config.train import ModelConfig, TrainConfig
from schemas.dataset.opened import Dataset
from schemas.layout import SEGMENTS
from trainer.components import Components, build_components, dense_optimizer
from trainer.data.collate import Batch, features_of_tables
from trainer.data.decode import BatchSpec, spec_of
from trainer.data.microbatches import single_microbatch
from trainer.data.reader import prefetch
from trainer.data.shared import SharedFeatures
from trainer.embedding.module import Embedding, TableSpec
from trainer.models import attention
from trainer.step import PhaseTimer, loss_of, train_batch

ATTENTION_STEPS = 4
"""Per round: a step of the expanded side takes seconds."""
HISTORY_AND_TARGET = {
    "mind": ("history", "item"),
    "kuairand": ("watch_seq", "video_id"),
    "demo": ("clicked_items", "item_id"),
}
"""History of each log, and the feature that queries it."""


class FusedSequences(nn.Module):
    """Pooled and unpooled lookups of FBGEMM's fused kernel, one bag per sample."""

    def __init__(self, spec: BatchSpec, config: TrainConfig) -> None:
        """Allocate the tables: the history's returns rows, the others return sums.

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
        self._last: tuple[torch.Tensor, KeyedJaggedTensor] | None = None

    def split(self, sparse: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Return the bags of the history's table and those of the other tables."""
        of_rows = sort_by_table(sparse, self._rows.features)
        return of_rows, sort_by_table(sparse, self._sums.features)

    def forward(self, sparse: Any) -> KeyedTensor:
        """Return the sums of all bags.

        Args:
            sparse: the result of `split`.
        """
        of_rows, of_sums = sparse
        rows = self._rows.rows(of_rows)
        self._last = rows, of_rows
        # Bags are ordered by feature: (num_features * num_samples, dim).
        summed = nn.functional.embedding_bag(
            torch.arange(len(rows)), rows, of_rows.offsets(), mode="sum", include_last_offset=True
        )
        wide = summed.view(len(self._rows.features), -1, self._dim).transpose(0, 1).flatten(1)
        keys = [*self._rows.features, *self._sums.features]
        values = torch.cat([wide, self._sums(of_sums).values()], dim=1)
        return KeyedTensor(keys, [self._dim] * len(keys), values)

    def sequence(self, sparse: Any, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of each sample's bag of a feature, and their offsets."""
        assert self._last is not None, "forward must be called before"
        rows, bags = self._last
        first = bags.keys().index(feature) * bags.stride()
        offsets = bags.offsets()[first : first + bags.stride() + 1]
        return rows[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]


def measure_attention(
    name: str, dataset: Dataset, config: TrainConfig, timing: Timing
) -> dict[str, Any]:
    """Measure attention on one dataset.

    Args:
        name: of its log.
        dataset: with its samples.
        config: train section of the DLRM's benchmark; the model is replaced.
        timing: rounds and clock.
    """
    history, target = HISTORY_AND_TARGET[name]
    model = ModelConfig(
        name="attention",
        history=history,
        target=target,
        bottom_layers=config.model.bottom_layers,
        top_layers=config.model.top_layers,
    )
    config = replace(config, model=model)
    spec = spec_of(dataset, config.dtype)
    ours, plain = (
        read_batches(dataset, config, expanded=e, count=ATTENTION_STEPS) for e in (False, True)
    )
    step, timer = our_step(spec, config, ours)
    tables = FusedSequences(spec, config)
    expanded = attention.build(config, spec.sparse, len(spec.dense), tables)
    inputs = [replace(batch, sparse=cast(Any, tables.split(batch.sparse))) for batch in plain]
    peer = peer_step(expanded, config, plain, lambda number: expanded(inputs[number]))
    sides = {"torchrec": peer, "ours": step}
    difference = parity(sides, "torchrec", len(ours))
    timer.finish()
    seconds = alternate({n: pass_over(s, len(ours)) for n, s in sides.items()}, timing)
    num_steps = (timing.rounds + 1) * len(ours)
    return {
        "num_steps": len(ours),
        "parity": difference,
        "milliseconds": milliseconds(seconds),
        "phases_ms": {n: round(s / num_steps * 1e3, 2) for n, s in timer.finish()[1].items() if s},
        "unique_histories": len(ours[0].groups[group].offsets) - 1
        if (group := ours[0].group_of[history]) is not None
        else ours[0].num_samples,
        **summarize(ratios(seconds, "torchrec", "ours")),
    }


GRADIENT_SCALE = 1e-3
SEED = 11


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """The gradient of the lookups' output, the same on each side.

    Attributes:
        by_feature: (num_samples, dim) of each sample's vectors.
    """

    by_feature: Mapping[str, torch.Tensor]

    def wide(self, features: Sequence[str]) -> torch.Tensor:
        """Return (num_samples, num_features * dim)."""
        return torch.cat([self.by_feature[f] for f in features], dim=1)

    def pool_shared(self, shared: SharedFeatures) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of shared rows, summed over their samples, and of samples."""
        own = self._stacked(shared.per_sample_features)
        wide = self._stacked(shared.shared_features)
        rows = wide.new_zeros(shared.num_rows, *wide.shape[1:])
        return rows.index_add_(0, shared.rows.indices, wide), own

    def _stacked(self, features: Sequence[str]) -> torch.Tensor:
        some = next(iter(self.by_feature.values()))
        none = some.new_empty(len(some), 0, some.shape[1])
        return torch.cat([none, *(self.by_feature[f][:, None] for f in features)], dim=1)


def draw_gradient(features: Sequence[str], num_samples: int, dim: int) -> OutputGradient:
    """Draw the gradient of all steps of all sides."""
    rng = torch.Generator().manual_seed(SEED)
    return OutputGradient(
        {f: torch.randn(num_samples, dim, generator=rng) * GRADIENT_SCALE for f in features}
    )


def measure_embedding(dataset: Dataset, config: TrainConfig, timing: Timing) -> dict[str, Any]:
    """Measure lookups alone on one dataset."""
    spec = spec_of(dataset, config.dtype)
    ours, plain = (read_batches(dataset, config, expanded=e) for e in (False, True))
    tables = fused_tables(spec, config)
    gradient = draw_gradient(tables.features, ours[0].num_samples, config.embedding_dim)
    dedup, wide = (build_components(spec, config) for _ in range(2))
    timer = PhaseTimer(time.perf_counter)
    sides = {
        "torchrec": _fused_step(tables, plain, gradient),
        "wide": _wide_step(wide.embedding, ours, gradient),
        "dedup": _dedup_step(dedup.embedding, ours, gradient, timer),
    }
    for number in range(min(PARITY_STEPS, len(ours))):
        for step in sides.values():
            step(number)
    difference = max(max_row_difference(tables, p, ours[:PARITY_STEPS]) for p in (dedup, wide))
    timer.finish()
    seconds = alternate({n: pass_over(s, len(ours)) for n, s in sides.items()}, timing)
    num_steps = (timing.rounds + 1) * len(ours)
    return {
        "num_steps": len(ours),
        "num_lookups": {"torchrec": _lookups_per_step(plain), "ours": _lookups_per_step(ours)},
        "parity": difference,
        "milliseconds": milliseconds(seconds),
        "phases_ms": {n: round(s / num_steps * 1e3, 2) for n, s in timer.finish()[1].items() if s},
        "wide": summarize(ratios(seconds, "torchrec", "wide")),
        "dedup": summarize(ratios(seconds, "torchrec", "dedup")),
    }


def _fused_step(tables: FusedTables, plain: Sequence[Batch], gradient: OutputGradient) -> Any:
    inputs = [sort_by_table(batch.sparse, tables.features) for batch in plain]
    wide = gradient.wide(tables.features)

    def step(number: int) -> float:
        tables(inputs[number]).values().backward(wide)
        return 0.0

    return step


def _wide_step(embedding: Embedding, ours: Sequence[Batch], gradient: OutputGradient) -> Any:
    wide = gradient.wide(ours[0].layout.keys)

    def step(number: int) -> float:
        batch = ours[number]
        embedding.open(single_microbatch(batch))
        embedding(batch.sparse).values().backward(wide)
        embedding.update_from_backward()
        return 0.0

    return step


def _dedup_step(
    embedding: Embedding, ours: Sequence[Batch], gradient: OutputGradient, timer: PhaseTimer
) -> Any:
    """Return the lookups of the deduplicating DLRM: wide if samples share no rows."""
    gradients = [
        (gradient.wide(batch.layout.keys),)
        if batch.shared is None
        else gradient.pool_shared(batch.shared)
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
            torch.autograd.backward(vectors, gradients[number])
        with timer("update"):
            embedding.update_from_backward()
        return 0.0

    return step


def max_row_difference(
    tables: FusedTables, components: Components, batches: Sequence[Batch]
) -> float:
    """Return the largest difference of rows of both sides, relative to the largest value.

    Args:
        tables: the peer's.
        components: ours, with rows in memory.
        batches: their rows are compared.
    """
    worst = 0.0
    peer_weights = tables.weights()
    for batch in batches:
        for table, lookup in batch.lookups.items():
            (records,) = components.store.fetch(0, {table: lookup.rows}).values()
            ours = torch.from_numpy(records.values)
            peer = peer_weights[table][torch.from_numpy(lookup.rows)]
            worst = max(worst, float((ours - peer).abs().max() / peer.abs().max()))
    return worst


def _lookups_per_step(batches: Sequence[Batch]) -> int:
    return sum(len(t.positions) for b in batches for t in b.lookups.values()) // len(batches)


PREFETCH_STEPS, READ_STEPS = 2, 40
ROW_GROUP = 65_536


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """TorchRec's input: labels, weights, dense features and bags by table."""

    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


def write_plain(batches: Sequence[Batch], spec: BatchSpec, path: Path) -> None:
    """Write expanded batches, in training order, as one plain Parquet file."""
    bags = [{f: batch.sparse[f] for f in spec.sparse} for batch in batches]
    lists = {f for f in spec.sparse if any(bool((b[f].lengths() != 1).any()) for b in bags)}

    def column(feature: str, number: int) -> Any:
        bag = bags[number][feature]
        values, offsets = bag.values().numpy(), bag.offsets().numpy()
        if feature not in lists:
            return values
        return pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), values)

    tables: list[pa.Table] = []
    for number, batch in enumerate(batches):
        columns: dict[str, Any] = {"label": batch.labels.numpy(), "weight": batch.weights.numpy()}
        columns |= {n: np.ascontiguousarray(batch.dense[:, i]) for i, n in enumerate(spec.dense)}
        columns |= {feature: column(feature, number) for feature in spec.sparse}
        tables.append(pa.table(columns))
    pq.write_table(pa.concat_tables(tables), path, compression="zstd", row_group_size=ROW_GROUP)


def read_plain(
    path: Path, spec: BatchSpec, features: Sequence[str], num_samples: int
) -> Iterator[PlainBatch]:
    """Yield the batches of a plain file, with prefetching.

    Args:
        path: of `write_plain`.
        spec: dense features.
        features: sparse ones, in the order of the tables.
        num_samples: of a batch.
    """
    rows = pq.ParquetFile(path).iter_batches(num_samples)
    num_batches = -(-pq.read_metadata(path).num_rows // num_samples)
    return prefetch(
        lambda _: _plain_batch(next(rows), spec, features), range(num_batches), PREFETCH_STEPS
    )


def _plain_batch(rows: pa.RecordBatch, spec: BatchSpec, features: Sequence[str]) -> PlainBatch:
    values: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for feature in features:
        column = rows.column(feature)
        if isinstance(column, pa.ListArray):
            values.append(column.flatten().to_numpy())
            lengths.append(np.diff(column.offsets.to_numpy()).astype(np.int64))
        else:
            values.append(column.to_numpy())
            lengths.append(np.ones(rows.num_rows, np.int64))
    counts = np.concatenate(lengths)
    sparse = KeyedJaggedTensor(
        list(features),
        torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(counts),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        stride=rows.num_rows,
    )
    dense = [rows.column(name).to_numpy() for name in spec.dense]
    stacked = np.stack(dense, 1) if dense else np.ones((rows.num_rows, 1), np.float32)
    label, weight = (
        torch.from_numpy(rows.column(n).to_numpy().copy()) for n in ("label", "weight")
    )
    return PlainBatch(label, weight, torch.from_numpy(stacked), sparse)


def measure_reading(
    dataset: Dataset, config: TrainConfig, timing: Timing, path: Path
) -> dict[str, Any]:
    """Measure training from Parquet, and from our batches in memory.

    Args:
        dataset: with its samples.
        config: train section of the DLRM's benchmark.
        timing: rounds and clock.
        path: where the plain file is written.
    """
    config = replace(config, model=replace(config.model, dedup_compute=True))
    spec = spec_of(dataset, config.dtype)
    plain = read_batches(dataset, config, expanded=True, count=READ_STEPS)
    write_plain(plain, spec, path)
    tables = fused_tables(spec, config)
    torchrec = dlrm_of(tables, spec, config)
    optimizer = dense_optimizer(config.dense_optimizer, list(torchrec.parameters()))
    collated = read_batches(dataset, config, expanded=False, count=READ_STEPS)
    components = build_components(spec, config)
    timer = PhaseTimer(time.perf_counter)

    def peer_pass() -> int:
        for batch in read_plain(path, spec, tables.features, config.batch_samples):
            logits = torchrec(batch.dense, batch.sparse).squeeze(1)
            loss = loss_of(logits, cast(Batch, batch))  # reads labels and weights only
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        return len(plain)

    def our_pass() -> int:
        reader = reader_of(dataset, config, expanded=False)  # a new one, without cached row groups
        for batch in prefetch(reader.read, range(len(plain)), PREFETCH_STEPS):
            train_batch(components, batch, timer)
        return len(plain)

    def memory_pass() -> int:
        for batch in collated:
            train_batch(components, batch, timer)
        return len(collated)

    sides = {"torchrec": peer_pass, "ours": our_pass, "memory": memory_pass}
    seconds = alternate(sides, timing)
    sizes = {"plain": path.stat().st_size, "dataset": _segment_bytes(dataset)}
    return {
        "num_steps": len(plain),
        "file_bytes": sizes,
        "milliseconds": milliseconds(seconds),
        "ours": summarize(ratios(seconds, "torchrec", "ours")),
        "of_memory": summarize(ratios(seconds, "ours", "memory")),
    }


def _segment_bytes(dataset: Dataset) -> int:
    """Return the bytes of all segments, including evaluation samples."""
    entries = (dataset.directory / SEGMENTS).entries()
    return sum(entry.num_bytes for entry in entries if entry.path.endswith(".parquet"))
