"""Throughput of the oracle's kernels: distinct rows of each step and the next use of each row.

`python -m benchmarks.oracle [--json] [--samples N] [--rounds N] [--bagpipe DIR]`

`ours` is `schemas.oracle.next_uses.distinct` and `schemas.oracle.next_uses.next_use`; the peer is
the obvious numpy solution, one sort of all accesses by (row, step). Both give the same result and
use one thread per core, in alternating rounds. With a checkout of BagPipe, its oracle processes the
same accesses in the same rounds, unmodified and in one thread: compare rates per CPU second.
Uniform ids over 10 M rows are the worst case. The benchmark also measures the end-to-end rate of
the Beam stages, from lookups to files, and the bytes of the oracle files of shipped jobs
(`oracle_pipeline.py`).

BagPipe's `BagPipe/oraclecacher.py` is loaded by itself: its transport, JSON reader and prints are
replaced by stubs, and `np.in1d`, which numpy removed, by `np.isin`. It computes the distinct rows
of each table and batch (`unique_once` of its loader), which rows the next batch shares, and, over a
window of batches, which rows are fetched and how long each is kept. Its loader normally runs in
separate processes; here it runs in the same thread, so that rates are per core. Rates are measured
between the first and the last decision, when each decision corresponds to one batch read: filling
the window and the batches left in it at the end are not counted.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.logs import NUM_ROWS, SHARED_DATA, skewed_rows, uniform_rows, write_result
from benchmarks.oracle_pipeline import GOALS, measure_bytes, run_beam_stages
from schemas.arrays import Jagged
from schemas.config.train import CacheConfig
from schemas.machine import num_cores
from schemas.oracle.cache_plan import Plan
from schemas.oracle.next_uses import distinct, next_use

ORACLE = Path("BagPipe/oraclecacher.py")
_PACKAGE = "bagpipe_checkout"


def load_bagpipe(checkout: Path) -> tuple[Any, Any]:
    """Return BagPipe's oracle and loader modules without importing their package.

    Raises:
        ValueError: the folder is no checkout of BagPipe.
    """
    if not (checkout / ORACLE).is_file():
        raise ValueError(
            f"--bagpipe must be a checkout of uw-mad-dash/bagpipe, got no {ORACLE} in {checkout}; "
            "clone it, or leave the option out"
        )
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(checkout / ORACLE.parent)]  # its __init__ would start the trainer
    sys.modules[_PACKAGE] = package
    sys.modules.setdefault("orjson", ModuleType("orjson"))  # imported, but not used here
    oracle: Any = importlib.import_module(f"{_PACKAGE}.oraclecacher")
    loader: Any = importlib.import_module(f"{_PACKAGE}.load_csv")
    oracle.print = lambda *_: None
    if not hasattr(np, "in1d"):
        numpy_with_in1d: Any = ModuleType("numpy")
        vars(numpy_with_in1d).update(vars(np), in1d=np.isin)
        oracle.np = numpy_with_in1d
    return oracle, loader


@dataclass(slots=True)
class Decisions:
    """A stub for BagPipe's RPC module that records what the oracle sends to its trainer.

    Attributes:
        record_rows: whether to record `fetched`.
        fetched: fetched rows of each table, by batch.
        times: wall and CPU seconds of each decision.
    """

    record_rows: bool
    fetched: list[list[NDArray[np.int64]]] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)

    def init_rpc(self, *_: object, **__: object) -> None:
        """Open no connection."""

    def rpc_async(self, _: str, __: object, args: tuple[dict[str, Any]]) -> None:
        """Record a decision."""
        self.times.append((time.perf_counter(), time.process_time()))
        if self.record_rows:
            self.fetched.append(args[0]["prefetch"]["prefetch_list"])


def run_bagpipe(
    checkout: Path,
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    lookahead: int,
    *,
    record_rows: bool = False,
) -> Decisions:
    """Run BagPipe's oracle over all batches but those that stay in its window.

    Args:
        checkout: folder of BagPipe.
        columns: for each table the row of each sample.
        num_rows: rows of each table.
        batch: samples of a batch.
        lookahead: batches of the window, including the current one.
        record_rows: record the fetched rows, for comparison.
    """
    oracle, loader = load_bagpipe(checkout)
    decisions = Decisions(record_rows)

    class InMemoryLoader:
        """Batches from memory with distinct rows computed by BagPipe's loader."""

        def __init__(self, *_: object) -> None:
            self._batches = _batches(columns, batch, loader)

        def __next__(self) -> tuple[Any, ...]:
            return next(self._batches)

    oracle.CSVLoader, oracle.rpc = InMemoryLoader, decisions
    settings = Namespace(
        lookahead_value=lookahead,
        stop_iter=0,
        ragged=False,
        additive_increase_param=1,
        multiplicative_decrease_param=2,
        worker_addresses=None,
        cache_size=0,
        processed_csv=None,
        mini_batch_size=batch,
        ln_emb=list(num_rows),
        dataset_multi_num=0,
        verbose=False,
        world_size_trainers=1,
        cleanup_proportion=0.25,
        worker_id=0,
        oracle_prefix="oracle",
        trainer_prefix="worker",
        world_size=2,
        master_ip="127.0.0.1",
        master_port="0",
    )
    oracle.OracleCacher(settings).train_addition()
    return decisions


