"""Checkpoints of large tables: ours, `torch.distributed.checkpoint`, and full copies.

`python -m benchmarks.checkpoint_peers [--json] [--megabytes N] [--tables N] [--rounds N]`

Tables with the state of row-wise AdaGrad are in memory. A round saves them in each way, in
alternating order, and loads each checkpoint into new memory after its pages left the page cache.
`pause` is the time that training waits for a save, `save` the time until it is on disk (the peers
sync their files, too), `size` what it wrote. Before a round all rows change, so our checkpoint is
full; then a share of the rows changes before each further one of ours. The peers save values and
state, ours row ids as well. `ratio` is the pause of `async_save` over ours of a full checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.logs import write_result
from schemas.arrays import Array
from schemas.config.train import CheckpointConfig, TrainConfig
from schemas.run.records import CHECKPOINTS
from trainer.checkpoint.load import load_rows, newest_checkpoint, verify_checkpoint
from trainer.checkpoint.manager import BackgroundSaver
from trainer.components import Components
from trainer.embedding.cache import DirectSource
from trainer.embedding.changes import Changes
from trainer.embedding.module import Embedding
from trainer.run_rows import RunRows
from trainer.stores.local import LocalStore, memory_store
from trainer.stores.store import TableLayout

DIM = 64
SHARES = (0.1, 0.01, 0.001)
"""Shares of changed rows, of incremental checkpoints."""
Figures = dict[str, list[float]]


def drop_pages(folder: Path) -> int:
    """Remove the files of a folder from the page cache; return their bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in files)


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    del result
    gc.collect()
    return seconds


class Tables:
    """Tables in a store, and the same arrays as tensors."""

    def __init__(self, num_bytes: int, num_tables: int) -> None:
        num_rows = num_bytes // num_tables // (DIM + 1) // 4
        self.layouts = {
            f"table{n}": TableLayout(
                table=f"table{n}", dim=DIM, state_width=1, dtype="float32", seed=0
            )
            for n in range(num_tables)
        }
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
            _, records = table.rows_at(np.arange(1, dtype=np.int32))
            arrays[f"{name}/values"] = records.values[: len(table)]
            arrays[f"{name}/state"] = records.state[: len(table)]
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
            figures[f"{name}_load"].append(timed(lambda: load_ours(run, tables.layouts)))
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

    figures[f"{name}_load"].append(timed(load_new))


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
    figures[f"{by}_load"].append(timed(lambda: [read(path) for path in paths]))


def measure(scratch: Path, num_bytes: int, num_tables: int, rounds: int) -> Figures:
    """Return the figures of all ways of saving, one per round."""
    tables, figures = Tables(num_bytes, num_tables), defaultdict[str, list[float]](list)
    run, folder = scratch / "run", scratch / "peer"
    run.mkdir()
    saver, changes = open_saver(run, tables, num_bytes)
    with closing(saver):
        tables.train(1)
        save_ours(run, saver, tables.step)  # not measured: rows are new
        for number in range(rounds):
            ways: list[Callable[[], None]] = [
                lambda: measure_ours(run, tables, saver, changes, figures),
                lambda: measure_dcp(folder, tables, figures, is_async=False),
                lambda: measure_dcp(folder, tables, figures, is_async=True),
                lambda: measure_copy(folder, tables, figures, by="torch"),
                lambda: measure_copy(folder, tables, figures, by="numpy"),
            ]
            for way in ways[:: -1 if number % 2 else 1]:
                way()
                shutil.rmtree(folder, ignore_errors=True)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_peers", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--megabytes", type=int, default=500, help="of values and state")
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(prefix="presage-checkpoint-") as name:
        scratch = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=0, world_size=1)
        try:
            figures = measure(scratch, options.megabytes * 10**6, options.tables, options.rounds)
        finally:
            dist.destroy_process_group()
    ours, peer = figures["ours_100%_pause"], figures["dcp_async_pause"]
    result = {
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": statistics.median(peer) / statistics.median(ours),
        "unit": "s that training waits for a full checkpoint",
        "rounds": [b / a for a, b in zip(ours, peer, strict=True)],
        "megabytes": options.megabytes,
        "figures": {
            key: [statistics.median(f), min(f), max(f)] for key, f in sorted(figures.items())
        },
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
