"""Batches of `presage.DataLoader` against a loader of plain Parquet that builds the same tensors.

`python -m benchmarks.loader [--json] [--rounds N] [--datasets mind,demo]
[--samples N,N]`

Peers read the samples as `presage expand --model-inputs` writes them, by
`pyarrow.parquet.ParquetFile.iter_batches` (`iter_batches`), by `pyarrow.dataset` (`scanner`), and
by Hugging Face `datasets`, `torchdata` and Mosaic `streaming` where they are installed
(`loader_peers.py`), in batches of as many samples, hash ids to rows by the same kernel, and build
one KeyedJaggedTensor of all sparse features, dense features and labels. Row groups have 65,536
samples. Before the measurement their tensors are compared with those of `expanded`: all values,
lengths, labels and dense features are equal.

Each side is a process of its own, in alternating order: one pass to warm up, then as many as take a
second, each with a new reader, so that nothing decoded is kept. `floor` is Arrow alone: our files
and the plain file, decoded to Arrow tables and dropped. Rates are samples per second of processor
time of all threads, so per core; ratios compare with the faster of `iter_batches` and `scanner`.
Columns are labels, weights, dense and sparse features, without kept ones. MIND is measured if its
log exists; the demo's log is generated.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from benchmarks.loader_peers import (
    BATCH,
    LIBRARIES,
    MDS_SAMPLES,
    PEERS,
    Tensors,
    has,
    peer_batches,
    peers_of,
    plain_path,
    write_mds,
)
from benchmarks.logs import (
    DEMO_JOB,
    SHARED_DATA,
    build_dataset,
    job_path,
    read_job,
    write_job_file,
    write_result,
)
from pipelines.demo_log.generate import GeneratorConfig, write_log
from pipelines.table.expand import expand
from presage import DataLoader
from schemas.dataset.checked_files import CheckedFile
from schemas.dataset.opened import open_dataset
from schemas.layout import DATA_DIRECTORIES
from trainer.data.decode import spec_of

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


def time_side(side: str, dataset: str) -> dict[str, float]:
    """Return the wall and the processor time of a pass of a side, in this process."""
    path, passes = Path(dataset), 0
    read_side(side, path)
    wall, processor = time.perf_counter(), time.process_time()
    while time.process_time() - processor < MIN_SEC:
        read_side(side, path)
        passes += 1
    end = time.perf_counter(), time.process_time()
    return {"wall_sec": (end[0] - wall) / passes, "cpu_sec": (end[1] - processor) / passes}


def digest(dataset: str, side: str) -> str:
    """Return a hash of the samples of a side, however they are divided into batches."""
    path = Path(dataset)
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


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(dataset: Path, rounds: int) -> dict[str, Any]:
    """Return rates and ratios on one dataset, after a comparison of the tensors of all sides."""
    num_samples = pq.read_metadata(plain_path(dataset)).num_rows
    shards = write_mds(dataset) if num_samples <= MDS_SAMPLES and has("streaming") else None
    peers = peers_of(dataset)
    digests = {side: in_process(digest, str(dataset), side) for side in ("expanded", *peers)}
    if len(set(digests.values())) != 1:
        raise RuntimeError(f"all sides must build the same tensors, got {digests}")
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in (*OURS, *peers, *FLOORS)}
    for number in range(rounds):
        for side in runs if number % 2 else reversed(runs):
            runs[side].append(in_process(time_side, side, str(dataset)))
            sys.stderr.write(f"{dataset.name} {side} {runs[side][-1]}\n")
    return {**summarize(dataset, runs), "mds": shards}


def summarize(dataset: Path, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return rates, ratios by round, and bytes."""
    num_samples = pq.read_metadata(plain_path(dataset)).num_rows

    def rates(clock: str) -> dict[str, int]:
        return {
            side: round(num_samples / statistics.median(r[clock] for r in of_side))
            for side, of_side in runs.items()
        }

    peer = min(PEERS, key=lambda side: statistics.median(r["cpu_sec"] for r in runs[side]))
    ratios = {
        f"{side}_{clock}": [
            a[clock] / b[clock] for a, b in zip(runs[peer], runs[side], strict=True)
        ]
        for side in OURS
        for clock in ("cpu_sec", "wall_sec")
    }
    return {
        "num_samples": num_samples,
        "peer": peer,
        "samples_per_core_sec": rates("cpu_sec"),
        "samples_per_sec": rates("wall_sec"),
        "ratios": {name: round(statistics.median(values), 2) for name, values in ratios.items()},
        "rounds": {name: [round(v, 2) for v in values] for name, values in ratios.items()},
        "read_bytes": {"ours": our_bytes(dataset), "peer": plain_bytes(dataset)},
    }


def our_bytes(dataset: Path) -> int:
    """Return the bytes that are verified and decoded: whole row groups of the data files."""
    return sum(
        entry.num_bytes
        for segment in open_dataset(dataset).segments
        for path, entry in segment.files.items()
        if path.startswith(tuple(DATA_DIRECTORIES))
    )


def plain_bytes(dataset: Path) -> int:
    """Return the bytes of the columns that the peer reads."""
    names = set(spec_of(open_dataset(dataset), "float32").columns)
    metadata = pq.read_metadata(plain_path(dataset))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in names)


def build_without_split(job: Path, log: Path, dataset: Path) -> Path:
    """Build a dataset whose samples are all trained, and write its plain file."""
    content = read_job(job)
    content["data"].pop("split")
    build_dataset(write_job_file(dataset.with_suffix(".job"), content, job), log, dataset)
    expand(dataset, plain_path(dataset), model_inputs=True)
    rows = pq.read_table(plain_path(dataset))
    pq.write_table(rows, plain_path(dataset), compression="zstd", row_group_size=ROW_GROUP)
    return dataset


def datasets(names: Sequence[str], samples: Sequence[int], scratch: Path) -> Iterator[Path]:
    """Yield the datasets that are measured."""
    mind = SHARED_DATA / "mind"
    if "mind" in names and mind.is_dir():
        yield build_without_split(job_path("mind"), mind, scratch / "mind")
    elif "mind" in names:
        sys.stderr.write(f"skipped mind, its log is not in {SHARED_DATA}\n")
    for count in samples if "demo" in names else ():
        log = scratch / f"log-{count}"
        write_log(GeneratorConfig(num_samples=count, start=datetime(2026, 1, 1)), log)
        yield build_without_split(DEMO_JOB, log, scratch / f"demo-{count}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the ratio of the largest log."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datasets", default="mind,demo", help="logs, comma-separated")
    parser.add_argument("--samples", default="100000,1000000", help="of demo logs, largest last")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="presage-loader-") as scratch:
        names, samples = options.datasets.split(","), map(int, options.samples.split(","))
        built = datasets(names, list(samples), Path(scratch))
        details = {dataset.name: measure(dataset, options.rounds) for dataset in built}
    missing = [name for name in LIBRARIES if not has(name)]
    if missing:
        sys.stderr.write(f"not installed, not measured: {', '.join(missing)}\n")
    last = details[max(details, key=lambda name: details[name]["num_samples"])]
    result = {
        "ours": last["samples_per_core_sec"]["deduplicated"],
        "peer": last["samples_per_core_sec"][last["peer"]],
        "ratio": last["ratios"]["deduplicated_cpu_sec"],
        "unit": "samples per second and core, deduplicated",
        "rounds": last["rounds"]["deduplicated_cpu_sec"],
        "details": details,
        "not_installed": missing,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
