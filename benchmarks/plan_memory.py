"""Peak memory of planning a large table, and of merging the dictionaries of two segments.

`python -m benchmarks.plan_memory [--json] [--rows N] [--accesses N]`

The files of one table are written as by a build: N rows of 8 bytes, 16,384 uniform accesses per
step. Each task runs in a separate process, which reports its memory at the start and its peak.
`ours` is the trainer's plan (Belady, a cache of 5 % of the rows), which decodes files step by step;
the peer is the same plan over fully decoded lists and next uses. `join` merges the dictionaries of
two segments that share half of their rows, as a reader does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.logs import write_result
from pipelines.oracle.table_files import (
    split_into_files,
    write_access_file,
    write_edges_file,
    write_index_file,
)
from schemas.arrays import Jagged, offsets_of
from schemas.config.job import OrderConfig
from schemas.config.train import CacheConfig
from schemas.dataset.accesses import merge_dictionaries
from schemas.dataset.checked_files import ListFiles
from schemas.dataset.files import describe_file, sha256_of, write_files
from schemas.dataset.manifest import Reference
from schemas.dataset.opened import Dataset, Index, IndexPart, Segment, access_lists
from schemas.dataset.order import Order
from schemas.dataset.run_next_uses import NextUses, indexed_steps
from schemas.layout import FILES
from schemas.oracle.cache_plan import Plan, summarize
from schemas.oracle.next_uses import next_use, sorted_gaps
from schemas.storage.location import Location

TABLE, STEP_ACCESSES, CACHE_SHARE = "items", 16_384, 0.05


def write_tables(root: Path, num_rows: int, num_accesses: int) -> None:
    """Write a segment with its index, and the edges of a second segment."""
    rng = np.random.default_rng(0)
    count = num_accesses // STEP_ACCESSES
    steps = [
        np.unique(rng.integers(0, num_rows, STEP_ACCESSES, np.int32)).astype(np.int32)
        for _ in range(count)
    ]
    distances = next_use(cast("list[NDArray[np.int64]]", steps), num_rows)
    for index, (a, b) in enumerate(
        pairwise(split_into_files(np.array(list(map(len, steps)))).tolist())
    ):
        offsets = offsets_of(np.array(list(map(len, steps[a:b]))))
        numbers = Jagged(np.concatenate(steps[a:b]), offsets)
        gaps = Jagged(sorted_gaps(numbers, num_rows), offsets)
        write_access_file(root / "segment", TABLE, index, np.arange(a, b), gaps)
        flat = Jagged(np.concatenate(distances[a:b]), offsets)
        write_index_file(root / "index", TABLE, index, a, flat)
    rows = rng.integers(0, 1 << 62, num_rows + num_rows // 2)
    write_edges(root / "segment", rows[:num_rows])
    write_edges(root / "second", rng.permutation(rows[num_rows // 2 :]))
    for name in ("segment", "index", "second"):
        place = root / name
        paths = [path.relative_to(place).as_posix() for path in place.rglob("*.parquet")]
        write_files(place / FILES, [describe_file(place / path, path) for path in paths])


def write_edges(root: Path, rows: NDArray[np.int64]) -> None:
    """Write the rows of a segment in files of 1 Mi rows."""
    for index, start in enumerate(range(0, len(rows), 1 << 20)):
        write_edges_file(root, TABLE, index, rows[start : start + (1 << 20)])


def manifest_of(root: Path) -> Any:
    """Return a manifest with the fields that plans read."""
    return SimpleNamespace(columns={}, files_sha256=sha256_of(root / FILES))


def segment_of(root: Path) -> Segment:
    """Return a segment with the fields that plans read."""
    reference = Reference(id="00000-a", manifest_sha256="")
    return Segment(Location.parse(root), reference, manifest_of(root))


def open_files(root: Path) -> tuple[Dataset, Index]:
    """Return a dataset with the fields that plans read, and its index."""
    place, anything = Location.parse(root), cast(Any, None)
    part = IndexPart(place / "index", manifest_of(root / "index"))
    order = Order((len(part.steps(TABLE)),), 1, 1, OrderConfig())
    job = SimpleNamespace(data=SimpleNamespace(tables={TABLE: SimpleNamespace(features=())}))
    features = SimpleNamespace(features=())
    segments = (segment_of(root / "segment"),)
    dataset = Dataset(place, anything, cast(Any, job), cast(Any, features), segments)
    return dataset, Index(place / "index", anything, order, (part,))


def count_fetched_rows(steps: Iterable[tuple[Any, Any]], num_rows: int) -> int:
    """Compute the plan; return its fetched rows."""
    cache = CacheConfig(policy="belady", rows=int(num_rows * CACHE_SHARE), prefetch_steps=2)
    return summarize(Plan(steps, cache)).fetched_rows


def plan_streaming(root: Path, num_rows: int) -> int:
    """Plan as the trainer does."""
    dataset, index = open_files(root)
    return count_fetched_rows(indexed_steps(dataset, index, TABLE), num_rows)


def plan_decoded(root: Path, num_rows: int) -> int:
    """Plan over fully decoded lists and next uses."""
    dataset, index = open_files(root)
    lists = ListFiles(dataset.segments[0].access_files(TABLE), access_lists)
    steps = zip(
        [lists[i] for i in range(len(lists))], list(NextUses(dataset, index, TABLE)), strict=True
    )
    return count_fetched_rows(steps, num_rows)


def merge_rows(root: Path, _: int) -> int:
    """Merge dictionaries as a reader does."""
    segments = [segment_of(root / name) for name in ("segment", "second")]
    return len(merge_dictionaries([segment.rows(TABLE) for segment in segments])[1])


TASKS: dict[str, Callable[[Path, int], int]] = {
    "ours": plan_streaming,
    "decoded whole": plan_decoded,
    "join": merge_rows,
}


def process_memory(key: str) -> int:
    """Return an entry of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10


