"""The scheduler's log: time to recover, time of a tick, bytes on disk.

`python -m benchmarks.scheduler_log [--json] [--parts recover,month,tick] [--rounds N]
[--events N] [--days N]`

`recover`: a log of one job with many events, each step and reading one of its own, is recovered by
its last snapshot and the events since; the peer handles all events again. `month`: 50 jobs with 10
processes each, of which each loses one a day, are measured for many days, and until the log is
about to be archived; then it is recovered. `tick`: 200 jobs with 10 processes each
report steps and readings, which are handled, logged and synced; only reading `/proc` is left out.
The driver measures MAX_MEASURED jobs in a tick, in turn; a tick with all 200 is measured as well.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.logs import DEMO_JOB, write_result
from scheduler.controller.events import BudgetSet, Ended, Event, Read, Started, Stepped, Submitted
from scheduler.controller.events import Tick as TickEvent
from scheduler.controller.handle import handle
from scheduler.controller.log import (
    ARCHIVE,
    LOG,
    Log,
    complete_lines,
    event_from_json,
    logs_of,
    recover,
)
from scheduler.controller.state import State
from scheduler.drivers.driver import MAX_MEASURED
from scheduler.drivers.run_jobs import raise_gc_threshold
from scheduler.model.past_runs import History
from scheduler.model.plan_inputs import DataFacts

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
MONTH_TICK_SEC = 300.0
"""Time between two ticks of `month`, all of which measure. Live jobs of this age are measured each
30 s; the log becomes as large either way, and is archived so much more often."""
DAY_SEC = 86_400.0
STEPS = 10
"""Steps of each job from one tick to the next."""
FULL_TICKS = 300
"""Ticks after which readings, windows and curves of the journal have their full size."""
MEASURED_TICKS = 40


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
        self.now, self.tick_sec = 1.0, TICK_SEC
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

    def lose_processes(self, losses_per_day: float) -> None:
        """Let some jobs lose a replica since the last tick; each is started again."""
        share = losses_per_day * self.tick_sec / DAY_SEC
        for name, job in list(self.log.state.jobs.items()):
            if self.rng.random() < share and (replicas := job.of_pool("replica")):
                lost = replicas[int(self.rng.integers(len(replicas)))].name
                self.tell(Ended(time_sec=self.now, job=name, process=lost, outcome="lost"))

    def copy_job(self, num_jobs: int) -> None:
        """Let the job have copies, so that there are `num_jobs`, and the budget be as large."""
        state = self.log.state
        job, budget = state.jobs["job-0"], state.budget
        cpus, memory = budget.cpus * num_jobs, budget.memory * num_jobs
        jobs = {f"job-{i}": replace(job, name=f"job-{i}") for i in range(num_jobs)}
        budget = replace(budget, cpus=cpus, memory=memory)
        self.log.reader.state = replace(state, budget=budget, jobs=jobs)
        self.log.reader.handle_sec = math.inf  # so that the next log begins with these jobs
        self.log.archive_if_long()

    def tick_event(self, most: int | None = None) -> TickEvent:
        """Return the steps and readings of the next tick, of `most` jobs in turn, or of all."""
        self.now += self.tick_sec
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


def measure_recovery(folder: Path, num_events: int, rounds: int) -> dict[str, Any]:
    """Recover a log of many events of one job, and handle them again."""
    path = folder / LOG
    with unsynced(), Log(path) as log:
        run = Simulated(log, 1)
        while log.num_events < num_events:
            tick = run.tick_event()
            for event in (*tick.steps, *tick.readings, replace(tick, steps=(), readings=())):
                run.tell(event)
            log.archive_if_long()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    cpu: dict[str, list[float]] = {"ours": [], "peer": []}
    sides = {"ours": recover, "peer": handle_again}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            begun, used = time.perf_counter(), time.process_time()
            sides[side](path)
            times[side].append(time.perf_counter() - begun)
            cpu[side].append(time.process_time() - used)
    return {
        "num_events": num_events,
        "ours_sec": statistics.median(times["ours"]),
        "peer_sec": statistics.median(times["peer"]),
        "ours_cpu_sec": statistics.median(cpu["ours"]),
        "peer_cpu_sec": statistics.median(cpu["peer"]),
        "rounds": [b / a for a, b in zip(times["ours"], times["peer"], strict=True)],
        **_sizes(folder),
    }


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


def measure_month(folder: Path, num_jobs: int, num_days: float, rounds: int) -> dict[str, Any]:
    """Recover a log of many jobs and days that is as large as one becomes."""
    path, largest, most_files = folder / LOG, b"", 0
    with unsynced(), Log(path) as log:
        run = Simulated(log, 2)
        run.copy_job(num_jobs)
        run.tick_sec = MONTH_TICK_SEC
        end = run.now + num_days * DAY_SEC
        while run.now < end:
            run.lose_processes(1.0)
            run.tick()
            most_files = max(most_files, _archived(folder))
        num_events = log.num_events
        while (folder / LOG).stat().st_size >= len(largest):
            run.tell(run.tick_event())
            largest = path.read_bytes()
            log.archive_if_long()
    sizes = _sizes(folder)
    path.write_bytes(largest)
    seconds: list[float] = []
    cpu: list[float] = []
    for _ in range(rounds):
        begun, used = time.perf_counter(), time.process_time()
        with Log(path):
            seconds.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - used)
    return {
        "num_jobs": num_jobs,
        "num_days": num_days,
        "num_events": num_events,
        "recover_sec": seconds,
        "recover_cpu_sec": cpu,
        "log_bytes": len(largest),
        "snapshot_bytes": len(b"".join(largest.splitlines(keepends=True)[:2])),
        "most_archived_logs": most_files,
        **sizes,
    }


def measure_tick(folder: Path, num_jobs: int) -> dict[str, Any]:
    """Handle, log and sync the steps and readings of many jobs."""
    raise_gc_threshold()
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
        return {
            "num_jobs": num_jobs,
            "measured_in_turn": MAX_MEASURED,
            "in_turn": _measure_ticks(run, folder / LOG, MAX_MEASURED),
            "all": _measure_ticks(run, folder / LOG, num_jobs),
            **_sizes(folder),
        }


def _measure_ticks(run: Simulated, path: Path, most: int) -> dict[str, Any]:
    """Have ticks that measure `most` jobs each."""
    seconds: list[float] = []
    cpu: list[float] = []
    archiving: list[float] = []
    for _ in range(MEASURED_TICKS):
        event = run.tick_event(most)
        begun, used = time.perf_counter(), time.process_time()
        run.tell(event)
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
        size, begun = path.stat().st_size, time.perf_counter()
        run.log.archive_if_long()
        if path.stat().st_size < size:
            archiving.append(time.perf_counter() - begun)
    return {
        "tick_sec": statistics.median(seconds),
        "tick_sec_p10": float(np.quantile(seconds, 0.1)),
        "tick_sec_p90": float(np.quantile(seconds, 0.9)),
        "tick_cpu_sec": statistics.median(cpu),
        "archive_sec": archiving,
    }


def _archived(folder: Path) -> int:
    return len(list((folder / ARCHIVE).glob("*")))


def _sizes(folder: Path) -> dict[str, int]:
    archived = [file.stat().st_size for file in (folder / ARCHIVE).glob("*")]
    return {
        "file_bytes": (folder / LOG).stat().st_size,
        "archived_logs": len(archived),
        "archived_bytes": sum(archived),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.scheduler_log", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--parts", default="recover,month,tick")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--events", type=int, default=10_000, help="of the log of `recover`")
    parser.add_argument("--days", type=float, default=1.0, help="of `month`")
    options = parser.parse_args()
    parts: dict[str, dict[str, Any]] = {}
    for part in options.parts.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            if part == "recover":
                parts[part] = measure_recovery(Path(scratch), options.events, options.rounds)
            elif part == "month":
                parts[part] = measure_month(Path(scratch), 50, options.days, options.rounds)
            else:
                parts[part] = measure_tick(Path(scratch), 200)
    recovery = parts.get("recover", {"ours_sec": None, "peer_sec": None, "rounds": []})
    result = {
        "ours": recovery["ours_sec"],
        "peer": recovery["peer_sec"],
        "ratio": statistics.median(recovery["rounds"]) if recovery["rounds"] else None,
        "unit": "s to recover",
        "rounds": recovery["rounds"],
        "parts": parts,
    }
    write_result(result, options)


if __name__ == "__main__":
    main()
