"""Batches of `presage.DataLoader` against a loader of plain Parquet that builds the same tensors.

Each side is a process of its own, in alternating order. Rates are samples per second of processor
time of all threads, so per core.

`batches`: peers read the samples as `presage expand --model-inputs` writes them, by
`pyarrow.parquet.ParquetFile.iter_batches` (`iter_batches`), by `pyarrow.dataset` (`scanner`), and
by Hugging Face `datasets` and `torchdata` where they are installed (`peers/loading.py`), in batches
of as many samples, hash ids to rows by the same kernel, and build
one KeyedJaggedTensor of all sparse features, dense features and labels. Row groups have 65,536
samples. Before the measurement their tensors are compared with those of `expanded`: all values,
lengths, labels and dense features are equal. A process makes one pass to warm up, then as many as
take a second, each with a new reader, so that nothing decoded is kept. The floors are Arrow alone:
our files and the plain file, decoded to Arrow tables and dropped; `bound` is that of our files.
Ratios compare with the faster of `iter_batches` and `scanner`. Columns are labels, weights, dense
and sparse features, without kept ones.

`tables`: all columns, and two of them, read by `presage.Dataset` and from what `presage expand`
writes; `_2` marks two columns. Seconds, and growth of the peak memory.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.common.harness import (
    Options,
    alternate,
    compared,
    median,
    medians,
    ratios,
)
from benchmarks.common.logs import (
    DEMO_JOB,
    SHARED_DATA,
    build_dataset,
    demo_dataset,
    job_path,
    read_job,
    write_demo,
    write_job_file,
)
from benchmarks.common.processes import in_process, measured
from benchmarks.peers.loading import (
    BATCH,
    LIBRARIES,
    PEERS,
    Tensors,
    has,
    peer_batches,
    plain_path,
)
from presage import DataLoader
from presage.dataset import Dataset as Table
from presage.pipelines.report.sizes import dataset_bytes
from presage.pipelines.table.expand import expand
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.layout import DATA_DIRECTORIES
from presage.trainer.data.decode import spec_of

ROW_GROUP = 65_536
MIN_SEC = 1.0
"""Processor time of the measured passes of a process, at least."""
OURS = ("deduplicated", "expanded")


def our_batches(dataset: Path, *, deduplicated: bool) -> Iterator[Tensors]:
    """Yield the batches of a DataLoader."""
    loader = DataLoader(dataset, batch_samples=BATCH, keep=(), deduplicated=deduplicated)
    for batch in loader:
        yield Tensors(batch.sparse_features, batch.dense_features, batch.labels, batch.weights)


def data_files(dataset: Path) -> Iterator[CheckedFile]:
    """Yield the data files of a dataset."""
    for segment in open_dataset(dataset).segments:
        for path in segment.files:
            if path.startswith(tuple(DATA_DIRECTORIES)):
                yield segment.file(path, texts_as_codes=True)


def decode_ours(dataset: Path) -> int:
    """Verify and decode our data files by Arrow; return 0, as groups have other rows."""
    for file in data_files(dataset):
        for row_group in range(file.metadata.num_row_groups):
            file.read_row_group(row_group)
    return 0


def decode_plain(dataset: Path) -> int:
    """Decode the plain file by Arrow; return its samples."""
    columns = list(spec_of(open_dataset(dataset), "float32").columns)
    rows = pq.ParquetFile(plain_path(dataset)).iter_batches(BATCH, columns=columns)
    return sum(batch.num_rows for batch in rows)


def drain(batches: Iterator[Tensors]) -> int:
    """Build all batches; return their samples."""
    return sum(len(batch.labels) for batch in batches)


FLOORS: dict[str, Callable[[Path], int]] = {"our_floor": decode_ours, "plain_floor": decode_plain}


def read_side(side: str, dataset: Path) -> int:
    """Read a dataset once by a side; return its samples."""
    if side in FLOORS:
        return FLOORS[side](dataset)
    if side in OURS:
        return drain(our_batches(dataset, deduplicated=side == "deduplicated"))
    return drain(peer_batches(dataset, side))


def time_side(side: str, path: Path) -> dict[str, float]:
    """Return the wall and the processor time of a pass of a side, in this process."""
    passes = 0
    read_side(side, path)
    wall, processor = time.perf_counter(), time.process_time()
    while time.process_time() - processor < MIN_SEC:
        read_side(side, path)
        passes += 1
    end = time.perf_counter(), time.process_time()
    return {"wall_sec": (end[0] - wall) / passes, "cpu_sec": (end[1] - processor) / passes}


def digest(path: Path, side: str) -> str:
    """Return a hash of the samples of a side, however they are divided into batches."""
    ours = side in OURS
    batches = our_batches(path, deduplicated=False) if ours else peer_batches(path, side)
    hashes: dict[str, Any] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        hashes.setdefault(name, hashlib.sha256()).update(tensor.contiguous().numpy())

    for batch in batches:
        for name in ("dense", "labels", "weights"):
            add(name, getattr(batch, name))
        for key in batch.sparse.keys():  # noqa: SIM118  # not a dictionary
            add(f"values/{key}", batch.sparse[key].values())
            add(f"lengths/{key}", batch.sparse[key].lengths())
    return " ".join(f"{name} {each.hexdigest()}" for name, each in sorted(hashes.items()))


def measure_batches(dataset: Path, rounds: int) -> dict[str, Any]:
    """Return rates and ratios on one dataset, after a comparison of the tensors of all sides."""
    num_samples = pq.read_metadata(plain_path(dataset)).num_rows
    peers = (*PEERS, *filter(has, LIBRARIES))
    digests = {side: in_process(digest, dataset, side) for side in ("expanded", *peers)}
    if len(set(digests.values())) != 1:
        raise RuntimeError(f"all sides must build the same tensors, got {digests}")
    sides = (*OURS, *peers, *FLOORS)
    runs = alternate(
        {side: partial(in_process, time_side, side, dataset) for side in sides}, rounds
    )
    sec = {
        clock: {side: [one[clock] for one in of] for side, of in runs.items()}
        for clock in ("cpu_sec", "wall_sec")
    }
    cpu, wall = sec["cpu_sec"], sec["wall_sec"]
    peer = min(PEERS, key=lambda side: statistics.median(cpu[side]))
    rates = {side: [num_samples / one for one in of] for side, of in cpu.items()}
    return compared(
        rates["deduplicated"],
        rates[peer],
        f"samples per second and core, deduplicated, against {peer}",
        higher=True,
        bound=statistics.median(cpu[peer]) / statistics.median(cpu["our_floor"]),
        num_samples=num_samples,
        not_installed=[name for name in LIBRARIES if not has(name)],
        samples_per_core_sec={side: round(median(of)) for side, of in rates.items()},
        expanded=ratios(cpu["expanded"], cpu[peer]),
        wall={side: ratios(wall[side], wall[peer]) for side in OURS},
        read_bytes={
            "ours": dataset_bytes(open_dataset(dataset)),
            "peer": plain_bytes(dataset),
        },
    )


def plain_bytes(dataset: Path) -> int:
    """Return the bytes of the columns that the peer reads."""
    names = set(spec_of(open_dataset(dataset), "float32").columns)
    metadata = pq.read_metadata(plain_path(dataset))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in names)


def write_dataset(job: Path, log: Path, dataset: Path) -> Path:
    """Build a dataset whose samples are all trained, and write its plain file."""
    content = read_job(job)
    content["data"].pop("split")
    build_dataset(write_job_file(dataset.with_suffix(".job"), content, job), log, dataset)
    expand(dataset, plain_path(dataset), model_inputs=True)
    rows = pq.read_table(plain_path(dataset))
    pq.write_table(rows, plain_path(dataset), compression="zstd", row_group_size=ROW_GROUP)
    return dataset


TWO = ["item_id", "clicked"]
WAYS: dict[str, Callable[[str, list[str] | None], int]] = {
    "batches": lambda path, columns: sum(b.num_rows for b in Table(path).batches(columns)),
    "to_arrow": lambda path, columns: Table(path).to_arrow(columns).num_rows,
    "to_polars": lambda path, columns: len(Table(path).to_polars(columns)),
    "to_duckdb": lambda path, columns: len(Table(path).to_duckdb(columns)),
    "parquet_batches": lambda path, columns: sum(
        b.num_rows for b in pq.ParquetFile(f"{path}.parquet").iter_batches(columns=columns)
    ),
    "parquet_table": lambda path, columns: (
        pq.read_table(f"{path}.parquet", columns=columns).num_rows
    ),
}


def read_table(way: str, path: Path, columns: list[str] | None) -> dict[str, float]:
    """Read the samples in this process; return rows, seconds and the growth of peak memory."""
    pa.array(np.zeros(1))  # imports pandas
    return measured(WAYS[way], str(path), columns)


def logs(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield name, job and raw files of the logs that are measured, the largest last."""
    mind = SHARED_DATA / "mind"
    if "mind" in options.datasets and mind.is_dir():
        yield "mind", job_path("mind"), mind
    elif "mind" in options.datasets:
        sys.stderr.write(f"skipped mind, its log is not in {SHARED_DATA}\n")
    for count in options.samples if "demo" in options.datasets else ():
        yield f"demo-{count}", DEMO_JOB, write_demo(scratch / f"log-{count}", count)


