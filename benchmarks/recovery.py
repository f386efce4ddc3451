"""Cost of failures of replicas, of stores and of a whole run, and of moving slots between stores.

Each scenario reports the seconds from the failure to the next new step and the steps that were
trained again. `replicas` trains the demo's job on two replicas; it also reports the seconds until
all replicas train again, the longest gap between commits around the rejoin, and the usual gap. Its
peers are `torchrun` over TorchRec's sharded tables (`peers/torchrun.py`), which restarts all
processes from the newest checkpoint, and our own launcher, killed and restarted with `--resume`.
`stores` trains one process with the planned cache in front of two supervised store processes; a
store is killed (`kill -9`), alone or with its directory, or a quarter of all slots moves to the
other one; or the trainer is killed, and is forked again (`--restarts`) or started again with
`--resume`. It also reports the longest gap between commits until the next checkpoint. `bound` is of
a recovery that takes no longer than the heartbeat by which a loss is noticed.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.commits import CommitWatcher
from benchmarks.common.harness import Options, alternate, compared, median
from benchmarks.common.logs import (
    DEMO_JOB,
    demo_dataset,
    read_job,
    write_job_file,
)
from benchmarks.common.processes import module, start_quietly
from presage.schemas.run.records import METRICS, SUMMARY, read_metrics
from presage.trainer.run.compare import compare_runs
from presage.trainer.run.folder import verify_run
from presage.trainer.stores.remote.connection import read_access
from presage.trainer.stores.remote.processes import TOKEN, StoreProcesses, migrate_slots
from tests.trainer.faults import DONE, FAULTY, Faults
from tests.trainer.processes import forked

Costs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Scenario -> its costs in each round."""
HEARTBEAT_SEC = 1.0
"""After which a silent replica is lost."""
EVERY, FAULT_STEP, BATCH = 20, 30, 1024
"""Steps between checkpoints, steps before the failure, samples of a step."""
NUM_REPLICAS, FAULT_SEC = 2, 3.0
"""Of `replicas`: processes, duration of failures that end by themselves."""
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
    words = ("train", job, "--dataset", dataset, "--output", run, "--embedding", "cached")
    return start_quietly(module("trainer", *words, "--steps", STORE_STEPS, *options, "--json"))


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
        fault, before, costs = time.time(), watcher.commits[-1][1], dict[str, Any]()
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
        end_of_fault = time.time()
        watcher.wait_for(lambda count: count > before)
        after = min(at for at, count in watcher.commits if at > fault and count > before)
        saved = watcher.wait_for(lambda count: count >= FAULT_STEP + EVERY // 2)
        watcher.wait_for(lambda count: count >= STORE_STEPS)
        status = watcher.process.wait()
        if status != 0:
            raise RuntimeError(f"{scenario} must train to the end, got exit status {status}")
        gap, usual = watcher.longest_gap(fault - 1.0, saved), watcher.median_gap(fault)
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        return costs | {
            "next_step_sec": round(after - fault, 3),
            "longest_gap_sec": round(gap, 3),
            "usual_gap_sec": round(usual, 3),
            "fault_sec": round(end_of_fault - fault, 3),
            "recomputed_steps": summary["recomputed_steps"] or watcher.recomputed(before, fault),
            "loss_last": summary["loss_last"],
        }


def write_replica_job(folder: Path, epochs: int) -> Path:
    """Write the job of all replica scenarios; return its path."""
    job = read_job(write_store_job(folder, None))
    job["data"]["oracle"]["epochs"] = job["train"]["epochs"] = epochs
    job["train"]["pooling"] = "sum"
    return write_job_file(folder, job)


def start_replicas(
    job: Path, dataset: Path, run: Path, faults: Faults, *options: str
) -> subprocess.Popen[bytes]:
    """Start our launcher."""
    words = (*FAULTY, "train", job, "--dataset", dataset, "--output", run)
    command = module(*words, "--replicas", NUM_REPLICAS, *options, "--json")
    return start_quietly(command, faults.environment())


def start_torchrun(job: Path, dataset: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start the peer, one process of which kills itself once."""
    launcher = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    launcher += ("--nproc-per-node", NUM_REPLICAS, "--max-restarts", 1)
    peer = ("-m", "benchmarks.peers.torchrun", job, "--dataset", dataset, "--output", run)
    steps = ("--every", EVERY, "--steps", FAULT_STEP + EVERY, "--kill-at", FAULT_STEP)
    return start_quietly(module(*launcher, *peer, *steps))


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
            fault = time.time()
            process.kill()
            process.wait()
            watcher.process = start_replicas(job, dataset, run, Faults(), "--resume")
            watcher.wait_for(lambda count: count < FAULT_STEP)  # processes that end may commit more
        elif scenario in FAULTS and FAULTS[scenario].schedule[0].kind == "slow":
            fault = time.time()  # this fault leaves no mark
        else:
            fault = wait_for_fault(run, watcher)
        before = max(count for at, count in watcher.commits if at <= fault)
        if scenario != WHOLE_RUN:  # the line of the step before may not be written yet
            before = max(before, FAULT_STEP)
        after = watcher.wait_for(lambda count: count > before)
        watcher.wait_for(lambda count: count >= num_steps)
        if watcher.process.wait() != 0:
            raise RuntimeError(f"{scenario} must train to the end, got another exit status")
        cost = {
            "next_step_sec": round(after - fault, 3),
            "recomputed_steps": watcher.recomputed(before, fault),
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
    return mark.stat().st_mtime


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


def measure_replicas(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the scenarios of replicas: a killed one against torchrun."""
    job = write_replica_job(scratch / "job", options.epochs)
    dataset = demo_dataset(scratch, options.samples, job)
    undisturbed = train_undisturbed(job, dataset, scratch / "alone")
    costs = alternate(
        {
            name: partial(measure_replica_failure, name, job, dataset, undisturbed, scratch)
            for name in REPLICA_SCENARIOS
            if not options.small or name in ("killed", TORCHRUN)
        },
        options.rounds,
    )
    equal = all(one.get("equal_bits", True) for runs in costs.values() for one in runs)
    return compare(costs, "killed", TORCHRUN, equal_bits=equal)


def measure_stores(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the scenarios of stores: a killed one against a restart of everything."""
    job = write_store_job(scratch / "job", None)
    dataset = demo_dataset(scratch, options.samples, job)
    costs = alternate(
        {name: partial(measure_store_failure, name, dataset, scratch) for name in STORE_SCENARIOS},
        options.rounds,
    )
    losses = {one["loss_last"] for runs in costs.values() for one in runs}
    return compare(costs, "process", WHOLE_RUN, equal_losses=len(losses) == 1)


def compare(costs: Costs, ours: str, peer: str, **more: Any) -> dict[str, Any]:
    """Compare the seconds to the next new step of two scenarios; the bound is the heartbeat."""
    sec = {name: [one["next_step_sec"] for one in runs] for name, runs in costs.items()}
    unit = f"seconds to the next new step: {ours} against {peer}"
    bound = median(sec[peer]) / HEARTBEAT_SEC if peer == TORCHRUN else None
    return compared(sec[ours], sec[peer], unit, bound=bound, scenarios=costs, **more)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("recovery", __doc__, rounds=2)
    parts = {"replicas": measure_replicas, "stores": measure_stores}
    options.add_parts(parts, small=("replicas",))
    options.add("--samples", 100_000, "of the demo's log")
    options.add("--epochs", 8, "over it, of `replicas`", small=2)
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
