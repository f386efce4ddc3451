"""What it costs when a store dies, with and without copies, and when slots move.

`python -m benchmarks.recovery_stores [--json] [--samples N] [--rounds N]`

The demo's tables in two store processes that a supervisor starts again, one training process with
the planned cache. After some steps a store is killed (`kill -9`), alone or with its directory, or
half of its slots move to the other one. Told are the seconds from then to the next step that was
not committed before, the longest time between two commits until the next checkpoint beside the
median before, and the steps that were trained again. The peer is what is left without any of this:
the training process is killed and started again with `--resume` from its newest checkpoint. All in
the same rounds.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.order import built
from pipelines.generator.log import GeneratorConfig, write_log
from schemas.events import METRICS, SUMMARY
from trainer.stores.manage import migrate_slots
from trainer.stores.processes import TOKEN, LocalStores

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "schemas" / "demo"
EVERY, FAULT, STEPS, BATCH = 20, 30, 70, 1024
"""Steps between checkpoints, before the fault, and in all; samples of a step."""
_LIMIT_SEC = 600.0
_LOOK_SEC = 0.001
SCENARIOS = {
    "process": 1,
    "node": 1,
    "process, with copies": 2,
    "node, with copies": 2,
    "migration": 1,
    "everything": 1,
}
"""What happens, and stores of each slot."""


def write_job(folder: Path, stores: LocalStores | None, replicas: int) -> Path:
    """Write the demo's job with the benchmark's widths; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    job = yaml.safe_load((DEMO / "job.yaml").read_text(encoding="utf-8"))
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
            "replicas": replicas,
            "timeout": "60s",
        }
    shutil.copy(DEMO / "schema.pbtxt", folder / "schema.pbtxt")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


class Commits:
    """When each step of a run was committed, as its metrics file grows."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        """Keep the parts."""
        self._path = run / METRICS
        self.process = process
        self.seen: list[tuple[float, int]] = []

    def until(self, wanted: Callable[[int], bool]) -> float:
        """Look until so many lines are there; return when they were.

        Raises:
            RuntimeError: the run ended before.
        """
        start = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            count = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0
            now = time.monotonic()
            if not self.seen or count != self.seen[-1][1]:
                self.seen.append((now, count))
            if wanted(count):
                return now
            if ended or now - start > _LIMIT_SEC:
                raise RuntimeError(f"run must commit steps, got {count} and then none")
            time.sleep(_LOOK_SEC)

    def longest_gap(self, since: float, until: float = float("inf")) -> float:
        """Return the most seconds between two looks at which there was news."""
        times = [at for at, _ in self.seen if since <= at <= until]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def median_gap(self, until: float) -> float:
        """Return the usual seconds between two commits before a moment."""
        times = [at for at, count in self.seen if at <= until and count > 2]
        return statistics.median([b - a for a, b in pairwise(times)])


def trained(job: Path, dataset: Path, run: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a training process."""
    command = [sys.executable, "-m", "trainer", "train", str(job), "--dataset", str(dataset)]
    command += ["--output", str(run), "--embedding", "cached", "--steps", str(STEPS), *options]
    return subprocess.Popen([*command, "--json"], cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def measure(scenario: str, dataset: Path, scratch: Path) -> dict[str, Any]:
    """Let one thing happen in a run; return what it cost.

    Args:
        scenario: one of `SCENARIOS`.
        dataset: of the demo.
        scratch: folder for the run.

    Raises:
        RuntimeError: the run did not end well.
    """
    replicas = SCENARIOS[scenario]
    with tempfile.TemporaryDirectory(dir=scratch) as name, ExitStack() as opened:
        folder = Path(name)
        stores = opened.enter_context(LocalStores(2, folder / "stores", replicas=replicas))
        job = write_job(folder / "job", stores, replicas)
        run = folder / "run"
        commits = Commits(run, trained(job, dataset, run))
        opened.callback(commits.process.kill)
        commits.until(lambda count: count >= FAULT)
        fault, before, found = time.monotonic(), commits.seen[-1][1], dict[str, Any]()
        if scenario == "migration":
            slots = ((0, 1024),)
            giver, taker = stores.addresses
            moved = migrate_slots(giver, taker, slots, token_file=folder / "stores" / TOKEN)
            found["moved"] = asdict(moved)
        elif scenario == "everything":
            commits.process.kill()
            commits.process.wait()
            commits.process = trained(job, dataset, run, "--resume")
            opened.callback(commits.process.kill)
        else:
            os.kill(stores.pids[0], 9)
            if scenario.startswith("node"):
                shutil.rmtree(folder / "stores" / "store-000", ignore_errors=True)
        done = time.monotonic()
        after = commits.until(lambda count: count > before)
        saving = commits.until(lambda count: count >= FAULT + EVERY // 2)
        commits.until(lambda count: count >= STEPS)
        if commits.process.wait() != 0:
            raise RuntimeError(f"{scenario} must train to the end, got another exit status")
        gap, usual = commits.longest_gap(fault - 1.0, saving), commits.median_gap(fault)
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        lowest = min(count for at, count in commits.seen if at >= fault)
        return found | {
            "next_step_sec": round(after - fault, 3),
            "longest_gap_sec": round(gap, 3),
            "usual_gap_sec": round(usual, 3),
            "fault_sec": round(done - fault, 3),
            "recomputed_steps": summary["recomputed_steps"] or max(0, before - lowest),
            "loss_last": summary["loss_last"],
        }


def measure_all(dataset: Path, scratch: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each scenario cost in each round; rounds take turns in their order."""
    found: dict[str, list[dict[str, Any]]] = {scenario: [] for scenario in SCENARIOS}
    for number in range(rounds):
        for scenario in SCENARIOS if number % 2 == 0 else reversed(SCENARIOS):
            found[scenario].append(measure(scenario, dataset, scratch))
            sys.stderr.write(f"{scenario}: {json.dumps(found[scenario][-1])}\n")
    return found


def summarised(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what is printed: a store's death against that of everything."""
    peer = [one["next_step_sec"] for one in found["everything"]]
    ours = [one["longest_gap_sec"] for one in found["process"]]
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    return {
        "ours": round(statistics.median(ours), 3),
        "peer": round(statistics.median(peer), 3),
        "ratio": round(statistics.median(ratios), 3),
        "unit": "seconds without a new step, a store killed against everything started again",
        "rounds": [round(ratio, 3) for ratio in ratios],
        "equal_losses": len({one["loss_last"] for runs in found.values() for one in runs}) == 1,
        "scenarios": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_stores")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="presage-recovery-") as name:
        scratch = Path(name)
        log = GeneratorConfig(num_samples=options.samples, seed=1, start=datetime(2026, 1, 1))
        write_log(log, scratch / "log")
        job = write_job(scratch / "job", None, 1)
        dataset = built(job, scratch / "log", scratch / "dataset")
        result = summarised(measure_all(dataset, scratch, options.rounds))
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
