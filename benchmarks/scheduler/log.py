"""The scheduler's log: time to recover, time of a tick, bytes on disk.

`recover`: a log of one job with many events, each step and reading one of its own, is recovered by
its last snapshot and the events since; the peer handles all events again. `tick`: 200 jobs with 10
processes each report steps and readings, which are handled, logged and synced; only reading `/proc`
is left out. `ours` are ticks as the driver has them, which measures MAX_MEASURED jobs in one, in
turn; the peer are ticks that measure all jobs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common.harness import Options, alternate, compared, timed
from benchmarks.common.logs import DEMO_JOB
from presage.scheduler.controller.events import (
    BudgetSet,
    Ended,
    Event,
    Read,
    Started,
    Stepped,
    Submitted,
)
from presage.scheduler.controller.events import Tick as TickEvent
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.log import (
    ARCHIVE,
    LOG,
    Log,
    complete_lines,
    event_from_json,
    logs_of,
    recover,
)
from presage.scheduler.controller.state import State
from presage.scheduler.drivers.driver import MAX_MEASURED
from presage.scheduler.drivers.run_jobs import raise_gc_threshold
from presage.scheduler.model.past_runs import History
from presage.scheduler.model.plan_inputs import DataFacts

GIB = 1 << 30
NUM_REPLICAS = 9
"""Of each job, beside its coordinator."""
SCHEDULE = f"""
schedule:
  budget: {{cpus: 16, memory: 64GiB}}
  preprocessing: {{max_workers: 4}}
  training: {{min_replicas: {NUM_REPLICAS}, max_replicas: {NUM_REPLICAS}}}
"""
FACTS = DataFacts(
    num_samples=40_000_000,
    num_train_samples=36_000_000,
    table_rows={"users": 50_000, "items": 200_000},
    rows_per_step=5_000.0,
    lookups_per_sample=20.0,
    row_bytes=800.0,
    part_rows=4_000.0,
    num_dense=4,
    num_sparse=6,
    measured=True,
)
TICK_SEC = 5.0
STEPS = 10
"""Steps of each job from one tick to the next."""
FULL_TICKS = 300
"""Ticks after which readings, windows and curves of the journal have their full size."""
TICKS_PER_ROUND = 10


class Simulated:
    """A scheduler whose jobs train, beside a log of what it does."""

    def __init__(self, log: Log, seed: int) -> None:
        """Train one job in NUM_REPLICAS replicas.

        Args:
            log: opened, new.
            seed: of measurements.
        """
        self.log = log
        self.rng = np.random.default_rng(seed)
        self.now = 1.0
        self.tell(BudgetSet(time_sec=self.now, cpus=20.0, memory_bytes=80 * GIB))
        self.tell(_submitted())
        while builds := self.log.state.jobs["job-0"].of_pool("segment"):
            who = {"time_sec": self.now, "job": "job-0", "process": builds[0].name}
            self.tell(Ended(**who, outcome="done", num_samples=1000, work_sec=5.0))

    def tell(self, event: Event) -> None:
        """Handle and log an event; processes start at once."""
        for decision in self.log.handle(event):
            if decision.action == "start":
                who = {"job": decision.job, "process": decision.process}
                self.tell(Started(time_sec=self.now, **who))

    def tick(self) -> None:
        """Have the next tick, and archive the log if it is large."""
        self.tell(self.tick_event())
        self.log.archive_if_long()

    def copy_job(self, num_jobs: int) -> None:
        """Let the job have copies, so that there are `num_jobs`, and the budget be as large."""
        state = self.log.state
        job, budget = state.jobs["job-0"], state.budget
        cpus, memory = budget.cpus * num_jobs, budget.memory * num_jobs
        jobs = {f"job-{i}": replace(job, name=f"job-{i}") for i in range(num_jobs)}
        budget = replace(budget, cpus=cpus, memory=memory)
        self.log.state = replace(state, budget=budget, jobs=jobs)
        self.log.handle_sec = math.inf  # so that the next log begins with these jobs
        self.log.archive_if_long()

    def tick_event(self, most: int | None = None) -> TickEvent:
        """Return the steps and readings of the next tick, of `most` jobs in turn, or of all."""
        self.now += TICK_SEC
        steps: list[Stepped] = []
        readings: list[Read] = []
        jobs = self.log.state.jobs
        for name in sorted(jobs, key=lambda name: jobs[name].next_step)[:most]:
            job = jobs[name]
            next_step = job.next_step + STEPS
            seconds = self.rng.normal(0.5, 0.02, STEPS).round(6).tolist()
            stepped = Stepped(
                time_sec=self.now,
                job=name,
                next_step=next_step,
                num_samples=256 * next_step,
                num_replicas=NUM_REPLICAS,
                seconds=tuple(seconds),
            )
            steps.append(stepped)
            readings += [self.reading(name, p.name, next_step) for p in job.processes.values()]
        return TickEvent(time_sec=self.now, steps=tuple(steps), readings=tuple(readings))

    def reading(self, job: str, process: str, position: int) -> Read:
        """Return a measurement of a process."""
        return Read(
            time_sec=self.now,
            job=job,
            process=process,
            position=position,
            resident_bytes=int(self.rng.normal(1e9, 1e6)),
            busy_cores=round(self.rng.uniform(0.5, 1.0), 4),
        )


def _submitted() -> Submitted:
    document = DEMO_JOB.read_text(encoding="utf-8") + SCHEDULE
    return Submitted(
        time_sec=1.0,
        job="job-0",
        document=document,
        facts=FACTS,
        history=History(),
        num_segments=40,
    )


@contextmanager
def unsynced() -> Iterator[None]:
    """Do not wait for the disk, while a log is prepared."""
    with mock.patch("os.fsync"):
        yield


def measure_recovery(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Recover a log of many events of one job, and handle them again."""
    path, num_events = folder / LOG, options.events
    with unsynced(), Log(path) as log:
        run = Simulated(log, 1)
        while log.num_events < num_events:
            tick = run.tick_event()
            for event in (*tick.steps, *tick.readings, replace(tick, steps=(), readings=())):
                run.tell(event)
            log.archive_if_long()
    times = alternate(
        {
            "ours": lambda: timed(lambda: recover(path)),
            "peer": lambda: timed(lambda: handle_again(path)),
        },
        options.rounds,
    )
    unit = f"s to recover {num_events} events, against handling them again"
    return compared(times["ours"], times["peer"], unit, sizes=_sizes(folder))


