"""The cost of slots: a step of TorchRec's sharded tables with `PlannedSlots`, against full tables.

Two ranks of one thread train the same DLRM on the same batches from the same rows, with
`DistributedModelParallel` over gloo: once with full tables in memory, once with slots for some of
their rows, and the others in mapped files. The sides alternate in turns of some steps, within the
same processes. The plan is stored before the first step. `equal` says whether all losses are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

from benchmarks.common.harness import Options, compared, headline, report, short
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
    config = SlotsConfig(
        dataset=dataset,
        scratch=folder,
        world_size=RANKS,
        cache_rows=options.cache_rows,
        sharding=sharding,
        dim=DIM,
        batch_samples=BATCH,
        steps=STEPS,
        rounds=options.rounds + 1,
    )
    seconds = store_plan(config)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(run_rank, (config, results), nprocs=RANKS)
    turns, sizes, fetched = results.get()
    of = {name: [sec * 1e3 for sec, _ in each[1:]] for name, each in turns.items()}
    used, held = (sum(each) for each in zip(*sizes, strict=True))
    return compared(
        of["slots"],
        of["full"],
        f"ms per step, {RANKS} ranks, dim {DIM}, batch {BATCH}",
        equal=[ls for _, ls in turns["slots"]] == [ls for _, ls in turns["full"]],
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
        num_parts=RANKS if config.sharding == "row_wise" else 1,
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
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
