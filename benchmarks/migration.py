"""Cost of the death of one process to a scheduled job: pause, lost work, time to the replacement.

Each part runs a job under `python -m scheduler run` with real processes and kills one of them
(`kill -9`): a replica of two, the trainer of a job whose rows are in two stores (`coordinator`),
one of these stores, both at once with the store's directory as in the loss of their node, or a
segment job. `pause_sec` is the time without a new step, or in which no process builds the segment;
the peer is the usual time between two steps before the kill, or the time to build the segment. The
bits of each run are compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.commits import CommitWatcher
from benchmarks.common.harness import Options, alternate, compared
from benchmarks.common.logs import DEMO_JOB, read_job, write_demo, write_job_file
from benchmarks.common.processes import module, start_quietly
from presage.scheduler.controller.events import Ended
from presage.scheduler.controller.journal import Incident
from presage.scheduler.controller.log import LOG, read_log
from presage.scheduler.status.board import Board
from presage.schemas.run.records import METRICS, read_metrics
from presage.trainer.run.compare import compare_runs

SAMPLES, BLOCK, BATCH, EVERY = 24_000, 256, 1024, 20
"""Samples of the log, of a block and of a step; steps between checkpoints."""
EPOCHS = {"replicas": 24, "stores": 6}
"""Passes over the log: enough steps for a replica to rejoin."""
FAULT_STEPS = 30
"""Steps before a trainer or a store is killed."""
FAULT_SEC = 1.0
"""Seconds before a segment job is killed."""
KINDS = {
    "replica": "replicas",
    "coordinator": "stores",
    "store": "stores",
    "node": "stores",
    "segment": "stores",
}
"""Part -> its job: one with two replicas, or one whose rows are in two stores."""
VICTIMS = {
    "replica": "replica-1.1",
    "coordinator": "coordinator-0.1",
    "store": "store-1.1",
    "node": "store-1.1",
}
SEGMENT = "segment-1.1"
SCHEDULES: dict[str, dict[str, Any]] = {
    "replicas": {"training": {"min_replicas": 2, "max_replicas": 2}},
    "stores": {
        "training": {
            "replica": {"memory": "1100MiB"},
            "store": {"memory": "200MiB"},
            "max_replicas": 1,
            "max_stores": 2,
        }
    },
}


class SchedulerRun:
    """One run of the scheduler, observed through its files."""

    def __init__(self, job: Path, log: Path, output: Path) -> None:
        """Start the scheduler.

        Args:
            job: job file.
            log: raw files.
            output: folder of the scheduler.
        """
        self.output = output
        self.job = read_job(job)["name"]
        self.run = output / self.job / "run"
        budget = output.with_suffix(".yaml")
        budget.write_text("cpus: 4\nmemory: 8GiB\n")
        words = ("run", job, "--input", log, "--output", output, "--status", "off")
        self._process = start_quietly(module("scheduler", *words, "--budget", budget))
        self.watcher = CommitWatcher(self.run, self._process)

    def pid(self, name: str) -> int | None:
        """Return the pid of a child process, None before it has one."""
        path = self.output / self.job / "processes" / f"{name}.pid"
        text = path.read_text().strip() if path.is_file() else ""
        return int(text) if text else None

    def finish(self) -> None:
        """Wait for the end of the scheduler.

        Raises:
            RuntimeError: it failed.
        """
        self.watcher.wait_for(lambda _: self._process.poll() is not None)
        if self._process.returncode != 0:
            raise RuntimeError(f"scheduler must succeed, got {self._process.returncode}")

    def stop(self) -> None:
        """Terminate the scheduler and its processes if they are running."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def write_job(folder: Path, kind: str) -> Path:
    """Write the job of one kind; return its path."""
    job = read_job(DEMO_JOB)
    job["name"] = kind
    job["data"]["block_samples"] = BLOCK
    job["data"]["generate"]["num_samples"] = SAMPLES
    job["data"]["oracle"] = {"batch_samples": BATCH, "epochs": EPOCHS[kind]}
    job["train"] = {
        "model": {"name": "dlrm", "bottom_layers": [32], "top_layers": [32]},
        "embedding_dim": 32,
        "batch_samples": BATCH,
        "epochs": EPOCHS[kind],
        "num_threads": 1,
        "checkpoint": {"every_steps": EVERY},
    }
    if kind == "stores":
        job["train"]["cache"] = {"lookahead": 2, "prefetch_steps": 1, "rows": 60_000}
    job["schedule"] = {"budget": {"cpus": 8, "memory": "32GiB"}, **SCHEDULES[kind]}
    return write_job_file(folder, job)


def run_undisturbed(job: Path, log: Path, output: Path) -> Path:
    """Run a job to its end; return its run."""
    run = SchedulerRun(job, log, output)
    try:
        run.finish()
    finally:
        run.stop()
    return run.run


