"""Training from a dataset at an S3 store with 20 ms of latency, against one on the local disk.

Both sides train the same steps, in turn. `waiting` is the time of the main thread in the phase
`read`, which is the whole cost of a store to a training step: row groups are fetched ahead, since
the order is known. The processor time of the trainer and that of the store are given apart: on
this machine they compete, in a cluster they do not.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.logs import build_dataset, each_log, job_path, log_parser, write_result
from schemas.run.records import METRICS, StepMetric, read_metrics
from schemas.storage.location import Location
from tests.fault_proxy import Faults, fault_proxy
from tests.object_store import new_url, s3_environment, s3_server

LATENCY_SEC = 0.02
"""Pause before each request."""
WARM_UP = 2
"""Steps that are not counted: the first row groups cannot be fetched ahead."""


@dataclass(frozen=True, slots=True)
class Side:
    """One training.

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


def train(job: Path, dataset: str, steps: int, embedding: str) -> Side:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", dataset]
        command += ["--output", f"{folder}/run", "--embedding", embedding, "--steps", str(steps)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        metrics = read_metrics(Path(folder) / "run" / METRICS)
    cpu_sec = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return side_of(metrics, cpu_sec)


def side_of(metrics: Sequence[StepMetric], cpu_sec: float) -> Side:
    """Return the figures of a training from its metrics."""
    counted = metrics[WARM_UP:]
    return Side(
        step_sec=statistics.mean(m.num_samples / m.samples_per_sec for m in counted),
        waiting_sec=statistics.mean(m.phases["read"] for m in counted),
        cpu_sec=cpu_sec,
        losses=tuple(m.loss for m in metrics),
    )


def copy_dataset(source: Path, target: Location) -> None:
    """Upload a dataset as it is."""
    for entry in Location.parse(source).entries():
        (target / entry.path).upload(source / entry.path)


def measure(job: Path, dataset: Path, rounds: int, steps: int, embedding: str) -> dict[str, Any]:
    """Train from both places in turn, and return the figures of one log."""
    faults = Faults(latency_sec=LATENCY_SEC)
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server(Path(folder)) as endpoint,
        fault_proxy(endpoint, faults) as slow,
    ):
        os.environ.update(s3_environment(slow))
        target = Location.parse(new_url())
        copy_dataset(dataset, target)
        local, remote = list[Side](), list[Side]()
        requests_before = faults.requests.total()
        own_before = sum(os.times()[:2])
        for _ in range(rounds):
            local.append(train(job, str(dataset), steps, embedding))
            remote.append(train(job, str(target), steps, embedding))
        own_sec = sum(os.times()[:2]) - own_before
        requests = faults.requests.total() - requests_before
    assert len({side.losses for side in (*local, *remote)}) == 1, "both train the same bits"
    ratios = [a.step_sec / b.step_sec for a, b in zip(local, remote, strict=True)]
    shares = [
        (b.waiting_sec - a.waiting_sec) / a.step_sec for a, b in zip(local, remote, strict=True)
    ]
    return {
        "rounds": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
        "waiting_share": [round(share, 4) for share in shares],
        "step_ms": round(statistics.median(s.step_sec for s in local) * 1e3, 1),
        "trainer_cpu_sec": [
            round(statistics.median(s.cpu_sec for s in side), 2) for side in (local, remote)
        ],
        "proxy_cpu_sec": round(own_sec / rounds, 2),
        "requests": requests // rounds,
    }


def main() -> None:
    """Run the benchmark of the command line."""
    parser = log_parser("remote", __doc__, ("demo", "mind"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--embedding", choices=("plain", "cached"), default="cached")
    options = parser.parse_args()
    logs: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        job = job_path(name, scratch)
        dataset = build_dataset(job, log, scratch / "dataset")
        logs[name] = measure(job, dataset, options.rounds, options.steps, options.embedding)
    first = next(iter(logs.values()))
    result = {
        "ours": first["step_ms"] / first["ratio"],
        "peer": first["step_ms"],
        "ratio": first["ratio"],
        "rounds": first["rounds"],
        "unit": "ms a step; ours at the store, peer on disk",
        "logs": logs,
    }
    write_result(result, options)


if __name__ == "__main__":
    main()
