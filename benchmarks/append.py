"""An append to a dataset of many segments, against one to a dataset of few.

Both datasets get the same logs, in turn, by the command in a process of its own. The ratio is that
of the durations of the late and the early append: it should stay near 1, since an append writes its
own segment and index part only, and reads one small manifest of each other segment.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.logs import DEMO_JOB, write_result
from pipelines.build import build
from pipelines.context import BuildRequest
from pipelines.demo_log.log import GeneratorConfig, write_log
from schemas.storage import Location

LOG_SAMPLES = 2_000
"""Samples of a segment."""


def write_logs(folder: Path, count: int) -> list[Path]:
    """Write logs of different sessions."""
    logs = [folder / f"log-{number}" for number in range(count)]
    for number, log in enumerate(logs):
        write_log(GeneratorConfig(num_samples=LOG_SAMPLES, seed=number, num_files=1), log)
    return logs


def append_in_process(log: Path, dataset: Path, *, is_first: bool) -> None:
    """Append a log, without the start of a process."""
    build(
        BuildRequest(
            job_path=DEMO_JOB,
            input_root=str(log),
            dataset=Location.parse(dataset),
            beam_args=["--runner=InProcess"],
            attempt=uuid.uuid4().hex[:12],
            append=not is_first,
        )
    )


def append_by_command(log: Path, dataset: Path) -> float:
    """Append a log by the command; return the seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pipelines", "append", str(DEMO_JOB), "--input", str(log)]
    subprocess.run([*command, "--dataset", str(dataset)], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.append", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--few", type=int, default=10, help="segments before the early append")
    parser.add_argument("--many", type=int, default=200, help="segments before the late append")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = write_logs(folder, options.many + options.rounds)
        for number, log in enumerate(logs[: options.many]):
            append_in_process(log, folder / "many", is_first=number == 0)
            if number + 1 == options.few:
                shutil.copytree(folder / "many", folder / "few")
        early, late = list[float](), list[float]()
        for log in logs[options.many :]:
            early.append(append_by_command(log, folder / "few"))
            late.append(append_by_command(log, folder / "many"))
    rounds = [a / b for a, b in zip(early, late, strict=True)]
    result = {
        "ours": round(statistics.median(late), 3),
        "peer": round(statistics.median(early), 3),
        "ratio": round(statistics.median(rounds), 3),
        "rounds": [round(ratio, 3) for ratio in rounds],
        "late_over_early": round(1 / statistics.median(rounds), 3),
        "unit": f"s, append after {options.many} segments; peer after {options.few}",
    }
    write_result(result, options)


if __name__ == "__main__":
    main()
