"""What it costs when a replica dies, is held, is slow or is cut off, and when the whole run dies.

The demo's job on two replicas that the launcher starts again. At some step a fault happens to one
of them. The peers are what is left without any of this: `torchrun` over TorchRec's sharded tables
(`recovery_peer.py`), which starts all processes again and goes on from the newest checkpoint, and
our own launcher, killed and started with `--resume`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.recovery_commits import Commits
from benchmarks.recovery_stores import REPOSITORY
from benchmarks.recovery_stores import write_job as write_demo
from schemas.run_log import METRICS, read_metrics
from trainer.diff import compare_runs
from trainer.elastic.faults import Faults
from trainer.elastic.worker import FAULTS_DONE
from trainer.run import verify_run

COUNT, EVERY, FAULT, EPOCHS = 2, 20, 30, 8
"""Processes, steps between checkpoints and before the fault, passes over the log."""
SECONDS = 3.0
"""Of those faults that end."""
FAULTS = {
    "killed": Faults().kill(1, FAULT),
    "killed, who writes": Faults().kill(0, FAULT, "exchanged"),
    "held": Faults().stop(1, FAULT, SECONDS),
    "slowed by half": Faults().slow(1, 2.0, FAULT),
    "cut off": Faults().partition(1, FAULT, SECONDS),
}
RUN, TORCHRUN = "everything", "torchrun"
SCENARIOS = (*FAULTS, RUN, TORCHRUN)


def write_job(folder: Path) -> Path:
    """Write the job of all scenarios; return its path."""
    path = write_demo(folder, None, 1)
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    job["data"]["oracle"]["epochs"] = job["train"]["epochs"] = EPOCHS
    job["train"]["pooling"] = "sum"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def trained(
    job: Path, dataset: Path, run: Path, faults: Faults, *options: str
) -> subprocess.Popen[bytes]:
    """Start our launcher."""
    command = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", str(dataset)]
    command += ["--output", str(run), "--replicas", str(COUNT), "--faults", faults.to_json()]
    return silent([*command, *options, "--json"])


def trained_by_torchrun(job: Path, dataset: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start the peer, of which a process kills itself once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(COUNT), "--max-restarts", "1"]
    command += ["-m", "benchmarks.recovery_peer", str(job), "--dataset", str(dataset)]
    command += ["--output", str(run), "--every", str(EVERY), "--steps", str(FAULT + EVERY)]
    return silent([*command, "--kill-at", str(FAULT)])


def undisturbed(job: Path, dataset: Path, run: Path) -> Path:
    """Train a run to which nothing happens; return its folder.

    Raises:
        RuntimeError: it did not end well.
    """
    if trained(job, dataset, run, Faults()).wait() != 0:
        raise RuntimeError("the run to which nothing happens must end well")
    return run


def silent(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that says nothing: agreements would be told, a line each."""
    none = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=none, stderr=none)


def measure(scenario: str, job: Path, dataset: Path, alone: Path, scratch: Path) -> dict[str, Any]:
    """Let one thing happen in a run; return what it cost.

    Args:
        scenario: one of `SCENARIOS`.
        job: job file.
        dataset: of the demo.
        alone: run to which nothing happened.
        scratch: folder for the run.

    Raises:
        RuntimeError: the run did not end well.
    """
    num_steps = len(read_metrics(alone / METRICS))
    with tempfile.TemporaryDirectory(dir=scratch) as name, ExitStack() as opened:
        run = Path(name) / "run"
        if scenario == TORCHRUN:
            process, num_steps = trained_by_torchrun(job, dataset, run), FAULT + EVERY
        else:
            process = trained(job, dataset, run, FAULTS.get(scenario, Faults()))
        commits = Commits(run, process)
        opened.callback(lambda: commits.process.kill())
        commits.until(lambda count: count >= FAULT)
        if scenario == RUN:
            fault = time.monotonic()
            process.kill()
            process.wait()
            commits.process = trained(job, dataset, run, Faults(), "--resume")
        elif scenario in FAULTS and FAULTS[scenario].schedule[0].kind == "slow":
            fault = time.monotonic()  # it leaves no mark
        else:
            fault = marked(run, commits)
        before = max(count for at, count in commits.seen if at <= fault)
        if scenario != RUN:  # of the step before, the line may still be on its way
            before = max(before, FAULT)
        after = commits.until(lambda count: count > before)
        commits.until(lambda count: count >= num_steps)
        if commits.process.wait() != 0:
            raise RuntimeError(f"{scenario} must train to the end, got another exit status")
        lowest = min(count for at, count in commits.seen if at >= fault)
        cost = {
            "next_step_sec": round(after - fault, 3),
            "recomputed_steps": max(0, before - lowest),
            "usual_gap_sec": round(commits.median_gap(fault), 4),
        }
        if scenario == TORCHRUN:
            return cost
        same = compare_runs(alone, run).difference is None
        equal = {"equal_bits": same and not verify_run(run).problems}
        return cost | equal | of_both(run, commits, after)


def marked(run: Path, commits: Commits) -> float:
    """Return when the fault happened, looking on at the commits meanwhile."""
    mark = run / FAULTS_DONE / "0"
    while not mark.is_file():
        count = commits.seen[-1][1]
        commits.until(lambda seen, count=count: seen > count or mark.is_file())
    return time.monotonic() - (time.time() - mark.stat().st_mtime)


def of_both(run: Path, commits: Commits, after: float) -> dict[str, Any]:
    """Return when both replicas trained again after a step, and the longest gap around that."""
    numbers = [metric.num_replicas for metric in read_metrics(run / METRICS)]
    late = [(at, count) for at, count in commits.seen if at >= after and 0 < count <= len(numbers)]
    both = [at for at, count in late if numbers[count - 1] == COUNT]
    if not both or len(late) < 2:
        return {"both_sec": None}
    around = [b - a for (a, _), (b, _) in pairwise(late) if b <= both[0] + 1.0]
    return {
        "both_sec": round(both[0] - after, 3),
        "join_gap_sec": round(max(around, default=0.0), 4),
        "late_gap_sec": round(statistics.median(b - a for (a, _), (b, _) in pairwise(late)), 4),
    }
