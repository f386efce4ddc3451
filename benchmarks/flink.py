"""A build on Flink with two task managers, one of them killed, beside the local runner.

`python -m benchmarks.flink LOG [--json] [--job JOB] [--scratch DIR] [--sides NAME,NAME]`

Each side builds the same log: `local`, `flink`, and `killed`, where one of the two task managers
gets SIGKILL while parts are built; Flink then repeats what is lost on the other one. `worker_mib`
is the largest peak of the memory of one process that runs our code besides the launcher,
`launcher_mib` that of the launcher, `java_mib` that of a task manager; `cpu_sec` is the processor
time of all of these. `shuffle_mb` are the bytes
that the stages of both pipelines sent each other on Flink, repetitions included, and what the tasks
of the local runner wrote for later ones. `ours` are the seconds of `flink`, `peer` those of
`local`. The run fails if a dataset differs from the first one in a byte, or nothing was killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.logs import DEMO_JOB, REPOSITORY, write_result
from benchmarks.scale import process_tree
from pipelines.shuffle import SHUFFLE
from tests.flink import ask, flink
from tests.pipelines.logs import bytes_of

SIDES = ("local", "flink", "killed")
VICTIM = "task-manager-2"
KILLED_STAGE = "{BuildParts"
"""Part of the name of the stage in which the task manager is killed."""
_POLL_SEC = 0.5


def peak_mib(pid: int) -> int:
    """Return the peak of the resident memory of a process, 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) >> 10
    return 0


def cpu_sec(pid: int) -> float:
    """Return the processor time of a process, 0 if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def shuffle_bytes(rest: str) -> int:
    """Return the bytes that the stages of all jobs of a cluster sent."""
    jobs = [ask(rest, f"/jobs/{job['jid']}") for job in ask(rest, "/jobs/overview")["jobs"]]
    return sum(v["metrics"]["write-bytes"] for job in jobs for v in job["vertices"])


def is_running(rest: str, stage: str) -> bool:
    """Return whether a stage runs on a cluster."""
    with suppress(urllib.error.URLError):
        for job in ask(rest, "/jobs/overview")["jobs"]:
            for vertex in ask(rest, f"/jobs/{job['jid']}")["vertices"]:
                if stage in vertex["name"] and vertex["status"] == "RUNNING":
                    return True
    return False


class Peaks:
    """Watches the processes of a build until it ends."""

    def __init__(self, launcher: int, about: dict[str, Any], dataset: Path) -> None:
        """Store the arguments; `about` describes a cluster, and is empty without one."""
        self._launcher, self._about, self._dataset = launcher, about, dataset
        self.mib: Counter[str] = Counter()
        self.written: dict[str, int] = {}
        self.cpu_sec: dict[int, float] = {}

    def look(self) -> None:
        """Update the peaks."""
        pids = {pid: "worker_mib" for pid in process_tree(self._launcher)}
        pids[self._launcher] = "launcher_mib"
        for name, pid in self._about.get("pids", {}).items():
            if name == "worker-pool":
                pids |= dict.fromkeys(process_tree(pid)[1:], "worker_mib")
            elif name.startswith("task-manager"):
                pids[pid] = "java_mib"
        for pid, kind in pids.items():
            self.mib[kind] = max(self.mib[kind], peak_mib(pid))
            self.cpu_sec[pid] = max(self.cpu_sec.get(pid, 0.0), cpu_sec(pid))
        for path in self._dataset.glob(f"segments/*/{SHUFFLE}/*"):
            with suppress(OSError):
                self.written[path.name] = path.stat().st_size


def measure(side: str, options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Build on one side; return its figures."""
    dataset = scratch / side
    command = [sys.executable, "-m", "pipelines", "build", str(options.job), "--input"]
    command += [str(options.log), "--output", str(dataset)]
    about: dict[str, Any] = {}
    with ExitStack() as stack:
        if side != "local":
            logs = scratch / f"{side}-logs"
            about = stack.enter_context(flink("session", REPOSITORY, logs, task_managers=2))
            command += about["options"]
        start = time.perf_counter()
        with (scratch / f"{side}.log").open("wb") as errors:
            build = subprocess.Popen(command, cwd=REPOSITORY, stdout=errors, stderr=errors)
        killer = threading.Thread(target=_kill_in_stage, args=(about,), daemon=True)
        if side == "killed":
            killer.start()
        peaks = Peaks(build.pid, about, dataset)
        while build.poll() is None:
            peaks.look()
            time.sleep(_POLL_SEC)
        seconds = time.perf_counter() - start
        if build.returncode:
            raise RuntimeError(f"{side} failed: {(scratch / f'{side}.log').read_text()[-3000:]}")
        if killer.is_alive():
            raise RuntimeError(
                f"{VICTIM} must be killed, but no {KILLED_STAGE} ran; use a larger log"
            )
        sent = shuffle_bytes(about["rest"]) if about else sum(peaks.written.values())
    cpu = round(sum(peaks.cpu_sec.values()))
    return {"sec": round(seconds), "cpu_sec": cpu, "shuffle_mb": sent // 1_000_000, **peaks.mib}


def _kill_in_stage(about: dict[str, Any]) -> None:
    while not is_running(about["rest"], KILLED_STAGE):
        time.sleep(_POLL_SEC)
    os.kill(about["pids"][VICTIM], signal.SIGKILL)
    sys.stderr.write(f"killed {VICTIM}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flink", description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--job", type=Path, default=DEMO_JOB)
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated")
    parser.add_argument("--scratch", type=Path, help="folder to keep the datasets in")
    options = parser.parse_args(argv)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="presage-flink-") as name:
        scratch = options.scratch or Path(name)
        scratch.mkdir(parents=True, exist_ok=True)
        sides = options.sides.split(",")
        for side in sides:
            figures[side] = measure(side, options, scratch)
            sys.stderr.write(f"{side} {figures[side]}\n")
        expected = bytes_of(scratch / sides[0])
        for side in sides[1:]:
            if bytes_of(scratch / side) != expected:
                raise RuntimeError(f"{side} must have the bytes of {sides[0]}, got others")
    ours, peer = (figures[side]["sec"] for side in (sides[-1], sides[0]))
    result = {"ours": ours, "peer": peer, "ratio": round(peer / ours, 3), "unit": "s of a build"}
    write_result(result | {"rounds": [result["ratio"]], "sides": figures}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
