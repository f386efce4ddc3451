"""Cost of failures of replicas, of stores and of a whole run, and of moving slots between stores.

`python -m benchmarks.recovery [--json] [--parts replicas,stores] [--samples N] [--rounds N]`

Each scenario reports the seconds from the failure to the next new step and the steps that were
trained again. `replicas` trains the demo's job on two replicas; it also reports the seconds until
all replicas train again, the longest gap between commits around the rejoin, and the usual gap. Its
peers are `torchrun` over TorchRec's sharded tables (`recovery_peer.py`), which restarts all
processes from the newest checkpoint, and our own launcher, killed and restarted with `--resume`.
`stores` trains one process with the planned cache in front of two supervised store processes; a
store is killed (`kill -9`), alone or with its directory, or a quarter of all slots moves to the
other one; or the trainer is killed, and is forked again (`--restarts`) or started again with
`--resume`. It also reports the longest gap between commits until the next checkpoint. Scenarios run
in rounds, forwards and backwards in turn.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.logs import (
    DEMO_JOB,
    REPOSITORY,
    build_dataset,
    read_job,
    write_job_file,
    write_result,
)
from pipelines.demo_log.generate import GeneratorConfig, write_log
from schemas.run.records import METRICS, SUMMARY, read_metrics
from tests.trainer.faults import DONE, FAULTY, Faults
from tests.trainer.processes import forked
from trainer.run.compare import compare_runs
from trainer.run.folder import verify_run
from trainer.stores.remote.connection import read_access
from trainer.stores.remote.processes import TOKEN, StoreProcesses, migrate_slots

Costs = dict[str, list[dict[str, Any]]]
"""Scenario -> its costs in each round."""
PARTS = ("replicas", "stores")
EVERY, FAULT_STEP, BATCH = 20, 30, 1024
"""Steps between checkpoints, steps before the failure, samples of a step."""
NUM_REPLICAS, EPOCHS, FAULT_SEC = 2, 8, 3.0
"""Of `replicas`: processes, passes over the log, duration of failures that end by themselves."""
STORE_STEPS = 70
"""Of `stores`: steps of a run."""
FAULTS = {
    "killed": Faults().kill(1, FAULT_STEP),
    "killed, who writes": Faults().kill(0, FAULT_STEP, "exchanged"),
    "held": Faults().stop(1, FAULT_STEP, FAULT_SEC),
    "slowed by half": Faults().slow(1, 2.0, FAULT_STEP),
    "cut off": Faults().partition(1, FAULT_STEP, FAULT_SEC),
}
WHOLE_RUN, TRAINER, TORCHRUN = "everything", "trainer", "torchrun"
REPLICA_SCENARIOS = (*FAULTS, WHOLE_RUN, TORCHRUN)
STORE_SCENARIOS = ("process", "node", "migration", TRAINER, WHOLE_RUN)
_TIMEOUT_SEC = 600.0
_POLL_SEC = 0.001


class CommitWatcher:
    """Times at which steps of a run are committed, from polling its metrics file."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        """Watch the run of a process."""
        self._path = run / METRICS
        self.process = process
        self.commits: list[tuple[float, int]] = []

    def wait_for(self, condition: Callable[[int], bool]) -> float:
        """Poll until the number of committed steps meets a condition; return the time.

        Raises:
            RuntimeError: the run ended before.
        """
        start = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            count = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0
            now = time.monotonic()
            if not self.commits or count != self.commits[-1][1]:
                self.commits.append((now, count))
            if condition(count):
                return now
            if ended or now - start > _TIMEOUT_SEC:
                raise RuntimeError(f"run must commit steps, got {count} and then none")
            time.sleep(_POLL_SEC)

    def longest_gap(self, since: float, until: float = float("inf")) -> float:
        """Return the longest time between two commits, in seconds."""
        times = [at for at, _ in self.commits if since <= at <= until]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def median_gap(self, until: float) -> float:
        """Return the median seconds between two commits before a time."""
        times = [at for at, count in self.commits if at <= until and count > 2]
        return statistics.median([b - a for a, b in pairwise(times)])


def write_store_job(folder: Path, stores: StoreProcesses | None) -> Path:
    """Write the demo's job with the benchmark's model; return its path."""
    job = read_job(DEMO_JOB)
    job["data"].setdefault("oracle", {})["batch_samples"] = BATCH
    job["train"] = {
        "model": {"name": "dlrm", "bottom_layers": [32], "top_layers": [32]},
        "embedding_dim": 16,
        "batch_samples": BATCH,
        "num_threads": 1,
        "cache": {"lookahead": 4},
        "checkpoint": {"every_steps": EVERY},
    }
    if stores is not None:
        job["train"]["stores"] = {
            "addresses": stores.addresses,
            "token_file": str(stores.directory / TOKEN),
            "timeout": "60s",
        }
    return write_job_file(folder, job)


def start_training(job: Path, dataset: Path, run: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start one training process with the planned cache."""
    command = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", str(dataset)]
    command += ["--output", str(run), "--embedding", "cached", "--steps", str(STORE_STEPS)]
    return subprocess.Popen(
        [*command, *options, "--json"], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )


def measure_store_failure(scenario: str, dataset: Path, scratch: Path) -> dict[str, Any]:
    """Run one scenario of `STORE_SCENARIOS` and return what it cost.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as name, ExitStack() as stack:
        folder = Path(name)
        stores = stack.enter_context(StoreProcesses(2, folder / "stores"))
        job = write_store_job(folder / "job", stores)
        run = folder / "run"
        supervised = ("--restarts", "1") if scenario == TRAINER else ()
        watcher = CommitWatcher(run, start_training(job, dataset, run, *supervised))
        stack.callback(watcher.process.kill)
        watcher.wait_for(lambda count: count >= FAULT_STEP)
        fault, before, costs = time.monotonic(), watcher.commits[-1][1], dict[str, Any]()
        if scenario == "migration":
            slots = ((0, 1024),)
            source, target = stores.addresses
            access = read_access(folder / "stores" / TOKEN)
            with ThreadPoolExecutor(1) as pool:
                move = pool.submit(migrate_slots, [source], target, slots, access)
                watcher.wait_for(lambda _: move.done())
            costs["moved"] = move.result()
        elif scenario == TRAINER:
            (trainer,) = forked(watcher.process.pid, "train")
            os.kill(trainer, 9)
        elif scenario == WHOLE_RUN:
            watcher.process.kill()
            watcher.process.wait()
            watcher.process = start_training(job, dataset, run, "--resume")
            stack.callback(watcher.process.kill)
        else:
            os.kill(stores.pids[0], 9)
            if scenario == "node":
                shutil.rmtree(folder / "stores" / "store-000", ignore_errors=True)
        end_of_fault = time.monotonic()
        watcher.wait_for(lambda count: count > before)
        after = min(at for at, count in watcher.commits if at > fault and count > before)
        saved = watcher.wait_for(lambda count: count >= FAULT_STEP + EVERY // 2)
        watcher.wait_for(lambda count: count >= STORE_STEPS)
        status = watcher.process.wait()
        if status != 0:
            raise RuntimeError(f"{scenario} must train to the end, got exit status {status}")
        gap, usual = watcher.longest_gap(fault - 1.0, saved), watcher.median_gap(fault)
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        lowest = min(count for at, count in watcher.commits if at >= fault)
        return costs | {
            "next_step_sec": round(after - fault, 3),
            "longest_gap_sec": round(gap, 3),
            "usual_gap_sec": round(usual, 3),
            "fault_sec": round(end_of_fault - fault, 3),
            "recomputed_steps": summary["recomputed_steps"] or max(0, before - lowest),
            "loss_last": summary["loss_last"],
        }


def write_replica_job(folder: Path) -> Path:
    """Write the job of all replica scenarios; return its path."""
    job = read_job(write_store_job(folder, None))
    job["data"]["oracle"]["epochs"] = job["train"]["epochs"] = EPOCHS
    job["train"]["pooling"] = "sum"
    return write_job_file(folder, job)


def start_replicas(
    job: Path, dataset: Path, run: Path, faults: Faults, *options: str
) -> subprocess.Popen[bytes]:
    """Start our launcher."""
    command = [sys.executable, "-m", *FAULTY, "train", str(job), "--dataset", str(dataset)]
    command += ["--output", str(run), "--replicas", str(NUM_REPLICAS), *options, "--json"]
    return start_silently(command, faults.environment())


def start_torchrun(job: Path, dataset: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start the peer, one process of which kills itself once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(NUM_REPLICAS)]
    command += ["--max-restarts", "1", "-m", "benchmarks.recovery_peer", str(job)]
    command += ["--dataset", str(dataset), "--output", str(run), "--every", str(EVERY)]
    command += ["--steps", str(FAULT_STEP + EVERY), "--kill-at", str(FAULT_STEP)]
    return start_silently(command)


def start_silently(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process without output."""
    none = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=none, stderr=none, env=environment)


