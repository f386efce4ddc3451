"""A job's stores become three and one again while it trains, as real processes, and bits stay."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from presage.scheduler.controller.log import LOG, Log
from presage.scheduler.controller.state import JobState
from presage.scheduler.drivers.children import ThisMachine
from presage.scheduler.drivers.driver import Driver, DriverOptions
from presage.scheduler.drivers.submit import submit
from tests.integration.scheduled_jobs import check_run, num_steps, pid_of, send, write_jobs
from tests.trainer.processes import suspend

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ONE_STORE = "store: {memory: 600MiB}\n    max_stores: 3"


class Run:
    """A driver whose job gets a number of stores."""

    def __init__(self, driver: Driver, log: Log) -> None:
        self.driver, self.log = driver, log
        self.num_stores: int | None = None

    @property
    def job(self) -> JobState:
        return self.driver.state.jobs["demo"]

    def until(self, condition: Callable[[], object], limit_sec: float = 300.0) -> None:
        """Go on until a condition holds; the number of stores stays what it is to be."""
        end = time.monotonic() + limit_sec
        while not condition():
            assert time.monotonic() < end, f"in time, got {self.job}"
            sizes = self.job.sizes
            if self.num_stores is not None and sizes is not None:
                job = replace(self.job, sizes=replace(sizes, num_stores=self.num_stores))
                self.log.state = replace(self.driver.state, jobs={"demo": job})
            self.driver.poll()
            time.sleep(0.05)


@contextmanager
def slowed(output: Path, name: str) -> Iterator[None]:
    """Let a trainer run for a part of the time: it moves slots, and does not end before."""
    pid, ended = pid_of(output, "demo", name), threading.Event()
    assert pid, f"{name} has begun"

    def stop_often() -> None:
        with suppress(ProcessLookupError, FileNotFoundError):  # the trainer has ended
            while not ended.wait(0.05):
                suspend(pid)
                ended.wait(0.5)
                os.kill(pid, signal.SIGCONT)

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_often)
        try:
            yield
        finally:
            ended.set()
            stopping.result()


@contextmanager
def ended_at_last(folder: Path) -> Iterator[None]:
    """End what still runs."""
    try:
        yield
    finally:
        for file in folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def test_stores_of_a_job_become_more_and_fewer_and_its_bits_stay(
    repository: Path, tmp_path: Path
) -> None:
    demo, _ = write_jobs(repository, tmp_path)
    text = demo.read_text()
    assert text.count("store: {memory: 200MiB}\n    max_stores: 2") == 1
    text = text.replace("store: {memory: 200MiB}\n    max_stores: 2", ONE_STORE)
    demo.write_text(text.replace("num_samples: 12000", "num_samples: 100000"))
    output = tmp_path / "out"
    output.mkdir()
    messages: list[str] = []
    submitted, place = submit(demo, {}, output, time.time())
    with Log(output / LOG) as log, ended_at_last(place.processes):
        options = DriverOptions(output=output, tick_sec=1.0, progress=messages.append)
        driver = Driver(options, ThisMachine(), log, {"demo": place})
        driver.begin([submitted], 8.0, 16 << 30)
        run = Run(driver, log)
        run.num_stores = 1
        run.until(lambda: num_steps(place.run) >= 2)
        assert run.job.stores == (0,)
        with slowed(output, "coordinator-0.1"):  # so that the run does not end before
            run.num_stores = 3
            run.until(lambda: set(run.job.owners) == {0, 1, 2} and not run.job.moving)
        before = num_steps(place.run)
        run.until(lambda: num_steps(place.run) >= before + 2)
        send(output, "demo", "coordinator-0.1")  # who begins anew finds rows where they have gone
        run.until(
            lambda: num_steps(place.run) > before + 4 and "coordinator-0.2" in run.job.processes
        )
        with slowed(output, "coordinator-0.2"):
            run.num_stores = 1
            run.until(lambda: [p.number for p in run.job.of_pool("store")] == [0])
            assert set(run.job.owners) == {0}
            assert place.stores.children()[0] == ["0"]
        assert not driver.is_done
        run.until(lambda: driver.is_done)
    assert driver.state.jobs["demo"].phase == "finished", messages[-5:]
    check_run(repository, demo, place.folder, tmp_path / "undisturbed")