def handle_again(path: Path) -> State:
    """Return the state after all events of a log and its archive, decided once more."""
    state = State()
    for part in logs_of(path):
        for line in complete_lines(part):
            body = json.loads(line)
            if "event" in body:
                body.pop("decisions", None)
                state, _ = handle(state, event_from_json(body))
    return state


def measure_tick(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Handle, log and sync the steps and readings of many jobs."""
    raise_gc_threshold()
    num_jobs = options.jobs
    with unsynced(), Log(folder / LOG) as log:
        run = Simulated(log, 3)
        for _ in range(FULL_TICKS):
            run.tick()
        run.copy_job(num_jobs)
        for _ in range(2):
            run.tick()
    # Opened again, so that the copies of the job share nothing in memory.
    with Log(folder / LOG) as log:
        run.log = log
        run.tick()

        def tick(most: int) -> float:
            event = run.tick_event(most)
            seconds = timed(lambda: run.tell(event))
            log.archive_if_long()
            return seconds

        sides = {"ours": partial(tick, MAX_MEASURED), "all": partial(tick, num_jobs)}
        times = alternate(sides, options.rounds * TICKS_PER_ROUND)
    unit = f"s a tick of {num_jobs} jobs, of which {MAX_MEASURED} are measured, against all"
    return compared(times["ours"], times["all"], unit, sizes=_sizes(folder))


def _sizes(folder: Path) -> dict[str, int]:
    archived = [file.stat().st_size for file in (folder / ARCHIVE).glob("*")]
    return {
        "file_bytes": (folder / LOG).stat().st_size,
        "archived_logs": len(archived),
        "archived_bytes": sum(archived),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("scheduler.log", __doc__, rounds=3)
    options.add_parts({"recover": measure_recovery, "tick": measure_tick})
    options.add("--events", 10_000, "of the log of `recover`", small=500)
    options.add("--jobs", 200, "of `tick`", small=10)
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
