"""What it costs that the bits of a run depend on no number of replicas.

`python -m benchmarks.leaves [--json] [--datasets NAME,NAME] [--rounds N] [--steps N]
[--shared-data DIR]`

A step is computed leaf by leaf, a leaf being one block of its batch, and the gradients of all
leaves are added over a fixed tree; `--fast` computes all samples of a step at once, with bits of
its own. Both train the shipped job from the same seed for the same steps in one process, taking
turns; times are medians over the steps of a run, the first ones left out. `ratio` is the time at
once over ours, so that 0.9 says that ours costs a ninth more. `loss_difference` is the largest
relative difference of the two losses of a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.logs import each_log, job_path, log_parser
from benchmarks.order import built
from benchmarks.run_figures import figures_of
from schemas.config.job import load_job
from schemas.run_log import METRICS, StepMetric, read_metrics
from trainer.setup import TrainOptions
from trainer.train_run import train

WARM = 5
"""Steps of a run that are not timed."""


def trained(job: Path, dataset: Path, run: Path, steps: int, *, fast: bool) -> list[StepMetric]:
    """Train some steps and return their lines."""
    train(
        job,
        dataset,
        run,
        TrainOptions(fast=fast, steps=steps),
        clock=time.perf_counter,
        on_step=lambda *_: None,
    )
    return read_metrics(run / METRICS)


def measure(name: str, log: Path, scratch: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Train a shipped job by both ways in turn.

    Args:
        name: of the job.
        log: its raw files.
        scratch: directory for everything that is written.
        rounds: runs of each way.
        steps: of a run, at most.
    """
    job, dataset = job_path(name), built(job_path(name), log, scratch / "dataset")
    millis: dict[bool, list[float]] = {False: [], True: []}
    apart, num_steps = 0.0, 0
    for number in range(rounds):
        losses: dict[bool, list[float]] = {}
        for fast in (False, True) if number % 2 else (True, False):
            run = scratch / f"run-{number}-{fast}"
            lines = trained(job, dataset, run, steps, fast=fast)
            millis[fast].append(figures_of(lines[WARM:])["step_ms"])
            losses[fast] = [line.loss for line in lines]
            num_steps = len(lines)
        pairs = zip(losses[False], losses[True], strict=True)
        apart = max(apart, *(abs(a - b) / abs(b) for a, b in pairs))
    config = load_job(job)
    return {
        "num_steps": num_steps,
        "leaves_of_a_step": config.train.batch_samples // config.data.block_samples,
        "ours_ms": millis[False],
        "at_once_ms": millis[True],
        "ratios": [round(b / a, 3) for a, b in zip(millis[False], millis[True], strict=True)],
        "loss_difference": apart,
    }


def main(argv: Sequence[str]) -> int:
    """Measure and print; return the exit code."""
    parser = log_parser("leaves", __doc__, ["demo", "kuairand"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    torch.set_num_threads(2)
    found: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        found[name] = measure(name, log, scratch, options.rounds, options.steps)
        sys.stderr.write(f"{name}: {found[name]}\n")
    first = next(iter(found.values()))
    result = {
        "ours": statistics.median(first["ours_ms"]),
        "peer": statistics.median(first["at_once_ms"]),
        "ratio": statistics.median(first["ratios"]),
        "unit": "ms of a step",
        "rounds": first["ratios"],
        "datasets": found,
    }
    sys.stdout.write(json.dumps(result) + "\n" if options.json else f"{result['ratio']:.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