def measure_logs(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure batches of each log, the largest first in the result."""
    details = {
        name: measure_batches(write_dataset(job, log, scratch / name), options.rounds)
        for name, job, log in logs(options, scratch)
    }
    return dict(reversed(details.items()))


def measure_tables(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Read the samples of a dataset in each way."""
    dataset = demo_dataset(scratch, max(options.samples))
    expand(dataset, dataset.with_suffix(".parquet"))
    sides = {
        f"{way}{suffix}": partial(in_process, read_table, way, dataset, columns)
        for suffix, columns in (("", None), ("_2", TWO))
        for way in WAYS
    }
    found = alternate(sides, options.rounds)
    rates = {way: [run["result"] / run["sec"] for run in of] for way, of in found.items()}
    return compared(
        rates["batches"],
        rates["parquet_batches"],
        "samples per second, all columns, against plain Parquet",
        higher=True,
        dataset_bytes=Table(dataset).sizes.dataset_bytes,
        parquet_bytes=dataset.with_suffix(".parquet").stat().st_size,
        reads={way: medians(of) for way, of in found.items()},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("loader", __doc__, rounds=3)
    options.add_parts({"batches": measure_logs, "tables": measure_tables}, small=("batches",))
    options.add("--datasets", ("mind", "demo"), "logs", small=("demo",), choices=("mind", "demo"))
    options.add("--samples", (100_000, 1_000_000), "of demo logs, largest last", small=(20_000,))
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
