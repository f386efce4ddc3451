"""Runs of a small job under the scheduler of this machine, in which one process is killed."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.recovery_stores import DEMO, REPOSITORY
from scheduler.controller.events import Ended
from scheduler.controller.log import LOG, read_log
from scheduler.status.board import Board
from scheduler.status.journal import Incident
from schemas.run_log import METRICS, read_metrics
from trainer.diff import compare_runs

SAMPLES, BLOCK, BATCH, EVERY = 24_000, 256, 1024, 20
"""Samples of the log, of a leaf and of a step, steps between checkpoints."""
EPOCHS = {"replicas": 24, "stores": 6}
"""Passes over the log: a replica needs as many steps as it takes to come back."""
FAULT_STEPS = 30
"""Steps before a trainer or a store is killed."""
FAULT_SEC = 6.0
"""Seconds that a segment job has run when it is killed."""
LOOK_SEC = 0.01
LIMIT_SEC = 1200.0
KINDS = {
    "replica": "replicas",
    "lead": "stores",
    "store": "stores",
    "node": "stores",
    "segment": "stores",
}
"""Which job a part is measured on: one with two replicas, or one whose rows lie in two stores."""
VICTIMS = {"replica": "replica-1.1", "lead": "lead-0.1", "store": "store-1.1", "node": "store-1.1"}
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


class Run:
    """One run of the scheduler, looked at from outside."""

    def __init__(self, job: Path, log: Path, output: Path) -> None:
        """Begin it.

        Args:
            job: job file.
            log: raw files.
            output: folder of the scheduler.
        """
        self.output = output
        name = yaml.safe_load(job.read_text(encoding="utf-8"))["name"]
        self.job, self.run = name, output / name / "run"
        self.seen: list[tuple[float, int]] = []
        budget = output.with_suffix(".yaml")
        budget.write_text("cpus: 4\nmemory: 8GiB\n")
        words = [str(job), "--input", str(log), "--output", str(output), "--status", "off"]
        with output.with_suffix(".err").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scheduler", "run", *words, "--budget", str(budget)],
                cwd=REPOSITORY,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def until(self, wanted: Callable[[], object]) -> float:
        """Look until something is so, and return when it was.

        Raises:
            RuntimeError: the scheduler ended before, or it takes too long.
        """
        start = time.time()
        while True:
            ended, now, count = self._process.poll() is not None, time.time(), self.num_steps
            if not self.seen or count != self.seen[-1][1]:
                self.seen.append((now, count))
            if wanted():
                return now
            if ended or now - start > LIMIT_SEC:
                said = self.output.with_suffix(".err").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"run must go on, got an end or none in time: {said}")
            time.sleep(LOOK_SEC)

    @property
    def num_steps(self) -> int:
        """Steps that are committed."""
        path = self.run / METRICS
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    @property
    def has_ended(self) -> bool:
        """Whether the scheduler is done."""
        return self._process.poll() is not None

    def pid(self, name: str) -> int | None:
        """Return the pid of a child, None before it is known."""
        path = self.output / self.job / "processes" / f"{name}.pid"
        text = path.read_text().strip() if path.is_file() else ""
        return int(text) if text else None

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: it did not end well.
        """
        self.until(lambda: self.has_ended)
        if self._process.returncode != 0:
            raise RuntimeError(self.output.with_suffix(".err").read_text()[-2000:])

    def end(self) -> None:
        """Ask the scheduler to end, with its processes, if it has not."""
        if not self.has_ended:
            self._process.terminate()
            self._process.wait()


def write_job(folder: Path, kind: str) -> Path:
    """Write the job of one kind; return its path."""
    folder.mkdir(parents=True)
    job = yaml.safe_load((DEMO / "job.yaml").read_text(encoding="utf-8"))
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
    shutil.copy(DEMO / "schema.pbtxt", folder / "schema.pbtxt")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def undisturbed(job: Path, log: Path, output: Path) -> Path:
    """Run a job to its end; return its run."""
    run = Run(job, log, output)
    try:
        run.finish()
    finally:
        run.end()
    return run.run


