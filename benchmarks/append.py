"""An append to a dataset of many segments, against one to a dataset of few.

Both datasets get the same days, in turn, by the command in a process of its own. The ratio is that
of the durations of the late and the early append: it should stay near 1, since an append writes its
own segment and index part only, and reads one small manifest of each other segment.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime, timedelta
from pathlib import Path

from benchmarks.logs import DEMO_JOB, write_result
from pipelines.build import build
from pipelines.demo_log.generate import GeneratorConfig, write_log
from pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from pipelines.table.target import SegmentTarget
from schemas.storage.location import Location

LOG_SAMPLES = 2_000
"""Samples of a segment."""
FIRST_DAY, DAY = datetime(2026, 1, 1), timedelta(days=1)


def write_job(folder: Path) -> Path:
    """Write the demo's job, with the last hours of each day for evaluation, and its schema."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO_JOB.parent / "schema.pbtxt", folder)
    text, count = re.subn("evaluation_from: .*}", "evaluation_last: 3h}", DEMO_JOB.read_text())
    assert count == 1, "the demo's job must have one time of evaluation"
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


def write_day(folder: Path, number: int, num_samples: int) -> Path:
    """Write the log of a day; return its folder, which has the name of the day."""
    start = FIRST_DAY + number * DAY
    log = folder / str(start.date())
    write_log(GeneratorConfig(num_samples=num_samples, seed=number, start=start, span=DAY), log)
    return log


def append_in_process(job: Path, log: Path, dataset: Path) -> None:
    """Append the log of a day, without the start of a process."""
    build(
        BuildRequest(
            BuildInput(job, str(log)),
            SegmentTarget(
                Location.parse(dataset),
                uuid.uuid4().hex[:12],
                append=dataset.exists(),
                day=log.name,
            ),
            BuildOptions(["--runner=InProcess"]),
        )
    )


def append_by_command(job: Path, log: Path, dataset: Path) -> float:
    """Append the log of a day by the command; return the seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pipelines", "append", job, "--input", log, "--day", log.name]
    subprocess.run([*command, "--dataset", dataset], check=True, capture_output=True)
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
        job, num_days = write_job(folder), options.many + options.rounds
        logs = [write_day(folder, number, LOG_SAMPLES) for number in range(num_days)]
        for number, log in enumerate(logs[: options.many]):
            append_in_process(job, log, folder / "many")
            if number + 1 == options.few:
                shutil.copytree(folder / "many", folder / "few")
        early, late = list[float](), list[float]()
        for log in logs[options.many :]:
            early.append(append_by_command(job, log, folder / "few"))
            late.append(append_by_command(job, log, folder / "many"))
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
