"""Bytes that training processes exchange per step, and the time of a step, against TorchRec.

Both sides train the same DLRM on the same batches of the same log from the same parameters. Our
replicas each hold all rows; a replica computes the microbatches of its share of a step and sends
their sums to every other replica, without ids. TorchRec runs `DistributedModelParallel` over gloo:
tables are sharded by its planner, or by rows; ids are sent to the process that holds the table,
pooled vectors are sent back, their gradients are sent to the table again, and dense gradients are
averaged. TorchRec's batches are in memory; ours are read during the measurement. Bytes are the
kernel's count of what was sent over all TCP connections of all processes, without the lighthouse.
The sides alternate in turns of some steps; a waiting process is idle, and each process has one
thread. `parity` is the largest relative difference of the loss of the first step and of all steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common.harness import (
    Options,
    alternate,
    compared,
    headline,
    median,
    ratios,
    report,
)
from benchmarks.common.logs import build_dataset, each_log, job_path, read_job, write_job_file
from benchmarks.peers.torchrec_ranks import ProcessConfig, Turn, run_replica, run_torchrec
from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.records import METRICS, read_metrics
from presage.trainer.elastic.membership import Lighthouse
from presage.trainer.run.folder import identity_of, start_run

LOGS, DIM, BATCH, STEPS = ("mind", "demo"), 64, 4096, 6
HEARTBEAT_SEC = 5.0

Run = Callable[[ProcessConfig, Connection], None]


def write_job(name: str, folder: Path) -> Path:
    """Write a shipped job with the benchmark's model; return its path."""
    shipped = job_path(name)
    job = read_job(shipped)
    job["data"].setdefault("oracle", {})["batch_samples"] = BATCH
    job["train"] = {
        "model": {
            "name": "dlrm",
            "bottom_layers": [64],
            "top_layers": [64, 32],
        },
        "embedding_dim": DIM,
        "batch_samples": BATCH,
        "pooling": "sum",
        "dtype": "float32",
        "sparse_optimizer": {"name": "rowwise_adagrad"},
        "num_threads": 1,
    }
    job.pop("schedule", None)
    return write_job_file(folder, job, shipped)


class ProcessGroup:
    """The processes of one side; a context in which they run."""

    def __init__(self, name: str, run: Run, config: ProcessConfig) -> None:
        """Store the configuration of all processes; each gets its own rank."""
        self.name = name
        self._run, self._config = run, config
        self._connections: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> ProcessGroup:
        """Start all processes and wait until they are ready for their first step."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.peers.torchrec_ranks", "pandas"])
        for rank in range(self._config.count):
            parent, child = context.Pipe()
            config = replace(self._config, rank=rank)
            process = context.Process(target=self._run, args=(config, child), daemon=True)
            process.start()
            child.close()
            self._connections.append(parent)
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
        for connection in self._connections:
            connection.recv()
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the processes."""
        self._stack.close()

    def train(self, num_steps: int) -> tuple[float, list[Turn]]:
        """Train some steps; return the seconds until the last process finished."""
        start = time.perf_counter()
        for connection in self._connections:
            connection.send(num_steps)
        turns = [connection.recv() for connection in self._connections]
        return time.perf_counter() - start, turns


def measure_count(
    job: Path, dataset: Path, count: int, rounds: int, plans: Sequence[str], scratch: Path
) -> dict[str, Any]:
    """Train all sides in turns.

    Args:
        job: job file.
        dataset: built from it.
        count: processes of each side.
        rounds: turns of each side after the first, which is a warm-up.
        plans: sharding plans of TorchRec's tables.
        scratch: folder for our run.
    """
    run = scratch / f"run-{count}"
    opened = open_dataset(dataset)
    start_run(run, job, opened, identity_of(opened, load_job(job).train, follows=False))
    # one step more: our replicas wait for the next turn before a step
    num_steps = (rounds + 1) * STEPS + 1
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse("127.0.0.1", 0, HEARTBEAT_SEC))

        def start(name: str, run_process: Run, address: str, plan: str = "") -> ProcessGroup:
            config = ProcessConfig(
                rank=0,
                count=count,
                job=job,
                dataset=dataset,
                run=run,
                address=address,
                num_steps=num_steps,
                plan=plan,
            )
            return stack.enter_context(ProcessGroup(name, run_process, config))

        groups = [start("ours", run_replica, lighthouse.address)]
        for plan in plans:
            groups.append(start(plan, run_torchrec, f"file://{scratch}/group-{count}-{plan}", plan))
        turns = alternate({g.name: partial(g.train, STEPS) for g in groups}, rounds + 1)
        losses = [metric.loss for metric in read_metrics(run / METRICS)]
    num_bytes = {name: bytes_per_step(of[1:]) for name, of in turns.items()}
    seconds = {name: [sec / STEPS for sec, _ in of[1:]] for name, of in turns.items()}
    return compared(
        num_bytes["ours"],
        num_bytes[plans[0]],
        f"bytes per step, dim {DIM}, batch {BATCH}",
        step_ms={name: round(median(of) * 1e3, 1) for name, of in seconds.items()},
        bytes={name: median(of) for name, of in num_bytes.items()},
        faster={plan: ratios(seconds["ours"], seconds[plan]) for plan in plans},
        parity={plan: parity(turns[plan], losses) for plan in plans},
    )


def bytes_per_step(turns: Sequence[tuple[float, Sequence[Turn]]]) -> list[float]:
    """Return the bytes that all processes of a side sent per step, in each round."""
    return [sum(turn.bytes_sent for turn in of) // STEPS for _, of in turns]


def parity(
    turns: Sequence[tuple[float, Sequence[Turn]]], losses: Sequence[float]
) -> dict[str, float]:
    """Return the largest relative difference of the loss of the first step, and of all steps."""
    theirs = [sum(parts) for _, of in turns for parts in zip(*(t.losses for t in of), strict=True)]
    differences = [abs(a / b - 1) for a, b in zip(theirs, losses, strict=False)]
    return {"first": differences[0], "all": max(differences)}


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all logs and counts; the result is the first one."""
    details: dict[str, Any] = {}
    for name, log, folder in each_log(options, scratch):
        job = write_job(name, folder / "job")
        dataset = build_dataset(job, log, folder / "dataset")
        for count in options.counts:
            label = f"{name}, {count} processes"
            details[label] = measure_count(
                job, dataset, count, options.rounds, options.plans, folder
            )
            report(label, details[label])
    return headline(details)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("scaling", __doc__, rounds=3)
    options.add_logs(LOGS, small=("demo",))
    plans = ("planner", "row_wise")
    options.add("--counts", (2, 4), "processes of each side", small=(2,))
    options.add("--plans", plans, "of TorchRec's tables", small=("row_wise",), choices=plans)
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
