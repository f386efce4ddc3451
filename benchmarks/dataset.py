"""Reading the samples of a dataset by `presage.Dataset`, and of the expanded Parquet file by Arrow.

`python -m benchmarks.dataset [--json] [--samples N] [--rounds N]`

Reads all columns, and two of them, of the demo's dataset, each in a process of its own, in
alternating order. The peer reads what `presage expand` writes, by `pyarrow.parquet`. `ours` and
`peer` are samples per second of reading all columns batch by batch; `reads` has the seconds and the
growth of peak memory of each way to read; those that end in `_2` read two columns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.logs import DEMO_JOB, build_dataset, write_result
from pipelines.demo_log.generate import GeneratorConfig, write_log
from pipelines.table.expand import expand
from presage import Dataset

TWO = ["item_id", "clicked"]
WAYS: dict[str, Callable[[str, list[str] | None], int]] = {
    "batches": lambda path, columns: sum(b.num_rows for b in Dataset(path).batches(columns)),
    "to_arrow": lambda path, columns: Dataset(path).to_arrow(columns).num_rows,
    "to_polars": lambda path, columns: len(Dataset(path).to_polars(columns)),
    "to_duckdb": lambda path, columns: len(Dataset(path).to_duckdb(columns)),
    "parquet_batches": lambda path, columns: sum(
        b.num_rows for b in pq.ParquetFile(f"{path}.parquet").iter_batches(columns=columns)
    ),
    "parquet_table": lambda path, columns: (
        pq.read_table(f"{path}.parquet", columns=columns).num_rows
    ),
}


def peak_kb() -> int:
    """Return the peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def read(way: str, path: str, columns: list[str] | None) -> dict[str, float]:
    """Read the samples in this process; return rows, seconds and the growth of peak memory."""
    pa.array(np.zeros(1))  # imports pandas
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from the present size
    before = peak_kb()
    started = time.perf_counter()
    num_rows = WAYS[way](path, columns)
    seconds = time.perf_counter() - started
    peak = peak_kb()
    return {"rows": num_rows, "sec": round(seconds, 3), "mb": (peak - before) // 976}


def measure(path: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the rounds of each way to read all columns, and two."""
    found: dict[str, list[dict[str, float]]] = {}
    context = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for columns in (None, TWO):
            for way in WAYS:
                with ProcessPoolExecutor(1, context) as pool:
                    result = pool.submit(read, way, str(path), columns).result()
                found.setdefault(way if columns is None else f"{way}_2", []).append(result)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dataset", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="presage-dataset-") as name:
        scratch = Path(name)
        start = datetime(2026, 1, 1)
        write_log(GeneratorConfig(num_samples=options.samples, start=start), scratch / "log")
        dataset = build_dataset(DEMO_JOB, scratch / "log", scratch / "dataset")
        expand(dataset, scratch / "dataset.parquet")
        num_bytes = Dataset(dataset).sizes.dataset_bytes
        parquet_bytes = (scratch / "dataset.parquet").stat().st_size
        found = measure(dataset, options.rounds)
    write_result(summarize(found, num_bytes, parquet_bytes), options)
    return 0


def summarize(
    found: dict[str, list[dict[str, float]]], num_bytes: int, parquet_bytes: int
) -> dict[str, Any]:
    """Return the result to print."""
    ours, peer = ([r["rows"] / r["sec"] for r in found[w]] for w in ("batches", "parquet_batches"))
    return {
        "ours": round(statistics.median(ours)),
        "peer": round(statistics.median(peer)),
        "ratio": statistics.median(ours) / statistics.median(peer),
        "unit": "samples per second, all columns",
        "rounds": [a / b for a, b in zip(ours, peer, strict=True)],
        "dataset_bytes": num_bytes,
        "parquet_bytes": parquet_bytes,
        "reads": {
            way: {key: statistics.median(r[key] for r in rounds) for key in ("sec", "mb")}
            for way, rounds in found.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