def kill(part: str, job: Path, log: Path, undisturbed: Path, scratch: Path) -> dict[str, Any]:
    """Kill one process of a run; return what it cost.

    Args:
        part: one of `KINDS`.
        job: of its kind.
        log: raw files.
        undisturbed: run of the same job without failures.
        scratch: folder for the run.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        run = SchedulerRun(job, log, Path(name) / "out")
        try:
            costs = _kill_segment_job(run) if part == "segment" else _kill_in_training(run, part)
            costs["equal_bits"] = compare_runs(run.run, undisturbed).difference is None
        finally:
            run.stop()
        return costs


def _kill_in_training(run: SchedulerRun, part: str) -> dict[str, Any]:
    victim = VICTIMS[part]
    watcher = run.watcher
    watcher.wait_for(lambda count: count >= FAULT_STEPS and run.pid(victim))
    before = watcher.commits[-1][1]
    fault = _kill_process(run, victim)
    if part == "node":  # the node also has the trainer and the store's directory
        _kill_process(run, VICTIMS["coordinator"])
        shutil.rmtree(run.run.parent / "stores" / victim.removeprefix("store-").partition(".")[0])
    after = watcher.wait_for(lambda count: count > before)
    run.finish()
    incident = _incident(run, victim)
    replaced = incident.back_sec
    metrics = read_metrics(run.run / METRICS)
    return {
        "pause_sec": round(after - fault, 3),
        "longest_gap_sec": round(
            max(after - fault, watcher.longest_gap(fault, replaced or after)), 3
        ),
        "usual_gap_sec": round(watcher.median_gap(fault), 3),
        "seen_after_sec": round(incident.time_sec - fault, 3),
        "replaced_after_sec": None if replaced is None else round(replaced - fault, 3),
        "recomputed_steps": watcher.recomputed(before, fault),
        "steps": len(metrics),
        "steps_with_fewer_replicas": sum(
            one.num_replicas < max(m.num_replicas for m in metrics) for one in metrics
        ),
    }


def _kill_segment_job(run: SchedulerRun) -> dict[str, Any]:
    start = run.watcher.wait_for(lambda _: run.pid(SEGMENT))
    run.watcher.wait_for(lambda _: time.time() - start >= FAULT_SEC)
    fault = _kill_process(run, SEGMENT)
    run.finish()
    incident, task = _incident(run, SEGMENT), SEGMENT.partition(".")[0]
    built = next(
        entry.event
        for entry in read_log(run.output / LOG)
        if isinstance(entry.event, Ended)
        and entry.event.outcome == "done"
        and entry.event.process.partition(".")[0] == task
    )
    replaced = incident.back_sec
    return {
        "pause_sec": round(built.time_sec - fault - built.work_sec, 3),
        "work_sec": round(built.work_sec, 3),
        "seen_after_sec": round(incident.time_sec - fault, 3),
        "replaced_after_sec": None if replaced is None else round(replaced - fault, 3),
        "lost_sec": round(fault - start, 3),
        "rebuilt_rows": built.num_samples,
    }


def _kill_process(run: SchedulerRun, victim: str) -> float:
    pid = run.pid(victim)
    if pid is None:
        raise RuntimeError(f"{victim} has no pid and cannot be killed")
    os.kill(pid, signal.SIGKILL)
    return time.time()


def _incident(run: SchedulerRun, victim: str) -> Incident:
    """Return the scheduler's record of the kill."""
    incidents = Board(run.output / LOG).view().incidents
    for incident in incidents:
        if incident.process == victim and incident.kind == "lost":
            return incident
    raise RuntimeError(f"the scheduler reported no loss of {victim}")


def compare(costs: Mapping[str, Sequence[Mapping[str, Any]]], part: str) -> dict[str, Any]:
    """Compare the pause of one part with the usual time of a step or of a segment."""
    peer = "work_sec" if part == "segment" else "usual_gap_sec"
    pauses, usual = ([one[key] for one in costs[part]] for key in ("pause_sec", peer))
    unit = f"seconds of pause when a {part} is killed, against {peer.removesuffix('_sec')}"
    return compared(pauses, usual, unit)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Kill a process of every part; the result is the first one."""
    log = write_demo(scratch / "log", SAMPLES)
    kinds = dict.fromkeys(KINDS[part] for part in options.parts)
    jobs = {kind: write_job(scratch / f"job-{kind}", kind) for kind in kinds}
    alone = {kind: run_undisturbed(job, log, scratch / kind) for kind, job in jobs.items()}
    costs = alternate(
        {
            part: partial(kill, part, jobs[KINDS[part]], log, alone[KINDS[part]], scratch)
            for part in options.parts
        },
        options.rounds,
    )
    equal = all(one["equal_bits"] for runs in costs.values() for one in runs)
    return {**compare(costs, options.parts[0]), "equal_bits": equal, "parts": costs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("migration", __doc__, rounds=2)
    parts = tuple(KINDS)
    options.add("--parts", parts, "parts", small=("coordinator",), choices=parts)
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
