"""The tensors of plain Parquet by pyarrow, and by the libraries that are installed.

Each library is used as its documentation recommends: Hugging Face `datasets` streams the file in
Arrow format, and `torchdata.nodes` maps and prefetches record batches in threads.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.arrays import offsets_of
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.model_inputs import scalar_values, to_bags
from presage.trainer.data.decode import BatchSpec, spec_of
from presage.trainer.data.reader import prefetch

BATCH, READ_AHEAD = 4096, 2
PEERS = ("iter_batches", "scanner")
LIBRARIES = ("datasets", "torchdata")
"""Modules of Hugging Face datasets and torchdata."""


class Tensors(NamedTuple):
    """What both sides build of a batch."""

    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def peer_batches(dataset: Path, peer: str) -> Iterator[Tensors]:
    """Yield the batches of the plain file or the MDS shards beside a dataset, read ahead."""
    spec, path = spec_of(open_dataset(dataset), "float32"), plain_path(dataset)
    columns = list(spec.columns)
    if peer == "torchdata":
        return _torchdata(path, columns, spec)
    if peer == "datasets":
        rows = _datasets(path, columns)
    elif peer == "iter_batches":
        rows = pq.ParquetFile(path).iter_batches(BATCH, columns=columns)
    else:
        rows = pads.dataset(path).to_batches(columns=columns, batch_size=BATCH)
    return _read_ahead(rows, spec, pq.read_metadata(path).num_rows)


def _read_ahead(
    rows: Iterator[pa.RecordBatch], spec: BatchSpec, num_samples: int
) -> Iterator[Tensors]:
    """Yield tensors that a thread builds, as our loader."""

    def build(_: int) -> Tensors | None:
        batch = next(rows, None)
        return None if batch is None else tensors_of(batch, spec)

    for batch in prefetch(build, range(num_samples), READ_AHEAD):  # more than there are batches
        if batch is None:
            return
        yield batch


def tensors_of(rows: pa.RecordBatch, spec: BatchSpec) -> Tensors:
    """Return the tensors of some samples."""
    bags = [to_bags(rows[f], t := spec.table_of[f], spec.tables[t]) for f in spec.sparse]
    lengths = np.concatenate([b.lengths for b in bags])
    sparse = KeyedJaggedTensor(
        list(spec.sparse),
        torch.from_numpy(np.concatenate([b.values for b in bags])),
        lengths=torch.from_numpy(lengths),
        offsets=torch.from_numpy(offsets_of(lengths)),
        stride=rows.num_rows,
    )
    dense = np.empty((rows.num_rows, len(spec.dense)), spec.dtype)
    for index, name in enumerate(spec.dense):
        dense[:, index] = scalar_values(rows[name], spec.dtype)
    weights = np.ones(rows.num_rows, spec.dtype)
    if spec.weight is not None:
        weights = scalar_values(rows[spec.weight], spec.dtype)
    labels = scalar_values(rows[spec.label], spec.dtype)
    return Tensors(sparse, *map(torch.from_numpy, (dense, labels, weights)))


def plain_path(dataset: Path) -> Path:
    """Return the plain file of a dataset."""
    return dataset.with_suffix(".parquet")


def has(library: str) -> bool:
    """Return whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


def _datasets(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    rows = importlib.import_module("datasets").load_dataset(
        "parquet", data_files=str(path), split="train", streaming=True, columns=columns
    )
    for table in rows.with_format("arrow").iter(batch_size=BATCH):
        yield table.combine_chunks().to_batches()[0]


def _torchdata(path: Path, columns: list[str], spec: BatchSpec) -> Iterator[Tensors]:
    nodes = importlib.import_module("torchdata.nodes")
    rows = nodes.IterableWrapper(pq.ParquetFile(path).iter_batches(BATCH, columns=columns))
    mapped = nodes.ParallelMapper(rows, partial(tensors_of, spec=spec), num_workers=1)
    return iter(nodes.Loader(nodes.Prefetcher(mapped, READ_AHEAD)))
