"""What it costs when a store dies, with and without copies, and when slots move.

The demo's tables in two store processes that a supervisor starts again, one training process with
the planned cache. After some steps a store is killed (`kill -9`), alone or with its directory, or
half of its slots move to the other one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.recovery_commits import Commits
from schemas.run_log import SUMMARY
from trainer.stores.remote.connection import read_access
from trainer.stores.remote.processes import TOKEN, StoreProcesses, migrate_slots

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "schemas" / "demo"
EVERY, FAULT, STEPS, BATCH = 20, 30, 70, 1024
"""Steps between checkpoints, before the fault, and in all; samples of a step."""
SCENARIOS = {
    "process": 1,
    "node": 1,
    "process, with copies": 2,
    "node, with copies": 2,
    "migration": 1,
    "everything": 1,
}
"""What happens, and stores of each slot."""


def write_job(folder: Path, stores: StoreProcesses | None, replicas: int) -> Path:
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
        stores = opened.enter_context(StoreProcesses(2, folder / "stores", replicas=replicas))
        job = write_job(folder / "job", stores, replicas)
        run = folder / "run"
        commits = Commits(run, trained(job, dataset, run))
        opened.callback(commits.process.kill)
        commits.until(lambda count: count >= FAULT)
        fault, before, found = time.monotonic(), commits.seen[-1][1], dict[str, Any]()
        if scenario == "migration":
            slots = ((0, 1024),)
            giver, taker = stores.addresses
            token_file = folder / "stores" / TOKEN
            with ThreadPoolExecutor(1) as pool:
                moving = pool.submit(migrate_slots, giver, taker, slots, read_access(token_file))
                commits.until(lambda _: moving.done())
            found["moved"] = asdict(moving.result())
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
        commits.until(lambda count: count > before)
        after = min(at for at, count in commits.seen if at > fault and count > before)
        saving = commits.until(lambda count: count >= FAULT + EVERY // 2)
        commits.until(lambda count: count >= STEPS)
        status = commits.process.wait()
        if status != 0:
            raise RuntimeError(f"{scenario} must train to the end, got exit status {status}")
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
