"""Most memory of a plan of a table that does not fit, and of joining two segments' numberings.

`python -m benchmarks.plan_memory [--json] [--rows N] [--accesses N]`

Files of one table are written as a build leaves them: N rows of 8 bytes, uniform accesses of
16,384 a step. Then each way runs in a process of its own, which says its memory before and at the
most. `ours` is the plan as the trainer makes it (Belady, a cache of 5 % of the rows), files decoded
as steps come; the peer is the same plan over lists and next uses decoded whole. `join` takes half
of the rows of a second segment from the first, by ranges of slots on disk as an index does, and in
memory as a reader does.
"""

from __future__ import annotations

import argparse
import json
import statistics
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

from pipelines.memory import keep_freed_memory
from pipelines.oracle.files import (
    concat_lists,
    split_into_files,
    write_access_file,
    write_edges_file,
    write_index_file,
)
from pipelines.oracle.index import merge_numberings
from pipelines.oracle.numbering import WORKER_ENTRIES
from schemas.accesses import indexed_steps, merge_dictionaries
from schemas.arrays import Jagged
from schemas.cache_plan import Plan, summarize
from schemas.config.job import OrderConfig
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset, Index, Segment
from schemas.files import FileEntry, describe_file
from schemas.oracle import next_use
from schemas.order import Order

TABLE, STEP_ACCESSES, CACHE_SHARE = "items", 16_384, 0.05


def make(root: Path, num_rows: int, num_accesses: int) -> None:
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
        write_access_file(root / "segment", TABLE, index, np.arange(a, b), concat_lists(steps[a:b]))
        write_index_file(root / "index", TABLE, index, a, concat_lists(distances[a:b]))
    rows = rng.integers(0, 1 << 62, num_rows + num_rows // 2)
    write_edges(root / "segment", rows[:num_rows])
    write_edges(root / "second", rng.permutation(rows[num_rows // 2 :]))


def write_edges(root: Path, rows: NDArray[np.int64]) -> None:
    """Write the rows of a segment, as many to a file as one of access lists is the first to use."""
    for index, start in enumerate(range(0, len(rows), 1 << 20)):
        part = rows[start : start + (1 << 20)]
        nowhere = np.zeros(len(part), np.int32)
        write_edges_file(root, TABLE, index, part, nowhere, nowhere)


def files_of(root: Path) -> dict[str, FileEntry]:
    """Describe all files below a directory."""
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*.parquet")]
    return {path: describe_file(root, path) for path in paths}


def segment_of(root: Path) -> Segment:
    """Return as much of a segment as plans read."""
    manifest: Any = SimpleNamespace(columns={})
    blocks: Any = None
    return Segment(root, manifest, files_of(root), blocks)


def opened(root: Path) -> tuple[Dataset, Index, Order]:
    """Return as much of a dataset as plans read."""
    segment, manifest = segment_of(root / "segment"), cast(Any, None)
    index = Index(root / "index", manifest, files_of(root / "index"))
    num_steps = len(index.steps(TABLE))
    job = SimpleNamespace(data=SimpleNamespace(tables={TABLE: SimpleNamespace(features=())}))
    features = SimpleNamespace(features=())
    dataset = Dataset(root, manifest, cast(Any, job), cast(Any, features), (segment,), (index,))
    return dataset, index, Order((num_steps,), 1, 1, OrderConfig())


def planned(steps: Iterable[tuple[Any, Any]], num_rows: int) -> int:
    """Make the plan; return its reads."""
    cache = CacheConfig(policy="belady", rows=int(num_rows * CACHE_SHARE), prefetch_steps=2)
    return summarize(Plan(steps, cache)).fetched_rows


def ours(root: Path, num_rows: int) -> int:
    """Plan as the trainer does."""
    dataset, index, order = opened(root)
    return planned(indexed_steps(dataset, index, TABLE, order), num_rows)


def decoded_whole(root: Path, num_rows: int) -> int:
    """Plan over lists and next uses that are decoded whole."""
    dataset, index, order = opened(root)
    lists, distances = dataset.segments[0].access(TABLE), index.distances(TABLE)

    def part(of: Jagged, step: int) -> NDArray[Any]:
        return of.values[of.offsets[step] : of.offsets[step + 1]]

    return planned(((part(lists, s), part(distances, s)) for s in range(order.num_steps)), num_rows)


def join_on_disk(root: Path, _: int) -> int:
    """Join numberings as an index does."""
    segments = [segment_of(root / name) for name in ("segment", "second")]
    with tempfile.TemporaryDirectory(dir=root) as maps:
        paths = [Path(maps) / str(index) for index in range(2)]
        return merge_numberings([s.edge_files(TABLE) for s in segments], paths, WORKER_ENTRIES // 2)


def join_in_memory(root: Path, _: int) -> int:
    """Join numberings as a reader does."""
    segments = [segment_of(root / name) for name in ("segment", "second")]
    return len(merge_dictionaries([segment.rows(TABLE) for segment in segments])[1])


WAYS: dict[str, Callable[[Path, int], int]] = {
    "ours": ours,
    "decoded whole": decoded_whole,
    "join on disk": join_on_disk,
    "join in memory": join_in_memory,
}


def memory(line: str) -> int:
    """Return a line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(found for found in lines if found.startswith(line)).split()[1]) << 10


def in_process(way: str, root: Path, num_rows: int) -> dict[str, float]:
    """Run one way in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--way", way, "--root", str(root)]
    command += ["--rows", str(num_rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(num_rows: int, num_accesses: int) -> dict[str, Any]:
    """Write the files and run all ways.

    Args:
        num_rows: of the table.
        num_accesses: over all steps, those that a step repeats counted.
    """
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), num_rows, num_accesses)
        found = {way: in_process(way, Path(name), num_rows) for way in WAYS}
    assert found["ours"]["result"] == found["decoded whole"]["result"], "plans must be equal"
    assert found["join on disk"]["result"] == found["join in memory"]["result"], "joins, too"
    mine, peer = found["ours"]["added_mib"], found["decoded whole"]["added_mib"]
    ratios = [round(peer / mine, 2)]
    return {
        "ours": mine,
        "peer": peer,
        "ratio": statistics.median(ratios),
        "unit": f"MiB of memory besides imports, {num_rows} rows, {num_accesses} accesses",
        "rounds": ratios,
        "details": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    parser.add_argument("--accesses", type=int, default=100_000_000)
    parser.add_argument("--way", choices=WAYS, help="run this one here, over files of --root")
    parser.add_argument("--root", type=Path)
    options = parser.parse_args(argv)
    if options.way is None:
        result = measure(options.rows, options.accesses)
        sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
        return 0
    if options.way == "join on disk":
        keep_freed_memory()  # as workers do
    before, started = memory("VmRSS"), time.perf_counter()
    result = WAYS[options.way](options.root, options.rows)
    seconds, peak = time.perf_counter() - started, memory("VmHWM")
    found = {
        "result": result,
        "before_mib": before >> 20,
        "peak_mib": peak >> 20,
        "added_mib": (peak - before) >> 20,
        "seconds": round(seconds, 1),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
