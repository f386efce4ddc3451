"""The cost of slots: a step of TorchRec's sharded tables with `PlannedSlots`, against full tables.

Two ranks of one thread train the same DLRM on the same batches from the same rows, with
`DistributedModelParallel` over gloo: once with full tables in memory, once with slots for some of
their rows, and the others in mapped files. The sides alternate in turns of some steps, within the
same processes. The plan is stored before the first step. `equal` says whether all losses are.

With `--device cuda` there is a rank for each device, and two more sides: full tables in the memory
of the host (`uvm`), and the same with FBGEMM's cache of as many rows as there are slots
(`uvm_caching`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.common.harness import (
    MissingError,
    Options,
    compared,
    headline,
    ratios,
    report,
    short,
)
from benchmarks.common.logs import build_dataset, each_log, job_path, read_job, write_job_file
from benchmarks.peers.slot_ranks import SlotsConfig, run_rank
from presage.schemas.dataset.opened import open_dataset
from presage.trainer.slots.slot_plan import SlotPlan, SlotSettings

BATCH, DIM, STEPS, RANKS = 4096, 16, 4, 2


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all logs and shardings; the result is the first one."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
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
    return headline(details)


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
    options.add_logs(("demo",), small=("demo_small",))
    kinds = ("table_wise", "row_wise")
    options.add("--shardings", kinds, "of the tables", small=kinds[:1], choices=kinds)
    options.add("--cache-rows", 20_000, "slots of each table")
    options.add("--device", "cpu", "of the tables", choices=("cpu", "cuda"))
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