def train_undisturbed(job: Path, dataset: Path, run: Path) -> Path:
    """Train a run without failures; return its folder.

    Raises:
        RuntimeError: the run failed.
    """
    if start_replicas(job, dataset, run, Faults()).wait() != 0:
        raise RuntimeError("the run without failures must succeed")
    return run


def measure_replica_failure(
    scenario: str, job: Path, dataset: Path, undisturbed: Path, scratch: Path
) -> dict[str, Any]:
    """Run one scenario of `REPLICA_SCENARIOS` and return what it cost.

    Args:
        scenario: one of `REPLICA_SCENARIOS`.
        job: job file.
        dataset: of the demo.
        undisturbed: a run of the same job without failures.
        scratch: folder for the run.

    Raises:
        RuntimeError: the run failed.
    """
    num_steps = len(read_metrics(undisturbed / METRICS))
    with tempfile.TemporaryDirectory(dir=scratch) as name, ExitStack() as stack:
        run = Path(name) / "run"
        if scenario == TORCHRUN:
            process, num_steps = start_torchrun(job, dataset, run), FAULT_STEP + EVERY
        else:
            process = start_replicas(job, dataset, run, FAULTS.get(scenario, Faults()))
        watcher = CommitWatcher(run, process)
        stack.callback(lambda: watcher.process.kill())
        watcher.wait_for(lambda count: count >= FAULT_STEP)
        if scenario == WHOLE_RUN:
            fault = time.monotonic()
            process.kill()
            process.wait()
            watcher.process = start_replicas(job, dataset, run, Faults(), "--resume")
            watcher.wait_for(lambda count: count < FAULT_STEP)  # processes that end may commit more
        elif scenario in FAULTS and FAULTS[scenario].schedule[0].kind == "slow":
            fault = time.monotonic()  # this fault leaves no mark
        else:
            fault = wait_for_fault(run, watcher)
        before = max(count for at, count in watcher.commits if at <= fault)
        if scenario != WHOLE_RUN:  # the line of the step before may not be written yet
            before = max(before, FAULT_STEP)
        after = watcher.wait_for(lambda count: count > before)
        watcher.wait_for(lambda count: count >= num_steps)
        if watcher.process.wait() != 0:
            raise RuntimeError(f"{scenario} must train to the end, got another exit status")
        lowest = min(count for at, count in watcher.commits if at >= fault)
        cost = {
            "next_step_sec": round(after - fault, 3),
            "recomputed_steps": max(0, before - lowest),
            "usual_gap_sec": round(watcher.median_gap(fault), 4),
        }
        if scenario == TORCHRUN:
            return cost
        same = compare_runs(undisturbed, run).difference is None
        equal = {"equal_bits": same and not verify_run(run).problems}
        return cost | equal | rejoin_costs(run, watcher, after)


def wait_for_fault(run: Path, watcher: CommitWatcher) -> float:
    """Wait for the mark of the fault, recording commits; return when the fault happened."""
    mark = run / DONE / "0"
    while not mark.is_file():
        count = watcher.commits[-1][1]
        watcher.wait_for(lambda current, count=count: current > count or mark.is_file())
    return time.monotonic() - (time.time() - mark.stat().st_mtime)