def _batches(
    columns: Sequence[NDArray[np.int32]], batch: int, loader: Any
) -> Iterator[tuple[Any, ...]]:
    dense, target = np.empty((batch, 0), np.float32), np.empty((batch, 1), np.float32)
    for start in range(0, len(columns[0]) - batch + 1, batch):
        sparse = np.stack([column[start : start + batch] for column in columns]).astype(np.int64)
        yield dense, sparse, [loader.unique_once(rows) for rows in sparse], target


def bagpipe_rate(
    checkout: Path,
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    lookahead: int,
) -> tuple[float, float]:
    """Return BagPipe's accesses per wall second and per CPU second."""
    times = run_bagpipe(checkout, columns, num_rows, batch, lookahead).times
    accesses = (len(times) - 1) * batch * len(columns)
    return accesses / (times[-1][0] - times[0][0]), accesses / (times[-1][1] - times[0][1])


def fetches_equal_rows(
    checkout: Path, columns: Sequence[NDArray[np.int32]], num_rows: Sequence[int], batch: int
) -> bool:
    """Return whether BagPipe's oracle and our plan with the `ttl` policy fetch the same rows.

    A window of n batches keeps a row for n - 1 steps.
    """
    lookahead = 5
    cache = CacheConfig(policy="ttl", lookahead=lookahead - 1, prefetch_steps=1)
    fetched = run_bagpipe(checkout, columns, num_rows, batch, lookahead, record_rows=True).fetched
    for table, rows in enumerate(columns):
        ids = rows.astype(np.int64)
        steps = [np.unique(ids[start : start + batch]) for start in range(0, len(rows), batch)]
        plan = Plan(zip(steps, next_use(steps, num_rows[table]), strict=True), cache)
        for of_tables, step in zip(fetched, plan, strict=False):
            if not np.array_equal(of_tables[table], step.numbers[step.fetch]):
                return False
    return len(fetched) > 0


BATCHES = 2_048, 16_384
LOOKAHEAD = 200
"""BagPipe's default window in batches; the benchmark limits it to a quarter of the run."""
Kernel = Callable[[NDArray[np.int32], int, int], NDArray[np.int32]]


def ours(rows: NDArray[np.int32], batch: int, num_rows: int) -> NDArray[np.int32]:
    """Return the next-use distances of all entries, step by step."""
    offsets = np.append(np.arange(0, len(rows), batch), len(rows))
    unique = distinct(Jagged(rows.astype(np.int64), offsets))
    steps = [unique.values[a:b] for a, b in pairwise(unique.offsets.tolist())]
    return np.concatenate(next_use(steps, num_rows))


def one_sort(rows: NDArray[np.int32], batch: int, num_rows: int) -> NDArray[np.int32]:
    """Return the same by a sort by (row, step) and a sort back to (step, row)."""
    del num_rows
    step = np.arange(len(rows)) // batch
    keys = np.sort(rows.astype(np.int64) << 32 | step)
    keys = keys[np.diff(keys, prepend=-1) != 0]
    row, step = keys >> 32, keys & 0xFFFFFFFF
    distances = np.zeros(len(keys), np.int32)
    has_next = row[1:] == row[:-1]
    distances[:-1][has_next] = np.diff(step)[has_next]
    return distances[np.argsort(step, kind="stable")]


def rate(
    kernel: Kernel, columns: Sequence[NDArray[np.int32]], batch: int, num_rows: Sequence[int]
) -> tuple[float, float]:
    """Return accesses per wall second and per CPU second."""
    tables = list(zip(columns, num_rows, strict=True))[::-1]  # the largest table first
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(num_cores()) as threads:
        list(threads.map(lambda table: kernel(table[0], batch, table[1]), tables))
    total = sum(map(len, columns))
    return total / (time.perf_counter() - wall_start), total / (time.process_time() - cpu_start)


