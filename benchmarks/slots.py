"""`PlannedSlots` in TorchRec's sharded tables: what it costs, and tables larger than memory.

`cost`: two ranks of one thread train the same DLRM on the same batches from the same rows, with
`DistributedModelParallel` over gloo: once with full tables in memory, once with slots for some of
their rows, and the others in mapped files. The sides alternate in turns of some steps, within the
same processes. The plan is stored before the first step. `equal` says whether all losses are.

With `--device cuda` there is a rank for each device, and two more sides: full tables in the memory
of the host (`uvm`), and the same with FBGEMM's cache of as many rows as there are slots
(`uvm_caching`).

`memory`: two ranks train the table of `benchmarks.cache --parts links`, row-wise, after all of its
rows were written: in a memory cgroup (version 1) of a quarter of the table's bytes, page cache
included, and without a limit. Each side is a run of its own. Requires root.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.common.control_groups import group, require_groups
from benchmarks.common.harness import (
    MissingError,
    Options,
    alternate,
    compared,
    ratios,
    report,
    short,
)
from benchmarks.common.logs import build_dataset, each_log, job_path, read_job, write_job_file
from benchmarks.common.processes import module, run
from benchmarks.common.reuse import build_reuse
from benchmarks.peers.slot_ranks import SlotsConfig, run_rank
from presage.schemas.dataset.accesses import num_unique_rows
from presage.schemas.dataset.opened import open_dataset
from presage.trainer.slots.slot_plan import SlotPlan, SlotSettings

BATCH, DIM, STEPS, RANKS = 4096, 16, 4, 2


def measure_cost(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all logs and shardings."""
    details: dict[str, Any] = {}
    for name, log, folder in each_log(options, scratch):
        shipped = job_path(name)
        job = read_job(shipped)
        job["data"]["oracle"] = {"batch_samples": BATCH}
        dataset = build_dataset(write_job_file(folder / "job", job, shipped), log, folder / "data")
        for sharding in options.shardings:
            label = f"{name}, {sharding}"
            details[label] = measure_sharding(options, dataset, sharding, folder / sharding)
            report(label, details[label])
    return details


def measure_sharding(
    options: argparse.Namespace, dataset: Path, sharding: str, folder: Path
) -> dict[str, Any]:
    """Measure one sharding."""
    folder.mkdir()
    on_device = options.device == "cuda"
    if on_device and not torch.cuda.is_available():
        raise MissingError("it must have a CUDA device for --device cuda, got none")
    config = SlotsConfig(
        dataset=dataset,
        scratch=folder,
        world_size=torch.cuda.device_count() if on_device else RANKS,
        cache_rows=options.cache_rows,
        sharding=sharding,
        dim=DIM,
        batch_samples=BATCH,
        steps=STEPS,
        rounds=options.rounds + 1,
        sides=("slots", "full", *(("uvm", "uvm_caching") if on_device else ())),
        device=options.device,
    )
    seconds = store_plan(config)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(run_rank, (config, results), nprocs=config.world_size)
    turns, sizes, fetched = results.get()
    of = {name: [sec * 1e3 for sec, _ in each[1:]] for name, each in turns.items()}
    losses = {name: [of_turn for _, of_turn in each] for name, each in turns.items()}
    used, held = (sum(each) for each in zip(*sizes, strict=True))
    return compared(
        of["slots"],
        of["full"],
        f"ms per step, {config.world_size} ranks, dim {DIM}, batch {BATCH}",
        equal=losses["slots"] == losses["full"],
        against={name: ratios(of["slots"], each) for name, each in of.items() if name != "slots"},
        slots_of_used_rows=short(held / used),
        fetched_rows=fetched,
        plan_sec=short(seconds),
    )


# Tables larger than a limit of memory.

LARGE_DIM, TABLES_OF_LIMIT = 512, 4


def measure_memory(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train tables of four times a memory limit, with the limit and without it."""
    require_groups()
    kept = options.scratch or scratch
    kept.mkdir(parents=True, exist_ok=True)
    dataset = build_reuse(Path(options.shared_data), options.reuse_samples, kept)
    (table,) = (opened := open_dataset(dataset)).job.data.tables
    num_rows = num_unique_rows(opened, table)
    num_bytes = num_rows * (4 * LARGE_DIM + 4)
    config = SlotsConfig(
        dataset=dataset,
        scratch=scratch / "ranks",
        world_size=RANKS,
        cache_rows=round(options.share * num_rows),
        sharding="row_wise",
        dim=LARGE_DIM,
        batch_samples=BATCH,
        steps=options.large_steps,
        rounds=1,
        store=options.store,
    )
    config.scratch.mkdir()
    store_plan(config)
    limit = num_bytes // TABLES_OF_LIMIT
    sides = {
        name: partial(train_stored, config, size)
        for name, size in (("limited", limit), ("free", None))
    }
    runs = alternate(sides, options.rounds)
    losses = {str(run["losses"]) for of in runs.values() for run in of}
    return compared(
        [run["step_ms"] for run in runs["limited"]],
        [run["step_ms"] for run in runs["free"]],
        f"ms per step under a memory limit and without, {RANKS} ranks, dim {LARGE_DIM}",
        table_bytes=num_bytes,
        limit_bytes=limit,
        peak_bytes=max(run["peak_bytes"] for run in runs["limited"]),
        equal=len(losses) == 1,
    )


def train_stored(config: SlotsConfig, limit_bytes: int | None) -> dict[str, Any]:
    """Write all rows and train on slots, in processes with a limit of memory unless it is None."""
    (config.scratch / "group").unlink(missing_ok=True)
    command = module("benchmarks.peers.slot_ranks", json.dumps(asdict(config), default=str))
    with group("slots") as limits:
        if limit_bytes is not None:
            limits.limit_memory(limit_bytes)
        *_, (seconds, losses) = run(limits.command(command)).json()
        return {"step_ms": seconds * 1e3, "losses": losses, "peak_bytes": limits.peak_bytes}


def store_plan(config: SlotsConfig) -> float:
    """Plan all steps; return the seconds that it takes."""
    opened = open_dataset(config.dataset)
    tables = opened.job.data.tables
    settings = SlotSettings(
        cache_rows=dict.fromkeys(tables, config.cache_rows),
        num_parts=config.world_size if config.sharding == "row_wise" else 1,
        prefetch_steps=2,
        first_step=0,
    )
    order = opened.order(BATCH, 1, "none", 0, "train")
    start = time.perf_counter()
    plan = SlotPlan(config.scratch / "rows", opened, order, settings)
    plan.chunk_path(order.num_steps - 1)
    seconds = time.perf_counter() - start
    plan.close()
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("slots", __doc__, rounds=9)
    options.add_parts({"cost": measure_cost, "memory": measure_memory}, small=("cost",))
    options.add_logs(("demo",), small=("demo_small",))
    kinds = ("table_wise", "row_wise")
    options.add("--shardings", kinds, "of the tables", small=kinds[:1], choices=kinds)
    options.add("--cache-rows", 20_000, "slots of each table")
    options.add("--device", "cpu", "of the tables", choices=("cpu", "cuda"))
    options.add("--store", "log", "of the rows of `memory`", choices=("log", "mmap"))
    options.add("--share", 0.03, "of the rows of `memory` that have slots", small=0.5)
    options.add("--large-steps", 20, "of each turn of `memory`", small=2)
    options.add("--reuse-samples", 10_000_000, "of the log of `memory`", small=200_000)
    options.add("--scratch", None, "folder to keep and reuse the dataset of `memory` in")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
