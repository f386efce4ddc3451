"""What order, ranks and work cost a reader: `python -m benchmarks.reading [DATASET...]`.

`python -m benchmarks.reading [DATASET...] [--json] [--rounds N] [--samples N] [--batch N]
[--ranks-batch N] [--ranks N]`

Each side reads a whole epoch in a process of its own, in alternating order; figures are processor
time of all its threads, so that other work disturbs them little. `floor` decodes each row group
once, in stored order, and copies each sample once into batches of consecutive blocks; `unshuffled`
and `shuffled` are the orders of a run. `alone` is one process that reads batches of
`--ranks-batch`; `rank` one of `--ranks` with equal counts that shares with no other,
`rank_by_work` the same with equal work, and `sharing` all of them together, step by step, by work,
in shared memory; all three by own sample.
Every side reports how many row groups it decoded. `ours` is the rate of `shuffled`, `peer` that of
`floor`.

`work` is the largest over the mean work of a rank in batches of 32 blocks, the median over steps,
for the splits of `runs_of_ranks`, for equal counts, and for the best contiguous split (dynamic
programme). `distance` is how far samples of a batch are apart in stored order: the median over
batches of the standard deviation of their positions in the segment, 0.29 if all are drawn at
random.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.logs import DEMO_JOB, build_dataset, write_result
from pipelines.demo_log.generate import GeneratorConfig, write_log
from schemas.dataset.opened import Dataset, open_dataset
from schemas.dataset.order import Order, blocks_of_rank, runs_of_ranks
from trainer.data import reader as reader_module
from trainer.data.decode import spec_of
from trainer.data.reader import Reader

ORDERS = ("floor", "unshuffled", "shuffled")
BLOCKS_OF_WORK = 32


def order_of(dataset: Dataset, side: str, batch_samples: int) -> Order:
    """Return the order of a side; the floor's has one row group a segment."""
    shuffle = "none" if side in ("floor", "unshuffled") else "blocks"
    order = dataset.order(batch_samples, 1, shuffle, 1)
    return replace(order, row_groups=()) if side == "floor" else order


def read_epoch(
    path: str, side: str, batch_samples: int, rank: int, world_size: int
) -> dict[str, float]:
    """Read an epoch; return processor time, samples, decoded row groups and memory."""
    torch.set_num_threads(1)
    dataset = open_dataset(path)
    decoded = 0

    def count(*arguments: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode(*arguments)

    decode = reader_module.decode
    reader_module.decode = count  # type: ignore[assignment]
    reader = Reader(
        dataset,
        order_of(dataset, side, batch_samples),
        spec_of(dataset, "float32"),
        lookups=False,
        equal_runs=side == "rank",
        num_sharing=world_size if side == "sharing" else 1,
    )
    _barriers[-1].wait()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    samples = 0
    for step in range(reader.order.num_steps):
        samples += reader.read_rank(step, rank, world_size).num_samples
        _barriers[-1].wait()
    seconds = time.process_time() - start
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"cpu_sec": seconds, "samples": samples, "decoded": decoded, "mib": mib}


_barriers: list[Any] = []


def set_barrier(barrier: Any) -> None:
    """Let a process wait at each step for those that were started with it."""
    _barriers.append(barrier)


