"""Cost of results that are bit-identical for any number of replicas.

`python -m benchmarks.microbatches [--json] [--datasets NAME,NAME] [--rounds N] [--steps N]
[--shared-data DIR]`

By default a step is computed in microbatches of one block each, and their gradients are added over
a fixed tree; `--fast` computes all samples of a step at once, with a result that is not
bit-identical to the default mode. Both train the shipped job with the same seed for the same steps
in one process, in alternating order; times are medians over the steps of a run after a warm-up.
`ratio` is the time with `--fast` over ours, so 0.9 means that ours takes a ninth more.
`loss_difference` is the largest relative difference of the two losses of a step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.logs import (
    build_dataset,
    each_log,
    job_path,
    log_parser,
    step_figures,
    write_result,
)
from schemas.config.job import load_job
from schemas.run.records import METRICS, StepMetric, read_metrics
from schemas.storage.location import Location
from trainer.options import TrainOptions
from trainer.train import train

WARM_UP = 5
"""Steps at the start of a run that are not measured."""


def train_steps(job: Path, dataset: Path, run: Path, steps: int, *, fast: bool) -> list[StepMetric]:
    """Train some steps and return their metrics."""
    train(
        job,
        Location.parse(dataset),
        run,
        TrainOptions(fast=fast, steps=steps),
        clock=time.perf_counter,
        on_step=lambda *_: None,
    )
    return read_metrics(run / METRICS)


def measure(name: str, log: Path, scratch: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Train a shipped job in both modes, in alternating order.

    Args:
        name: of the job.
        log: its raw files.
        scratch: directory for all files.
        rounds: runs of each mode.
        steps: of a run, at most.
    """
    job, dataset = job_path(name), build_dataset(job_path(name), log, scratch / "dataset")
    millis: dict[bool, list[float]] = {False: [], True: []}
    difference, num_steps = 0.0, 0
    for number in range(rounds):
        losses: dict[bool, list[float]] = {}
        for fast in (False, True) if number % 2 else (True, False):
            run = scratch / f"run-{number}-{fast}"
            metrics = train_steps(job, dataset, run, steps, fast=fast)
            millis[fast].append(step_figures(metrics[WARM_UP:])["step_ms"])
            losses[fast] = [metric.loss for metric in metrics]
            num_steps = len(metrics)
        pairs = zip(losses[False], losses[True], strict=True)
        difference = max(difference, *(abs(a - b) / abs(b) for a, b in pairs))
    config = load_job(job)
    return {
        "num_steps": num_steps,
        "microbatches_per_step": config.train.batch_samples // config.data.block_samples,
        "ours_ms": millis[False],
        "at_once_ms": millis[True],
        "ratios": [round(b / a, 3) for a, b in zip(millis[False], millis[True], strict=True)],
        "loss_difference": difference,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("microbatches", __doc__, ["demo", "kuairand"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    torch.set_num_threads(2)
    details: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        details[name] = measure(name, log, scratch, options.rounds, options.steps)
        sys.stderr.write(f"{name}: {details[name]}\n")
    first = next(iter(details.values()))
    result = {
        "ours": statistics.median(first["ours_ms"]),
        "peer": statistics.median(first["at_once_ms"]),
        "ratio": statistics.median(first["ratios"]),
        "unit": "ms of a step",
        "rounds": first["ratios"],
        "datasets": details,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
