"""Times of both pools at a grid of sizes: builds, and steps of training, for the model's defaults.

A build runs as the scheduler's segment jobs do, in one control group whose quota is the cores of
all its workers. Replicas and stores run as the scheduler starts them, each in a group of its own;
one run gives the times of several quotas, which are set while it trains. The groups have nearly
all of the machine's weight, so that other processes hardly disturb them, and the share of the
machine that others used is measured. Measured cells are added to `--output`, a file such as
`pools.json`, from which `benchmarks.scheduler.fit` takes the defaults of
`scheduler/model/predict.py`. `ours` are the seconds that the scheduler predicts by them, `peer` the
measured ones, so the ratio is best at 1. Needs root and control groups of version 1.
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.control_groups import Group, busy_seconds, group, require_groups
from benchmarks.common.harness import Options, compared, report
from benchmarks.common.logs import (
    LOGS,
    SHARED_DATA,
    MissingError,
    job_path,
    read_job,
    write_demo,
    write_job_file,
)
from benchmarks.scheduler.fit import GRID_FILE, predicted_build, predicted_step
from presage.scheduler.drivers.job_files import (
    JobPaths,
    coordinator_command,
    environment,
    prepare_stores,
    replica_command,
    segment_command,
    store_command,
)
from presage.schemas.machine import num_cores
from presage.schemas.run.records import METRICS, RENDEZVOUS, StepMetric, read_metrics
from presage.schemas.storage.location import Location

GIB = 1 << 30


# Builds.


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCell:
    """Sizes of one measured build."""

    log: str
    """`demo-N` with N thousand samples, or a shipped job with a published log."""
    workers: int
    """Workers of the segment job."""
    cpus: float
    """Cores of each."""
    memory_gib: float = 8.0
    """Memory of all of them; a build with too little for its samples exchanges them in files."""


BUILDS = (
    *(
        BuildCell(log=log, workers=workers, cpus=cpus)
        for log, sizes in {
            "demo-1000": [(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0), (4, 0.25), (4, 0.5)],
            "demo-300": [(1, 0.5), (1, 1.0), (2, 0.25), (2, 1.0), (4, 0.5)],
            "demo-100": [(1, 0.25), (1, 1.0), (2, 0.5), (2, 1.0)],
            "kuairand": [(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0), (4, 0.25), (4, 0.5)],
            "mind": [(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0), (4, 0.5)],
            "thirtymusic": [(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0), (4, 0.25)],
        }.items()
        for workers, cpus in sizes
    ),
    *(
        BuildCell(log="demo-1000", workers=workers, cpus=cpus, memory_gib=2.0)
        for workers, cpus in [(1, 1.0), (2, 1.0), (2, 0.5)]
    ),
)


def log_folder(name: str, scratch: Path) -> Path:
    """Return the folder of a log, written first if it is synthetic.

    Raises:
        MissingError: a published log is not here.
    """
    if (published := LOGS.get(name)) is not None:
        if not (SHARED_DATA / published).is_dir():
            raise MissingError(f"the log of {name} must exist, got none in {SHARED_DATA}")
        return SHARED_DATA / published
    folder = scratch / name
    if not folder.exists():
        partial = scratch / f"{name}.partial"
        write_demo(partial, 1000 * int(name.removeprefix("demo-"))).rename(folder)
    return folder


def paths_of(folder: Path, job: Path, log: Path) -> JobPaths:
    """Return the files of a job whose input is one segment."""
    storage = Location.parse(folder)
    shutil.copytree(job.parent, folder, dirs_exist_ok=True)
    return JobPaths(
        source=job, folder=folder, storage=storage, input=Location.parse(log), segments=((),)
    )


def measure_build(cell: BuildCell, scratch: Path) -> dict[str, Any]:
    """Build a dataset and return the cell with its figures."""
    log = log_folder(cell.log, scratch)
    job = job_path(cell.log.split("-")[0])
    folder = scratch / "build"
    shutil.rmtree(folder, ignore_errors=True)
    paths = paths_of(folder, job, log)
    with group("build") as limits:
        limits.limit_cpus(cell.workers * cell.cpus)
        limits.limit_memory(round(cell.memory_gib * GIB))
        before, start = busy_seconds(), time.perf_counter()
        done = subprocess.run(
            limits.command(segment_command(paths, 0, cell.workers)),
            env=environment(),
            capture_output=True,
            check=True,
            text=True,
        )
        seconds, used = time.perf_counter() - start, busy_seconds() - before
        peak = limits.peak_bytes
    body = json.loads(done.stdout)
    if body["num_samples"] == 0:
        raise ValueError(f"build of {cell.log} has no sample; check its log")
    return {
        **asdict(cell),
        "samples": body["num_samples"],
        "input_bytes": body["input_bytes"],
        "seconds": round(seconds, 3),
        "startup_sec": body["startup_sec"],
        "machine_busy": round(used / seconds, 2),
        "peak_bytes": peak,
    }


# Steps of training.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCell:
    """Sizes of one measured run, and the quotas that it goes through."""

    log: str
    """As in a build."""
    batch: int
    """Samples of a step."""
    replicas: int
    """Processes that train."""
    stores: int = 0
    """Processes that hold the rows; with none, each replica holds all."""
    threads: int = 1
    """Microbatches that a replica computes at once."""
    cpus: tuple[float, ...]
    """Cores of a replica, one after the other."""
    store_cpus: float = 0.5
    """Cores of a store."""
    dim: int = 32
    """Values of an embedding row."""
    model: str = ""
    """Another model than the job's."""


