"""Real scheduled runs against what the scheduler predicted when they were submitted.

Each run is one job of the demo's log, with its own samples, model, batch, budget and sizes of
processes, run by the real scheduler with its local driver: real builds and real training. Every
process is in a control group whose quota is the cores that the scheduler has reserved for it, as
on a cluster. Predicted is the completion of the chosen plan, from the shipped defaults alone,
without a history; measured is the time from submission to the job's end. `ours` are the predicted
seconds, `peer` the measured ones, so the ratio is best at 1. Needs root and control groups of
version 1.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.control_groups import Group, busy_seconds, require_groups
from benchmarks.common.harness import Options, compared, report, short
from benchmarks.common.logs import job_path, read_job, write_job_file
from benchmarks.scheduler.pools import log_folder
from presage.scheduler.controller.events import Submitted
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.log import LOG, Log
from presage.scheduler.controller.state import State
from presage.scheduler.drivers.base import NO_RESOURCES, ResourceRequest
from presage.scheduler.drivers.children import Children, ThisMachine
from presage.scheduler.drivers.driver import Driver, DriverOptions
from presage.scheduler.drivers.job_files import JobPaths, environment
from presage.scheduler.drivers.submit import submit
from presage.scheduler.model.pools import PoolSizes
from presage.scheduler.model.predict import fit_models
from presage.scheduler.planner.candidates import predict_candidates
from presage.schemas.config.schedule import BudgetConfig
from presage.schemas.storage.location import Location

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job and its budget."""

    log: str
    """`demo-N` with N thousand samples in four files, each a segment."""
    cpus: float
    """Budget."""
    worker: float = 1.0
    """Cores of a pipeline worker."""
    workers: int = 2
    """Most workers."""
    replica: float = 1.0
    """Cores of a replica."""
    replicas: int = 1
    """Most replicas."""
    batch: int = 4096
    """Samples of a step."""
    dim: int = 32
    """Values of an embedding row."""
    model: str = ""
    """Another model than the demo's."""
    epochs: int = 1
    """Passes over the data."""


RUNS = (
    Run(log="demo-100", cpus=2.0, epochs=2),
    Run(log="demo-100", cpus=1.0, worker=0.5, replica=0.5),
    Run(log="demo-100", cpus=2.0, replica=0.5, epochs=2),
    Run(log="demo-100", cpus=2.0, worker=0.5, replica=0.5, replicas=2, epochs=2),
    Run(log="demo-100", cpus=2.0, model="dlrm", epochs=4),
    Run(log="demo-100", cpus=1.0, worker=0.5, replica=0.5, model="dlrm", epochs=2),
    Run(log="demo-100", cpus=2.0, batch=1024, epochs=2),
    Run(log="demo-100", cpus=2.0, batch=1024, model="dlrm", epochs=3),
    Run(log="demo-100", cpus=2.0, dim=16, epochs=2),
    Run(log="demo-100", cpus=2.0, dim=16, model="dlrm", epochs=4),
    Run(log="demo-300", cpus=2.0),
    Run(log="demo-300", cpus=1.5, worker=0.5),
    Run(log="demo-300", cpus=1.5, replica=0.75, worker=0.75, model="dlrm"),
    Run(log="demo-300", cpus=2.0, model="dlrm", epochs=2),
    Run(log="demo-300", cpus=2.0, worker=0.5, replica=0.5, replicas=2, model="dlrm"),
    Run(log="demo-300", cpus=2.0, batch=8192),
    Run(log="demo-300", cpus=2.0, batch=8192, model="dlrm", epochs=2),
    Run(log="demo-1000", cpus=2.0, model="dlrm"),
    Run(log="demo-1000", cpus=2.0, model="dlrm", batch=8192),
    Run(log="demo-100", cpus=2.0, epochs=4),
)


class LimitedChildren(Children):
    """Child processes that get the cores which the scheduler has reserved for them."""

    def start(
        self, name: str, command: Sequence[str], request: ResourceRequest = NO_RESOURCES
    ) -> None:
        """Start a child in a group of its own; one without a request has no quota."""
        if self.was_started(name):
            return
        limits = Group(f"{self.work.parent.name}-{name}")
        GROUPS_IN_USE.append(limits)
        if request.cpus:
            limits.limit_cpus(request.cpus)
        super().start(name, limits.command(command), request)


GROUPS_IN_USE: list[Group] = []
"""Groups of the processes of the current run."""


