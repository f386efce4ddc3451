"""Seconds until a run may train: the start of a new one, and that of one resumed halfway.

`python -m benchmarks.start [--json] [--steps N] [--rounds N] [--dim N] [--directory DIR]`

Draws the rows that each step of 26 tables looks up, in two shuffled epochs, and writes access lists
and index as a build does, and a checkpoint of all rows. A round starts a run, and resumes it in the
log and in mapped files: it loads the rows, plans the caches under a limit, finds the memory that
checkpoints need, and plans the first step. `ours` is the longest of the three. Before each the
files leave the page cache, and the bytes that it reads from the disk are counted. `peer` is the
time of as many bytes at the rate at which all files are read, one after the other. Files in
`--directory` that an earlier call has left are used again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.checkpoint_peers import drop_pages
from benchmarks.logs import NUM_ROWS, skewed_rows, write_result
from pipelines.oracle.index import index_table
from pipelines.oracle.table_files import split_into_files, write_access_file, write_edges_file
from schemas.arrays import Jagged
from schemas.config.job import OrderConfig
from schemas.config.train import CacheConfig
from schemas.dataset.files import FileEntry, sha256_of, write_files
from schemas.dataset.manifest import Reference
from schemas.dataset.opened import Dataset, Index, IndexPart, Segment
from schemas.dataset.order import Order
from schemas.dataset.run_next_uses import SharedNextUses
from schemas.kernels.oracle import FirstUseNumbering
from schemas.layout import FILES
from schemas.oracle.next_uses import distinct, sorted_gaps
from schemas.run.records import CHECKPOINTS
from schemas.storage.location import Location
from trainer.checkpoint.files import NewCheckpoint, folder_name
from trainer.checkpoint.load import load_rows, newest_checkpoint, verify_checkpoint
from trainer.checkpoint.snapshot import copy_bytes
from trainer.components import plans_of
from trainer.stores.future_log import NextUseLookup, log_store
from trainer.stores.local import mmap_store
from trainer.stores.store import Records, TableLayout

LOOKUPS = 32
"""Look-ups of a step in each table."""
EPOCHS, EVERY_STEPS = 2, 1000
TABLES = tuple(f"table_{number:02d}" for number in range(len(NUM_ROWS)))
CACHE = CacheConfig(rows=1 << 20)


@dataclass(frozen=True)
class DrawnDataset(Dataset):
    """A dataset with the fields that plans read, and its only index."""

    index: Index = field(kw_only=True)

    def index_for(self, order: Order) -> Index:
        """Return the index."""
        return self.index


def write_dataset(root: Path, num_steps: int) -> None:
    """Write the access lists of a segment and its index; `num_steps` are those of the run."""
    num_blocks, files = num_steps // EPOCHS, list[FileEntry]()
    for number, num_rows in enumerate(NUM_ROWS):
        drawn = skewed_rows(num_rows, num_blocks * LOOKUPS, number).astype(np.int64)
        lists = distinct(Jagged(drawn, np.arange(num_blocks + 1) * LOOKUPS))
        codes, rows, new = FirstUseNumbering().number(lists.values, lists.offsets)
        gaps = sorted_gaps(Jagged(codes, lists.offsets), len(rows) + 1)
        for index, (start, end) in enumerate(pairwise(split_into_files(lists.lengths).tolist())):
            first, last = lists.offsets[[start, end]]
            part = Jagged(gaps[first:last], lists.offsets[start : end + 1] - first)
            where = root / "segment", TABLES[number], index
            files.append(write_access_file(*where, np.arange(start, end), part))
            files.append(write_edges_file(*where, rows[new[start] : new[end]]))
    write_files(root / "segment" / FILES, files)
    segment, order = open_segment(root), order_of(num_steps).of_segment(0)
    place = Location.parse(root / "index")
    totals = [index_table(place, segment, table, order) for table in TABLES]
    write_files(root / "index" / FILES, [file for each in totals for file in each.files])


def order_of(num_steps: int) -> Order:
    """Return the order of a run; a batch is one block."""
    return Order((num_steps // EPOCHS,), 1, EPOCHS, OrderConfig(shuffle="blocks"))


def open_segment(root: Path) -> Segment:
    """Return the segment, with the fields that plans read."""
    manifest = SimpleNamespace(columns={}, files_sha256=sha256_of(root / "segment" / FILES))
    reference = Reference(id="00000-a", manifest_sha256="")
    segment = Segment(Location.parse(root / "segment"), reference, cast(Any, manifest))
    num_rows = {t: sum(file.num_rows for file in segment.edge_files(t)) for t in TABLES}
    manifest.tables = {t: SimpleNamespace(num_unique_rows=num_rows[t]) for t in TABLES}
    return segment


def open_drawn(root: Path, num_steps: int) -> DrawnDataset:
    """Return the dataset, with the fields that plans read."""
    place, anything, order = Location.parse(root), cast(Any, None), order_of(num_steps)
    sha256 = sha256_of(root / "index" / FILES)
    manifest = SimpleNamespace(files_sha256=sha256, num_steps=order.steps_per_epoch)
    part = IndexPart(place / "index", cast(Any, manifest))
    index = Index(place / "index", anything, order, (part,))
    tables = dict.fromkeys(TABLES, SimpleNamespace(features=()))
    job = cast(Any, SimpleNamespace(data=SimpleNamespace(tables=tables)))
    features = cast(Any, SimpleNamespace(features=()))
    return DrawnDataset(place, anything, job, features, (open_segment(root),), index=index)


def layouts_of(dim: int) -> dict[str, TableLayout]:
    """Return the layouts of the tables."""
    kind: dict[str, Any] = {"dim": dim, "state_width": 1, "dtype": "float32", "seed": 0}
    return {table: TableLayout(table=table, **kind) for table in TABLES}


def write_checkpoint(run: Path, dataset: DrawnDataset, layouts: dict[str, TableLayout]) -> None:
    """Write a checkpoint of all rows, halfway."""
    (run / CHECKPOINTS).mkdir(parents=True)
    step = dataset.index.order.num_steps // 2
    with NewCheckpoint(run / CHECKPOINTS, step) as checkpoint:
        for table, layout in layouts.items():
            rows = np.sort(dataset.segments[0].rows(table))
            shape = (len(rows), layout.dim + 1)
            block = np.random.default_rng(0).random(shape, np.float32)
            records = Records(block[:, : layout.dim], block[:, layout.dim :])
            checkpoint.write_rows(table, layout, [(rows, records)])
        parts = {table: (f"{folder_name(step)}/{table}",) for table in layouts}
        checkpoint.finish({}, parts, {}, keep=1)


def start(
    root: Path, num_steps: int, layouts: dict[str, TableLayout], run: Path, store: str | None
) -> None:
    """Start a run, or resume it with its rows in a store."""
    dataset, first = open_drawn(root, num_steps), 0
    order = dataset.index.order
    if store is not None:
        folder = run / "store"
        shutil.rmtree(folder, ignore_errors=True)
        opened = log_store(layouts, folder) if store == "log" else mmap_store(layouts, folder)
        next_use = NextUseLookup(dataset, order) if store == "log" else None
        checkpoint = newest_checkpoint(run)
        assert checkpoint is not None
        manifest = verify_checkpoint(checkpoint, with_rows=False)
        load_rows(checkpoint, manifest, opened, next_use)
        first = manifest.train_step
    shared = SharedNextUses(dataset, order)
    plans = plans_of(dataset, order, layouts, CACHE, first, shared=shared)
    copy_bytes(dataset, shared, layouts, range(first, order.num_steps), EVERY_STEPS, CACHE)
    for plan in plans.values():
        next(plan.steps)


def read_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def timed_read(folder: Path, action: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of an action, wall and processor, and the bytes that it reads."""
    drop_pages(folder)
    num_bytes, cpu, begin = read_bytes(), time.process_time(), time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "processor_sec": time.process_time() - cpu,
        "bytes": read_bytes() - num_bytes,
    }


