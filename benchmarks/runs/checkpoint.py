"""Checkpoints: pause of training, and comparison with other formats.

`pause` trains the demo's job for as many epochs as needed. Every `--every` steps the run is saved
in both ways, in alternating order: `ours` copies changed rows to memory and lets the agent write
them, `peer` writes everything while training waits, including fsync, like the checkpoint at the end
of a run. Both are timed in the training thread. `pause_share` is ours over the time of the steps
between two checkpoints; `memory_ratio` is the most memory used for copies, including evicted dirty
rows, over the most bytes that changed between two checkpoints.

`peers`: tables with the state of row-wise AdaGrad are in memory. A round saves them in each way:
ours, `torch.distributed.checkpoint`, and full copies; and loads each checkpoint into new memory
after its pages left the page cache. `pause` is the time that training waits for a save, `save` the
time until it is on disk (the peers sync their files, too), `size` what it wrote. Before a round all
rows change, so our checkpoint is full; then a share of the rows changes before each further one of
ours. The peers save values and state, ours row ids as well. `ratio` is the pause of `async_save`
over ours of a full checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.common.harness import Options, alternate, compared, median, timed
from benchmarks.common.logs import DEMO_JOB, demo_dataset, read_job, write_job_file
from benchmarks.common.processes import drop_pages
from presage.schemas.arrays import Array
from presage.schemas.config.job import load_job
from presage.schemas.config.train import CheckpointConfig, TrainConfig
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.run_next_uses import SharedNextUses
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.files import (
    read_checkpoint_manifest,
    step_of_newest,
)
from presage.trainer.checkpoint.load import load_rows, newest_checkpoint, verify_checkpoint
from presage.trainer.checkpoint.manager import CHECKPOINT_LOG, BackgroundSaver
from presage.trainer.checkpoint.save import save_checkpoint
from presage.trainer.components import (
    Components,
    build_components,
    layouts_of,
    order_of,
    plan_of_rows,
)
from presage.trainer.data.decode import spec_of
from presage.trainer.embedding.cache import DirectSource, PlannedCache, RowSource
from presage.trainer.embedding.changes import Changes
from presage.trainer.embedding.module import Embedding
from presage.trainer.options import TrainOptions
from presage.trainer.run.checkpoints import RunCheckpoints, copy_bytes_of
from presage.trainer.run.run_context import RunContext
from presage.trainer.run_rows import RunRows
from presage.trainer.step import MicrobatchCompute, PhaseTimer
from presage.trainer.steps import Horizon, Span, StepReader
from presage.trainer.stores.factory import open_store
from presage.trainer.stores.local import LocalStore, memory_store
from presage.trainer.stores.store import TableLayout

# Pause of training.

WARM_UP = 5
"""Steps before the first measured one."""


def write_job(folder: Path, epochs: int, every: int) -> Path:
    """Write the demo's job with a number of epochs and a checkpoint interval; return its path."""
    job = read_job(DEMO_JOB)
    job["data"]["oracle"]["epochs"] = epochs
    job["train"] |= {"epochs": epochs, "checkpoint": {"every_steps": every, "late": "wait"}}
    return write_job_file(folder, job)