def measure(part: str, job: Path, log: Path, alone: Path, scratch: Path) -> dict[str, Any]:
    """Kill one process of a run; return what it cost.

    Args:
        part: one of `KINDS`.
        job: of its kind.
        log: raw files.
        alone: run of the same job to which nothing happened.
        scratch: folder for the run.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        run = Run(job, log, Path(name) / "out")
        try:
            found = _of_segment(run) if part == "segment" else _of_trainer(run, part)
            found["equal_bits"] = compare_runs(run.run, alone).difference is None
        finally:
            run.end()
        return found


def _of_trainer(run: Run, part: str) -> dict[str, Any]:
    """Kill a process without which no step is made, or fewer hands make it."""
    victim = VICTIMS[part]
    run.until(lambda: run.num_steps >= FAULT_STEPS and run.pid(victim))
    before = run.num_steps
    fault = _kill(run, victim)
    if part == "node":  # with all that was there: the trainer, and the store's directory
        _kill(run, VICTIMS["lead"])
        shutil.rmtree(run.run.parent / "stores" / victim.removeprefix("store-").partition(".")[0])
    after = run.until(lambda: run.num_steps > before)
    run.finish()
    gone = _incident(run, victim)
    settled = gone.back_sec or after
    lowest = min((count for at, count in run.seen if at >= fault), default=before)
    times = [at for at, _ in run.seen if at <= fault]
    metrics = read_metrics(run.run / METRICS)
    return {
        "pause_sec": round(after - fault, 3),
        "longest_gap_sec": round(_longest_gap(run, fault, max(after, settled)), 3),
        "usual_gap_sec": round(statistics.median(b - a for a, b in pairwise(times[-20:])), 3),
        "seen_after_sec": round(gone.time_sec - fault, 3),
        "replaced_after_sec": None if gone.back_sec is None else round(gone.back_sec - fault, 3),
        "recomputed_steps": max(0, before - lowest),
        "steps": len(metrics),
        "steps_with_fewer_replicas": sum(
            one.num_replicas < max(m.num_replicas for m in metrics) for one in metrics
        ),
    }


def _of_segment(run: Run) -> dict[str, Any]:
    """Kill a segment job while it builds."""
    began = run.until(lambda: run.pid(SEGMENT))
    run.until(lambda: time.time() - began >= FAULT_SEC)
    fault = _kill(run, SEGMENT)
    run.finish()
    gone, place = _incident(run, SEGMENT), SEGMENT.partition(".")[0]
    done = next(
        entry.event
        for entry in read_log(run.output / LOG)
        if isinstance(entry.event, Ended)
        and entry.event.outcome == "done"
        and entry.event.process.partition(".")[0] == place
    )
    pause = done.time_sec - fault - done.work_sec
    return {
        "pause_sec": round(pause, 3),
        "work_sec": round(done.work_sec, 3),
        "seen_after_sec": round(gone.time_sec - fault, 3),
        "replaced_after_sec": None if gone.back_sec is None else round(gone.back_sec - fault, 3),
        "lost_sec": round(fault - began, 3),
        "rebuilt_rows": done.num_samples,
    }


def _kill(run: Run, victim: str) -> float:
    pid = run.pid(victim)
    if pid is None:
        raise RuntimeError(f"{victim} must run when it is killed, got no pid")
    os.kill(pid, signal.SIGKILL)
    return time.time()


def _incident(run: Run, victim: str) -> Incident:
    """Return what the scheduler says of the kill."""
    incidents = Board(run.output / LOG).view().incidents
    found = [one for one in incidents if one.process == victim and one.kind == "lost"]
    if not found:
        raise RuntimeError(f"{victim} must be told as lost, got none")
    return found[0]


def _longest_gap(run: Run, since: float, until: float) -> float:
    times = [since, *(at for at, _ in run.seen if since <= at <= until)]
    return max((b - a for a, b in pairwise(times)), default=0.0)