STEPS = (
    StepCell(log="demo-100", batch=4096, replicas=1, cpus=(1.0, 0.5, 0.25)),
    StepCell(log="demo-100", batch=4096, replicas=1, threads=2, cpus=(2.0, 1.0)),
    StepCell(log="demo-100", batch=1024, replicas=1, cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=2, cpus=(1.0, 0.5, 0.25)),
    StepCell(log="demo-100", batch=1024, replicas=2, cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=4, cpus=(0.5, 0.25)),
    StepCell(log="demo-100", batch=4096, replicas=1, stores=1, cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=1, stores=2, cpus=(1.0, 0.5), store_cpus=0.25),
    StepCell(log="demo-100", batch=4096, replicas=2, stores=2, cpus=(0.5, 0.25)),
    StepCell(log="demo-100", batch=4096, replicas=1, model="dlrm", cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=2, model="dlrm", cpus=(1.0, 0.5)),
    StepCell(log="mind", batch=1024, replicas=1, cpus=(1.0, 0.5, 0.25)),
    StepCell(log="mind", batch=4096, replicas=1, threads=2, cpus=(2.0, 1.0)),
    StepCell(log="mind", batch=1024, replicas=2, cpus=(1.0, 0.5)),
    StepCell(log="mind", batch=4096, replicas=2, cpus=(1.0, 0.5)),
    StepCell(log="mind", batch=4096, replicas=4, cpus=(0.5, 0.25)),
    StepCell(log="mind", batch=4096, replicas=2, stores=1, cpus=(0.75, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=1, dim=16, cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=1, dim=64, cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=4096, replicas=1, dim=16, model="dlrm", cpus=(1.0, 0.5)),
    StepCell(log="demo-100", batch=1024, replicas=1, model="dlrm", cpus=(1.0, 0.5)),
)
EPOCHS = 12
WARM_STEPS, SETTLING_STEPS, MEASURED_STEPS, MEASURED_SEC = 4, 3, 10, 2.5
"""Steps before the first quota, after each change of it, and fewest steps and seconds of a cell."""
START_SEC = 120.0
"""Longest wait for the first steps."""


def prepare_steps(cell: StepCell, scratch: Path) -> JobPaths:
    """Return a job with its dataset, built on the first call."""
    name = f"steps-{cell.log}-{cell.batch}-{cell.dim}-{cell.model or 'own'}-{cell.threads}"
    shipped = job_path(cell.log.split("-")[0])
    job = read_job(shipped)
    job["data"].setdefault("oracle", {}).update(batch_samples=cell.batch, epochs=EPOCHS)
    job["train"] |= {
        "batch_samples": cell.batch,
        "embedding_dim": cell.dim,
        "num_threads": cell.threads,
        "epochs": EPOCHS,
    }
    if cell.model:
        job["train"]["model"] = {"name": cell.model}
    path = write_job_file(scratch / f"{name}-job", job, shipped)
    paths = paths_of(scratch / name, path, log_folder(cell.log, scratch))
    if not (scratch / name / "built").exists():
        subprocess.run(
            segment_command(paths, 0, 2), env=environment(), capture_output=True, check=True
        )
        (scratch / name / "built").touch()
    for used in ("run", "stores"):
        shutil.rmtree(scratch / name / used, ignore_errors=True)
    return paths


def measure_steps(cell: StepCell, scratch: Path) -> list[dict[str, Any]]:
    """Run one training at all quotas of a cell, and return a row for each."""
    paths = prepare_steps(cell, scratch)
    metrics = Path(str(paths.run)) / METRICS
    has_replicas, served = cell.replicas > 1, cell.stores > 0
    with ExitStack() as stack:

        def start(name: str, command: Sequence[str]) -> Group:
            limits = stack.enter_context(group(name))
            out = stack.enter_context((scratch / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                limits.command(command), env=environment(), stdout=out, stderr=out
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return limits

        begun = time.perf_counter()
        work = scratch / "work"
        if served:
            prepare_stores(paths, range(cell.stores))
        stores = [start(f"store-{n}", store_command(paths, work, n)) for n in range(cell.stores)]
        for number in range(cell.stores):
            _wait(lambda n=number: paths.address_file(n).stat() is not None)
        coordinator = start(
            "coordinator",
            coordinator_command(paths, work, has_replicas=has_replicas, served=served),
        )
        replicas = [coordinator]
        if has_replicas:
            _wait(lambda: (paths.run / RENDEZVOUS).stat() is not None)
            replicas = [
                start(f"replica-{n}", replica_command(paths, work, n, cell.threads))
                for n in range(cell.replicas)
            ]
        _wait(lambda: _num_steps(metrics, cell.replicas) > WARM_STEPS)
        started = time.perf_counter() - begun
        for limits in stores:
            limits.limit_cpus(cell.store_cpus)
        rows: list[dict[str, Any]] = []
        for cpus in cell.cpus:
            for limits in replicas:
                limits.limit_cpus(cpus)
            rows.append(_measure_quota(cell, cpus, metrics))
    return [{**row, "start_sec": round(started, 2)} for row in rows]


def _measure_quota(cell: StepCell, cpus: float, metrics: Path) -> dict[str, Any]:
    """Return the mean time of the steps that began under a quota."""
    first = _num_steps(metrics, cell.replicas) + SETTLING_STEPS
    _wait(lambda: _num_steps(metrics, cell.replicas) >= first)
    busy, start = busy_seconds(), time.perf_counter()

    def is_done() -> bool:
        enough = _num_steps(metrics, cell.replicas) >= first + MEASURED_STEPS
        return enough and time.perf_counter() - start >= MEASURED_SEC

    _wait(is_done)
    seconds, used = time.perf_counter() - start, busy_seconds() - busy
    # A run's last batch of an epoch has fewer samples.
    steps = [m for m in read_metrics(metrics)[first:] if m.num_samples == cell.batch]
    took = [_seconds(m) for m in steps]
    return {
        **{k: v for k, v in asdict(cell).items() if k != "cpus"},
        "cpus": cpus,
        "steps": len(steps),
        "seconds": round(sum(took) / len(took), 5),
        "median_sec": round(sorted(took)[len(took) // 2], 5),
        "machine_busy": round(used / seconds, 2),
    }


def _seconds(metric: StepMetric) -> float:
    return metric.num_samples / metric.samples_per_sec


def _num_steps(metrics: Path, replicas: int) -> int:
    """Return the number of steps so far; 0 until all replicas take part."""
    if not metrics.exists():
        return 0
    steps = read_metrics(metrics)
    return len(steps) if steps and steps[-1].num_replicas == replicas else 0


def _wait(is_done: Any) -> None:
    end = time.monotonic() + START_SEC
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError("training must go on, got no step; read the logs in --scratch")
        time.sleep(0.02)


# The file of the grid.


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    values = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in info.splitlines())
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": num_cores(),
        "processor": values.get("model name", ""),
        "mhz": round(float(values.get("cpu MHz", 0))),
        "memory_gib": round(memory / GIB, 1),
    }


def add_rows(path: Path, kind: str, rows: Sequence[Mapping[str, Any]], date: str) -> None:
    """Add rows to the file of the grid."""
    body: dict[str, Any] = {"builds": [], "steps": []}
    if path.exists():
        body = json.loads(path.read_text(encoding="utf-8"))
    body = {"date": date, "machine": machine(), "builds": body["builds"], "steps": body["steps"]}
    body[kind] += rows
    lines = [f' "{key}": {json.dumps(body[key])}' for key in ("date", "machine")]
    for key in ("builds", "steps"):
        inner = ",\n".join(f"  {json.dumps(row)}" for row in body[key])
        lines.append(f' "{key}": [\n{inner}\n ]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def cells_of(options: argparse.Namespace) -> list[BuildCell | StepCell]:
    """Return the chosen cells of all parts."""
    first, end = (int(word) if word else None for word in options.cells.split(":"))
    parts: dict[str, Sequence[BuildCell | StepCell]] = {"builds": BUILDS, "steps": STEPS}
    return [cell for part in options.parts for cell in parts[part][first:end]]


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the cells and add them to the file; a round is a cell."""
    require_groups()
    scratch = options.scratch or scratch
    scratch.mkdir(parents=True, exist_ok=True)
    date, predicted, took = time.strftime("%Y-%m-%d"), list[float](), list[float]()
    for cell in cells_of(options):
        is_build = isinstance(cell, BuildCell)
        rows = [measure_build(cell, scratch)] if is_build else measure_steps(cell, scratch)
        if options.output is not None:
            add_rows(options.output, "builds" if is_build else "steps", rows, date)
        for row in rows:
            predicted.append(predicted_build(row) if is_build else predicted_step(row))
            took.append(row["seconds"])
            report(f"predicted {predicted[-1]:.3g} s", row)
    return compared(predicted, took, "s; ours predicted, peer measured")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("scheduler.pools", __doc__)
    parts = ("builds", "steps")
    options.add("--parts", parts, "parts", small=("builds",), choices=parts)
    options.add("--cells", ":", "FIRST:END of the cells of each part", small="11:12")
    options.add("--scratch", None, "folder to keep logs and datasets in")
    options.add("--output", None, f"file that receives the cells, as {GRID_FILE.name}")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
