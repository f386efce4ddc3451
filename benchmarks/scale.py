"""Seconds, memory and requests of each command on datasets of different sizes.

`python -m benchmarks.scale [--json] [--samples N,N] [--segments N] [--columns N] [--store]
[--commands NAME,NAME] [--scratch DIR]`

A dataset is the demo's log with so many samples, or, with `--segments`, so many appended days of
them, or, with `--columns`, so many columns of ids and numbers. Each command is a process of its own
on local files. `mib` is the peak of the memory of its processes together, mapped files included;
`start` and `resume` end with their first step; `loader` ends with the first batch. `requests` are
those of the same command on a copy of the dataset at an S3 store, with `--store`. `ours` are the
seconds of all commands at the last size; `peer` are those at the first one, times the ratio of the
sizes: a ratio below 1 shows a command that grows faster than its input.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.append import append_in_process, write_day, write_job
from benchmarks.logs import DEMO_JOB, REPOSITORY, write_result
from benchmarks.remote import copy_dataset
from pipelines.demo_log.example import generate_log
from schemas.config.job import load_job
from schemas.run.records import METRICS
from schemas.storage.leases import LEASES
from schemas.storage.location import Location
from tests.fault_proxy import Faults, fault_proxy
from tests.object_store import new_url, s3_environment, s3_server

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


def _module(*words: object) -> list[str]:
    return [sys.executable, "-m", *map(str, words)]


def _train(place: Place, run: str, *options: str) -> list[str]:
    train = _module("trainer", "train", place.job, "--dataset", place.dataset)
    return [*train, "--output", str(place.scratch / run), *options]


COMMANDS: dict[str, Callable[[Place], list[str]]] = {
    "build": lambda p: _module(
        "pipelines", "build", p.job, "--input", p.scratch / "log", "--output", p.dataset
    ),
    "loader": lambda p: [sys.executable, "-c", LOADER, p.dataset],
    "verify": lambda p: _module("pipelines", "verify", p.dataset),
    "expand": lambda p: _module(
        "pipelines", "expand", p.dataset, "--output", p.scratch / "expanded.parquet"
    ),
    "report": lambda p: _module(
        "pipelines", "report", p.dataset, "--html", p.scratch / "report.html"
    ),
    "oracle": lambda p: _module("pipelines", "oracle", p.dataset, "--json"),
    "plan": lambda p: _module("scheduler", "plan", p.job, "--dataset", p.dataset, "--json"),
    "start": lambda p: _train(p, "started"),
    "start_cached": lambda p: _train(p, "started", "--embedding", "cached"),
    "train": lambda p: _train(p, "run", "--embedding", "cached", "--steps", str(TRAINED_STEPS)),
    "resume": lambda p: _train(p, "run", "--embedding", "cached", "--resume"),
    "evaluate": lambda p: _module(
        "trainer", "evaluate", p.job, "--dataset", p.dataset, "--run", p.trained, "--json"
    ),
    "diff": lambda p: _module("trainer", "diff", p.trained, p.trained),
    "reindex": lambda p: _module(
        "pipelines", "oracle", p.dataset, "--reindex", "--batch-samples", "8192", "--json"
    ),
    "erase": lambda p: _module(
        "pipelines", "erase", p.dataset, "--ids", p.scratch / "ids.txt", "--json"
    ),
    "compact": lambda p: _module("pipelines", "erase", p.dataset, "--rewrite", "--json"),
    "vacuum": lambda p: _module("pipelines", "vacuum", p.dataset, "--json"),
}
"""The commands in the order in which they run; the last four change the dataset."""
UNTIL_FIRST_STEP = {"start": "started", "start_cached": "started", "resume": "run"}
"""Command that is killed after its first step -> its run."""


def process_tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(folder.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def tree_bytes(root: int) -> int:
    """Return the resident bytes of a process tree; pages that several share count once."""
    kib = 0
    for pid in process_tree(root):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return kib << 10


def run(command: Sequence[str], errors: Path, ends: Callable[[], bool]) -> dict[str, float]:
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


def measure(name: str, place: Place) -> dict[str, float]:
    """Run one command."""
    ends: Callable[[], bool] = lambda: False  # noqa: E731
    if name in UNTIL_FIRST_STEP:
        metrics = place.scratch / UNTIL_FIRST_STEP[name] / METRICS
        if name != "resume":
            shutil.rmtree(metrics.parent, ignore_errors=True)
        before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        ends = lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > before  # noqa: E731
    if name == "train":
        shutil.rmtree(place.trained, ignore_errors=True)
    figures = run(COMMANDS[name](place), place.scratch / f"{name}.log", ends)
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


# Datasets

_FEATURE = 'feature {{ name: "{name}" type: {type} annotation {{ tag: "{tag}" }} {more} }}\n'
_ALWAYS = "presence { min_fraction: 1 }"


def write_wide(scratch: Path, num_samples: int, num_columns: int) -> Path:
    """Write a log of sessions of eight samples, and its job; return the job's path.

    Half of the columns are ids with a table each, half are numbers; half of both are of the user.
    """
    rng = np.random.default_rng(0)
    (scratch / "log").mkdir(parents=True)
    session = np.arange(num_samples) // 8
    columns: dict[str, Any] = {
        "session": session,
        "time": np.arange(num_samples).astype("datetime64[s]").astype("datetime64[us]"),
        "label": rng.integers(0, 2, num_samples),
    }
    of_user: list[str] = ["session"]
    features = [("session", "INT", "kept", _ALWAYS), ("label", "INT", "label", _ALWAYS)]
    unit = " time_domain { integer_format: UNIX_MICROSECONDS }"
    features.append(("time", "INT", "kept", _ALWAYS + unit))
    for number in range(num_columns):
        is_id, is_of_user = number % 2 == 0, number % 4 < 2
        name = f"{'id' if is_id else 'dense'}_{number:04d}"
        count = num_samples // 8 + 1 if is_of_user else num_samples
        values = rng.integers(0, 1000, count) if is_id else rng.random(count, np.float32)
        columns[name] = values[session] if is_of_user else values
        of_user += [name] if is_of_user else []
        features.append((name, "INT", "sparse", _ALWAYS) if is_id else (name, "FLOAT", "dense", ""))
    pq.write_table(pa.table(columns), scratch / "log" / "log.parquet")
    ids = [name for name in columns if name.startswith("id_")]
    tables = {f"t{n}": {"features": [n], "rows": "identity", "num_rows": 1000} for n in ids}
    job = {
        "name": "wide",
        "data": {
            "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
            "samples": {"map": "SELECT * FROM log"},
            "session": {"key": "session", "time": "time"},
            "groups": {"user": of_user},
            "tables": tables,
            "oracle": {"batch_samples": 4096},
        },
        "train": {
            "model": {"name": "dlrm", "bottom_layers": [16], "top_layers": [16]},
            "embedding_dim": 16,
            "batch_samples": 4096,
        },
    }
    text = [_FEATURE.format(name=n, type=t, tag=g, more=more) for n, t, g, more in features]
    (scratch / "schema.pbtxt").write_text("".join(text))
    path = scratch / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def prepare(scratch: Path, num_samples: int, num_segments: int, num_columns: int) -> Place:
    """Write a log, and the dataset of several segments; what exists is used again."""
    place = Place(scratch, DEMO_JOB, str(scratch / "dataset"))
    if num_columns:
        place = Place(scratch, scratch / "job.yaml", place.dataset)
        if not place.job.exists():
            write_wide(scratch, num_samples, num_columns)
    elif num_segments > 1:
        place = Place(scratch, write_job(scratch), place.dataset)
        while (number := len(list((scratch / "dataset" / "segments").glob("*")))) < num_segments:
            with tempfile.TemporaryDirectory() as folder:
                log = write_day(Path(folder), number, num_samples)
                append_in_process(place.job, log, Path(place.dataset))
    elif not Path(place.dataset).exists() and not (scratch / "log").exists():
        config = load_job(DEMO_JOB).data.generate
        assert config is not None
        generate_log(config, Location.parse(scratch / "log"), num_samples)
    return place


def measure_size(options: argparse.Namespace, scratch: Path, num_samples: int) -> dict[str, Any]:
    """Measure all commands on one dataset."""
    scratch.mkdir(parents=True, exist_ok=True)
    place = prepare(scratch, num_samples, options.segments, options.columns)
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in options.commands:
            if name == "build" and Path(place.dataset).exists():
                continue
            if name == "erase":
                write_ids(place)
            figures[name] = measure(name, place)
            if name == "build":
                num_bytes = sum(f.stat().st_size for f in Path(place.dataset).rglob("*.parquet"))
                figures[name]["dataset_mb"] = num_bytes // 1_000_000
                shutil.rmtree(scratch / "log")
            _show(num_samples, name, figures[name])
        if options.store:
            _count_requests(stack, place, options.commands, figures)
    return figures


def _show(num_samples: int, name: str, figures: Mapping[str, float]) -> None:
    values = "  ".join(f"{key} {value}" for key, value in figures.items())
    sys.stderr.write(f"{num_samples:>11,}  {name:<13} {values}\n")
    sys.stderr.flush()


def _count_requests(
    stack: ExitStack, place: Place, commands: Iterable[str], figures: dict[str, Any]
) -> None:
    """Repeat the commands on a copy of the dataset at a store, and add their requests."""
    faults = Faults()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place.scratch)))
    endpoint = stack.enter_context(s3_server(folder))
    proxy = stack.enter_context(fault_proxy(endpoint, faults))
    os.environ.update(s3_environment(proxy))
    target = Location.parse(new_url())
    copy_dataset(Path(place.dataset), target)
    there = Place(place.scratch, place.job, str(target))
    for name in commands:
        if name in ("build", "diff"):
            continue
        if name == "erase":
            write_ids(place)  # others than before
        faults.requests.clear()
        seconds = measure(name, there)["sec"]
        figures[name] |= {"requests": faults.requests.total(), "store_sec": seconds}
        _show(0, name, {"requests": faults.requests.total(), "sec": seconds})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", default="100000,1000000", help="sizes, comma-separated")
    parser.add_argument("--segments", type=int, default=1, help="days, each of --samples")
    parser.add_argument("--columns", type=int, default=0, help="of a wide log")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="comma-separated")
    parser.add_argument("--store", action="store_true", help="count requests at an S3 store, too")
    parser.add_argument("--scratch", type=Path, help="folder to keep and reuse the datasets in")
    options = parser.parse_args(argv)
    options.commands = [name for name in COMMANDS if name in options.commands.split(",")]
    sizes = [int(size) for size in options.samples.split(",")]
    with tempfile.TemporaryDirectory(prefix="presage-scale-") as name:
        scratch = options.scratch or Path(name)
        details = {size: measure_size(options, scratch / str(size), size) for size in sizes}
    first, last = (details[size] for size in (sizes[0], sizes[-1]))
    common = first.keys() & last.keys()
    growth = sizes[-1] / sizes[0]
    ours, peer = (sum(figures[name]["sec"] for name in common) for figures in (last, first))
    result = {
        "ours": round(ours, 1),
        "peer": round(peer * growth, 1),
        "ratio": round(peer * growth / ours, 3),
        "rounds": [round(peer * growth / ours, 3)],
        "unit": "s, all commands at the last size; at the first one, times the ratio of sizes",
        "sizes": details,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
