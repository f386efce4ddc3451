"""Seconds, memory and requests of each command on datasets of different sizes.

A dataset is the demo's log with so many samples, or, with `--segments`, so many appended days of
them, or, with `--columns`, so many columns of ids and numbers. Each command is a process of its own
on local files. `mib` is the peak of the memory of its processes together, mapped files included;
`start` and `resume` end with their first step; `loader` ends with the first batch.
`requests` are those of the same command on a copy of the dataset at an S3 store, with `--store`.
`ours` are the seconds of all commands at the last size; `peer` are those at the first one, times
the ratio of the sizes: a ratio below 1 shows a command that grows faster than its input.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common.harness import Options, compared, report
from benchmarks.common.id_logs import write_id_job, write_id_log
from benchmarks.common.logs import DEMO_JOB, REPOSITORY, build_job, num_lines, write_demo
from benchmarks.common.processes import memory_bytes, module, process_tree
from benchmarks.common.store import at_store
from presage.pipelines.demo_log.generate import GeneratorConfig, write_log
from presage.schemas.config.job import load_job
from presage.schemas.run.records import METRICS
from presage.schemas.storage.leases import LEASES
from presage.schemas.storage.location import Location
from tests.fault_proxy import Faults

LOADER = """
import sys, time
from presage import DataLoader
start = time.perf_counter()
batch = next(iter(DataLoader(sys.argv[1], batch_samples=4096, shuffle=True)))
print(time.perf_counter() - start, file=sys.stderr)
"""
TRAINED_STEPS = 4
NUM_ERASED = 1000
"""Sessions whose samples are erased."""
_POLL_SEC = 0.05
"""At least; 20 times as long as the last poll took, which locks the mappings of the processes."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the commands of one size use.

    Attributes:
        scratch: folder of log, dataset and results.
        job: job file.
        dataset: path or URL.
    """

    scratch: Path
    job: Path
    dataset: str

    @property
    def trained(self) -> Path:
        """Run of a few steps."""
        return self.scratch / "run"


def _train(place: Place, run: str, *options: str) -> list[str]:
    train = module("trainer", "train", place.job, "--dataset", place.dataset)
    return [*train, "--output", str(place.scratch / run), *options]


COMMANDS: dict[str, Callable[[Place], list[str]]] = {
    "build": lambda p: module(
        "pipelines", "build", p.job, "--input", p.scratch / "log", "--output", p.dataset
    ),
    "loader": lambda p: [sys.executable, "-c", LOADER, p.dataset],
    "verify": lambda p: module("pipelines", "verify", p.dataset),
    "expand": lambda p: module(
        "pipelines", "expand", p.dataset, "--output", p.scratch / "expanded.parquet"
    ),
    "report": lambda p: module(
        "pipelines", "report", p.dataset, "--html", p.scratch / "report.html"
    ),
    "oracle": lambda p: module("pipelines", "oracle", p.dataset, "--json"),
    "plan": lambda p: module("scheduler", "plan", p.job, "--dataset", p.dataset, "--json"),
    "start": lambda p: _train(p, "started"),
    "start_cached": lambda p: _train(p, "started", "--embedding", "cached"),
    "train": lambda p: _train(p, "run", "--embedding", "cached", "--steps", str(TRAINED_STEPS)),
    "resume": lambda p: _train(p, "run", "--embedding", "cached", "--resume"),
    "evaluate": lambda p: module(
        "trainer", "evaluate", p.job, "--dataset", p.dataset, "--run", p.trained, "--json"
    ),
    "diff": lambda p: module("trainer", "diff", p.trained, p.trained),
    "reindex": lambda p: module(
        "pipelines", "oracle", p.dataset, "--reindex", "--batch-samples", "8192", "--json"
    ),
    "erase": lambda p: module(
        "pipelines", "erase", p.dataset, "--ids", p.scratch / "ids.txt", "--json"
    ),
    "compact": lambda p: module("pipelines", "erase", p.dataset, "--rewrite", "--json"),
    "vacuum": lambda p: module("pipelines", "vacuum", p.dataset, "--json"),
}
"""The commands in the order in which they run; the last four change the dataset."""
UNTIL_FIRST_STEP = {"start": "started", "start_cached": "started", "resume": "run"}
"""Command that is killed after its first step -> its run."""


def tree_bytes(root: int) -> int:
    """Return the resident bytes of a process tree; pages that several share count once."""
    return sum(memory_bytes("Pss", pid, "smaps_rollup") for pid in process_tree(root))


def watch(command: Sequence[str], errors: Path, ends: Callable[[], bool]) -> dict[str, float]:
    """Run a command until it or the condition ends; return its seconds and peak memory.

    `cpu_sec` is the processor time, of waited-for children too.

    Raises:
        RuntimeError: it failed; the message has the end of its errors, which are in a file.
    """
    peak, seconds, start = 0, 0.0, time.perf_counter()
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            polled = time.perf_counter()
            peak = max(peak, tree_bytes(process.pid))
            if not seconds and ends():
                seconds = time.perf_counter() - start
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(max(_POLL_SEC, 20 * (time.perf_counter() - polled)))
    if not seconds:
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read_text()[-2000:]}")
    return {
        "sec": round(seconds, 1),
        "cpu_sec": round(usage.ru_utime + usage.ru_stime, 1),
        "mib": max(peak, usage.ru_maxrss << 10) >> 20,
    }


def run_command(name: str, place: Place) -> dict[str, float]:
    """Run one command."""
    ends: Callable[[], bool] = lambda: False  # noqa: E731
    if name in UNTIL_FIRST_STEP:
        metrics = place.scratch / UNTIL_FIRST_STEP[name] / METRICS
        if name != "resume":
            shutil.rmtree(metrics.parent, ignore_errors=True)
        before = num_lines(metrics)
        ends = lambda: num_lines(metrics) > before  # noqa: E731
    if name == "train":
        shutil.rmtree(place.trained, ignore_errors=True)
    figures = watch(COMMANDS[name](place), place.scratch / f"{name}.log", ends)
    if name == "loader":
        inside = (place.scratch / "loader.log").read_text().split()[-1]
        figures["first_batch_sec"] = round(float(inside), 2)
    if name in UNTIL_FIRST_STEP:
        (Location.parse(place.dataset) / LEASES).remove_all()  # of the run that was killed
    (place.scratch / "expanded.parquet").unlink(missing_ok=True)
    return figures


def write_ids(place: Place) -> None:
    """Write sessions to erase, drawn from the first row group of the dataset."""
    parts = sorted(Path(place.dataset).glob("segments/*/groups/*/*.parquet"))
    key = load_job(place.job).data.session.key
    part = next(p for p in parts if key in pq.read_schema(p).names)
    ids = np.unique(pq.ParquetFile(part).read_row_group(0, [key])[key].to_numpy())
    text = "\n".join(map(str, np.random.default_rng(0).permutation(ids)[:NUM_ERASED]))
    (place.scratch / "ids.txt").write_text(text)


# Datasets.


def write_wide(scratch: Path, num_samples: int, num_columns: int) -> Path:
    """Write a log of sessions of eight samples, and its job; return the job's path.

    Half of the columns are ids with a table each, half are numbers; half of both are of the user.
    """
    rng, session = np.random.default_rng(0), np.arange(num_samples) // 8
    columns: dict[str, Any] = {}
    of_user: list[str] = ["session"]
    for number in range(num_columns):
        is_id, is_of_user = number % 2 == 0, number % 4 < 2
        name = f"{'id' if is_id else 'dense'}_{number:04d}"
        count = num_samples // 8 + 1 if is_of_user else num_samples
        values = rng.integers(0, 1000, count) if is_id else rng.random(count, np.float32)
        columns[name] = values[session] if is_of_user else values
        of_user += [name] if is_of_user else []
    write_id_log(scratch / "log", columns, num_samples, per_session=8)
    rows = {name: 1000 if name.startswith("id") else 0 for name in columns}
    data = {"groups": {"user": of_user}, "oracle": {"batch_samples": 4096}}
    return write_id_job(scratch, rows, data, {"batch_samples": 4096})


FIRST_DAY, DAY = datetime(2026, 1, 1), timedelta(days=1)


def write_daily_job(folder: Path) -> Path:
    """Write the demo's job, with the last hours of each day for evaluation, and its schema."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO_JOB.parent / "schema.pbtxt", folder)
    text, count = re.subn("evaluation_from: .*}", "evaluation_last: 3h}", DEMO_JOB.read_text())
    assert count == 1, "the demo's job must have one time of evaluation"
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


