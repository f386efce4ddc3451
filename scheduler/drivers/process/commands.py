"""The command line of each kind of process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from scheduler.drivers.process.workplace import Workplace

_ROOT = Path(__file__).resolve().parents[3]


def environment() -> dict[str, str]:
    """Return this process's environment, in which our packages are found."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def generate_command(job_file: Path, output: Path) -> list[str]:
    """Return the command that writes a job's synthetic log."""
    return [*_module("pipelines"), "generate", str(job_file), "--output", str(output)]


def segment_command(place: Workplace, number: int, workers: int) -> list[str]:
    """Return the command that builds a segment and enters it in its turn."""
    source = ["--input", str(place.segment(number)), "--json"]
    last = ["--last"] if number + 1 == place.num_segments else []
    running = [f"--direct_num_workers={workers}"]
    if workers > 1:
        running.append("--direct_running_mode=multi_processing")
    build = [*_module("pipelines"), "build", str(place.job_file), "--output", str(place.dataset)]
    append = [*_module("pipelines"), "append", str(place.job_file), "--dataset", str(place.dataset)]
    turn = ["--position", str(number), "--in-order"]
    return [*([*append, *turn] if number else build), *source, *last, *running]


def lead_command(place: Workplace, values: Mapping[str, float]) -> list[str]:
    """Return the command that begins training, or goes on with it."""
    train = [*_module("trainer"), "train", str(place.job_file), "--dataset", str(place.dataset)]
    train += ["--output", str(place.run), "--follow", "--resume"]
    return [*train, *(["--replicas", "0"] if values.get("grouped") else [])]


def replica_command(place: Workplace, number: int) -> list[str]:
    """Return the command of one replica."""
    return [*_module("trainer"), "replica", str(place.run), "--number", str(number)]


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]
