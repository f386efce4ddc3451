"""Training with the planned cache, in front of remote stores, and under a memory limit.

`plain` has all rows in the trainer's memory, `cached` follows the plan with the Belady policy,
`lru` keeps the most recently used rows, both with at most so many rows per table and one thread
besides training; `uncached` fetches and writes in every step. Modes alternate. Requires root.

`stores`: the demo's 26 tables, dim 64, batch 4,096. Each mode is one training process pinned to the
first core, with two store processes pinned to the second. Trainer and stores communicate in their
own network namespace, whose loopback is limited to 2 Gbit/s (`tc tbf`): fetches and write-backs
share it like a link of 1 Gbit/s each way. The time of a step is the median over steps after the
first tenth. `bound` is the time of a step without a cache over one without stores.

`memory`: 26 tables of 2 M rows shaped like Criteo's large ones, dim 256, batch 1,024, one compute
thread. A run without limit trains the first epoch, which touches every row. Each mode resumes from
its checkpoint in the second epoch, so every fetched row was written before. `plain` has no limit.
The others run in a memory cgroup (version 1) whose limit covers the whole process including its
page cache: `log` is the planned cache in front of the log ordered by next use, `mmap` the same plan
in front of memory-mapped files; `lru` and `uncached` use memory-mapped files as well. Files are
dropped from the page cache before each run. Times are means over the steps after the first quarter,
bytes are what the process read from and wrote to the device in these steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.control_groups import group, require_groups
from benchmarks.common.harness import (
    MissingError,
    Options,
    alternate,
    compared,
    median,
    ratios,
)
from benchmarks.common.id_logs import write_id_job, write_id_log
from benchmarks.common.logs import (
    DEMO_JOB,
    REPOSITORY,
    build_dataset,
    demo_dataset,
    num_lines,
    read_job,
    write_job_file,
    write_yaml,
)
from benchmarks.common.processes import drop_pages, module, run
from benchmarks.common.skew import NUM_TABLES, skewed_rows
from benchmarks.common.training import step_figures
from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.records import METRICS, SUMMARY, read_metrics
from presage.trainer.components import order_of

# Stores behind a network.

MODES = ("plain", "cached", "lru", "uncached")
DIM, BATCH, NUM_STORES, RATE = 64, 4096, 2, "2gbit"
TOOLS = ("ip", "taskset", "tc", "unshare")
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
        train = train_command(job, task["dataset"], folder / "run", task["mode"])
        train += ["--steps", str(task["steps"])]
        return subprocess.run(["taskset", "-c", "0", *train], stdout=subprocess.DEVNULL).returncode
    finally:
        for process in processes:
            assert process.stdin is not None, "its input is piped"
            process.stdin.close()  # a store exits at the end of its input
            process.wait()


def _start_store(
    folder: Path, number: int, token: Path, delay_sec: float
) -> subprocess.Popen[bytes]:
    command = module("trainer", "store", "--token-file", token, "--end-with-stdin")
    command += ["--directory", str(folder / f"store-{number}"), "--delay-sec", str(delay_sec)]
    return subprocess.Popen(
        ["taskset", "-c", "1", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def train_command(job: Path, dataset: Path | str, output: Path, embedding: str) -> list[str]:
    """Return the command of one mode."""
    words = ("train", job, "--dataset", dataset, "--output", output, "--embedding", embedding)
    return module("trainer", *words, "--json")


def train_mode(task: dict[str, Any], mode: str, scratch: Path) -> dict[str, float]:
    """Run one mode and return the milliseconds of a step, fetched rows and hit rate."""
    folder = scratch / "mode"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "task.json").write_text(json.dumps(task | {"mode": mode}), encoding="utf-8")
    script = IN_NAMESPACE.format(rate=RATE, python=sys.executable, folder=folder)
    run(["unshare", "--net", "bash", "-euc", script])
    metrics = read_metrics(folder / "run" / METRICS)
    summary = json.loads((folder / "run" / SUMMARY).read_text(encoding="utf-8"))
    return {
        **step_figures(metrics[len(metrics) // 10 :]),
        "fetched_rows": summary["fetched_rows"] / len(metrics),
        "hit_rate": summary["cache_hit_rate"],
    }


def measure_stores(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train in every mode."""
    if os.geteuid() != 0:
        raise MissingError("it must run as root to create its network; use sudo")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise MissingError(f"it must have {', '.join(TOOLS)}, got no {missing[0]} on PATH")
    job = write_job(scratch / "job", options.rows)
    path = options.dataset or demo_dataset(scratch, options.samples, job)
    task = {"job": str(job), "dataset": str(path), "steps": options.steps}
    task["delay_sec"] = options.delay_sec
    runs = alternate(
        {mode: partial(train_mode, task, mode, scratch) for mode in MODES}, options.rounds
    )
    sec = {mode: [one["step_ms"] / 1e3 for one in of] for mode, of in runs.items()}
    dataset = open_dataset(path)
    touched = [
        max(s.manifest.tables[table].num_unique_rows for s in dataset.segments)
        for table in dataset.job.data.tables
    ]
    return compared(
        [BATCH / one for one in sec["cached"]],
        [BATCH / one for one in sec["uncached"]],
        "samples/s, the planned cache against no cache",
        higher=True,
        bound=median(ratios(sec["plain"], sec["uncached"])),
        against_lru=ratios(sec["cached"], sec["lru"]),
        of_plain=ratios(sec["cached"], sec["plain"]),
        cached_rows=sum(min(options.rows, t) for t in touched),
        touched_rows=sum(touched),
        equal_losses=len({one["loss_last"] for of in runs.values() for one in of}) == 1,
        modes={mode: of[-1] for mode, of in runs.items()},
    )


