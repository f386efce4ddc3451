"""Training with the planned cache in front of two stores behind a link of 1 Gbit/s.

`python -m benchmarks.cache [--json] [--samples N] [--steps N] [--rows N] [--rounds N]`

The demo's 26 tables, dim 64, batch 4,096. Each mode is one training process pinned to the first
core, with two store processes pinned to the second; `plain` has all rows in its own memory. Trainer
and stores communicate in their own network namespace, whose loopback is limited to 2 Gbit/s (`tc
tbf`): fetches and write-backs share it like a link of 1 Gbit/s each way. `cached` follows the plan
with the Belady policy, `lru` keeps the most recently used rows, both with at most `--rows` rows per
table and one thread besides training; `uncached` fetches and writes in every step. Modes alternate;
the time of a step is the median over steps after the first tenth. Requires root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.logs import (
    DEMO_JOB,
    REPOSITORY,
    build_dataset,
    read_job,
    step_figures,
    write_job_file,
    write_result,
)
from pipelines.demo_log.generate import GeneratorConfig, write_log
from schemas.dataset.opened import Dataset, open_dataset
from schemas.run.records import METRICS, SUMMARY, read_metrics

MODES = ("plain", "cached", "lru", "uncached")
DIM, BATCH, NUM_STORES, RATE = 64, 4096, 2, "2gbit"

IN_NAMESPACE = """
ip link set lo up
tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 100ms
exec "{python}" -m benchmarks.cache --inside "{folder}"
"""


def write_job(folder: Path, rows: int) -> Path:
    """Write the demo's job with the benchmark's model; return its path."""
    job = read_job(DEMO_JOB)
    job["train"] = {
        "model": {"name": "dlrm", "bottom_layers": [64], "top_layers": [64, 32]},
        "embedding_dim": DIM,
        "batch_samples": BATCH,
        "num_threads": 1,
        "cache": {"policy": "belady", "rows": rows, "prefetch_steps": 4},
    }
    return write_job_file(folder, job)


def train_in_namespace(folder: Path) -> int:
    """Train one mode inside the network namespace, as configured in `folder/task.json`."""
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    job, processes = Path(task["job"]), []
    try:
        if task["mode"] != "plain":
            token = folder / "token"
            token.write_text(os.urandom(16).hex(), encoding="utf-8")
            addresses = []
            for number in range(NUM_STORES):
                process = _start_store(folder, number, token, task["delay_sec"])
                processes.append(process)
                assert process.stdout is not None, "its output is piped"
                addresses.append(json.loads(process.stdout.readline())["address"])
            body = read_job(job)
            body["train"]["stores"] = {"addresses": addresses, "token_file": str(token)}
            job = write_job_file(folder, body)
        train = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", task["dataset"]]
        train += ["--output", str(folder / "run"), "--embedding", task["mode"]]
        train += ["--steps", str(task["steps"]), "--json"]
        return subprocess.run(["taskset", "-c", "0", *train], stdout=subprocess.DEVNULL).returncode
    finally:
        for process in processes:
            assert process.stdin is not None, "its input is piped"
            process.stdin.close()  # a store exits at the end of its input
            process.wait()


def _start_store(
    folder: Path, number: int, token: Path, delay_sec: float
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainer", "store", "--token-file", str(token)]
    command += ["--directory", str(folder / f"store-{number}")]
    command += ["--delay-sec", str(delay_sec), "--end-with-stdin"]
    return subprocess.Popen(
        ["taskset", "-c", "1", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def measure(task: dict[str, Any], scratch: Path) -> dict[str, float]:
    """Run one mode and return the milliseconds of a step, fetched rows and hit rate.

    Raises:
        RuntimeError: the run failed; its error is on stderr.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        script = IN_NAMESPACE.format(rate=RATE, python=sys.executable, folder=folder)
        done = subprocess.run(
            ["unshare", "--net", "bash", "-euc", script], cwd=REPOSITORY, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{task['mode']} must train, got exit status {done.returncode}")
        metrics = read_metrics(folder / "run" / METRICS)
        summary = json.loads((folder / "run" / SUMMARY).read_text(encoding="utf-8"))
    return {
        **step_figures(metrics[len(metrics) // 10 :]),
        "fetched_rows": summary["fetched_rows"] / len(metrics),
        "hit_rate": summary["cache_hit_rate"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=20_000, help="cached rows per table")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--delay-sec", type=float, default=0.0, help="added to every response")
    parser.add_argument("--dataset", type=Path, help="an existing dataset of the demo")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside is not None:
        return train_in_namespace(options.inside)
    if os.geteuid() != 0:
        sys.stderr.write("error: benchmark must run as root to create its network; use sudo\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="presage-cache-") as name:
        scratch = Path(name)
        job = write_job(scratch / "job", options.rows)
        dataset = options.dataset
        if dataset is None:
            log = GeneratorConfig(num_samples=options.samples, seed=1, start=datetime(2026, 1, 1))
            write_log(log, scratch / "log")
            dataset = build_dataset(job, scratch / "log", scratch / "dataset")
        figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                task = {"mode": mode, "job": str(job), "dataset": str(dataset)}
                task |= {"steps": options.steps, "delay_sec": options.delay_sec}
                figures[mode].append(measure(task, scratch))
                sys.stderr.write(f"{mode} {json.dumps(figures[mode][-1])}\n")
        result = summarize(figures, open_dataset(dataset), options)
    write_result(result, options)
    return 0


def summarize(
    figures: dict[str, list[dict[str, float]]], dataset: Dataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the result of the benchmark."""
    touched = [
        max(s.manifest.tables[table].num_unique_rows for s in dataset.segments)
        for table in dataset.job.data.tables
    ]
    steps = {mode: [r["step_ms"] for r in runs] for mode, runs in figures.items()}
    ratios = {
        mode: [a / b for a, b in zip(steps[mode], steps["cached"], strict=True)] for mode in MODES
    }
    return {
        "ours": round(BATCH / statistics.median(steps["cached"]) * 1e3, 1),
        "peer": round(BATCH / statistics.median(steps["uncached"]) * 1e3, 1),
        "ratio": round(statistics.median(ratios["uncached"]), 3),
        "unit": "samples/s, the planned cache against no cache",
        "rounds": [round(r, 3) for r in ratios["uncached"]],
        "against_lru": [round(r, 3) for r in ratios["lru"]],
        "of_plain": [round(r, 3) for r in ratios["plain"]],
        "cached_rows": sum(min(options.rows, t) for t in touched),
        "touched_rows": sum(touched),
        "equal_losses": len({run["loss_last"] for runs in figures.values() for run in runs}) == 1,
        "modes": {mode: runs[-1] for mode, runs in figures.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
