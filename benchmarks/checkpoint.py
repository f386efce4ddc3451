"""Pause of training for a checkpoint: copied and written in the background, or written at once.

`python -m benchmarks.checkpoint [--json] [--samples N] [--rounds N] [--every N] [--embedding KIND]`

Trains the demo's job for as many epochs as needed. Every `--every` steps the run is saved in both
ways, in alternating order: `ours` copies changed rows to memory and lets the agent write them,
`peer` writes everything while training waits, including fsync, like the checkpoint at the end of a
run. Both are timed in the training thread. `pause_share` is ours over the time of the steps between
two checkpoints; `memory_ratio` is the most memory used for copies, including evicted dirty rows,
over the most bytes that changed between two checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.logs import DEMO_JOB, build_dataset, read_job, write_job_file, write_result
from pipelines.demo_log.generate import GeneratorConfig, write_log
from schemas.config.job import load_job
from schemas.dataset.opened import open_dataset
from schemas.dataset.run_next_uses import SharedNextUses
from schemas.run.records import CHECKPOINTS
from trainer.checkpoint.files import read_checkpoint_manifest, step_of_newest
from trainer.checkpoint.manager import CHECKPOINT_LOG
from trainer.checkpoint.save import save_checkpoint
from trainer.components import build_components, layouts_of, order_of, plans_of
from trainer.compute import StepCompute
from trainer.data.decode import spec_of
from trainer.embedding.cache import DirectSource, PlannedCache, RowSource
from trainer.options import TrainOptions
from trainer.run.checkpoints import RunCheckpoints, copy_bytes_of
from trainer.run.run_context import RunContext
from trainer.run_rows import RunRows
from trainer.step import PhaseTimer
from trainer.steps import Horizon, Span
from trainer.stores.factory import open_store

WARM_UP = 5
"""Steps before the first measured one."""


def write_job(folder: Path, epochs: int, every: int) -> Path:
    """Write the demo's job with a number of epochs and a checkpoint interval; return its path."""
    job = read_job(DEMO_JOB)
    job["data"]["oracle"]["epochs"] = epochs
    job["train"] |= {"epochs": epochs, "checkpoint": {"every_steps": every, "late": "wait"}}
    return write_job_file(folder, job)


def measure(
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
                plans_of(dataset, order, layouts, config.cache, 0),
                first_step=0,
                last_step=last,
                prefetch_steps=config.cache.prefetch_steps,
                saves_at=lambda step: step % every == 0,
            )
        components.embedding.set_source(source)
        planned = config.cache if embedding == "cached" else None
        horizon = Horizon(end_step=last, known_end=last, is_final=True)
        span = Span(dataset, order, horizon, SharedNextUses(dataset, order))
        rows = RunRows(source, store)
        stack.callback(rows.close)
        clock = time.perf_counter
        context = RunContext(run, job, TrainOptions(), span, components, rows, 0, clock)
        checkpoints = RunCheckpoints(context, copy_bytes_of(job, span, 0, components, planned))
        stack.callback(checkpoints.close)
        checkpoints.reserve()

        def save_at_once(step: int) -> float:
            start = time.perf_counter()
            source.flush()
            save_checkpoint(scratch / "peer", step, components, keep=1)
            return time.perf_counter() - start

        compute = stack.enter_context(StepCompute(context, PhaseTimer(clock)))
        start = time.perf_counter()
        for step in range(last):
            for later in range(step + 1, min(step + 3, last)):
                compute.prefetch(later, range(context.num_microbatches(later)))
            sums = compute.compute(step, range(context.num_microbatches(step)))
            compute.update(sums.total())
            if (step + 1) % every:
                continue
            intervals.append(time.perf_counter() - start)
            ours_first = len(ours) % 2 == 0
            if ours_first:
                ours.append(save_in_background(checkpoints, run, step + 1, every))
            peer.append(save_at_once(step + 1))
            if not ours_first:
                ours.append(save_in_background(checkpoints, run, step + 1, every))
            start = time.perf_counter()
        checkpoints.finish(last)
    return {"ours": ours[1:], "peer": peer[1:], "intervals": intervals[1:], **sizes_of(run)}


def save_in_background(checkpoints: RunCheckpoints, run: Path, step: int, every: int) -> float:
    """Return the seconds that training waits if the previous copy has been written."""
    while step > every and step_of_newest(run) < step - every:
        time.sleep(0.01)
    start = time.perf_counter()
    checkpoints.save_if_due(step, step_of_newest(run), writes=True)
    return time.perf_counter() - start


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--embedding", choices=("plain", "cached"), default="plain")
    options = parser.parse_args(argv)
    torch.set_num_threads(2)
    steps = (options.rounds + 2) * options.every + WARM_UP
    epochs = -(-steps * 4096 // (options.samples * 9 // 10))
    with tempfile.TemporaryDirectory(prefix="presage-checkpoint-") as name:
        scratch = Path(name)
        job = write_job(scratch / "job", epochs, options.every)
        write_log(
            GeneratorConfig(num_samples=options.samples, start=datetime(2026, 1, 1)),
            scratch / "log",
        )
        dataset = build_dataset(job, scratch / "log", scratch / "dataset")
        figures = measure(job, dataset, scratch, options.rounds, options.embedding)
    our_sec, peer_sec, intervals = (figures.pop(key) for key in ("ours", "peer", "intervals"))
    ours, peer = statistics.median(our_sec), statistics.median(peer_sec)
    shares = [a / b for a, b in zip(our_sec, intervals, strict=True)]
    result = {
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "unit": "s that training waits for a checkpoint",
        "rounds": [b / a for a, b in zip(our_sec, peer_sec, strict=True)],
        "pause_share": statistics.median(shares),
        "pause_share_max": max(shares),
        "peer_share": statistics.median(a / b for a, b in zip(peer_sec, intervals, strict=True)),
        "embedding": options.embedding,
        "every_steps": options.every,
        **figures,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
