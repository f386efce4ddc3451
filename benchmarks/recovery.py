"""What it costs when a replica dies, is held, is slow or is cut off, and when the whole run dies.

`python -m benchmarks.recovery [--json] [--samples N] [--rounds N]`

The demo's job on two replicas that the launcher starts again. At some step a fault happens to one
of them. Told are the seconds from then to the next step that was not committed before, the steps
that were trained again, the seconds until both train again and the longest time between two commits
while the second came back, beside the usual time. The peer is what is left without any of this, and
what `torchrun` does, too: all processes are started again and go on from the newest checkpoint. It
is our own launcher, killed and started with `--resume`. All in the same rounds.
What happens to stores is in `benchmarks.recovery_stores`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.order import built
from benchmarks.recovery_stores import REPOSITORY, Commits
from benchmarks.recovery_stores import write_job as write_demo
from pipelines.generator.log import GeneratorConfig, write_log
from schemas.events import METRICS, read_metrics
from trainer.compare import compare_runs
from trainer.ledger import verify_run
from trainer.replicas.faults import Faults
from trainer.replicas.work import FAULTS_DONE

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
RUN = "everything"
SCENARIOS = (*FAULTS, RUN)


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
        if scenario in FAULTS:  # of the step before, the line may still be on its way
            before = max(before, FAULT)
        after = commits.until(lambda count: count > before)
        commits.until(lambda count: count >= num_steps)
        if commits.process.wait() != 0:
            raise RuntimeError(f"{scenario} must train to the end, got another exit status")
        lowest = min(count for at, count in commits.seen if at >= fault)
        same = compare_runs(alone, run).difference is None
        return {
            "next_step_sec": round(after - fault, 3),
            "recomputed_steps": max(0, before - lowest),
            "usual_gap_sec": round(commits.median_gap(fault), 4),
            "equal_bits": same and not verify_run(run).problems,
            **of_both(run, commits, after),
        }


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


def summarised(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what is printed: a replica's death against that of everything."""
    ours = [one["next_step_sec"] for one in found["killed"]]
    peer = [one["next_step_sec"] for one in found[RUN]]
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    return {
        "ours": round(statistics.median(ours), 3),
        "peer": round(statistics.median(peer), 3),
        "ratio": round(statistics.median(ratios), 3),
        "unit": "seconds to the next new step, a replica killed against everything started again",
        "rounds": [round(ratio, 3) for ratio in ratios],
        "equal_bits": all(one["equal_bits"] for runs in found.values() for one in runs),
        "scenarios": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    found: dict[str, list[dict[str, Any]]] = {scenario: [] for scenario in SCENARIOS}
    with tempfile.TemporaryDirectory(prefix="presage-recovery-") as name:
        scratch = Path(name)
        log = GeneratorConfig(num_samples=options.samples, seed=1, start=datetime(2026, 1, 1))
        write_log(log, scratch / "log")
        job = write_job(scratch / "job")
        dataset = built(job, scratch / "log", scratch / "dataset")
        alone = scratch / "alone"
        if trained(job, dataset, alone, Faults()).wait() != 0:
            raise RuntimeError("the run to which nothing happens must end well")
        for number in range(options.rounds):
            for scenario in SCENARIOS if number % 2 == 0 else reversed(SCENARIOS):
                found[scenario].append(measure(scenario, job, dataset, alone, scratch))
                sys.stderr.write(f"{scenario}: {json.dumps(found[scenario][-1])}\n")
    result = summarised(found)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
