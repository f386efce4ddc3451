"""Speed of a run at a URL, whose checkpoints are uploaded beside training, and of one at a path.

`python -m benchmarks.upload [--json] [--url URL] [--samples N] [--rounds N] [--every N]`

Trains the demo's job, with a checkpoint every `--every` steps, to an object store and to a folder,
in alternating order. `ours` and `peer` are the samples per second of all steps but the first of
each run. `last_sec` is the time that the end of the run waits for the last upload. Names of runs
below `--url` are new; without it the store is the memory of this process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch

from benchmarks.checkpoint import write_job
from benchmarks.logs import build_dataset, write_result
from pipelines.demo_log.generate import GeneratorConfig, write_log
from schemas.config.job import load_job
from schemas.paths import path_or_url
from schemas.run.records import METRICS, read_metrics
from schemas.run.run_manifest import local_run
from schemas.storage.location import Location
from trainer.options import TrainOptions
from trainer.recovery import Drain
from trainer.run.upload import open_output
from trainer.train import train


def train_once(
    job: Path, dataset: Path, output: Path | Location, work: Path
) -> tuple[float, float]:
    """Train a run; return its samples per second, and the seconds that its end took."""
    drain, config = Drain(), load_job(job).train.checkpoint
    with open_output(output, work, config, resume=False, drain=drain) as run:
        train(
            job,
            Location.parse(dataset),
            run,
            TrainOptions(),
            clock=time.perf_counter,
            on_step=lambda metric, num_steps: None,
            drain=drain,
        )
        trained = time.perf_counter()
    end_sec = time.perf_counter() - trained
    with local_run(output, (METRICS,)) as run:
        steps = read_metrics(run / METRICS)[1:]
    seconds = sum(step.num_samples / step.samples_per_sec for step in steps)
    return sum(step.num_samples for step in steps) / seconds, end_sec


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upload", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--url", default="memory://benchmark", help="of an object store")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args(argv)
    torch.set_num_threads(2)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    ends: list[float] = []
    with tempfile.TemporaryDirectory(prefix="presage-upload-") as name:
        scratch = Path(name)
        job = write_job(scratch / "job", 2, options.every)
        start = datetime(2026, 1, 1)
        write_log(GeneratorConfig(num_samples=options.samples, start=start), scratch / "log")
        dataset = build_dataset(job, scratch / "log", scratch / "dataset")
        for number in range(options.rounds):
            outputs = (f"{options.url}/{uuid.uuid4().hex}", f"{scratch}/run{number}")
            for text in outputs[:: -1 if number % 2 else 1]:
                output = path_or_url(text)
                speed, end_sec = train_once(job, dataset, output, scratch / "work")
                speeds[isinstance(output, Location)].append(speed)
                ends += [end_sec] if isinstance(output, Location) else []
    ours, peer = speeds[True], speeds[False]
    result = {
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": statistics.median(ours) / statistics.median(peer),
        "unit": "samples per second of training steps",
        "rounds": [a / b for a, b in zip(ours, peer, strict=True)],
        "last_sec": statistics.median(ends),
        "every_steps": options.every,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
