"""Training from Parquet: our dataset against the same samples in one plain file.

The plain file holds what TorchRec would be fed: a row per sample in training order, lists repeated
for every sample, ids already mapped to rows of tables (ours are mapped while they are read), zstd,
row groups of 65,536. Both sides read ahead in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.train_peer import dlrm_of, tables_of
from benchmarks.train_sides import Timing, batches, in_turns, milliseconds, ratios, reader_of, shown
from schemas.config.train import TrainConfig
from schemas.dataset import Dataset
from trainer.components import build_components, dense_optimizer
from trainer.data.collate import Batch
from trainer.data.decode import BatchSpec, spec_of
from trainer.data.reader import prefetch
from trainer.step import PhaseTimer, loss_of, train_batch

READ_AHEAD, READ_STEPS = 2, 40
ROW_GROUP = 65_536


@dataclass(frozen=True, slots=True)
class Plain:
    """What TorchRec's side is fed: labels, weights, dense features and bags by table."""

    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


def write_plain(given: Sequence[Batch], spec: BatchSpec, path: Path) -> None:
    """Write expanded batches as one plain Parquet file.

    Args:
        given: in training order.
        spec: features.
        path: to write to.
    """
    bags = [{f: batch.sparse[f] for f in spec.sparse} for batch in given]
    lists = {f for f in spec.sparse if any(bool((b[f].lengths() != 1).any()) for b in bags)}

    def column(feature: str, number: int) -> Any:
        bag = bags[number][feature]
        values, offsets = bag.values().numpy(), bag.offsets().numpy()
        if feature not in lists:
            return values
        return pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), values)

    tables: list[pa.Table] = []
    for number, batch in enumerate(given):
        columns: dict[str, Any] = {"label": batch.labels.numpy(), "weight": batch.weights.numpy()}
        columns |= {n: np.ascontiguousarray(batch.dense[:, i]) for i, n in enumerate(spec.dense)}
        columns |= {feature: column(feature, number) for feature in spec.sparse}
        tables.append(pa.table(columns))
    pq.write_table(pa.concat_tables(tables), path, compression="zstd", row_group_size=ROW_GROUP)


def read_plain(
    path: Path, spec: BatchSpec, features: Sequence[str], num_samples: int
) -> Iterator[Plain]:
    """Yield the batches of a plain file, read ahead.

    Args:
        path: of `write_plain`.
        spec: dense features.
        features: sparse ones, in the order of the tables.
        num_samples: of a batch.
    """
    rows = pq.ParquetFile(path).iter_batches(num_samples)
    num_batches = -(-pq.read_metadata(path).num_rows // num_samples)
    return prefetch(lambda _: _fed(next(rows), spec, features), range(num_batches), READ_AHEAD)


def _fed(rows: pa.RecordBatch, spec: BatchSpec, features: Sequence[str]) -> Plain:
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
    wide = np.stack(dense, 1) if dense else np.ones((rows.num_rows, 1), np.float32)
    label, weight = (
        torch.from_numpy(rows.column(n).to_numpy().copy()) for n in ("label", "weight")
    )
    return Plain(label, weight, torch.from_numpy(wide), sparse)


def _as_batch(plain: Plain) -> Batch:
    """Return a plain batch where only labels and weights are read."""
    return cast(Batch, plain)


def measure_reading(
    dataset: Dataset, config: TrainConfig, timing: Timing, path: Path
) -> dict[str, Any]:
    """Time passes that read their samples from Parquet, each side from its own.

    Args:
        dataset: with its samples.
        config: train section.
        timing: rounds and clock.
        path: where the plain file is written.
    """
    config = replace(config, model=replace(config.model, dedup_compute=True))
    spec = spec_of(dataset, config.dtype)
    plain = batches(dataset, config, expanded=True, count=READ_STEPS)
    write_plain(plain, spec, path)
    tables = tables_of(spec, config)
    torchrec = dlrm_of(tables, spec, config)
    optimizer = dense_optimizer(config.dense_optimizer, list(torchrec.parameters()))
    components = build_components(spec, config)
    timer = PhaseTimer(time.perf_counter)

    def peer_pass() -> int:
        for batch in read_plain(path, spec, tables.features, config.batch_samples):
            loss = loss_of(torchrec(batch.dense, batch.sparse).squeeze(1), _as_batch(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        return len(plain)

    def our_pass() -> int:
        reader = reader_of(dataset, config, expanded=False)  # anew: decoded row groups are kept
        for batch in prefetch(reader.read, range(len(plain)), READ_AHEAD):
            train_batch(components, batch, timer)
        return len(plain)

    seconds = in_turns({"torchrec": peer_pass, "ours": our_pass}, timing)
    sizes = {"plain": path.stat().st_size, "dataset": _bytes_of(dataset)}
    return {
        "num_steps": len(plain),
        "file_bytes": sizes,
        "milliseconds": milliseconds(seconds),
        "ours": shown(ratios(seconds, "torchrec", "ours")),
    }


def _bytes_of(dataset: Dataset) -> int:
    """Return the bytes of all segments, evaluation included."""
    return sum(f.stat().st_size for f in (dataset.directory / "segments").rglob("*.parquet"))
