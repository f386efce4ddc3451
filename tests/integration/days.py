"""The demo's job, smaller, with a log that is cut into days; and the commands that run on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from presage.scheduler.retrain.records import RetrainState
from presage.scheduler.retrain.root_log import read_state
from presage.schemas.storage.location import Location
from tests.fork_server import FORKS_STAGES
from tests.integration.small_demo import write_small_demo

DAYS = [f"2026-01-0{i}" for i in range(1, 5)]
SMALL = {
    "num_samples: 200000, seed: 1, start: 2026-01-01, span: 2d": (
        "num_samples: 8000, seed: 1, start: 2026-01-01, span: 4d"
    ),
    "split: {evaluation_from: 2026-01-02 21:00:00}": (
        "split: {evaluation_last: 4h}\n  block_samples: 256"
    ),
    "oracle: {batch_samples: 4096}": "oracle: {batch_samples: 256}",
    "\n  batch_samples: 4096": "\n  batch_samples: 256\n  checkpoint: {every_steps: 2}",
}
GATE = """
schedule:
  budget: {cpus: 8, memory: 32GiB}
  training: {max_replicas: 1}
  retrain:
    input: logs/{date}
    output: root
    gate: {max_ne: 3, min_auc: 0.3, max_calibration_error: null, max_ne_increase: 0.5,
           max_auc_decrease: 0.5, max_calibration_drift: null}
"""


@dataclass(frozen=True)
class Site:
    """A job file, its logs by day and its root, in one folder."""

    repository: Path
    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def state(self) -> RetrainState:
        return read_state(Location.parse(self.root))

    @property
    def promoted(self) -> dict[str, Any]:
        return json.loads((self.root / "PROMOTED").read_text())

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", *words]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of commands, whose stages are forked from the server of the tests."""
        return {**os.environ, "PYTHONPATH": str(self.repository), FORKS_STAGES: "1"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, check=False
        )

    def retrain(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("scheduler", "retrain", str(self.job), *words)

    def copy(self, folder: Path) -> Site:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return Site(self.repository, folder)


def write_job(repository: Path, folder: Path) -> None:
    text = write_small_demo(repository, folder, SMALL)
    (folder / "job.yaml").write_text(text.rstrip() + GATE)


def make_site(repository: Path, folder: Path) -> Site:
    """Write the job, and its log by day."""
    site = Site(repository, folder)
    folder.mkdir(exist_ok=True)
    write_job(repository, folder)
    process = site.run("pipelines", "generate", str(site.job), "--output", str(folder / "all"))
    assert process.returncode == 0, process.stderr
    rows = ds.dataset(folder / "all").to_table()
    days = np.array([str(time)[:10] for time in rows["time"].to_pylist()])
    for day in DAYS:
        (folder / "logs" / day).mkdir(parents=True)
        of_day = rows.filter(pa.array(days == day))
        assert of_day.num_rows > 1000
        pq.write_table(of_day, folder / "logs" / day / "part.parquet")
    shutil.rmtree(folder / "all")
    return site
