"""Jobs of the small demo under `python -m scheduler run`, whose processes tests kill and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from presage.scheduler.controller.events import Ended
from presage.scheduler.controller.log import LOG, read_log
from presage.scheduler.controller.replay import replay
from presage.schemas.run.records import METRICS
from presage.schemas.run.run_manifest import RunLogTail
from presage.schemas.storage.location import Location
from tests.integration.small_demo import write_small_demo

SMALL = {
    "num_samples: 200000": "num_samples: 12000",
    "oracle: {batch_samples: 4096}": "oracle: {batch_samples: 1024}",
    "\n  batch_samples: 4096": "\n  batch_samples: 1024\n  checkpoint: {every_steps: 2}",
}
STORES = """
schedule:
  budget: {cpus: 8, memory: 32GiB}
  training:
    replica: {memory: 1100MiB}
    store: {memory: 200MiB}
    max_stores: 2
"""
REPLICAS = """
schedule:
  budget: {cpus: 8, memory: 32GiB}
  priority: 1
  training: {min_replicas: 2, max_replicas: 2}
"""
CACHE = "\n  cache: {lookahead: 2, prefetch_steps: 1, rows: 60000}"


def write_jobs(repository: Path, folder: Path) -> list[Path]:
    """Write the demo job, smaller and with stores, and a more important one with replicas."""
    text = write_small_demo(repository, folder, SMALL)
    urgent = text.rstrip().replace("name: demo", "name: urgent") + REPLICAS
    served = text.replace("{every_steps: 2}", f"{{every_steps: 2}}{CACHE}").rstrip() + STORES
    texts = {"demo": served, "urgent": urgent}
    for name, content in texts.items():
        (folder / f"{name}.yaml").write_text(content)
    return [folder / f"{name}.yaml" for name in texts]


class Scheduler:
    """`python -m presage.scheduler run` in a process that can be killed."""

    def __init__(self, repository: Path, words: list[str], stem: Path) -> None:
        self._stdout, self._stderr = stem.with_suffix(".stdout"), stem.with_suffix(".stderr")
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scheduler", "run", *words],
                env={**os.environ, "PYTHONPATH": str(repository)},
                stdout=stdout,
                stderr=stderr,
            )

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, however long it takes, unless the scheduler ends before."""
        while not condition():
            ended = self.process.poll() is not None
            if ended:
                assert condition(), self._stderr.read_text()
            time.sleep(0.05)

    def result(self) -> dict[str, dict[str, object]]:
        """Wait until the scheduler ends without an error, and return the jobs that it prints."""
        assert self.process.wait() == 0, self._stderr.read_text()
        return json.loads(self._stdout.read_text())


def pid_of(output: Path, job: str, name: str) -> int | None:
    try:
        return int((output / job / "processes" / f"{name}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None


def send(output: Path, job: str, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that has begun; to no process is to the group of this one."""
    pid = pid_of(output, job, name)
    assert pid, f"{name} of {job} has begun"
    os.kill(pid, number)


@contextmanager
def paused(output: Path, job: str, name: str) -> Iterator[None]:
    """Stop a process as soon as it begins, until the context ends."""
    over = threading.Event()

    def stop() -> bool:
        while not over.wait(0.02):
            if pid_of(output, job, name):
                send(output, job, name, signal.SIGSTOP)
                return True
        return False

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        try:
            yield
        finally:
            over.set()
            if stopping.result():
                with suppress(ProcessLookupError):  # the scheduler may have removed it meanwhile
                    send(output, job, name, signal.SIGCONT)


def num_steps(run: Path | Location) -> int:
    """Return the number of steps in the log of a run at a path or URL."""
    lines, _ = RunLogTail(Location.parse(run), METRICS).read()
    return len(lines)


def run_command(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )


def check_run(repository: Path, job: Path, folder: Path | Location, again: Path) -> None:
    """Check that a job's run is complete, and has the bits of an undisturbed one."""
    words = ("train", str(job), "--dataset", str(folder / "dataset"), "--output", str(again))
    for each in (("verify", str(folder / "run")), words, ("diff", str(folder / "run"), str(again))):
        done = run_command(repository, "trainer", *each)
        assert done.returncode == 0, done.stdout + done.stderr


def words_for(folder: Path, jobs: Sequence[Path], *options: str, cpus: float = 4) -> list[str]:
    """Return the arguments of a scheduler of some jobs, whose output is the folder `out`."""
    budget = folder / "budget.yaml"
    budget.write_text(f"cpus: {cpus}\nmemory: 8GiB\n")
    words = [*map(str, jobs), "--output", str(folder / "out"), "--budget", str(budget), "--json"]
    return [*words, *options]


def ends_of(output: Path) -> dict[tuple[str, str], Ended]:
    """Return how each process of each job ended, which the log has once; check its replay."""
    assert not replay(output / LOG).differences
    ends = [entry.event for entry in read_log(output / LOG) if isinstance(entry.event, Ended)]
    by_process = {(end.job, end.process): end for end in ends}
    assert len(by_process) == len(ends)
    return by_process