def read_all(folder: Path) -> None:
    """Read all files, one after the other."""
    buffer = bytearray(8 << 20)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(root: Path, num_steps: int, rounds: int, dim: int) -> dict[str, Any]:
    """Run all rounds."""
    layouts, run = layouts_of(dim), root / "run"
    if not run.exists():
        write_dataset(root / "dataset", num_steps)
        write_checkpoint(run, open_drawn(root / "dataset", num_steps), layouts)
    ways = {"start": None, "resume in the log": "log", "resume in mapped files": "mmap"}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in [*ways, "disk"]}
    for number in range(rounds):
        for name, store in ways.items():
            action = partial(start, root / "dataset", num_steps, layouts, run, store)
            figures[name].append(timed_read(root, action))
            sys.stderr.write(f"round {number}, {name}: {figures[name][-1]}\n")
        shutil.rmtree(run / "store")
        figures["disk"].append(timed_read(root, partial(read_all, root)))
        sys.stderr.write(f"round {number}, disk: {figures['disk'][-1]}\n")
    details = {
        name: {key: statistics.median(each[key] for each in of) for key in of[0]}
        for name, of in figures.items()
    }
    slowest = max(ways, key=lambda name: details[name]["seconds"])
    disk = [each["bytes"] / each["seconds"] for each in figures["disk"]]
    peers = [ours["bytes"] / rate for ours, rate in zip(figures[slowest], disk, strict=True)]
    ours, peer = details[slowest]["seconds"], statistics.median(peers)
    return {
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "unit": f"seconds, {slowest}, {num_steps} steps, {len(layouts)} tables",
        "rounds": [p / each["seconds"] for p, each in zip(peers, figures[slowest], strict=True)],
        "details": details,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--directory", type=Path, help="of the files, kept")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        root = options.directory or Path(scratch)
        result = measure(root, options.steps, options.rounds, options.dim)
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
