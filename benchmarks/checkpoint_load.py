"""Rate at which a large checkpoint is loaded, compared with reads that throw the bytes away.

`python -m benchmarks.checkpoint_load [--json] [--gigabytes N] [--tables N] [--dim N] [--rounds N]
[--store KIND] [--s3]`

Writes a checkpoint of drawn rows with the state of row-wise AdaGrad. A round reads its files one
after the other into one buffer, through the page cache and around it, of which the faster one
counts, and loads it into a new store, in alternating order; before each its pages are removed from
the page cache. Loading verifies every byte. `kept` is the rate of reads around the page cache into
new memory, as that of a store is. `processor_sec` is of our loads.

With `--s3` the checkpoint is at versitygw on this machine instead: the peer is one client that
reads the objects by ranges, with the fastest number of requests at once, and ours fetches the run
into a folder and loads it from there. `ratio` is our rate over the peer's.
"""

from __future__ import annotations

import argparse
import io
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.checkpoint_peers import drop_pages, timed
from benchmarks.logs import write_result
from schemas.run.records import CHECKPOINTS, RUN_FILE
from schemas.run.run_manifest import ALL, fetch_run, read_newest_state
from schemas.storage.location import Location
from tests.object_store import new_url, s3_environment, s3_server
from trainer.checkpoint.files import NewCheckpoint, folder_name
from trainer.checkpoint.format import RowsAndRecords
from trainer.checkpoint.load import load_rows, newest_checkpoint, verify_checkpoint
from trainer.run.upload import RunUploader
from trainer.stores.local import LocalStore, memory_store, mmap_store
from trainer.stores.store import Records, TableLayout

STEP, DRAWN_ROWS = 1, 1 << 14
RANGE_BYTES = 8 << 20
REQUESTS = (1, 2, 4, 8)
"""Requests at once that the client of the peer tries."""


def drawn_chunks(layout: TableLayout, num_rows: int, seed: int) -> Iterator[RowsAndRecords]:
    """Yield ascending rows with 62-bit ids and values."""
    rng = np.random.default_rng(seed)
    rows = np.unique(rng.integers(0, 1 << 62, num_rows))
    drawn = rng.random((DRAWN_ROWS, layout.dim + 1), np.float32)
    for start in range(0, len(rows), DRAWN_ROWS):
        part = rows[start : start + DRAWN_ROWS]
        block = drawn[: len(part)] + np.float32(start)
        yield part, Records(block[:, : layout.dim], block[:, layout.dim :])


def write_run(run: Path, layouts: dict[str, TableLayout], num_bytes: int) -> None:
    """Write a run with one checkpoint."""
    (run / CHECKPOINTS).mkdir(parents=True)
    (run / RUN_FILE).write_text("{}")
    with NewCheckpoint(run / CHECKPOINTS, STEP) as checkpoint:
        for seed, (table, layout) in enumerate(layouts.items()):
            num_rows = num_bytes // len(layouts) // (8 + 4 * layout.dim + 4)
            checkpoint.write_rows(table, layout, drawn_chunks(layout, num_rows, seed))
        parts = {table: (f"{folder_name(STEP)}/{table}",) for table in layouts}
        checkpoint.finish({}, parts, {}, keep=1)