def write_day(folder: Path, number: int, num_samples: int) -> Path:
    """Write the log of a day; return its folder, which has the name of the day."""
    start = FIRST_DAY + number * DAY
    log = folder / str(start.date())
    write_log(GeneratorConfig(num_samples=num_samples, seed=number, start=start, span=DAY), log)
    return log


def prepare(scratch: Path, num_samples: int, num_segments: int, num_columns: int) -> Place:
    """Write a log, and the dataset of several segments; what exists is used again."""
    place = Place(scratch, DEMO_JOB, str(scratch / "dataset"))
    if num_columns:
        place = Place(scratch, scratch / "job.yaml", place.dataset)
        if not place.job.exists():
            write_wide(scratch, num_samples, num_columns)
    elif num_segments > 1:
        place = Place(scratch, write_daily_job(scratch), place.dataset)
        while (number := len(list((scratch / "dataset" / "segments").glob("*")))) < num_segments:
            with tempfile.TemporaryDirectory() as folder:
                log = write_day(Path(folder), number, num_samples)
                build_job(place.job, log, Path(place.dataset), day=log.name)
    elif not Path(place.dataset).exists() and not (scratch / "log").exists():
        write_demo(scratch / "log", num_samples)
    return place


def measure_size(options: argparse.Namespace, scratch: Path, num_samples: int) -> dict[str, Any]:
    """Measure all commands on one dataset."""
    scratch.mkdir(parents=True, exist_ok=True)
    place = prepare(scratch, num_samples, options.segments, options.columns)
    figures: dict[str, Any] = {}
    for name in options.commands:
        if name == "build" and Path(place.dataset).exists():
            continue
        if name == "erase":
            write_ids(place)
        figures[name] = run_command(name, place)
        if name == "build":
            num_bytes = sum(f.stat().st_size for f in Path(place.dataset).rglob("*.parquet"))
            figures[name]["dataset_mb"] = num_bytes // 1_000_000
            shutil.rmtree(scratch / "log")
        report(f"{num_samples:,}, {name}", figures[name])
    if options.store:
        count_requests(place, options.commands, figures)
    return figures