def rejoin_costs(run: Path, watcher: CommitWatcher, after: float) -> dict[str, Any]:
    """Return the seconds until all replicas train again, and the longest gap around the rejoin."""
    num_replicas = [metric.num_replicas for metric in read_metrics(run / METRICS)]
    late = [
        (at, count)
        for at, count in watcher.commits
        if at >= after and 0 < count <= len(num_replicas)
    ]
    rejoined = [at for at, count in late if num_replicas[count - 1] == NUM_REPLICAS]
    if not rejoined or len(late) < 2:
        return {"both_sec": None}
    around = [b - a for (a, _), (b, _) in pairwise(late) if b <= rejoined[0] + 1.0]
    return {
        "both_sec": round(rejoined[0] - after, 3),
        "join_gap_sec": round(max(around, default=0.0), 4),
        "late_gap_sec": round(statistics.median(b - a for (a, _), (b, _) in pairwise(late)), 4),
    }


def in_rounds(
    scenarios: Iterable[str], rounds: int, measure: Callable[[str], dict[str, Any]]
) -> Costs:
    """Measure every scenario in every round, in reverse order in odd rounds."""
    costs: Costs = {scenario: [] for scenario in scenarios}
    for number in range(rounds):
        for scenario in costs if number % 2 == 0 else reversed(costs):
            costs[scenario].append(measure(scenario))
            sys.stderr.write(f"{scenario}: {json.dumps(costs[scenario][-1])}\n")
    return costs


def measure_replicas(log: Path, scratch: Path, rounds: int) -> Costs:
    """Measure all replica scenarios."""
    job = write_replica_job(scratch / "job-replicas")
    dataset = build_dataset(job, log, scratch / "dataset-replicas")
    undisturbed = train_undisturbed(job, dataset, scratch / "alone")
    return in_rounds(
        REPLICA_SCENARIOS,
        rounds,
        lambda scenario: measure_replica_failure(scenario, job, dataset, undisturbed, scratch),
    )


def measure_stores(log: Path, scratch: Path, rounds: int) -> Costs:
    """Measure all store scenarios."""
    job = write_store_job(scratch / "job-stores", None)
    dataset = build_dataset(job, log, scratch / "dataset-stores")
    return in_rounds(
        STORE_SCENARIOS,
        rounds,
        lambda scenario: measure_store_failure(scenario, dataset, scratch),
    )


def headline(costs: Costs, ours: str, peer: str) -> dict[str, Any]:
    """Compare the seconds to the next new step of two scenarios."""
    our_sec, peer_sec = ([one["next_step_sec"] for one in costs[name]] for name in (ours, peer))
    ratios = [b / a for a, b in zip(our_sec, peer_sec, strict=True)]
    return {
        "ours": round(statistics.median(our_sec), 3),
        "peer": round(statistics.median(peer_sec), 3),
        "ratio": round(statistics.median(ratios), 3),
        "unit": f"seconds to the next new step: {ours} against {peer}",
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {options.parts!r}")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="presage-recovery-") as name:
        scratch = Path(name)
        log = scratch / "log"
        start = datetime(2026, 1, 1)
        write_log(GeneratorConfig(num_samples=options.samples, seed=1, start=start), log)
        if "replicas" in parts:
            costs = measure_replicas(log, scratch, options.rounds)
            equal = [one.get("equal_bits", True) for runs in costs.values() for one in runs]
            result |= headline(costs, "killed", TORCHRUN)
            result |= {"equal_bits": all(equal), "replicas": costs}
        if "stores" in parts:
            costs = measure_stores(log, scratch, options.rounds)
            losses = {one["loss_last"] for runs in costs.values() for one in runs}
            if "replicas" not in parts:
                result |= headline(costs, "process", WHOLE_RUN)
            result |= {"equal_losses": len(losses) == 1, "stores": costs}
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
