"""Accesses a second that the oracle decides: distinct rows of each step, and each one's next use.

`python -m benchmarks.oracle [--json] [--samples N] [--rounds N] [--bagpipe DIR]`

`ours` is `schemas.oracle` and `schemas.oracle.next_use`; the peer is the obvious way in numpy,
one sort of all accesses by (row, step). Both answer the same and run in as many threads as there
are processors, in alternating rounds. With a checkout of BagPipe its oracle decides the same
accesses in the same rounds (`benchmarks/oracle_bagpipe.py`), in one thread as it is; compare it by
a processor's second. Uniform ids over 10 M rows are the worst case. Beside that stand the rate end
to end, from look-ups to files by the Beam stages, and the bytes that shipped jobs take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.logs import SHARED_DATA
from benchmarks.oracle_bagpipe import agrees, bagpipe_rate
from benchmarks.oracle_beam import through_beam
from benchmarks.oracle_bytes import GOALS, measure_bytes
from benchmarks.oracle_tables import NUM_ROWS, skewed, uniform
from schemas.arrays import Jagged
from schemas.oracle import distinct, next_use

BATCHES = 2_048, 16_384
LOOKAHEAD = 200
"""Batches of BagPipe's window, its default; at most a quarter of the run, so that it decides."""
Kernel = Callable[[NDArray[np.int32], int, int], NDArray[np.int32]]


def ours(rows: NDArray[np.int32], batch: int, num_rows: int) -> NDArray[np.int32]:
    """Return the next-use distances of all entries, step by step."""
    offsets = np.append(np.arange(0, len(rows), batch), len(rows))
    found = distinct(Jagged(rows, offsets), num_rows)
    steps = [found.values[a:b] for a, b in pairwise(found.offsets.tolist())]
    return np.concatenate(next_use(steps, num_rows))


def obvious(rows: NDArray[np.int32], batch: int, num_rows: int) -> NDArray[np.int32]:
    """Return the same by one sort by (row, step) and one back to (step, row)."""
    del num_rows
    step = np.arange(len(rows)) // batch
    keys = np.sort(rows.astype(np.int64) << 32 | step)
    keys = keys[np.diff(keys, prepend=-1) != 0]
    row, step = keys >> 32, keys & 0xFFFFFFFF
    distances = np.zeros(len(keys), np.int32)
    again = row[1:] == row[:-1]
    distances[:-1][again] = np.diff(step)[again]
    return distances[np.argsort(step, kind="stable")]


def rate(
    kernel: Kernel, columns: Sequence[NDArray[np.int32]], batch: int, num_rows: Sequence[int]
) -> tuple[float, float]:
    """Return accesses a second by the clock, and a second of one processor's time."""
    work = list(zip(columns, num_rows, strict=True))[::-1]  # the largest table first
    started, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(lambda w: kernel(w[0], batch, w[1]), work))
    total = sum(map(len, columns))
    return total / (time.perf_counter() - started), total / (time.process_time() - used)


def compare(
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    rounds: int,
    bagpipe: Path | None = None,
) -> dict[str, Any]:
    """Run all ways in alternating rounds."""
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: rate(ours, columns, batch, num_rows),
        "peer": lambda: rate(obvious, columns, batch, num_rows),
    }
    if bagpipe is not None:
        window = min(LOOKAHEAD, len(columns[0]) // batch // 4)
        ways["bagpipe"] = lambda: bagpipe_rate(bagpipe, columns, num_rows, batch, window)
    clock: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    expected, found = (kernel(columns[-1], batch, num_rows[-1]) for kernel in (obvious, ours))
    assert np.array_equal(found, expected), "both kernels must give the same next uses"
    for _ in range(rounds):
        for name, measured in ways.items():
            by_clock, by_cpu = measured()
            clock[name].append(by_clock)
            cpu[name].append(by_cpu)
    against = {
        f"cpu_rounds_against_{name}": [
            round(a / b, 2) for a, b in zip(cpu["ours"], found, strict=True)
        ]
        for name, found in cpu.items()
        if name != "ours"
    }
    return {
        **{name: round(statistics.median(found) / 1e6, 1) for name, found in clock.items()},
        "per_cpu_second": {
            name: round(statistics.median(found) / 1e6, 1) for name, found in cpu.items()
        },
        "rounds": [round(a / b, 2) for a, b in zip(clock["ours"], clock["peer"], strict=True)],
        **against,
    }


def end_to_end(columns: list[NDArray[np.int32]], batch: int) -> dict[str, float]:
    """Return the rate of the Beam stages, start of the pipeline included."""
    with tempfile.TemporaryDirectory() as root:
        seconds = through_beam(columns, batch, Path(root))
    accesses = sum(map(len, columns))
    return {"seconds": round(seconds, 2), "M_per_sec": round(accesses / seconds / 1e6, 2)}


def measure(
    samples: int, rounds: int, shared_data: Path, bagpipe: Path | None = None
) -> dict[str, Any]:
    """Measure everything.

    Args:
        samples: accesses of each of the tables.
        rounds: of the kernels.
        shared_data: directory of logs.
        bagpipe: checkout of BagPipe, None to leave it out.
    """
    columns = [skewed(num_rows, samples, 0) for num_rows in NUM_ROWS]
    worst = [uniform(NUM_ROWS[-1], samples * 4, seed) for seed in range(2)]
    if bagpipe is None:
        sys.stderr.write("skipped BagPipe's oracle, give a checkout of it by --bagpipe\n")
    else:
        small = [rows[:2_048] for rows in columns[:16]]
        assert agrees(bagpipe, small, NUM_ROWS[:16], 64), "both must fetch the same rows"
    found: dict[str, Any] = {}
    for batch in BATCHES:
        found[f"batch {batch}"] = compare(columns, NUM_ROWS, batch, rounds, bagpipe)
        found[f"batch {batch}, uniform"] = compare(
            worst, [NUM_ROWS[-1]] * 2, batch, rounds, bagpipe
        )
        found[f"batch {batch}, end to end"] = end_to_end(columns, batch)
        sys.stderr.write(f"batch {batch}: {found[f'batch {batch}']}\n")
    for name in GOALS:
        with tempfile.TemporaryDirectory() as scratch:
            measured = measure_bytes(name, shared_data, Path(scratch))
        if measured is None:
            sys.stderr.write(f"skipped {name}, its log is not in {shared_data}\n")
        else:
            found[f"bytes of {name}"] = measured
    head = found[f"batch {BATCHES[0]}"]
    return {
        "ours": head["ours"],
        "peer": head["peer"],
        "ratio": round(statistics.median(head["rounds"]), 2),
        "unit": f"million accesses a second, 26 tables, batch {BATCHES[0]}, against one sort",
        "rounds": head["rounds"],
        "details": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=1 << 20, help="accesses of each table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    parser.add_argument("--bagpipe", type=Path, help="checkout of uw-mad-dash/bagpipe")
    options = parser.parse_args(argv)
    result = measure(options.samples, options.rounds, options.shared_data, options.bagpipe)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