def in_processes(arguments: Sequence[tuple[Any, ...]]) -> list[dict[str, float]]:
    """Return the results of `read_epoch` in processes that run at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(arguments))
    with ProcessPoolExecutor(len(arguments), context, set_barrier, (barrier,)) as pool:
        return list(pool.map(read_epoch, *zip(*arguments, strict=True)))


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a dataset."""
    place, world = str(path), options.ranks
    sides = {side: [(place, side, options.batch, 0, 1)] for side in ORDERS}
    sides["alone"] = [(place, "alone", options.ranks_batch, 0, 1)]
    for side in ("rank", "rank_by_work"):
        sides[side] = [(place, side, options.ranks_batch, world // 2, world)]
    sides["sharing"] = [(place, "sharing", options.ranks_batch, r, world) for r in range(world)]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sides if number % 2 else reversed(sides):
            results = in_processes(sides[side])
            total = {key: sum(each[key] for each in results) for key in results[0]}
            runs[side].append({**total, "us": total["cpu_sec"] / total["samples"] * 1e6})
            sys.stderr.write(f"{path.name} {side} {runs[side][-1]}\n")
    ratios = {
        "shuffled/floor": ("floor", "shuffled"),
        "shuffled/unshuffled": ("unshuffled", "shuffled"),
        **{f"{side}/alone": (side, "alone") for side in ("rank", "rank_by_work", "sharing")},
    }
    dataset = open_dataset(path)
    return {
        "row_groups": sum(len(set(s.row_groups("train"))) for s in dataset.segments),
        "samples_per_core_sec": {
            side: round(1e6 / statistics.median(r["us"] for r in of)) for side, of in runs.items()
        },
        "decoded": {side: of[0]["decoded"] for side, of in runs.items()},
        "mib": {side: round(max(r["mib"] for r in of)) for side, of in runs.items()},
        "ratios": {
            name: [round(x["us"] / y["us"], 3) for x, y in zip(runs[a], runs[b], strict=True)]
            for name, (a, b) in ratios.items()
        },
        "work": {str(ranks): work(dataset, ranks) for ranks in (2, 4, 8)},
        "distance": {side: distance(dataset, side, options.batch) for side in ORDERS},
    }


def work(dataset: Dataset, world_size: int) -> dict[str, float]:
    """Return the largest over the mean work of a rank: of our split, equal counts, and the best."""
    samples = BLOCKS_OF_WORK * dataset.job.data.block_samples
    reader = Reader(dataset, dataset.order(samples, 1, "blocks", 1), spec_of(dataset, "float32"))
    ratios: list[tuple[float, ...]] = []
    for train_step in range(reader.order.num_steps):
        of_blocks = reader.work(reader.order.step(train_step)).tolist()
        if len(of_blocks) < BLOCKS_OF_WORK:
            continue
        equal = [blocks_of_rank(len(of_blocks), rank, world_size) for rank in range(world_size)]
        largest: list[float] = [
            max(sum(of_blocks[run]) for run in runs)
            for runs in (runs_of_ranks(of_blocks, world_size), equal)
        ]
        largest.append(least_largest(of_blocks, world_size))
        ratios.append(tuple(each * world_size / sum(of_blocks) for each in largest))
    if not ratios:
        return {}
    medians = np.median(ratios, axis=0).round(3).tolist()
    over_best = max(ours / best for ours, _, best in ratios)
    return dict(zip(("ours", "equal", "best"), medians, strict=True)) | {
        "most_over_best": round(over_best, 3)
    }


def least_largest(of_blocks: Sequence[float], world_size: int) -> float:
    """Return the largest work of a run in the best cut, by dynamic programming."""
    ends = np.concatenate([[0.0], np.cumsum(of_blocks)])
    best = ends.copy()
    for _ in range(world_size - 1):
        best = np.array(
            [np.maximum(best[: j + 1], ends[j] - ends[: j + 1]).min() for j in range(len(ends))]
        )
    return float(best[-1])


def distance(dataset: Dataset, side: str, batch_samples: int) -> float:
    """Return the median over batches of the deviation of their blocks' relative positions."""
    order = order_of(dataset, side, batch_samples)
    steps = map(order.step, range(order.num_steps))
    spreads = [
        float(np.std(step.positions / order.num_blocks[step.segment]))
        for step in steps
        if len(step.positions) == order.blocks_per_batch
    ]
    return round(statistics.median(spreads), 3) if spreads else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the ratio of the last dataset."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("datasets", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4_000_000, help="of a demo log")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--ranks-batch", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="presage-reading-") as scratch:
        paths = list(options.datasets)
        if not paths:
            log, dataset = Path(scratch) / "log", Path(scratch) / f"demo-{options.samples}"
            config = GeneratorConfig(num_samples=options.samples, start=datetime(2026, 1, 1))
            write_log(config, log)
            paths.append(build_dataset(DEMO_JOB, log, dataset))
        details = {path.name: measure(path, options) for path in paths}
    last = details[paths[-1].name]
    rates = last["samples_per_core_sec"]
    result = {
        "ours": rates["shuffled"],
        "peer": rates["floor"],
        "ratio": round(statistics.median(last["ratios"]["shuffled/floor"]), 3),
        "unit": "samples per second and core, shuffled",
        "rounds": last["ratios"]["shuffled/floor"],
        "details": details,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