# A memory limit.

TABLE_ROWS = 2_000_000
HOT_SHARE = 0.5
"""Share of accesses of the hottest 1 % of rows; low, so that every row of a table is touched."""
NUM_DENSE = 13
LARGE_DIM, LARGE_BATCH = 256, 1024
EPOCHS = 2
_EVALUATED = 16_384
MODES_IN_MEMORY = {
    "plain": ("plain", "log"),
    "log": ("cached", "log"),
    "mmap": ("cached", "mmap"),
    "lru": ("lru", "mmap"),
    "uncached": ("uncached", "mmap"),
}
"""Mode -> its `--embedding` and `cache.files`."""
RECORD_BYTES = 4 * (LARGE_DIM + 1)
_POLL_SEC = 0.01


def write_large_log(directory: Path, num_samples: int) -> None:
    """Write training samples, and some of evaluation; every sample is a session."""
    count, rng = num_samples + _EVALUATED, np.random.default_rng(0)
    columns: dict[str, Any] = {
        f"dense_{k}": rng.random(count, np.float32) for k in range(NUM_DENSE)
    }
    for k in range(NUM_TABLES):
        columns[f"id_{k:02d}"] = skewed_rows(TABLE_ROWS, count, k, HOT_SHARE).astype(np.int64)
    write_id_log(directory, columns, count)


def write_large_job(directory: Path, num_samples: int, train: dict[str, Any]) -> Path:
    """Write the job that builds the log and trains on it; return its path.

    Args:
        directory: to create.
        num_samples: argument of `write_large_log`.
        train: additional keys of the `train` section.
    """
    columns = dict.fromkeys((f"dense_{k}" for k in range(NUM_DENSE)), 0)
    columns |= dict.fromkeys((f"id_{k:02d}" for k in range(NUM_TABLES)), TABLE_ROWS)
    data = {
        "split": {"evaluation_from": str(np.datetime64(num_samples, "s"))},
        "oracle": {"batch_samples": LARGE_BATCH, "epochs": EPOCHS},
    }
    common = {
        "model": {"name": "dlrm", "bottom_layers": [256], "top_layers": [512, 256]},
        "embedding_dim": LARGE_DIM,
        "batch_samples": LARGE_BATCH,
        "epochs": EPOCHS,
    }
    return write_id_job(directory, columns, data, {**common, **train})


def prepare(options: argparse.Namespace, scratch: Path) -> Path:
    """Build the dataset and train its first epoch, unless both exist; return that run."""
    warm, samples = scratch / "warm", options.large_samples
    cache = {"policy": "belady", "rows": options.large_rows, "prefetch_steps": 4}
    if warm.is_dir():
        return warm
    write_large_log(scratch / "log", samples)
    job = write_large_job(scratch / "job", samples, {"num_threads": 1, "cache": cache})
    dataset = build_dataset(job, scratch / "log", scratch / "dataset")
    shutil.rmtree(scratch / "log")
    steps = order_of(load_job(job), open_dataset(dataset)).num_steps // 2
    unfinished = scratch / "warm.partial"
    run([*train_command(job, dataset, unfinished, "plain"), "--steps", str(steps)])
    return unfinished.rename(warm)