def new_memory(num_bytes: int) -> mmap.mmap:
    """Return memory in huge pages, which need few requests of a disk."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_files(run: Path, flags: int, *, keep: bool = False) -> list[mmap.mmap]:
    """Read the files of a run, one after the other, into one buffer or into memory that is kept."""
    buffer, kept = new_memory(RANGE_BYTES), list[mmap.mmap]()
    for path in sorted(path for path in (run / CHECKPOINTS).rglob("*") if path.is_file()):
        num_bytes, num_read = path.stat().st_size, 0
        if keep:
            kept.append(new_memory(-(-num_bytes // RANGE_BYTES) * RANGE_BYTES))
        with closing(
            io.FileIO(path, opener=lambda name, mode: os.open(name, mode | flags))
        ) as file:
            while num_read < num_bytes:
                view = memoryview(kept[-1])[num_read:] if keep else memoryview(buffer)
                num_read += os.preadv(file.fileno(), [view[:RANGE_BYTES]], num_read)
    return kept


def load_run(run: Path, layouts: dict[str, TableLayout], kind: str) -> LocalStore:
    """Load the checkpoint of a run into a new store."""
    folder = run.parent / "store"
    shutil.rmtree(folder, ignore_errors=True)
    store = memory_store(layouts) if kind == "memory" else mmap_store(layouts, folder)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None, "the run has a checkpoint"
    load_rows(checkpoint, verify_checkpoint(checkpoint, with_rows=False), store)
    return store


def read_objects(url: Location, at_once: int) -> None:
    """Read the objects of a run by ranges."""
    state = read_newest_state(url)
    assert state is not None, "the run was uploaded"
    ranges = [
        (url / each.name, start, min(start + RANGE_BYTES, each.num_bytes))
        for objects in state.manifest.files.values()
        for each in objects
        for start in range(0, each.num_bytes, RANGE_BYTES)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(lambda each: len(each[0].read_ranges([each[1:]])[0]), ranges):
            pass


def load_from(
    url: Location, folder: Path, layouts: dict[str, TableLayout], kind: str
) -> LocalStore:
    """Fetch a run into an empty folder and load its checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    fetch_run(url, folder, ALL)
    return load_run(folder, layouts, kind)


def seconds_of(action: Callable[[], object], files: Path) -> float:
    """Return the seconds that an action takes after files have left the page cache."""
    drop_pages(files)
    return timed(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_load", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", choices=("memory", "mmap"), default="memory")
    parser.add_argument("--s3", action="store_true", help="from versitygw on this machine")
    options = parser.parse_args(argv)
    layouts = {
        f"table{n}": TableLayout(
            table=f"table{n}", dim=options.dim, state_width=1, dtype="float32", seed=0
        )
        for n in range(options.tables)
    }
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="presage-checkpoint-"))
        run = files = Path(name) / "run"
        write_run(run, layouts, int(options.gigabytes * 1e9))
        num_bytes = drop_pages(run)
        peers: list[Callable[[], object]] = [
            partial(read_files, run, 0),
            partial(read_files, run, os.O_DIRECT),
        ]
        keep = partial(read_files, run, os.O_DIRECT, keep=True)
        load = partial(load_run, run, layouts, options.store)
        if options.s3:
            files = Path(name) / "server"
            files.mkdir()
            os.environ.update(s3_environment(stack.enter_context(s3_server(files))))
            url = Location.parse(new_url())
            with RunUploader(run, url, None):
                pass
            shutil.rmtree(run)
            peers = [partial(read_objects, url, at_once) for at_once in REQUESTS]
            load = partial(load_from, url, run, layouts, options.store)
        ours: list[float] = []
        peer: list[float] = []
        kept: list[float] = []
        processor: list[float] = []

        def measured_load() -> object:
            start = time.process_time()
            store = load()
            processor.append(time.process_time() - start)
            return store

        for number in range(options.rounds):
            if number % 2:
                ours.append(num_bytes / seconds_of(measured_load, files) / 1e9)
            peer.append(num_bytes / min(seconds_of(each, files) for each in peers) / 1e9)
            if not options.s3:
                kept.append(num_bytes / seconds_of(keep, files) / 1e9)
            if not number % 2:
                ours.append(num_bytes / seconds_of(measured_load, files) / 1e9)
    result = {
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": statistics.median(ours) / statistics.median(peer),
        "unit": "GB/s",
        "rounds": [a / b for a, b in zip(ours, peer, strict=True)],
        "ours_rounds": ours,
        "peer_rounds": peer,
        "kept_rounds": kept,
        "processor_sec": processor,
        "gigabytes": num_bytes / 1e9,
        "store": options.store,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
