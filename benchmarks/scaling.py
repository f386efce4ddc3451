"""Bytes that training processes exchange per step, and the time of a step, against TorchRec.

`python -m benchmarks.scaling [--json] [--datasets NAME,NAME] [--counts 2,4] [--rounds N]
[--plans planner,row_wise]`

Both sides train the same DLRM on the same batches of the same log from the same parameters. Ours
are replicas: each has all rows, computes the leaves of its share, and sends the sums of them to
every other, without ids. TorchRec's are a `DistributedModelParallel` over gloo: tables are sharded
as its planner chooses, or by rows; ids go to the process that has the table, pooled vectors come
back and their gradients go there again, and dense gradients are averaged. Its batches are in
memory, ours are read meanwhile. Bytes are what the kernel says was sent over all TCP connections
of all processes, the lighthouse's left out. Sides take turns of some steps; processes wait between
their turns and have one thread each. `parity` is the largest relative difference of the loss of a
step before any update was made, `parity_after` that of all steps.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from benchmarks.logs import each_log, job_path, log_parser, write_result
from benchmarks.order import built
from benchmarks.ports import free_ports
from benchmarks.scaling_sides import Side, Turn, ours, torchrec
from schemas.config.job import load_job
from schemas.dataset import open_dataset
from schemas.run_log import METRICS, read_metrics
from trainer.elastic.membership import Lighthouse
from trainer.run import start_run

LOGS, DIM, BATCH, STEPS = ("mind", "demo"), 64, 4096, 6
HEARTBEAT_SEC = 5.0


def write_job(name: str, folder: Path) -> Path:
    """Write a shipped job with the benchmark's model; return its path."""
    folder.mkdir(parents=True)
    shipped = job_path(name)
    job = yaml.safe_load(shipped.read_text(encoding="utf-8"))
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
    schema = job["data"].get("schema", "schema.pbtxt")
    shutil.copy(shipped.parent / schema, folder / schema)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


class Team:
    """The processes of one side; a context in which they run."""

    def __init__(self, name: str, work: Callable[[Side, Connection], None], side: Side) -> None:
        """Keep what each is told, but for its rank."""
        self.name = name
        self._work, self._side = work, side
        self._wires: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> Team:
        """Start all and wait until they are ready for their first step."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.scaling_sides", "pandas"])
        for rank in range(self._side.count):
            mine, its = context.Pipe()
            told = replace(self._side, rank=rank)
            process = context.Process(target=self._work, args=(told, its), daemon=True)
            process.start()
            its.close()
            self._wires.append(mine)
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
        for wire in self._wires:
            wire.recv()
        return self

    def __exit__(self, *error: object) -> None:
        """End them."""
        self._stack.close()

    def train(self, num_steps: int) -> tuple[float, list[Turn]]:
        """Train some steps; return the seconds until the last process was done."""
        start = time.perf_counter()
        for wire in self._wires:
            wire.send(num_steps)
        turns = [wire.recv() for wire in self._wires]
        return time.perf_counter() - start, turns


@dataclass(slots=True)
class Taken:
    """Seconds and bytes of a step of one side, a value for each turn."""

    seconds: list[float]
    num_bytes: list[int]
    losses: list[float]

    def add(self, seconds: float, turns: Sequence[Turn]) -> None:
        """Add a turn."""
        self.seconds.append(seconds / STEPS)
        self.num_bytes.append(sum(turn.bytes_sent for turn in turns) // STEPS)
        self.losses += [sum(parts) for parts in zip(*(t.losses for t in turns), strict=True)]


def measure(
    job: Path, dataset: Path, count: int, rounds: int, plans: Sequence[str], scratch: Path
) -> dict[str, Any]:
    """Let all sides train in turns.

    Args:
        job: job file.
        dataset: built of it.
        count: processes of each side.
        rounds: turns of each side after its first, which does not count.
        plans: of TorchRec's tables.
        scratch: folder for our run.
    """
    run = scratch / f"run-{count}"
    start_run(run, job, open_dataset(dataset), load_job(job).train)
    num_steps = (rounds + 1) * STEPS
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse("127.0.0.1", 0, HEARTBEAT_SEC))

        def team(name: str, work: Callable[[Side, Connection], None], plan: str) -> Team:
            meeting = lighthouse.address if work is ours else f"127.0.0.1:{free_ports(1)[0]}"
            # one step more: ours waits for its next turn before a step
            side = Side(
                rank=0,
                count=count,
                job=job,
                dataset=dataset,
                run=run,
                meeting=meeting,
                num_steps=num_steps + 1,
                plan=plan,
            )
            return stack.enter_context(Team(name, work, side))

        teams = [team("ours", ours, ""), *(team(plan, torchrec, plan) for plan in plans)]
        taken = {each.name: Taken([], [], []) for each in teams}
        for number in range(rounds + 1):
            for each in teams if number % 2 else reversed(teams):
                taken[each.name].add(*each.train(STEPS))
        taken["ours"].losses = [metric.loss for metric in read_metrics(run / METRICS)]
    return {name: shown(side, taken["ours"]) for name, side in taken.items()}


def shown(side: Taken, reference: Taken) -> dict[str, Any]:
    """Return the medians of a side, its first turn left out, and how far its losses are."""
    apart = [abs(a / b - 1) for a, b in zip(side.losses, reference.losses, strict=False)]
    return {
        "step_ms": round(statistics.median(side.seconds[1:]) * 1e3, 1),
        "bytes": round(statistics.median(side.num_bytes[1:])),
        "faster": [round(a / b, 3) for a, b in zip(side.seconds, reference.seconds, strict=True)][
            1:
        ],
        "parity": apart[0],
        "parity_after": max(apart),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = log_parser("scaling", __doc__, LOGS)
    parser.add_argument("--counts", default="2,4", help="processes of each side, by comma")
    parser.add_argument("--plans", default="planner,row_wise", help="of TorchRec's tables")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    plans = options.plans.split(",")
    found: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        job = write_job(name, scratch / "job")
        dataset = built(job, log, scratch / "dataset")
        for count in map(int, options.counts.split(",")):
            label = f"{name}, {count} processes"
            found[label] = measure(job, dataset, count, options.rounds, plans, scratch)
            sys.stderr.write(f"{label}: {json.dumps(found[label])}\n")
    label, first = next(iter(found.items()))
    result = {
        "ours": first["ours"]["bytes"],
        "peer": first[plans[0]]["bytes"],
        "ratio": round(first[plans[0]]["bytes"] / first["ours"]["bytes"], 3),
        "unit": f"bytes per step, {label}, dim {DIM}, batch {BATCH}",
        "rounds": first[plans[0]]["faster"],
        "details": found,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
