"""Steps of training runs that differ in one thing.

All runs of a part train the shipped job with the same seed for the same steps; times are those of a
step after a warm-up.

`microbatches`: by default a step is computed in microbatches of one block each, and their gradients
are added over a fixed tree; the peer, `--fast`, computes all samples of a step at once, with a
result that is not bit-identical for other numbers of replicas. A ratio of 0.9 means that ours takes
a ninth more. `loss_difference` is the largest relative difference of the two losses of a step.

`store`: from a dataset at an S3 store with 20 ms of latency; the peer is the same on the local
disk. `waiting_share` is what the phase `read` of a step takes longer, the whole cost of a store to
a step: row groups are fetched ahead, since the order is known. The processor time of the trainer
and that of the store are given apart: on this machine they compete, in a cluster they do not.

`devices`: each model, with rows in host memory (`plain`) and with rows cached by the plan in the
device's memory (`cached`), on each device. `loss_difference` is to the first device, in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.harness import Measure, Options, alternate, compared, median
from benchmarks.common.logs import (
    build_dataset,
    each_log,
    job_path,
    read_job,
    write_job_file,
)
from benchmarks.common.processes import module, run
from benchmarks.common.store import at_store
from benchmarks.common.training import step_figures, train_steps
from presage.schemas.config.job import load_job
from presage.schemas.run.records import METRICS, StepMetric, read_metrics
from presage.trainer.options import TrainOptions
from tests.fault_proxy import Faults

WARM_UP = 2
"""Steps at the start of a run that are not measured."""
LATENCY_SEC = 0.02
"""Pause before each request to the store."""
EMBEDDINGS = "plain", "cached"


def step_ms(runs: Sequence[Sequence[StepMetric]]) -> list[float]:
    """Return the milliseconds of a step in each run, without warm-up."""
    return [step_figures(metrics[WARM_UP:])["step_ms"] for metrics in runs]


def loss_difference(some: Sequence[StepMetric], others: Sequence[StepMetric]) -> float:
    """Return the largest relative difference of the losses of a step."""
    pairs = zip(some, others, strict=True)
    return max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs)


def train_fast(
    job: Path, dataset: Path, scratch: Path, steps: int, *, fast: bool
) -> list[StepMetric]:
    """Train in this process, all samples of a step at once if `fast`."""
    options = TrainOptions(fast=fast, steps=steps)
    return train_steps(job, dataset, scratch / uuid.uuid4().hex, options)


def measure_microbatches(
    options: argparse.Namespace, job: Path, dataset: Path, scratch: Path
) -> dict[str, Any]:
    """Train in both modes."""
    train = partial(train_fast, job, dataset, scratch, options.steps)
    sides = {"ours": partial(train, fast=False), "fast": partial(train, fast=True)}
    runs = alternate_steps(sides, options.rounds)
    config = load_job(job)
    return compared(
        step_ms(runs["ours"]),
        step_ms(runs["fast"]),
        "ms of a step, against --fast",
        microbatches_per_step=config.train.batch_samples // config.data.block_samples,
        loss_difference=max(map(loss_difference, runs["ours"], runs["fast"])),
    )


def alternate_steps(
    sides: Mapping[str, Callable[[], list[StepMetric]]], rounds: int
) -> dict[str, list[list[StepMetric]]]:
    """Return the metrics of each side in each round."""
    found: dict[str, list[list[StepMetric]]] = {name: [] for name in sides}

    def keep(name: str) -> dict[str, float]:
        found[name].append(sides[name]())
        return step_figures(found[name][-1][WARM_UP:])

    alternate({name: partial(keep, name) for name in sides}, rounds)
    return found


# A dataset at a store.


@dataclass(frozen=True, slots=True)
class Run:
    """One training in a process of its own.

    Attributes:
        step_sec: mean duration of a step, without warm-up.
        waiting_sec: mean time of a step in the phase `read`.
        cpu_sec: processor time of the trainer.
        losses: of all steps.
    """

    step_sec: float
    waiting_sec: float
    cpu_sec: float
    losses: tuple[float, ...]


def train_from(job: Path, dataset: object, scratch: Path, steps: int) -> Run:
    """Train with the planned cache in a process of its own."""
    output = scratch / uuid.uuid4().hex
    words = ("train", job, "--dataset", dataset, "--output", output, "--steps", steps)
    done = run(module("trainer", *words, "--embedding", "cached"))
    metrics = read_metrics(output / METRICS)
    counted = metrics[WARM_UP:]
    return Run(
        step_sec=statistics.mean(m.num_samples / m.samples_per_sec for m in counted),
        waiting_sec=statistics.mean(m.phases["read"] for m in counted),
        cpu_sec=done.cpu_sec,
        losses=tuple(m.loss for m in metrics),
    )


def measure_store(
    options: argparse.Namespace, job: Path, dataset: Path, scratch: Path
) -> dict[str, Any]:
    """Train from both places."""
    faults = Faults(latency_sec=LATENCY_SEC)
    with at_store(dataset, faults) as target:
        requests, own_sec = faults.requests.total(), sum(os.times()[:2])
        places = {"disk": dataset, "store": target}
        runs = alternate(
            {
                name: partial(train_from, job, place, scratch, options.steps)
                for name, place in places.items()
            },
            options.rounds,
        )
        own_sec = sum(os.times()[:2]) - own_sec
        requests = faults.requests.total() - requests
    local, remote = runs["disk"], runs["store"]
    assert len({one.losses for one in (*local, *remote)}) == 1, "both train the same bits"
    pairs = zip(local, remote, strict=True)
    return compared(
        [one.step_sec * 1e3 for one in remote],
        [one.step_sec * 1e3 for one in local],
        "ms a step; ours at the store, peer on disk",
        waiting_share=[round((b.waiting_sec - a.waiting_sec) / a.step_sec, 4) for a, b in pairs],
        trainer_cpu_sec={name: median([one.cpu_sec for one in of]) for name, of in runs.items()},
        proxy_cpu_sec=round(own_sec / options.rounds, 2),
        requests=requests // options.rounds,
    )


# Devices.


def with_model(job: Path, model: str, device: str, folder: Path) -> Path:
    """Write a job with another model and device."""
    body = read_job(job)
    own = body["train"].get("model", {})
    body["train"]["model"] = own if own.get("name") == model else {"name": model}
    body["train"]["device"] = device
    return write_job_file(folder, body, job)


def measure_devices(
    options: argparse.Namespace, job: Path, dataset: Path, scratch: Path
) -> dict[str, Any]:
    """Train each model with each embedding on each device."""
    found: dict[str, Any] = {}
    total = dict.fromkeys(options.devices, 0.0)
    for model in options.models:
        for embedding in EMBEDDINGS:
            first: list[StepMetric] = []
            for device in options.devices:
                label = f"{model} {embedding} {device}"
                folder = scratch / label.replace(" ", "-")
                choice = TrainOptions(embedding=embedding, steps=options.steps, fast=True)
                changed = with_model(job, model, device, folder)
                metrics = train_steps(changed, dataset, folder / "run", choice)
                first = first or metrics
                figures = step_figures(metrics[WARM_UP:])
                found[label] = figures | {"loss_difference": loss_difference(metrics, first)}
                total[device] += figures["step_ms"]
    return compared(
        [total[options.devices[-1]]],
        [total[options.devices[0]]],
        f"ms of a step, summed over the runs, {options.devices[-1]} against {options.devices[0]}",
        gpu=torch.cuda.get_device_name() if "cuda" in options.devices else None,
        runs=found,
    )


OfLog = Callable[[argparse.Namespace, Path, Path, Path], dict[str, Any]]


def on_each_log(measure: OfLog) -> Measure:
    """Return the measurement of all logs, each with its job, dataset and folder."""

    def measure_logs(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, log, folder in each_log(options, scratch):
            job = job_path(name, folder)
            dataset = build_dataset(job, log, folder / "dataset")
            found[f"{scratch.name}, {name}"] = measure(options, job, dataset, folder)
        return found

    return measure_logs


PARTS = {
    "microbatches": on_each_log(measure_microbatches),
    "store": on_each_log(measure_store),
    "devices": on_each_log(measure_devices),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    has_gpu = torch.cuda.is_available()
    options = Options("runs.steps", __doc__, rounds=3)
    local = ("microbatches", "store", *(("devices",) if has_gpu else ()))
    options.add_parts(PARTS, default=local, small=("microbatches",))
    options.add_logs(["demo", "kuairand"])
    options.add("--steps", 40, "of a run", small=4)
    options.add("--devices", ("cpu", "cuda") if has_gpu else ("cpu",), "the last one is ours")
    options.add("--models", ("dlrm", "dcn", "attention"), "models of `devices`", small=("dlrm",))
    torch.set_num_threads(2)
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
