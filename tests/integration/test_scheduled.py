"""Two jobs under one budget as real processes: one of each kind is killed, and the scheduler."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scheduler.controller.events import Ended
from scheduler.controller.log import LOG, read_log, replay
from schemas.manifest import read_dataset
from schemas.run_log import METRICS
from schemas.run_manifest import RunLogTail
from schemas.storage import Location
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
    """`python -m scheduler run` in a process that can be killed."""

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
def held(output: Path, job: str, name: str) -> Iterator[None]:
    """Stop a process as soon as it begins, until the context ends."""
    over = threading.Event()

    def stop() -> bool:
        while not over.wait(0.02):
            if pid_of(output, job, name):
                send(output, job, name, signal.SIGSTOP)
                return True
        return False

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(stop)
        try:
            yield
        finally:
            over.set()
            if holding.result():
                with suppress(ProcessLookupError):  # the scheduler may have removed it meanwhile
                    send(output, job, name, signal.SIGCONT)


def num_steps(run: Path | Location) -> int:
    """Return the number of steps in the log of a run at a path or URL."""
    lines, _ = RunLogTail(Location.parse(run), METRICS).read()
    return len(lines)


def command(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )


def check_bits(repository: Path, job: Path, folder: Path | Location, again: Path) -> None:
    """Check that a job's run has the bits of one that nobody disturbs."""
    words = ("train", str(job), "--dataset", str(folder / "dataset"), "--output", str(again))
    trained = command(repository, "trainer", *words)
    assert trained.returncode == 0, trained.stderr
    equal = command(repository, "trainer", "diff", str(folder / "run"), str(again))
    assert equal.returncode == 0, equal.stdout + equal.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_jobs_whose_processes_and_scheduler_are_killed_finish_with_the_bits_of_undisturbed_ones(
    repository: Path, tmp_path: Path
) -> None:
    demo, urgent = write_jobs(repository, tmp_path)
    output = tmp_path / "out"
    (tmp_path / "budget.yaml").write_text("cpus: 4\nmemory: 8GiB\n")
    words = [str(demo), str(urgent), "--output", str(output)]
    words += ["--budget", str(tmp_path / "budget.yaml"), "--json"]
    # The urgent job has a log of one file, made from what its job file says.
    log = output / "urgent" / "log"
    made = command(
        repository, "pipelines", "generate", str(urgent), "--output", str(tmp_path / "urgent-log")
    )
    assert made.returncode == 0, made.stderr
    first = sorted((tmp_path / "urgent-log").glob("*.parquet"))[0]
    log.mkdir(parents=True)
    pq.write_table(pq.read_table(first), log / "one.parquet")

    scheduler = Scheduler(repository, words, tmp_path / "said")
    with held(output, "demo", "segment-3.1"):  # without it the run cannot end
        scheduler.until(lambda: pid_of(output, "urgent", "segment-0.1"))
        send(output, "urgent", "segment-0.1")
        scheduler.until(lambda: pid_of(output, "urgent", "replica-1.1"))
        send(output, "urgent", "replica-1.1")
        scheduler.until(lambda: num_steps(output / "demo" / "run") >= 3)
        send(output, "demo", "store-1.1")
        send(output, "demo", "coordinator-0.1")
        scheduler.until(lambda: pid_of(output, "demo", "coordinator-0.2"))
        scheduler.process.kill()
        scheduler.process.wait()

    scheduler = Scheduler(repository, words, tmp_path / "said-again")
    jobs = scheduler.result()
    assert {name: job["phase"] for name, job in jobs.items()} == {
        "demo": "finished",
        "urgent": "finished",
    }
    ends = [entry.event for entry in read_log(output / LOG) if isinstance(entry.event, Ended)]
    told = {(end.job, end.process): end.outcome for end in ends}
    killed = {"urgent": ["segment-0.1", "replica-1.1"], "demo": ["coordinator-0.1", "store-1.1"]}
    found = [told[job, process] for job, processes in killed.items() for process in processes]
    assert found == ["lost"] * 4
    assert len(told) == len(ends), "each process ends once"
    built = [(end.job, end.process.partition(".")[0]) for end in ends if end.outcome == "done"]
    assert len(built) == len(set(built)), "nothing is done twice"
    assert not replay(output / LOG).differences
    for name, count in (("demo", 4), ("urgent", 1)):
        assert len(read_dataset(output / name / "dataset").segments) == count
        verified = command(repository, "trainer", "verify", str(output / name / "run"))
        assert verified.returncode == 0, verified.stderr
    past = (output / "history" / "jobs.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["name"] for line in past) == ["demo", "urgent"]

    check_bits(repository, demo, output / "demo", tmp_path / "undisturbed")