def train_and_save(
    job_path: Path, dataset_path: Path, scratch: Path, rounds: int, embedding: str
) -> dict[str, Any]:
    """Train, save in both ways at each interval, and return the seconds of each."""
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    config, run = job.train, scratch / "run"
    every = config.checkpoint.every_steps
    assert every is not None, "set by write_job"
    order, spec = order_of(job, dataset), spec_of(dataset, config.dtype)
    last = min(order.num_steps, WARM_UP // every * every + every * (rounds + 1))
    layouts = layouts_of(spec, config)
    run.mkdir()
    ours: list[float] = []
    peer: list[float] = []
    intervals: list[float] = []
    with ExitStack() as stack:
        store = stack.enter_context(
            open_store(run, layouts, config, job=job_path, embedding=embedding, num_processes=None)
        )
        components = build_components(spec, config, store)
        source: RowSource = DirectSource(store)
        if embedding == "cached":
            source = PlannedCache(
                store,
                plan_of_rows(dataset, order, layouts, config.cache, 0),
                first_step=0,
                last_step=last,
                prefetch_steps=config.cache.prefetch_steps,
                saves_at=range(0, last + 1, every),
            )
        components.embedding.set_source(source)
        planned = config.cache if embedding == "cached" else None
        horizon = Horizon(end_step=last, known_end=last, is_final=True)
        span = Span(dataset, order, horizon, SharedNextUses(dataset, order))
        rows = RunRows(source, store)
        stack.callback(rows.close)
        clock = time.perf_counter
        options = TrainOptions()
        reader = StepReader(config, options, span, layouts, is_replica=False)
        stack.enter_context(reader)
        context = RunContext(run, job, options, components, rows, reader, 0)
        checkpoints = RunCheckpoints(context, copy_bytes_of(job, span, 0, components, planned))
        stack.callback(checkpoints.close)
        checkpoints.reserve()

        def save_at_once(step: int) -> float:
            def save_all() -> None:
                source.flush()
                save_checkpoint(scratch / "peer", step, components, keep=1)

            return timed(save_all)

        compute = stack.enter_context(MicrobatchCompute(components, PhaseTimer(clock)))
        start = time.perf_counter()
        for step in range(last):
            for later in range(step + 1, min(step + 3, last)):
                reader.prefetch(later, range(reader.num_microbatches(later)))
            microbatches = reader.take(step, range(reader.num_microbatches(step)))
            sums = compute.compute(microbatches)
            compute.update(sums.total())
            if (step + 1) % every:
                continue
            intervals.append(time.perf_counter() - start)
            ways = (
                (ours, partial(save_in_background, checkpoints, run, step + 1, every)),
                (peer, partial(save_at_once, step + 1)),
            )
            for values, way in ways[:: -1 if len(ours) % 2 else 1]:
                values.append(way())
            start = time.perf_counter()
        checkpoints.finish(last)
    return {"ours": ours[1:], "peer": peer[1:], "intervals": intervals[1:], **sizes_of(run)}


def save_in_background(checkpoints: RunCheckpoints, run: Path, step: int, every: int) -> float:
    """Return the seconds that training waits if the previous copy has been written."""
    while step > every and step_of_newest(run) < step - every:
        time.sleep(0.01)
    return timed(lambda: checkpoints.save_if_due(step, step_of_newest(run), writes=True))


def sizes_of(run: Path) -> dict[str, float]:
    """Return the copied and written bytes of a checkpoint."""
    lines = [json.loads(line) for line in (run / CHECKPOINT_LOG).read_text().splitlines()]
    copied = [line["num_bytes"] for line in lines[1:]]
    memory = [line["memory_bytes"] for line in lines[1:]]
    newest = sorted((run / CHECKPOINTS).iterdir())[-1]
    files = read_checkpoint_manifest(newest).files
    own = sum(each.num_bytes for name, each in files.items() if name.startswith(newest.name))
    return {
        "copied_bytes": statistics.mean(copied),
        "memory_bytes": max(memory),
        "memory_ratio": max(memory) / max(copied),
        "written_bytes": own,
        "checkpoint_bytes": sum(each.num_bytes for each in files.values()),
    }


def measure_pause(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train and save in both ways."""
    num_saves, every = options.saves, options.every
    steps = (num_saves + 2) * every + WARM_UP
    epochs = -(-steps * 4096 // (options.samples * 9 // 10))
    job = write_job(scratch / "job", epochs, every)
    dataset = demo_dataset(scratch, options.samples, job)
    figures = train_and_save(job, dataset, scratch, num_saves, options.embedding)
    ours, peer, intervals = (figures.pop(key) for key in ("ours", "peer", "intervals"))
    shares = {
        name: [a / b for a, b in zip(sec, intervals, strict=True)]
        for name, sec in (("pause_share", ours), ("peer_share", peer))
    }
    return compared(
        ours,
        peer,
        f"s that training waits for a checkpoint, {options.embedding}, every {every} steps",
        **{name: median(values) for name, values in shares.items()},
        pause_share_max=max(shares["pause_share"]),
        **figures,
    )


# Other formats.

DIM = 64
SHARES = (0.1, 0.01, 0.001)
"""Shares of changed rows, of incremental checkpoints."""
Figures = dict[str, list[float]]


def layouts_of_tables(num_tables: int) -> dict[str, TableLayout]:
    """Return the layouts of tables with the state of row-wise AdaGrad."""
    kind: dict[str, Any] = {"dim": DIM, "state_width": 1, "dtype": "float32", "seed": 0}
    return {f"table{n}": TableLayout(table=f"table{n}", **kind) for n in range(num_tables)}


def timed_load(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes, and free what it returns."""
    seconds = timed(action)
    gc.collect()
    return seconds


class Tables:
    """Tables in a store, and the same arrays as tensors."""

    def __init__(self, num_bytes: int, num_tables: int) -> None:
        num_rows = num_bytes // num_tables // (DIM + 1) // 4
        self.layouts = layouts_of_tables(num_tables)
        self.rng = np.random.default_rng(0)
        self.store = memory_store(self.layouts)
        self.rows = {
            table: np.unique(self.rng.integers(0, 1 << 62, num_rows)) for table in self.layouts
        }
        self.source = DirectSource(self.store)
        self.step = 0

    def train(self, share: float) -> None:
        """Change a share of the rows of each table, as one step would."""
        chosen = {
            table: rows[self.rng.random(len(rows)) < share] if share < 1 else rows
            for table, rows in self.rows.items()
        }
        for table, gathered in self.source.gather(self.step, chosen).items():
            values, positions = gathered.records.values, gathered.positions
            for start in range(0, len(chosen[table]), 1 << 16):
                some = slice(start, start + (1 << 16))
                values[some if positions is None else positions[some]] += 1
        self.source.release(self.step, chosen)
        self.step += 1

    def arrays(self) -> dict[str, Array]:
        """Return values and state of all tables, views."""
        arrays: dict[str, Array] = {}
        for name, table in self.store.tables.items():
            _, gathered = table.rows_at(np.arange(1, dtype=np.int32))
            records = gathered.records.take(slice(0, len(table)))
            arrays |= {f"{name}/values": records.values, f"{name}/state": records.state}
        return arrays


def open_saver(run: Path, tables: Tables, num_bytes: int) -> tuple[BackgroundSaver, Changes]:
    """Return the saver that the trainer uses, with a model of one parameter, and the changes."""
    config = CheckpointConfig(every_steps=1, keep=1, late="wait")
    model = torch.nn.Linear(1, 1)
    embedding = Embedding((), TrainConfig(), tables.source)
    optimizer = torch.optim.Adam(model.parameters())
    components = Components(tables.store, embedding, model, optimizer)
    changes = Changes(tables.layouts, run)
    tables.source.track_changes(changes)
    rows = RunRows(tables.source, tables.store)
    saver = BackgroundSaver(run, components, rows, changes, dict, config, None)
    saver.start(num_bytes + num_bytes // 10)
    return saver, changes


def save_ours(run: Path, saver: BackgroundSaver, step: int) -> tuple[float, float, float]:
    """Return pause, seconds until the checkpoint is on disk, and its own bytes."""
    start = time.perf_counter()
    saver.save(step)
    pause = time.perf_counter() - start
    saver.wait_until_saved()
    seconds = time.perf_counter() - start
    newest = newest_checkpoint(run)
    assert newest is not None, "the step is saved"
    assert int(newest.name) == step, "the step is saved"
    return pause, seconds, sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())


def load_ours(run: Path, layouts: Mapping[str, TableLayout]) -> LocalStore:
    """Load the newest checkpoint into new tables."""
    newest = newest_checkpoint(run)
    assert newest is not None, "the run is saved"
    store = memory_store(layouts)
    load_rows(newest, verify_checkpoint(newest, with_rows=False), store)
    return store


def check_equal(loaded: LocalStore, tables: Tables) -> None:
    """Check that loaded rows are those of the tables."""
    for table, rows in tables.rows.items():
        some = rows[:: max(1, len(rows) // 10_000)]
        ours = loaded.tables[table].fetch(some)
        assert np.array_equal(ours.values, tables.store.tables[table].fetch(some).values), table


def measure_ours(
    run: Path, tables: Tables, saver: BackgroundSaver, changes: Changes, figures: Figures
) -> None:
    """Save and load a full checkpoint and one of each share of changed rows."""
    for share in (1, *SHARES):
        tables.train(share)
        changes.drop_before(tables.step - 1)  # as the trainer does with what is saved
        pause, seconds, size = save_ours(run, saver, tables.step)
        name = f"ours_{100 * share:g}%"
        for key, figure in (("pause", pause), ("save", seconds), ("size", size)):
            figures[f"{name}_{key}"].append(figure)
        if share in (1, SHARES[-1]):
            drop_pages(run / CHECKPOINTS)
            figures[f"{name}_load"].append(timed_load(lambda: load_ours(run, tables.layouts)))
    check_equal(load_ours(run, tables.layouts), tables)


def measure_dcp(folder: Path, tables: Tables, figures: Figures, *, is_async: bool) -> None:
    """Save by `torch.distributed.checkpoint`, and load."""
    state = {name: torch.from_numpy(array) for name, array in tables.arrays().items()}
    name, start = "dcp_async" if is_async else "dcp", time.perf_counter()
    writer = FileSystemWriter(folder, thread_count=2)
    if is_async:
        response = async_save(state, storage_writer=writer)
        figures[f"{name}_pause"].append(time.perf_counter() - start)
        response.result()  # type: ignore[union-attr] # a future unless a stager is given
    else:
        save(state, storage_writer=writer)
        figures[f"{name}_pause"].append(time.perf_counter() - start)
    figures[f"{name}_save"].append(time.perf_counter() - start)
    figures[f"{name}_size"].append(drop_pages(folder))
    shapes = {key: value.shape for key, value in state.items()}

    def load_new() -> dict[str, torch.Tensor]:
        loaded = {key: torch.empty(shape) for key, shape in shapes.items()}
        load(loaded, storage_reader=FileSystemReader(folder))
        return loaded

    figures[f"{name}_load"].append(timed_load(load_new))


def measure_copy(folder: Path, tables: Tables, figures: Figures, *, by: str) -> None:
    """Save full copies by `torch.save` or `np.save`, synced, and load them."""
    folder.mkdir()
    arrays, start = tables.arrays(), time.perf_counter()
    if by == "torch":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        torch.save(tensors, folder / "tables.pt")
    else:
        for name, array in arrays.items():
            np.save(folder / f"{name.replace('/', '-')}.npy", array)
    paths = list(folder.iterdir())
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    figures[f"{by}_save"].append(seconds)
    figures[f"{by}_pause"].append(seconds)
    figures[f"{by}_size"].append(drop_pages(folder))
    read = torch.load if by == "torch" else np.load
    figures[f"{by}_load"].append(timed_load(lambda: [read(path) for path in paths]))


def save_in_all_ways(scratch: Path, options: argparse.Namespace) -> Figures:
    """Return the figures of all ways of saving, one per round."""
    num_bytes = options.megabytes * 10**6
    tables, figures = Tables(num_bytes, options.tables), defaultdict[str, list[float]](list)
    run, folder = scratch / "run", scratch / "peer"
    run.mkdir(parents=True)
    saver, changes = open_saver(run, tables, num_bytes)
    ways: dict[str, Callable[[], None]] = {
        "ours": lambda: measure_ours(run, tables, saver, changes, figures),
        "dcp": lambda: measure_dcp(folder, tables, figures, is_async=False),
        "dcp_async": lambda: measure_dcp(folder, tables, figures, is_async=True),
        "torch": lambda: measure_copy(folder, tables, figures, by="torch"),
        "numpy": lambda: measure_copy(folder, tables, figures, by="numpy"),
    }

    def measure_way(way: Callable[[], None]) -> None:
        way()
        shutil.rmtree(folder, ignore_errors=True)

    with closing(saver):
        tables.train(1)
        save_ours(run, saver, tables.step)  # not measured: rows are new
        alternate({name: partial(measure_way, way) for name, way in ways.items()}, options.rounds)
    return figures


def measure_peers(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Save and load in all ways, in a process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=0, world_size=1)
    try:
        figures = save_in_all_ways(scratch, options)
    finally:
        dist.destroy_process_group()
    return compared(
        figures["ours_100%_pause"],
        figures["dcp_async_pause"],
        f"s that training waits for a full checkpoint of {options.megabytes} MB",
        figures={key: [median(f), min(f), max(f)] for key, f in sorted(figures.items())},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("runs.checkpoint", __doc__, rounds=3)
    options.add_parts({"pause": measure_pause, "peers": measure_peers})
    options.add("--samples", 200_000, "of the demo's log", small=20_000)
    options.add("--saves", 8, "measured ones of `pause`", small=1)
    options.add("--every", 20, "steps between checkpoints", small=3)
    options.add("--embedding", "plain", "of `pause`", choices=("plain", "cached"))
    options.add("--megabytes", 500, "of values and state of `peers`", small=20)
    options.add("--tables", 4, "that these are in")
    torch.set_num_threads(2)
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