def run_in_process(task: str, root: Path, num_rows: int) -> dict[str, float]:
    """Run one task in a separate process."""
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--way", task, "--root", str(root)]
    command += ["--rows", str(num_rows)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(completed.stdout)


def run_task(task: str, root: Path, num_rows: int) -> dict[str, float]:
    """Run one task in this process."""
    before, start = process_memory("VmRSS"), time.perf_counter()
    result = TASKS[task](root, num_rows)
    seconds, peak = time.perf_counter() - start, process_memory("VmHWM")
    return {
        "result": result,
        "before_mib": before >> 20,
        "peak_mib": peak >> 20,
        "added_mib": (peak - before) >> 20,
        "seconds": round(seconds, 1),
    }


def measure(num_rows: int, num_accesses: int) -> dict[str, Any]:
    """Write the files and run all tasks.

    Args:
        num_rows: of the table.
        num_accesses: over all steps, including repeated accesses of a step.
    """
    with tempfile.TemporaryDirectory() as name:
        write_tables(Path(name), num_rows, num_accesses)
        details = {task: run_in_process(task, Path(name), num_rows) for task in TASKS}
    plans = {details[task]["result"] for task in ("ours", "decoded whole")}
    assert len(plans) == 1, "both plans must be equal"
    ours, peer = details["ours"]["added_mib"], details["decoded whole"]["added_mib"]
    ratio = round(peer / ours, 2)
    return {
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "unit": f"MiB of memory besides imports, {num_rows} rows, {num_accesses} accesses",
        "rounds": [ratio],
        "details": details,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    parser.add_argument("--accesses", type=int, default=100_000_000)
    parser.add_argument("--way", choices=TASKS, help="run this task here, on files of --root")
    parser.add_argument("--root", type=Path)
    options = parser.parse_args(argv)
    if options.way is not None:
        write_result(run_task(options.way, options.root, options.rows), options)
    else:
        write_result(measure(options.rows, options.accesses), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
