"""Time and losses of training on a GPU, against the processors beside it.

`python -m benchmarks.gpu [--json] [--datasets NAME] [--devices cpu,cuda] [--models NAME,NAME]
[--steps N] [--shared-data DIR]`

Trains the shipped job with each model, with rows in host memory (`plain`) and with rows cached by
the plan in the device's memory (`cached`), for the same steps on each device. Times are medians
over the steps of a run after a warm-up; `loss_difference` is the largest relative difference of
the losses of a step to those of the first device, in float32.
"""

from __future__ import annotations

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
    read_job,
    step_figures,
    write_job_file,
    write_result,
)
from schemas.run.records import METRICS, StepMetric, read_metrics
from schemas.storage.location import Location
from trainer.options import TrainOptions
from trainer.train import train

WARM_UP = 5
"""Steps at the start of a run that are not measured."""
EMBEDDINGS = "plain", "cached"
PHASES = "read", "fetch", "forward", "backward", "update"


def train_steps(
    job: Path, dataset: Path, run: Path, steps: int, embedding: str
) -> list[StepMetric]:
    """Train some steps and return their metrics."""
    train(
        job,
        Location.parse(dataset),
        run,
        TrainOptions(embedding=embedding, steps=steps, fast=True),
        clock=time.perf_counter,
        on_step=lambda *_: None,
    )
    return read_metrics(run / METRICS)


def with_model(job: Path, model: str, device: str, folder: Path) -> Path:
    """Write a job with another model and device."""
    body = read_job(job)
    own = body["train"].get("model", {})
    body["train"]["model"] = own if own.get("name") == model else {"name": model}
    body["train"]["device"] = device
    return write_job_file(folder, body, job)


def measure(
    name: str, log: Path, scratch: Path, models: Sequence[str], devices: Sequence[str], steps: int
) -> list[dict[str, Any]]:
    """Train each model with each embedding on each device; return a line for each run."""
    dataset = build_dataset(job_path(name), log, scratch / "dataset")
    lines: list[dict[str, Any]] = []
    for model in models:
        for embedding in EMBEDDINGS:
            expected: list[float] = []
            for device in devices:
                folder = scratch / f"{model}-{embedding}-{device}"
                job = with_model(job_path(name), model, device, folder)
                metrics = train_steps(job, dataset, folder / "run", steps, embedding)
                losses = [metric.loss for metric in metrics]
                expected = expected or losses
                pairs = zip(losses, expected, strict=True)
                difference = max(abs(a - b) / abs(b) for a, b in pairs)
                figures = step_figures(metrics[WARM_UP:])
                key = {"model": model, "embedding": embedding, "device": device}
                lines.append(key | figures | {"loss_difference": difference})
                sys.stderr.write(f"{line_of(lines[-1])}\n")
    return lines


def line_of(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    phases = " | ".join(f"{line[phase]:.1f}" for phase in PHASES)
    key = f"| {line['model']} | {line['embedding']} | {line['device']} "
    return f"{key}| {line['step_ms']:.1f} | {phases} | {line['loss_difference']:.1e} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("gpu", __doc__, ["demo"])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--devices", default="cpu,cuda" if has_gpu else "cpu")
    parser.add_argument("--models", default="dlrm,dcn,attention")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    devices, models = options.devices.split(","), options.models.split(",")
    sys.stderr.write(
        f"| model | embedding | device | step, ms | {' | '.join(PHASES)} | loss_difference |\n"
    )
    lines: list[dict[str, Any]] = []
    for name, log, scratch in each_log(options):
        lines += measure(name, log, scratch, models, devices, options.steps)
    gpu = torch.cuda.get_device_name() if "cuda" in devices else None
    by_device = {d: [x["step_ms"] for x in lines if x["device"] == d] for d in devices}
    first, last = sum(by_device[devices[0]]), sum(by_device[devices[-1]])
    result = {
        "ours": last,
        "peer": first,
        "ratio": round(first / last, 3),
        "unit": "ms of a step, summed over the runs",
        "gpu": gpu,
        "runs": lines,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
