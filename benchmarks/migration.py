"""Cost of the death of one process to a scheduled job: pause, lost work, time to the replacement.

`python -m benchmarks.migration [--json] [--parts PART,...] [--rounds N]`; parts are replica,
coordinator, store, node, segment.

Each part runs a job under `python -m scheduler run` with real processes and kills one of them
(`kill -9`): a replica of two, the trainer of a job whose rows are in two stores (`coordinator`),
one of these stores, both at once with the store's directory as in the loss of their node, or a
segment job. `pause_sec` is the time without a new step, or in which no process builds the segment;
the peer is the usual time between two steps before the kill, or the time to build the segment. The
bits of each run are compared with those of an undisturbed run. All parts run in each round,
forwards and backwards in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.logs import DEMO_JOB, REPOSITORY, read_job, write_job_file, write_result
from benchmarks.recovery import in_rounds
from pipelines.demo_log.generate import GeneratorConfig, write_log
from scheduler.controller.events import Ended
from scheduler.controller.journal import Incident
from scheduler.controller.log import LOG, read_log
from scheduler.status.board import Board
from schemas.run.records import METRICS, read_metrics
from trainer.run.compare import compare_runs

SAMPLES, BLOCK, BATCH, EVERY = 24_000, 256, 1024, 20
"""Samples of the log, of a block and of a step; steps between checkpoints."""
EPOCHS = {"replicas": 24, "stores": 6}
"""Passes over the log: enough steps for a replica to rejoin."""
FAULT_STEPS = 30
"""Steps before a trainer or a store is killed."""
FAULT_SEC = 6.0
"""Seconds before a segment job is killed."""
POLL_SEC = 0.01
TIMEOUT_SEC = 1200.0
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
        self.commits: list[tuple[float, int]] = []
        budget = output.with_suffix(".yaml")
        budget.write_text("cpus: 4\nmemory: 8GiB\n")
        options = ["--input", str(log), "--output", str(output), "--status", "off"]
        options += ["--budget", str(budget)]
        with output.with_suffix(".err").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scheduler", "run", str(job), *options],
                cwd=REPOSITORY,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def wait_for(self, condition: Callable[[], object]) -> float:
        """Poll until a condition holds; return the time.

        Raises:
            RuntimeError: the scheduler ended before, or the wait timed out.
        """
        start = time.time()
        while True:
            ended, now, count = self.has_ended, time.time(), self.num_steps
            if not self.commits or count != self.commits[-1][1]:
                self.commits.append((now, count))
            if condition():
                return now
            if ended or now - start > TIMEOUT_SEC:
                errors = self.output.with_suffix(".err").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"scheduler ended or timed out: {errors}")
            time.sleep(POLL_SEC)

    @property
    def num_steps(self) -> int:
        """Number of committed steps."""
        path = self.run / METRICS
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    @property
    def has_ended(self) -> bool:
        """Whether the scheduler has ended."""
        return self._process.poll() is not None

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
        self.wait_for(lambda: self.has_ended)
        if self._process.returncode != 0:
            raise RuntimeError(self.output.with_suffix(".err").read_text()[-2000:])

    def stop(self) -> None:
        """Terminate the scheduler and its processes if they are running."""
        if not self.has_ended:
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


def measure(part: str, job: Path, log: Path, undisturbed: Path, scratch: Path) -> dict[str, Any]:
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
    run.wait_for(lambda: run.num_steps >= FAULT_STEPS and run.pid(victim))
    before = run.num_steps
    fault = _kill(run, victim)
    if part == "node":  # the node also has the trainer and the store's directory
        _kill(run, VICTIMS["coordinator"])
        shutil.rmtree(run.run.parent / "stores" / victim.removeprefix("store-").partition(".")[0])
    after = run.wait_for(lambda: run.num_steps > before)
    run.finish()
    incident = _incident(run, victim)
    replaced = incident.back_sec
    lowest = min((count for at, count in run.commits if at >= fault), default=before)
    times = [at for at, _ in run.commits if at <= fault]
    metrics = read_metrics(run.run / METRICS)
    return {
        "pause_sec": round(after - fault, 3),
        "longest_gap_sec": round(_longest_gap(run, fault, max(after, replaced or after)), 3),
        "usual_gap_sec": round(statistics.median(b - a for a, b in pairwise(times[-20:])), 3),
        "seen_after_sec": round(incident.time_sec - fault, 3),
        "replaced_after_sec": None if replaced is None else round(replaced - fault, 3),
        "recomputed_steps": max(0, before - lowest),
        "steps": len(metrics),
        "steps_with_fewer_replicas": sum(
            one.num_replicas < max(m.num_replicas for m in metrics) for one in metrics
        ),
    }


def _kill_segment_job(run: SchedulerRun) -> dict[str, Any]:
    start = run.wait_for(lambda: run.pid(SEGMENT))
    run.wait_for(lambda: time.time() - start >= FAULT_SEC)
    fault = _kill(run, SEGMENT)
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


def _kill(run: SchedulerRun, victim: str) -> float:
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


def _longest_gap(run: SchedulerRun, since: float, until: float) -> float:
    times = [since, *(at for at, _ in run.commits if since <= at <= until)]
    return max((b - a for a, b in pairwise(times)), default=0.0)


def headline(costs: dict[str, list[dict[str, Any]]], part: str) -> dict[str, Any]:
    """Compare the pause of one part with the usual time of a step or of a segment."""
    peer = "work_sec" if part == "segment" else "usual_gap_sec"
    pauses, usual = ([one[key] for one in costs[part]] for key in ("pause_sec", peer))
    ratios = [b / a for a, b in zip(pauses, usual, strict=True)]
    return {
        "ours": round(statistics.median(pauses), 3),
        "peer": round(statistics.median(usual), 3),
        "ratio": round(statistics.median(ratios), 4),
        "unit": f"seconds of pause when a {part} is killed, against {peer.removesuffix('_sec')}",
        "rounds": [round(ratio, 4) for ratio in ratios],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.migration", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--parts", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if not set(parts) <= set(KINDS):
        parser.error(f"parts must be of {', '.join(KINDS)}, got {options.parts!r}")
    with tempfile.TemporaryDirectory(prefix="presage-migration-") as name:
        scratch = Path(name)
        log = scratch / "log"
        start = datetime(2026, 1, 1)
        write_log(GeneratorConfig(num_samples=SAMPLES, seed=1, start=start), log)
        kinds = dict.fromkeys(KINDS[part] for part in parts)
        jobs = {kind: write_job(scratch / f"job-{kind}", kind) for kind in kinds}
        undisturbed = {
            kind: run_undisturbed(job, log, scratch / kind) for kind, job in jobs.items()
        }
        costs = in_rounds(
            parts,
            options.rounds,
            lambda part: measure(part, jobs[KINDS[part]], log, undisturbed[KINDS[part]], scratch),
        )
    equal = all(one["equal_bits"] for runs in costs.values() for one in runs)
    result = headline(costs, parts[0]) | {"equal_bits": equal, "parts": costs}
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
