"""Training on tables four times larger than the process's memory.

`python -m benchmarks.memory [--json] [--rounds N] [--steps N] [--limit-mib N] [--scratch DIR]`

26 tables of 2 M rows shaped like Criteo's large ones, dim 256, batch 1,024, one compute thread. A
run without limit trains the first epoch, which touches every row. Each mode resumes from its
checkpoint in the second epoch, so every fetched row was written before. `plain` has all rows in
memory and no limit. The others run in a memory cgroup (version 1) whose limit covers the whole
process including its page cache: `log` is the planned cache in front of the log ordered by next
use, `mmap` the same plan in front of memory-mapped files; `lru` and `uncached` use memory-mapped
files as well. Files are dropped from the page cache before each run. Modes alternate; times are
means over the steps after the first quarter, bytes are what the process read from and wrote to the
device in these steps. Requires root.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.logs import (
    NUM_TABLES,
    REPOSITORY,
    build_dataset,
    skewed_rows,
    step_figures,
    write_result,
)
from schemas.config.job import load_job
from schemas.dataset.accesses import TableAccesses
from schemas.dataset.opened import Dataset, open_dataset
from schemas.run.records import METRICS, read_metrics
from trainer.components import order_of

TABLE_ROWS = 2_000_000
HOT_SHARE = 0.5
"""Share of accesses of the hottest 1 % of rows; low, so that every row of a table is touched."""
NUM_DENSE = 13
DIM, BATCH = 256, 1024
EPOCHS = 2
_EVALUATED = 16_384
_FEATURE = 'feature {{ name: "{name}" type: {type} annotation {{ tag: "{tag}" }} {more} }}\n'
_ALWAYS = "presence { min_fraction: 1 }"
_TIME = _ALWAYS + " time_domain { integer_format: UNIX_MICROSECONDS }"
CGROUPS = Path("/sys/fs/cgroup/memory")
MODES = {
    "plain": ("plain", "log"),
    "log": ("cached", "log"),
    "mmap": ("cached", "mmap"),
    "lru": ("lru", "mmap"),
    "uncached": ("uncached", "mmap"),
}
"""Mode -> its `--embedding` and `cache.files`."""
SAMPLES = 786_432
RECORD_BYTES = 4 * (DIM + 1)
IN_CGROUP = 'echo $$ > "$0" && exec "$@"'
"""The shell joins the cgroup before it executes the trainer, so that all memory is counted."""
_POLL_SEC = 0.01


def write_log(directory: Path, num_samples: int) -> None:
    """Write samples one second apart, each its own session; half of the labels are 1.

    Args:
        directory: to create.
        num_samples: of training; evaluation samples are added.
    """
    directory.mkdir(parents=True)
    count = num_samples + _EVALUATED
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "session": np.arange(count),
        "time": np.arange(count).astype("datetime64[s]").astype("datetime64[us]"),
        "label": rng.integers(0, 2, count),
    }
    for number in range(NUM_DENSE):
        columns[f"dense_{number}"] = rng.random(count, np.float32)
    for number in range(NUM_TABLES):
        columns[_id(number)] = skewed_rows(TABLE_ROWS, count, number, HOT_SHARE).astype(np.int64)
    pq.write_table(pa.table(columns), directory / "log.parquet", row_group_size=1 << 16)


def write_job(directory: Path, num_samples: int, train: dict[str, Any]) -> Path:
    """Write the job that builds the log and trains on it, with its schema; return its path.

    Args:
        directory: to create.
        num_samples: argument of `write_log`.
        train: additional keys of the `train` section.
    """
    directory.mkdir(parents=True)
    tables = {
        _table(k): {"features": [_id(k)], "rows": "identity", "num_rows": TABLE_ROWS}
        for k in range(NUM_TABLES)
    }
    first_evaluated = np.datetime64(num_samples, "s")
    job = {
        "name": "memory",
        "data": {
            "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
            "samples": {"map": "SELECT * FROM log"},
            "session": {"key": "session", "time": "time"},
            "split": {"evaluation_from": str(first_evaluated)},
            "tables": tables,
            "oracle": {"batch_samples": BATCH, "epochs": EPOCHS},
        },
        "train": {
            "model": {"name": "dlrm", "bottom_layers": [256], "top_layers": [512, 256]},
            "embedding_dim": DIM,
            "batch_samples": BATCH,
            "epochs": EPOCHS,
            **train,
        },
    }
    features = [("session", "INT", "kept", _ALWAYS), ("time", "INT", "kept", _TIME)]
    features.append(("label", "INT", "label", _ALWAYS))
    features += [(f"dense_{k}", "FLOAT", "dense", "") for k in range(NUM_DENSE)]
    features += [(_id(k), "INT", "sparse", _ALWAYS) for k in range(NUM_TABLES)]
    text = [_FEATURE.format(name=n, type=t, tag=g, more=more) for n, t, g, more in features]
    (directory / "schema.pbtxt").write_text("".join(text), encoding="utf-8")
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def _id(number: int) -> str:
    return f"id_{number:02d}"


def _table(number: int) -> str:
    return f"table_{number:02d}"


def prepare(scratch: Path, cache_rows: int) -> Path:
    """Build the dataset and train its first epoch, unless both exist; return that run."""
    warm, cache = scratch / "warm", {"policy": "belady", "rows": cache_rows, "prefetch_steps": 4}
    if warm.is_dir():
        return warm
    write_log(scratch / "log", SAMPLES)
    job = write_job(scratch / "job", SAMPLES, {"num_threads": 1, "cache": cache})
    dataset = build_dataset(job, scratch / "log", scratch / "dataset")
    shutil.rmtree(scratch / "log")
    steps = order_of(load_job(job), open_dataset(dataset)).num_steps // 2
    partial = scratch / "warm.partial"
    command = [*_command(job, dataset, partial, "plain"), "--steps", str(steps)]
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
    return partial.rename(warm)


def measure(mode: str, scratch: Path, steps: int, limit_bytes: int) -> dict[str, float]:
    """Resume from the first epoch in one mode and return its figures.

    The process is killed after the steps.

    Raises:
        RuntimeError: it ended before; its error is on stderr.
    """
    embedding, files = MODES[mode]
    body = yaml.safe_load((scratch / "job" / "job.yaml").read_text(encoding="utf-8"))
    body["train"]["cache"]["files"] = files
    job = scratch / "job" / f"{mode}.yaml"
    job.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(scratch / "warm", run, copy_function=os.link)  # files are not modified in place
    for folder in (scratch / "dataset", run):
        _drop_from_page_cache(folder)
    first = len(read_metrics(run / METRICS))
    counted, last = first + steps // 4, first + steps
    command = [*_command(job, scratch / "dataset", run, embedding), "--resume"]
    with memory_limit(None if mode == "plain" else limit_bytes) as group:
        prefix = [] if group is None else ["sh", "-c", IN_CGROUP, str(group / "cgroup.procs")]
        process = subprocess.Popen([*prefix, *command], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        try:
            read, written = _bytes_of_steps(process, run / METRICS, counted, last)
        finally:
            process.kill()  # the rest of the epoch is not measured
            process.wait()
        peak = 0 if group is None else int((group / "memory.max_usage_in_bytes").read_text())
    figures = step_figures(read_metrics(run / METRICS)[counted:last])
    shutil.rmtree(run)
    per_step = 1e6 * (last - counted)
    megabytes = {"read_mb": round(read / per_step, 2), "written_mb": round(written / per_step, 2)}
    return {**figures, **megabytes, "peak_mib": peak >> 20}


@contextmanager
def memory_limit(limit_bytes: int | None) -> Iterator[Path | None]:
    """Create a memory cgroup and remove it at the end; yield None without a limit."""
    if limit_bytes is None:
        yield None
        return
    group = CGROUPS / f"presage-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
        yield group
    finally:
        group.rmdir()


def _command(job: Path, dataset: Path, run: Path, embedding: str) -> list[str]:
    train = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", str(dataset)]
    return [*train, "--output", str(run), "--embedding", embedding, "--json"]


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _bytes_of_steps(
    process: subprocess.Popen[bytes], metrics: Path, first: int, last: int
) -> tuple[int, int]:
    """Return the bytes that a process reads and writes between the commits of two steps."""
    counts: list[tuple[int, int]] = []
    for step in (first, last):
        while process.poll() is None and metrics.read_bytes().count(b"\n") < step:
            time.sleep(_POLL_SEC)
        if process.returncode is not None:
            raise RuntimeError(f"trainer must continue, got exit status {process.returncode}")
        counts.append(_device_bytes(process.pid))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def _device_bytes(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def refetched_share(dataset: Dataset, warm: Path, steps: range) -> float:
    """Return the share of the rows of some steps that the first epoch touched."""
    (checkpoint,) = (warm / "checkpoints").iterdir()
    order = order_of(dataset.job, dataset)
    num_accesses = num_touched = 0
    for table in dataset.job.data.tables:
        touched = np.load(checkpoint / table / "rows.npy")
        accesses = TableAccesses(dataset, table, order)
        for step in steps:
            rows = accesses.rows[accesses.numbers(step)]
            num_accesses += len(rows)
            num_touched += int(np.isin(rows, touched, assume_unique=True).sum())
    return num_touched / num_accesses


def touched_rows(warm: Path) -> int:
    """Return the number of rows that the first epoch wrote."""
    files = warm.glob("checkpoints/*/*/rows.npy")
    return sum(len(np.load(path, mmap_mode="r")) for path in files)


def summarize(
    figures: Mapping[str, Sequence[Mapping[str, float]]], warm: Path, limit_bytes: int
) -> dict[str, Any]:
    """Return the result of the benchmark."""
    steps = {mode: [run["mean_ms"] for run in runs] for mode, runs in figures.items()}
    ratios = {
        mode: [round(a / b, 3) for a, b in zip(steps[mode], steps["log"], strict=True)]
        for mode in figures
    }
    dataset, first = open_dataset(warm.parent / "dataset"), len(read_metrics(warm / METRICS))
    touched = touched_rows(warm) * RECORD_BYTES
    return {
        "ours": round(BATCH / statistics.median(steps["log"]) * 1e3, 1),
        "peer": round(BATCH / statistics.median(steps["uncached"]) * 1e3, 1),
        "ratio": statistics.median(ratios["uncached"]),
        "unit": "samples/s under a memory limit, the plan over a log against no cache",
        "rounds": ratios["uncached"],
        "of_plain": ratios["plain"],
        "against_lru": ratios["lru"],
        "against_mmap": ratios["mmap"],
        "touched_bytes": touched,
        "limit_bytes": limit_bytes,
        "touched_of_limit": round(touched / limit_bytes, 2),
        "refetched": round(refetched_share(dataset, warm, range(first, first + 8)), 4),
        "equal_losses": len({run["loss_last"] for runs in figures.values() for run in runs}) == 1,
        "modes": {mode: runs[-1] for mode, runs in figures.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--steps", type=int, default=48, help="steps of the second epoch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-mib", type=int, default=2000, help="memory of a process")
    parser.add_argument("--rows", type=int, default=6000, help="cached rows of a table")
    parser.add_argument("--scratch", type=Path, help="folder to keep and reuse the dataset in")
    options = parser.parse_args(argv)
    if os.geteuid() != 0 or not (CGROUPS / "memory.limit_in_bytes").is_file():
        sys.stderr.write(
            "error: benchmark must run as root with memory cgroups of version 1, got none in "
            f"{CGROUPS}; mount them or use sudo\n"
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="presage-memory-") as name:
        scratch = options.scratch or Path(name)
        scratch.mkdir(parents=True, exist_ok=True)
        warm, limit = prepare(scratch, options.rows), options.limit_mib << 20
        figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                figures[mode].append(measure(mode, scratch, options.steps, limit))
                sys.stderr.write(f"{mode} {json.dumps(figures[mode][-1])}\n")
        result = summarize(figures, warm, limit)
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
