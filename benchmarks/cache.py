"""Training with the planned cache, in front of remote stores, and under a memory limit.

`links`: rows in two store processes behind a link, which fetches and write-backs share; Linux
limits a loopback in a network namespace of its own to twice the link's rate. Requires root. A log
of eight columns of ids with the skew of Meta's traces and the reuse distances of KuaiRand and
30Music (`common/reuse.py`), in one table. A step of 4,096 samples reads 0.2 % of the rows. Modes
train the same steps from the middle of the run, with one thread of computation and the cache that a
run would have there: `planned` follows the oracle, `lru` keeps the most recently used rows,
`lru_next` also reads the rows of the next batch ahead, `uncached` reads and writes all in every
step, `memory` has no link. `bound` is the larger of computation and transfer of `lru_next` over
that of `planned`, whose rows are the fewest of any cache of its size; computation is that of
`planned`, or the whole step of `memory` if it is shorter.

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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
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
    report,
    short,
)
from benchmarks.common.id_logs import write_id_job, write_id_log
from benchmarks.common.logs import (
    REPOSITORY,
    build_dataset,
    num_lines,
    read_job,
    write_yaml,
)
from benchmarks.common.processes import drop_pages, module, run
from benchmarks.common.reuse import BATCH_SAMPLES, build_reuse
from benchmarks.common.skew import NUM_TABLES, skewed_rows
from benchmarks.common.training import step_figures
from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.records import METRICS, read_metrics
from presage.trainer.components import order_of

# Stores behind a link.

CACHES = ("planned", "lru_next", "lru")
COMPUTATION = ("forward", "backward", "update")
"""Phases of a step that wait for no row."""
TOOLS = ("ip", "tc", "unshare")
IN_NAMESPACE = """
ip link set lo up
tc qdisc add dev lo root tbf rate {rate}mbit burst 1mb latency 100ms
exec "{python}" -m benchmarks.peers.linked "{task}"
"""
MODELS = {
    "small": {"embedding_dim": 64, "bottom_layers": [64], "top_layers": [64, 32]},
    "medium": {"embedding_dim": 128, "bottom_layers": [64], "top_layers": [64, 32]},
    "large": {"embedding_dim": 256, "bottom_layers": [64], "top_layers": [64, 32]},
}
# Simulated before the first timing, rows that a step reads at caches of 2, 5, 10 and 20 % of 8.8
# million: LRU 12,075, 9,634, 7,654 and 5,578; the plan 8,693, 6,042, 4,436 and 2,990, which is all
# first uses. At 200 Mbit/s the bounds of the large model at 10 and 20 %, and of the medium one at
# 10 %, are thus 1.7 or more.


def train_linked(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train the steps of a task behind a link; return its figures, or why it is refused."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = folder / "task.json"
    file.write_text(json.dumps({**task, "folder": str(folder)}), encoding="utf-8")
    rate = 2 * task["megabits"]
    script = IN_NAMESPACE.format(rate=rate, python=sys.executable, task=file)
    return run(["unshare", "--net", "bash", "-euc", script]).json()


def measure_links(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train in every mode, for each model, link and size of the cache."""
    if os.geteuid() != 0:
        raise MissingError("it must run as root to create its network; use sudo")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise MissingError(f"it must have {', '.join(TOOLS)}, got no {missing[0]} on PATH")
    kept = options.scratch or scratch
    kept.mkdir(parents=True, exist_ok=True)
    dataset = build_reuse(Path(options.shared_data), options.samples, kept)
    found: dict[str, Any] = {}
    for model, megabits in product(options.models, options.megabits):
        sizes = dict(MODELS[model])
        train = {
            "embedding_dim": sizes.pop("embedding_dim"),
            "model": {"name": "dlrm", **sizes},
            "batch_samples": BATCH_SAMPLES,
            "num_threads": 1,
        }
        task = {"dataset": str(dataset), "train": train, "megabits": megabits}
        task["steps"] = options.steps
        kinds = [(0.0, "memory"), (0.0, "uncached"), *product(options.shares, CACHES)]
        sides = {
            (share, mode): partial(
                train_linked, {**task, "share": share, "mode": mode}, scratch / "run"
            )
            for share, mode in kinds
        }
        runs = alternate(sides, options.rounds)
        for share in options.shares:
            cell = {mode: runs[share, mode] for mode in CACHES}
            cell |= {mode: runs[0.0, mode] for mode in ("memory", "uncached")}
            label = f"{model} model, {megabits} Mbit/s, cache of {100 * share:g} %"
            found[label] = compare_linked(cell, megabits)
            report(label, found[label])
    return found


def compare_linked(runs: Mapping[str, list[dict[str, Any]]], megabits: int) -> dict[str, Any]:
    """Return the result of a cell, the plan against LRU with the next batch prefetched."""
    refused = {mode: of[0]["refused"] for mode, of in runs.items() if "refused" in of[0]}
    if refused:
        return {"unit": "refused", "refused": refused}
    ms = {mode: [one["step_ms"] for one in of] for mode, of in runs.items()}
    link_ms = {
        mode: median([one["bytes"] for one in of]) * 8 / (2 * megabits * 1e3)
        for mode, of in runs.items()
    }
    own = median([sum(one[phase] for phase in COMPUTATION) for one in runs["planned"]])
    compute = min(own, median(ms["memory"]))
    bound = max(compute, link_ms["lru_next"]) / max(compute, link_ms["planned"])
    return compared(
        ms["planned"],
        ms["lru_next"],
        "ms per step, the plan against LRU with the next batch prefetched",
        bound=bound,
        compute_ms=short(compute),
        link_ms={mode: short(each) for mode, each in link_ms.items()},
        against={mode: ratios(ms["planned"], each) for mode, each in ms.items()},
        equal_losses=len({one["loss"] for of in runs.values() for one in of}) == 1,
        modes={mode: of[-1] for mode, of in runs.items()},
    )


def train_command(job: Path, dataset: Path | str, output: Path, embedding: str) -> list[str]:
    """Return the command of one mode."""
    words = ("train", job, "--dataset", dataset, "--output", output, "--embedding", embedding)
    return module("trainer", *words, "--json")


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
    options.add_parts({"links": measure_links, "memory": measure_memory}, small=("links",))
    options.add_shared_data()
    options.add("--samples", 10_000_000, "of the log of `links`", small=200_000)
    options.add("--steps", 40, "of a mode of `links`", small=4)
    options.add("--models", tuple(MODELS), "of `links`", small=("small",), choices=tuple(MODELS))
    options.add("--megabits", (1000, 200), "of the links, each way", small=(200,))
    options.add("--shares", (0.02, 0.05, 0.1, 0.2), "of the rows that are cached", small=(0.5,))
    options.add("--large-samples", 786_432, "of the log of `memory`", small=32_768)
    options.add("--large-steps", 48, "of the second epoch", small=8)
    options.add("--large-rows", 156_000, "cached rows of `memory`, of all tables")
    options.add("--limit-mib", 2000, "memory of a process")
    options.add("--scratch", None, "folder to keep and reuse a part's dataset in")
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
