"""What is seen of processes and runs from outside: how they ended, and steps."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from scheduler.drivers.process.workplace import Workplace
from scheduler.drivers.processes import Processes
from scheduler.machine.events import Ended, Outcome, Stepped
from scheduler.machine.state import Process
from schemas.events import BEHIND, HUNG, LOST, METRICS, SUMMARY, StepMetric
from schemas.layout import MANIFEST
from schemas.manifest import position_of, read_dataset

MAX_STEPS = 32
"""Steps whose time is told at once."""
CLUSTER_FAILED = re.compile(r"error: pipeline must finish, got Pipeline \S+ failed in state (.*)")
"""What a segment job says when its pipeline ended on a cluster."""

OTHER_AWAY = re.compile(r"error: (store|lighthouse) must answer within ")
"""What a process says that waited for another of its job."""


def ended(
    place: Workplace, children: Processes, job: str, process: Process, time_sec: float
) -> Ended:
    """Return how a process that runs no more has ended: by what it left, before what it said."""
    name, ending = process.name, children.ending(process.name)
    status = ending.status
    said = children.last_words(name)
    num_samples, work_sec = 0, 0.0
    if process.pool == "segment" and is_built(place, process.number):
        outcome: Outcome = "done"
        num_samples, work_sec = _build_figures(children.output(name))
    elif process.pool == "lead" and (place.run / SUMMARY).is_file():
        outcome = "done"
    elif status == 0 and process.pool != "segment":
        outcome = "left"
    elif ending.oom:
        outcome, said = "oom", ending.lost
    elif ending.lost or ending.refused:
        outcome, said = ("lost", ending.lost) if ending.lost else ("failed", ending.refused)
    elif status in (HUNG, BEHIND, LOST):
        outcome = "lost"
    elif status is not None and status < 0:
        outcome, said = "lost", f"signal {-status}"
    elif process.pool == "segment" and is_fault_of_cluster(said):
        outcome = "lost"
    elif children.reach is not None and OTHER_AWAY.match(said):
        outcome = "lost"  # a node that fell silent: its Pods are replaced minutes later
    elif status is None and not said.startswith("error"):
        outcome, said = "lost", said or "it ended while nobody looked"
    else:
        outcome = "failed"
    return Ended(
        time_sec=time_sec,
        job=job,
        process=name,
        outcome=outcome,
        detail="" if outcome == "done" else said[:500],
        num_samples=num_samples,
        work_sec=work_sec,
    )


def is_fault_of_cluster(said: str) -> bool:
    """Tell whether a pipeline failed on a cluster, and none of our steps raised anything there.

    Example:
        >>> is_fault_of_cluster(
        ...     "error: pipeline must finish, got Pipeline a_1 failed in state FAILED: "
        ...     "org.apache.flink.runtime.JobException: a task manager is gone"
        ... )
        True
    """
    found = CLUSTER_FAILED.match(said)
    return found is not None and "[while running '" not in found[1]


def is_built(place: Workplace, number: int) -> bool:
    """Tell whether a segment is committed; the last one only with the end of the dataset."""
    if not (place.dataset / MANIFEST).exists():
        return False
    root = read_dataset(place.dataset)
    there = any(position_of(segment.id) == number for segment in root.segments)
    return there and (number + 1 < place.num_segments or root.finished)


def _build_figures(output: str) -> tuple[int, float]:
    """Return samples and seconds of what `build --json` printed; zeros where it built nothing."""
    try:
        body: Any = json.loads(output)
        if body["built"] is False:
            return 0, 0.0
        return int(body["num_samples"]), float(body["startup_sec"]) + float(body["wall_sec"])
    except (ValueError, KeyError, TypeError):
        return 0, 0.0


class StepTail:
    """New lines of a run's metrics; a run that went back to a checkpoint is read anew."""

    def __init__(self, run: Path) -> None:
        """Begin with the first line."""
        self._path = run / METRICS
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._num_samples = 0
        self._next_step = 0

    def read(self, job: str, time_sec: float) -> Stepped | None:
        """Return what is new, None when nothing is."""
        found: list[StepMetric] = []
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._at:
                self._start_over()
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with suppress(ValueError, TypeError):  # cut while it was read
                    found.append(StepMetric(**json.loads(line)))
        if not found:
            return None
        self._num_samples += sum(m.num_samples for m in found)
        self._next_step = found[-1].step + 1
        replicas = found[-1].num_replicas
        # Kernels are made in the first step.
        same = [m for m in found if m.step and m.num_replicas == replicas and m.samples_per_sec > 0]
        return Stepped(
            time_sec=time_sec,
            job=job,
            next_step=self._next_step,
            num_samples=self._num_samples,
            num_replicas=replicas,
            seconds=tuple(m.num_samples / m.samples_per_sec for m in same[-MAX_STEPS:]),
        )
