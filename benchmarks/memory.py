"""Training on tables four times larger than the memory of the process.

`python -m benchmarks.memory [--json] [--rounds N] [--steps N] [--limit-mib N] [--scratch DIR]`

26 tables at dim 256, batch 1,024, one compute thread; `benchmarks/memory_log.py` makes the log. A
run without limit trains the first epoch, which touches every row. Each mode goes on from its
checkpoint in the second epoch, so every row that is fetched was written before. `plain` has all
rows in memory and no limit. The others run in a memory cgroup (version 1) whose limit holds for
the whole process, its page cache included: `log` is the planned cache in front of the log ordered
by the future, `mmap` the same plan in front of mapped files, `lru` and `uncached` are in front of
mapped files, too. Files leave the page cache before each run. Modes take turns; times are means
over the steps after the first quarter, bytes are what the process read from and wrote to the
device in these steps. Needs root.
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
import yaml

from benchmarks.memory_log import BATCH, DIM, write_job, write_log
from benchmarks.order import built
from benchmarks.run_figures import figures_of
from schemas.accesses import TableAccesses
from schemas.config.job import load_job
from schemas.dataset import Dataset, open_dataset
from schemas.run_log import METRICS, read_metrics
from trainer.components import order_of

REPOSITORY = Path(__file__).resolve().parents[1]
CGROUPS = Path("/sys/fs/cgroup/memory")
MODES = {
    "plain": ("plain", "log"),
    "log": ("cached", "log"),
    "mmap": ("cached", "mmap"),
    "lru": ("lru", "mmap"),
    "uncached": ("uncached", "mmap"),
}
"""Mode to its embedding and its files."""
SAMPLES = 786_432
RECORD_BYTES = 4 * (DIM + 1)
INSIDE = 'echo $$ > "$0" && exec "$@"'
"""The shell moves itself before the trainer takes its place: all its memory is counted."""
_POLL_SEC = 0.01


def prepare(scratch: Path, cache_rows: int) -> Path:
    """Build the dataset and train its first epoch, unless both are there; return that run."""
    warm, cache = scratch / "warm", {"policy": "belady", "rows": cache_rows, "prefetch_steps": 4}
    if warm.is_dir():
        return warm
    write_log(scratch / "log", SAMPLES)
    job = write_job(scratch / "job", SAMPLES, {"num_threads": 1, "cache": cache})
    dataset = built(job, scratch / "log", scratch / "dataset")
    shutil.rmtree(scratch / "log")
    steps = order_of(load_job(job), open_dataset(dataset)).num_steps // 2
    partial = scratch / "warm.partial"
    command = [*_command(job, dataset, partial, "plain"), "--steps", str(steps)]
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
    return partial.rename(warm)


def taken(mode: str, scratch: Path, steps: int, limit_bytes: int) -> dict[str, float]:
    """Go on from the first epoch in one mode and return its figures.

    The process is killed when it has trained the steps.

    Raises:
        RuntimeError: it ended before; its own line is on stderr.
    """
    embedding, files = MODES[mode]
    body = yaml.safe_load((scratch / "job" / "job.yaml").read_text(encoding="utf-8"))
    body["train"]["cache"]["files"] = files
    job = scratch / "job" / f"{mode}.yaml"
    job.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(scratch / "warm", run, copy_function=os.link)  # no file is changed in place
    for folder in (scratch / "dataset", run):
        _drop_from_page_cache(folder)
    first = len(read_metrics(run / METRICS))
    counted, last = first + steps // 4, first + steps
    command = [*_command(job, scratch / "dataset", run, embedding), "--resume"]
    with memory_limit(None if mode == "plain" else limit_bytes) as group:
        inside = [] if group is None else ["sh", "-c", INSIDE, str(group / "cgroup.procs")]
        process = subprocess.Popen([*inside, *command], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        try:
            read, written = _bytes_of_steps(process, run / METRICS, counted, last)
        finally:
            process.kill()  # what follows, up to the end of the epoch, is not measured
            process.wait()
        peak = 0 if group is None else int((group / "memory.max_usage_in_bytes").read_text())
    figures = figures_of(read_metrics(run / METRICS)[counted:last])
    shutil.rmtree(run)
    per_step = 1e6 * (last - counted)
    megabytes = {"read_mb": round(read / per_step, 2), "written_mb": round(written / per_step, 2)}
    return {**figures, **megabytes, "peak_mib": peak >> 20}


@contextmanager
def memory_limit(limit_bytes: int | None) -> Iterator[Path | None]:
    """Make a memory cgroup and remove it at the end; None where there is no limit."""
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
    """Return the bytes that a process reads and writes between two steps, as they are committed."""
    found: list[tuple[int, int]] = []
    for step in (first, last):
        while process.poll() is None and metrics.read_bytes().count(b"\n") < step:
            time.sleep(_POLL_SEC)
        if process.returncode is not None:
            raise RuntimeError(f"trainer must train on, got exit status {process.returncode}")
        found.append(_bytes_of(process.pid))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


def _bytes_of(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def refetched(dataset: Dataset, warm: Path, steps: range) -> float:
    """Return the share of the rows of some steps that the first epoch had touched."""
    (checkpoint,) = (warm / "checkpoints").iterdir()
    order = order_of(dataset.job, dataset)
    accesses = known = 0
    for table in dataset.job.data.tables:
        held = np.load(checkpoint / table / "rows.npy")
        of_table = TableAccesses(dataset, table, order)
        for step in steps:
            rows = of_table.rows[of_table.numbers(step)]
            accesses += len(rows)
            known += int(np.isin(rows, held, assume_unique=True).sum())
    return known / accesses


def touched_rows(warm: Path) -> int:
    """Return the rows that the first epoch wrote."""
    files = warm.glob("checkpoints/*/*/rows.npy")
    return sum(len(np.load(path, mmap_mode="r")) for path in files)


def summarised(
    found: Mapping[str, Sequence[Mapping[str, float]]], warm: Path, limit_bytes: int
) -> dict[str, Any]:
    """Return what is printed."""
    steps = {mode: [run["mean_ms"] for run in runs] for mode, runs in found.items()}
    ratios = {
        mode: [round(a / b, 3) for a, b in zip(steps[mode], steps["log"], strict=True)]
        for mode in found
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
        "refetched": round(refetched(dataset, warm, range(first, first + 8)), 4),
        "equal_losses": len({run["loss_last"] for runs in found.values() for run in runs}) == 1,
        "modes": {mode: runs[-1] for mode, runs in found.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--steps", type=int, default=48, help="of the second epoch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-mib", type=int, default=2000, help="memory of a process")
    parser.add_argument("--rows", type=int, default=6000, help="cached rows of a table")
    parser.add_argument("--scratch", type=Path, help="kept, and its dataset used again")
    options = parser.parse_args(argv)
    if os.geteuid() != 0 or not (CGROUPS / "memory.limit_in_bytes").is_file():
        sys.stderr.write(
            f"error: benchmark must run as root with memory cgroups of version 1, got none in "
            f"{CGROUPS}; mount them or use sudo\n"
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="presage-memory-") as name:
        scratch = options.scratch or Path(name)
        scratch.mkdir(parents=True, exist_ok=True)
        warm, limit = prepare(scratch, options.rows), options.limit_mib << 20
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                found[mode].append(taken(mode, scratch, options.steps, limit))
                sys.stderr.write(f"{mode} {json.dumps(found[mode][-1])}\n")
        result = summarised(found, warm, limit)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