def compare(
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    rounds: int,
    bagpipe: Path | None = None,
) -> dict[str, Any]:
    """Measure the rates of all kernels in alternating rounds."""
    kernels: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: rate(ours, columns, batch, num_rows),
        "peer": lambda: rate(one_sort, columns, batch, num_rows),
    }
    if bagpipe is not None:
        window = min(LOOKAHEAD, len(columns[0]) // batch // 4)
        kernels["bagpipe"] = lambda: bagpipe_rate(bagpipe, columns, num_rows, batch, window)
    wall: dict[str, list[float]] = {name: [] for name in kernels}
    cpu: dict[str, list[float]] = {name: [] for name in kernels}
    expected, actual = (kernel(columns[-1], batch, num_rows[-1]) for kernel in (one_sort, ours))
    assert np.array_equal(actual, expected), "both kernels must give the same next uses"
    for _ in range(rounds):
        for name, measure_rate in kernels.items():
            per_wall_sec, per_cpu_sec = measure_rate()
            wall[name].append(per_wall_sec)
            cpu[name].append(per_cpu_sec)
    cpu_ratios = {
        f"cpu_rounds_against_{name}": [
            round(a / b, 2) for a, b in zip(cpu["ours"], rates, strict=True)
        ]
        for name, rates in cpu.items()
        if name != "ours"
    }
    return {
        **{name: round(statistics.median(rates) / 1e6, 1) for name, rates in wall.items()},
        "per_cpu_second": {
            name: round(statistics.median(rates) / 1e6, 1) for name, rates in cpu.items()
        },
        "rounds": [round(a / b, 2) for a, b in zip(wall["ours"], wall["peer"], strict=True)],
        **cpu_ratios,
    }


def end_to_end(columns: list[NDArray[np.int32]], batch: int) -> dict[str, float]:
    """Return the rate of the Beam stages, including pipeline start-up."""
    with tempfile.TemporaryDirectory() as root:
        seconds = run_beam_stages(columns, batch, Path(root))
    accesses = sum(map(len, columns))
    return {"seconds": round(seconds, 2), "M_per_sec": round(accesses / seconds / 1e6, 2)}


def measure(
    samples: int, rounds: int, shared_data: Path, bagpipe: Path | None = None
) -> dict[str, Any]:
    """Measure everything.

    Args:
        samples: accesses per table.
        rounds: of the kernels.
        shared_data: directory of logs.
        bagpipe: checkout of BagPipe, None to skip it.
    """
    columns = [skewed_rows(num_rows, samples, 0) for num_rows in NUM_ROWS]
    worst = [uniform_rows(NUM_ROWS[-1], samples * 4, seed) for seed in range(2)]
    if bagpipe is None:
        sys.stderr.write("skipped BagPipe's oracle; pass a checkout of it with --bagpipe\n")
    else:
        small = [rows[:2_048] for rows in columns[:16]]
        assert fetches_equal_rows(bagpipe, small, NUM_ROWS[:16], 64), "fetched rows must be equal"
    details: dict[str, Any] = {}
    for batch in BATCHES:
        details[f"batch {batch}"] = compare(columns, NUM_ROWS, batch, rounds, bagpipe)
        details[f"batch {batch}, uniform"] = compare(
            worst, [NUM_ROWS[-1]] * 2, batch, rounds, bagpipe
        )
        details[f"batch {batch}, end to end"] = end_to_end(columns, batch)
        sys.stderr.write(f"batch {batch}: {details[f'batch {batch}']}\n")
    for name in GOALS:
        with tempfile.TemporaryDirectory() as scratch:
            sizes = measure_bytes(name, shared_data, Path(scratch))
        if sizes is None:
            sys.stderr.write(f"skipped {name}, its log is not in {shared_data}\n")
        else:
            details[f"bytes of {name}"] = sizes
    head = details[f"batch {BATCHES[0]}"]
    return {
        "ours": head["ours"],
        "peer": head["peer"],
        "ratio": round(statistics.median(head["rounds"]), 2),
        "unit": f"million accesses a second, 26 tables, batch {BATCHES[0]}, against one sort",
        "rounds": head["rounds"],
        "details": details,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=1 << 20, help="accesses per table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    parser.add_argument("--bagpipe", type=Path, help="checkout of uw-mad-dash/bagpipe")
    options = parser.parse_args(argv)
    result = measure(options.samples, options.rounds, options.shared_data, options.bagpipe)
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