class LimitedMachine(ThisMachine):
    """This machine, with enforced quotas."""

    def of_job(self, job: str, folder: Path) -> LimitedChildren:
        """Return the children of a job."""
        return LimitedChildren(folder, environment(), self._kills)


def write_job(run: Run, folder: Path) -> Path:
    """Write the job of a run; return its path."""
    job = read_job(job_path("demo"))
    job["data"]["oracle"] = {"batch_samples": run.batch, "epochs": run.epochs}
    job["train"] |= {
        "batch_samples": run.batch,
        "embedding_dim": run.dim,
        "epochs": run.epochs,
        "num_threads": max(1, int(run.replica)),
    }
    if run.model:
        job["train"]["model"] = {"name": run.model}
    job["schedule"] = {
        "budget": {"cpus": run.cpus, "memory": "16GiB"},
        "preprocessing": {
            "worker": {"cpus": run.worker, "memory": "2GiB"},
            "max_workers": run.workers,
        },
        "training": {
            "replica": {"cpus": run.replica, "memory": "3GiB"},
            "max_replicas": run.replicas,
            "max_stores": 0,
        },
    }
    return write_job_file(folder, job)


def prepare(run: Run, folder: Path, scratch: Path) -> tuple[Submitted, JobPaths]:
    """Return a run's job as it is submitted."""
    shutil.rmtree(folder, ignore_errors=True)
    path, log = write_job(run, folder / "job"), log_folder(run.log, scratch)
    (folder / "output").mkdir()
    inputs = {"demo": Location.parse(log)}
    return submit(path, inputs, folder / "output", time.time(), budget=budget_of(run))


def budget_of(run: Run) -> BudgetConfig:
    """Return the budget of a run."""
    return BudgetConfig(cpus=run.cpus, memory=16 * GIB)


def predict(run: Run, sizes: PoolSizes, scratch: Path) -> float:
    """Return the predicted seconds of a run at sizes, before anything was measured."""
    submitted, paths = prepare(run, scratch / "predicted", scratch)
    state, _ = handle(State(), submitted)
    snapshot = state.jobs["demo"].snapshot
    config = snapshot.job.schedule
    models = replace(fit_models(snapshot, config), num_segments=len(paths.segments))
    return float(predict_candidates(sizes.grid, snapshot, config, models).predicted_sec[0])


def run_job(run: Run, scratch: Path) -> dict[str, Any]:
    """Run a job with the scheduler; return the sizes that it got and the time that it took."""
    folder = scratch / "scheduled"
    submitted, paths = prepare(run, folder, scratch)
    output, budget = folder / "output", budget_of(run)
    busy, begun = busy_seconds(), time.time()
    try:
        with Log(output / LOG) as log:
            options = DriverOptions(output=output)
            driver = Driver(options, LimitedMachine(), log, {"demo": paths})
            driver.begin([submitted], budget.cpus, budget.memory)
            sizes = driver.state.jobs["demo"].sizes
            assert sizes is not None, "an admitted job has sizes"
            while not driver.is_done:
                driver.poll()
                time.sleep(options.poll_sec)
            job = driver.state.jobs["demo"]
    finally:
        for limits in GROUPS_IN_USE:
            limits.remove()
        GROUPS_IN_USE.clear()
    seconds = time.time() - begun
    if job.phase != "finished":
        raise RuntimeError(f"job must finish, got {job.phase}; read {output / LOG}")
    return {
        **asdict(run),
        "sizes": asdict(sizes),
        "seconds": round(seconds, 2),
        "machine_busy": round((busy_seconds() - busy) / seconds, 2),
    }


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run the jobs; a round is a job."""
    require_groups()
    scratch = options.scratch or scratch
    scratch.mkdir(parents=True, exist_ok=True)
    first, end = (int(word) if word else None for word in options.runs.split(":"))
    rows: list[dict[str, Any]] = []
    for one in RUNS[first:end]:
        row = run_job(one, scratch)
        predicted = predict(one, PoolSizes(**row["sizes"]), scratch)
        rows.append({**row, "predicted": predicted, "error": short(row["seconds"] / predicted - 1)})
        report(one.log, rows[-1])
    errors = [abs(row["error"]) for row in rows]
    return compared(
        [row["predicted"] for row in rows],
        [row["seconds"] for row in rows],
        "s from submission to the end; ours predicted, peer measured",
        errors={"median": statistics.median(errors), "max": max(errors)},
        runs=rows,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("scheduler.scheduled_runs", __doc__)
    options.add("--runs", ":", "FIRST:END of the runs", small="4:5")
    options.add("--scratch", None, "folder to keep logs in")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
