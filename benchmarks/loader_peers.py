"""The tensors of plain Parquet by pyarrow, and by the libraries that are installed.

Each library is used as its documentation recommends: Hugging Face `datasets` streams the file in
Arrow format, `torchdata.nodes` maps and prefetches record batches in threads, and Mosaic
`streaming` reads the samples of MDS shards, which are written from the same file. MDS has no empty
arrays and no lists of texts: lists are bytes, and texts are hashed when the shards are written.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader as TorchDataLoader
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas.arrays import is_list, offsets_of, values_of
from schemas.dataset.opened import open_dataset
from schemas.rows import ids_of, rows_of_ids
from schemas.run.model_inputs import scalar_values, to_bags
from trainer.data.decode import BatchSpec, spec_of
from trainer.data.reader import prefetch

BATCH, READ_AHEAD = 4096, 2
PEERS = ("iter_batches", "scanner")
LIBRARIES = ("datasets", "torchdata", "streaming")
"""Modules of Hugging Face datasets, torchdata and Mosaic streaming."""
MDS_SAMPLES = 200_000
"""Mosaic, which handles each sample in Python, is not measured on larger logs."""


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
    if peer == "streaming":
        return _streaming(mds_path(dataset), spec)
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


def mds_path(dataset: Path) -> Path:
    """Return the folder of a dataset's MDS shards."""
    return dataset.with_suffix(".mds")


def has(library: str) -> bool:
    """Return whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


def peers_of(dataset: Path) -> list[str]:
    """Return the peers that are measured on a dataset: those that are installed."""
    libraries = list(filter(has, LIBRARIES))
    if not mds_path(dataset).exists():
        libraries = [name for name in libraries if name != "streaming"]
    return [*PEERS, *libraries]


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


def write_mds(dataset: Path) -> dict[str, float]:
    """Write the samples of the plain file as MDS shards; return seconds and bytes."""
    start, path = time.perf_counter(), plain_path(dataset)
    spec, schema = spec_of(open_dataset(dataset), "float32"), pq.read_schema(path)
    numbers = [c for c in (spec.label, spec.weight, *spec.dense) if c is not None]
    kinds = {c: "float32" for c in numbers}
    for feature in spec.sparse:
        kinds[feature] = "bytes" if is_list(schema.field(feature).type) else "int64"
    streaming = importlib.import_module("streaming")
    with streaming.MDSWriter(columns=kinds, out=str(mds_path(dataset))) as writer:
        for rows in pq.ParquetFile(path).iter_batches(BATCH, columns=list(kinds)):
            columns = {c: scalar_values(rows[c], "float32") for c in numbers}
            columns |= {f: _ids(rows[f]) for f in spec.sparse}
            for values in zip(*columns.values(), strict=True):
                writer.write(dict(zip(columns, values, strict=True)))
    files = [file.stat().st_size for file in mds_path(dataset).iterdir()]
    return {"seconds": round(time.perf_counter() - start, 1), "bytes": sum(files)}


def _ids(column: pa.Array) -> Iterable[Any]:
    """Return the id of each sample, or its ids as bytes."""
    values, offsets = values_of(column)
    ids = ids_of(values)
    if not is_list(column.type):
        return ids
    return [part.tobytes() for part in np.split(ids, offsets[1:-1])]


def _streaming(shards: Path, spec: BatchSpec) -> Iterator[Tensors]:
    samples = importlib.import_module("streaming").StreamingDataset(
        local=str(shards), batch_size=BATCH, num_canonical_nodes=1, shuffle=False
    )
    collate = partial(_tensors_of_samples, spec=spec)
    return iter(TorchDataLoader(samples, batch_size=BATCH, collate_fn=collate))


def _tensors_of_samples(samples: Sequence[Mapping[str, Any]], spec: BatchSpec) -> Tensors:
    def numbers(name: str) -> NDArray[np.float32]:
        return np.array([sample[name] for sample in samples], np.float32)

    lengths: list[NDArray[np.int64]] = []
    values: list[NDArray[np.int64]] = []
    for feature in spec.sparse:
        table, bags = spec.table_of[feature], [sample[feature] for sample in samples]
        if isinstance(bags[0], bytes):
            ids = np.frombuffer(b"".join(bags), np.int64)
            lengths.append(np.array([len(bag) for bag in bags]) // ids.itemsize)
        else:
            ids = np.array(bags)
            lengths.append(np.ones(len(bags), np.int64))
        values.append(rows_of_ids(ids, table, spec.tables[table]))
    all_lengths = np.concatenate(lengths)
    sparse = KeyedJaggedTensor(
        list(spec.sparse),
        torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(all_lengths),
        offsets=torch.from_numpy(offsets_of(all_lengths)),
        stride=len(samples),
    )
    dense = np.stack([numbers(name) for name in spec.dense], 1)
    weights = np.ones(len(samples), np.float32) if spec.weight is None else numbers(spec.weight)
    return Tensors(sparse, *map(torch.from_numpy, (dense, numbers(spec.label), weights)))