def resume_mode(mode: str, scratch: Path, steps: int, limit_bytes: int) -> dict[str, float]:
    """Resume from the first epoch in one mode and return its figures.

    The process is killed after the steps.

    Raises:
        RuntimeError: it ended before; its error is on stderr.
    """
    embedding, files = MODES_IN_MEMORY[mode]
    body = read_job(scratch / "job" / "job.yaml")
    body["train"]["cache"]["files"] = files
    job = write_yaml(scratch / "job" / f"{mode}.yaml", body)
    folder = scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch / "warm", folder, copy_function=os.link)
    (folder / METRICS).unlink()  # the only one of these files that is modified in place
    shutil.copy(scratch / "warm" / METRICS, folder / METRICS)
    drop_pages(scratch / "dataset")
    drop_pages(folder)
    first = len(read_metrics(folder / METRICS))
    counted, last = first + steps // 4, first + steps
    command = [*train_command(job, scratch / "dataset", folder, embedding), "--resume"]
    with nullcontext() if mode == "plain" else group("memory") as limits:
        if limits is not None:
            limits.limit_memory(limit_bytes)
            command = limits.command(command)
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        try:
            read, written = _bytes_of_steps(process, folder / METRICS, counted, last)
        finally:
            process.kill()  # the rest of the epoch is not measured
            process.wait()
        peak = 0 if limits is None else limits.peak_bytes
    per_step = 1e6 * (last - counted)
    return {
        **step_figures(read_metrics(folder / METRICS)[counted:last]),
        "read_mb": round(read / per_step, 2),
        "written_mb": round(written / per_step, 2),
        "peak_mib": peak >> 20,
    }


def _bytes_of_steps(
    process: subprocess.Popen[bytes], metrics: Path, first: int, last: int
) -> tuple[int, int]:
    """Return the bytes that a process reads and writes between the commits of two steps."""
    counts: list[tuple[int, int]] = []
    for step in (first, last):
        while process.poll() is None and num_lines(metrics) < step:
            time.sleep(_POLL_SEC)
        if process.returncode is not None:
            raise RuntimeError(f"trainer must continue, got exit status {process.returncode}")
        counts.append(_device_bytes(process.pid))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def _device_bytes(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def touched_rows(warm: Path) -> int:
    """Return the number of rows that the first epoch wrote."""
    files = warm.glob("checkpoints/*/*/rows.npy")
    return sum(len(np.load(path, mmap_mode="r")) for path in files)


def measure_memory(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train the second epoch in every mode."""
    require_groups()
    scratch = options.scratch or scratch
    scratch.mkdir(parents=True, exist_ok=True)
    warm, limit = prepare(options, scratch), options.limit_mib << 20
    sides = {
        mode: partial(resume_mode, mode, scratch, options.large_steps, limit)
        for mode in MODES_IN_MEMORY
    }
    runs = alternate(sides, options.rounds)
    sec = {mode: [one["mean_ms"] / 1e3 for one in of] for mode, of in runs.items()}
    touched = touched_rows(warm) * RECORD_BYTES
    return compared(
        [LARGE_BATCH / one for one in sec["log"]],
        [LARGE_BATCH / one for one in sec["uncached"]],
        "samples/s under a memory limit, the plan over a log against no cache",
        higher=True,
        over_log={mode: ratios(sec["log"], sec[mode]) for mode in ("plain", "lru", "mmap")},
        touched_bytes=touched,
        limit_bytes=limit,
        touched_of_limit=round(touched / limit, 2),
        equal_losses=len({one["loss_last"] for of in runs.values() for one in of}) == 1,
        modes={mode: of[-1] for mode, of in runs.items()},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("cache", __doc__, rounds=2)
    options.add_parts({"stores": measure_stores, "memory": measure_memory}, small=("stores",))
    options.add("--samples", 1_000_000, "of the demo's log", small=40_000)
    options.add("--steps", 200, "of `stores`", small=8)
    options.add("--rows", 20_000, "cached rows per table of `stores`")
    options.add("--delay-sec", 0.0, "added to every response of a store")
    options.add("--dataset", None, "an existing dataset of the demo")
    options.add("--large-samples", 786_432, "of the log of `memory`", small=32_768)
    options.add("--large-steps", 48, "of the second epoch", small=8)
    options.add("--large-rows", 6000, "cached rows of a table of `memory`")
    options.add("--limit-mib", 2000, "memory of a process")
    options.add("--scratch", None, "folder to keep and reuse the dataset of `memory` in")
    options.add("--inside", None, argparse.SUPPRESS)
    inside = options.parse(argv).inside
    return options.run_parts(argv) if inside is None else train_in_namespace(inside)


if __name__ == "__main__":
    sys.exit(main())
