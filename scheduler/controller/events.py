"""Events of the controller: what happened outside, each with its time.

Events are written to the scheduler's log with the names of their fields, which therefore stay
(`controller/log.py` has the names of the classes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from presage.scheduler.model.past_runs import History
from presage.scheduler.model.plan_inputs import DataFacts
from presage.schemas.config.schedule import ScheduleConfig

Outcome = Literal["done", "left", "failed", "lost", "oom"]
"""How a process ended. `done`: its work is complete; `left`: it exited on request; `failed`: it
reported that it cannot do its work; `lost`: it was killed, or its node failed; `oom`: it was killed
for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    time_sec: float
    """Seconds since the epoch, not before the previous event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSet(Event):
    """The budget of all jobs together, from now on."""

    cpus: float
    memory_bytes: int
    resizes: bool = False
    """Whether cores and memory of a process are limits that can be changed while it runs."""
    time_cost_exponent: float | None = None
    """That of `schedule.budget` for all jobs; None to use the one of each job."""
    largest_job: int | None = None
    """Most workers of one segment job; None if the Beam runner does not limit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent(Event):
    """Base of the events of one job."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(JobEvent):
    """A job was submitted; one that was drained or failed before is resumed."""

    document: str
    """Text of its job file."""
    facts: DataFacts
    history: History
    num_segments: int
    schedule: ScheduleConfig | None = None
    """That of its file, with the sizes that it leaves to the machine; None for Pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(JobEvent):
    """A job is to stop early without losing work; submitting it again resumes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent(JobEvent):
    """Base of the events of one process."""

    process: str
    """Its name, unique in the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(ProcessEvent):
    """A process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(ProcessEvent):
    """A process ended."""

    outcome: Outcome
    detail: str = ""
    """Its last message, or the signal that killed it."""
    num_samples: int = 0
    """Samples that a finished segment job wrote."""
    work_sec: float = 0.0
    """Seconds that a finished segment job worked, without waiting for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(ProcessEvent):
    """A process will be taken away."""

    grace_sec: float
    """Seconds until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(ProcessEvent):
    """A resize of a running process succeeded or was refused."""

    resized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(ProcessEvent):
    """A measurement of a running process."""

    position: int
    """Its step; for a segment job, the seconds since it started."""
    resident_bytes: int
    busy_cores: float | None = None
    """Cores that were busy since the previous reading; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(JobEvent):
    """Steps were committed."""

    next_step: int
    """The step after the last one."""
    num_samples: int
    """Samples trained so far, over all epochs."""
    num_replicas: int
    """Replicas of the steps below."""
    seconds: tuple[float, ...]
    """Duration of each of the latest steps with this number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKnown(JobEvent):
    """Future accesses of the run, from the oracle."""

    num_steps: int
    """Steps that the oracle covers."""
    slots: tuple[tuple[int, ...], ...]
    """Accesses by equal periods of the run and equal ranges of the slots."""
    touched_rows: tuple[int, ...]
    """Distinct rows up to the end of each period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(JobEvent):
    """The move of slot ranges to another store ended."""

    moved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed: sizes, processes and slot ranges of all jobs are reconsidered."""

    steps: tuple[Stepped, ...] = ()
    """Steps that were committed since the last tick."""
    readings: tuple[Read, ...] = ()
    """Measurements of running processes, those of a job one after the other."""