def count_requests(place: Place, commands: Iterable[str], figures: dict[str, Any]) -> None:
    """Repeat the commands on a copy of the dataset at a store, and add their requests."""
    faults = Faults()
    with at_store(Path(place.dataset), faults) as target:
        there = Place(place.scratch, place.job, str(target))
        for name in commands:
            if name in ("build", "diff"):
                continue
            if name == "erase":
                write_ids(place)  # others than before
            faults.requests.clear()
            seconds = run_command(name, there)["sec"]
            figures[name] |= {"requests": faults.requests.total(), "store_sec": seconds}
            report(f"{name} at a store", figures[name])


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the commands at all sizes."""
    scratch, sizes = options.scratch or scratch, options.samples
    options.commands = [name for name in COMMANDS if name in options.commands]
    details = {size: measure_size(options, scratch / str(size), size) for size in sizes}
    first, last = (details[size] for size in (sizes[0], sizes[-1]))
    common, growth = first.keys() & last.keys(), sizes[-1] / sizes[0]
    ours, peer = (sum(figures[name]["sec"] for name in common) for figures in (last, first))
    unit = "s, all commands at the last size; at the first one, times the ratio of sizes"
    return compared([ours], [peer * growth], unit, sizes=details)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("runs.scale", __doc__)
    few = ("build", "loader", "train", "vacuum")
    options.add("--samples", (100_000, 1_000_000), "sizes", small=(10_000, 20_000))
    options.add("--segments", 1, "days, each of --samples")
    options.add("--columns", 0, "of a wide log")
    options.add("--commands", tuple(COMMANDS), "commands", small=few, choices=tuple(COMMANDS))
    options.add("--store", False, "count requests at an S3 store, too")
    options.add("--scratch", None, "folder to keep and reuse the datasets in")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
