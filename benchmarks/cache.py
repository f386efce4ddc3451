"""Training with the planned cache in front of two stores behind a link of 1 Gbit/s.

`python -m benchmarks.cache [--json] [--samples N] [--steps N] [--rows N] [--rounds N]`

The demo's 26 tables at dim 64, batch 4,096. Each mode is one training process, pinned to the first
processor, in front of two store processes pinned to the second; `plain` holds all rows in its own
memory. Trainer and stores talk in a network namespace of their own whose loopback passes 2 Gbit/s
(`tc tbf`): what is fetched and what is written back share it, as they would share a link of 1
Gbit/s each way. `cached` obeys the plan by Belady, `lru` keeps the rows used last, both with at
most `--rows` rows a table and one thread beside training; `uncached` fetches and writes every
step. Modes take turns; a step's time is the median over steps after the first tenth. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.order import built
from benchmarks.run_figures import figures_of
from pipelines.demo_log.log import GeneratorConfig, write_log
from schemas.dataset import open_dataset
from schemas.run_log import METRICS, SUMMARY, read_metrics
from trainer.stores.remote.ownership import slot_range_of_part

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "schemas" / "demo"
MODES = ("plain", "cached", "lru", "uncached")
DIM, BATCH, NUM_STORES, RATE = 64, 4096, 2, "2gbit"

INSIDE = """
ip link set lo up
tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 100ms
exec "{python}" -m benchmarks.cache --inside "{folder}"
"""


def write_job(folder: Path, rows: int) -> Path:
    """Write the demo's job with the benchmark's widths; return its path."""
    folder.mkdir(parents=True)
    job = yaml.safe_load((DEMO / "job.yaml").read_text(encoding="utf-8"))
    job["train"] = {
        "model": {"name": "dlrm", "bottom_layers": [64], "top_layers": [64, 32]},
        "embedding_dim": DIM,
        "batch_samples": BATCH,
        "num_threads": 1,
        "cache": {"policy": "belady", "rows": rows, "prefetch_steps": 4},
    }
    shutil.copy(DEMO / "schema.pbtxt", folder / "schema.pbtxt")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def inside(folder: Path) -> int:
    """Train one mode inside the namespace; `folder` holds `task.json`."""
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    job, processes = Path(task["job"]), []
    try:
        if task["mode"] != "plain":
            token = folder / "token"
            token.write_text(os.urandom(16).hex(), encoding="utf-8")
            addresses = []
            for number in range(NUM_STORES):
                process = _store(folder, number, token, task["delay_sec"])
                processes.append(process)
                assert process.stdout is not None, "its output is piped"
                addresses.append(json.loads(process.stdout.readline())["address"])
            body = yaml.safe_load(job.read_text(encoding="utf-8"))
            body["train"]["stores"] = {"addresses": addresses, "token_file": str(token)}
            job = folder / "job.yaml"
            shutil.copy(DEMO / "schema.pbtxt", folder / "schema.pbtxt")
            job.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
        train = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", task["dataset"]]
        train += ["--output", str(folder / "run"), "--embedding", task["mode"]]
        train += ["--steps", str(task["steps"]), "--json"]
        return subprocess.run(["taskset", "-c", "0", *train], stdout=subprocess.DEVNULL).returncode
    finally:
        for process in processes:
            assert process.stdin is not None, "its input is piped"
            process.stdin.close()  # a store ends with its input
            process.wait()


def _store(folder: Path, number: int, token: Path, delay_sec: float) -> subprocess.Popen[bytes]:
    start, end = slot_range_of_part(number, NUM_STORES)
    command = [sys.executable, "-m", "trainer", "store", "--token-file", str(token)]
    command += ["--directory", str(folder / f"store-{number}"), "--slots", f"{start}:{end}"]
    command += ["--delay-sec", str(delay_sec), "--end-with-stdin"]
    return subprocess.Popen(
        ["taskset", "-c", "1", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def taken(task: dict[str, Any], scratch: Path) -> dict[str, float]:
    """Run one mode and return the milliseconds of a step and what was fetched.

    Raises:
        RuntimeError: the run failed; its own line is on stderr.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        script = INSIDE.format(rate=RATE, python=sys.executable, folder=folder)
        done = subprocess.run(
            ["unshare", "--net", "bash", "-euc", script], cwd=REPOSITORY, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{task['mode']} must train, got exit status {done.returncode}")
        metrics = read_metrics(folder / "run" / METRICS)
        summary = json.loads((folder / "run" / SUMMARY).read_text(encoding="utf-8"))
    return {
        **figures_of(metrics[len(metrics) // 10 :]),
        "fetched_rows": summary["fetched_rows"] / len(metrics),
        "hit_rate": summary["cache_hit_rate"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=20_000, help="cached rows of a table")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--delay-sec", type=float, default=0.0, help="added to every answer")
    parser.add_argument("--dataset", type=Path, help="a dataset of the demo that is there already")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside is not None:
        return inside(options.inside)
    if os.geteuid() != 0:
        sys.stderr.write("error: benchmark must run as root to make its network; use sudo\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="presage-cache-") as name:
        scratch = Path(name)
        job = write_job(scratch / "job", options.rows)
        dataset = options.dataset
        if dataset is None:
            log = GeneratorConfig(num_samples=options.samples, seed=1, start=datetime(2026, 1, 1))
            write_log(log, scratch / "log")
            dataset = built(job, scratch / "log", scratch / "dataset")
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                task = {"mode": mode, "job": str(job), "dataset": str(dataset)}
                task |= {"steps": options.steps, "delay_sec": options.delay_sec}
                found[mode].append(taken(task, scratch))
                sys.stderr.write(f"{mode} {json.dumps(found[mode][-1])}\n")
        result = summarised(found, dataset, options)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


def summarised(
    found: dict[str, list[dict[str, float]]], dataset: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what is printed."""
    opened = open_dataset(dataset)
    touched = [
        max(s.manifest.tables[table].num_unique_rows for s in opened.segments)
        for table in opened.job.data.tables
    ]
    steps = {mode: [r["step_ms"] for r in runs] for mode, runs in found.items()}
    ratios = {
        mode: [a / b for a, b in zip(steps[mode], steps["cached"], strict=True)] for mode in MODES
    }
    head = ratios["uncached"]
    return {
        "ours": round(BATCH / statistics.median(steps["cached"]) * 1e3, 1),
        "peer": round(BATCH / statistics.median(steps["uncached"]) * 1e3, 1),
        "ratio": round(statistics.median(head), 3),
        "unit": "samples/s, the planned cache against no cache",
        "rounds": [round(r, 3) for r in head],
        "against_lru": [round(r, 3) for r in ratios["lru"]],
        "of_plain": [round(r, 3) for r in ratios["plain"]],
        "cached_rows": sum(min(options.rows, t) for t in touched),
        "touched_rows": sum(touched),
        "equal_losses": len({run["loss_last"] for runs in found.values() for run in runs}) == 1,
        "modes": {mode: runs[-1] for mode, runs in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
