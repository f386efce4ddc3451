"""Events of the controller: every fact from outside, with its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.model.history import History
from scheduler.model.snapshot import DataFacts
from scheduler.planner.machine_sizes import MachineSizes

Outcome = Literal["done", "left", "failed", "lost", "oom"]
"""How a process ended: its work is done; it left as it was asked; it says that it cannot do its
work; it is gone without a word, killed or with its node; or it was killed for memory."""
FIRST_RULES, SECOND_RULES, THIRD_RULES, RULES = 1, 2, 3, 4
"""Versions of the rules that decisions follow: what a log says with older ones is decided by those
again. 1: time x cost, and the earliest first. 2: `budget.haste`, and the shortest first. 3: cores
that processes need, too. 4: memory given back in place, and stores that become more and fewer."""
RunnerName = Literal["local", "flink", "dataflow"]
"""Which of Beam's runners segment jobs run on; `local` is that of their own processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    time_sec: float
    """Seconds since the epoch; never smaller than that of the event before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSet(Event):
    """From now on all jobs together may use so much."""

    cpus: float
    """Cores."""
    memory_bytes: int
    """Memory."""
    resizes: bool = False
    """Whether cores and memory of a process are limits, which may be changed while it runs."""
    time_cost_exponent: float | None = None
    """Of `schedule.budget`, for all jobs; what each of them says when None."""
    rules: int = RULES
    """By which is decided from now on; 1 in a log that does not say."""

    def __post_init__(self) -> None:
        """Refuse rules that only later code knows."""
        if not FIRST_RULES <= self.rules <= RULES:
            raise ValueError(
                f"rules must be in [{FIRST_RULES}, {RULES}], got {self.rules}; use the code that "
                "began the log"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSet(Event):
    """From now on segment jobs run there; what was read of another place counts no more.

    Of a cluster, what it said comes along, so that no job is started there as if it were silent.
    """

    name: RunnerName
    """Which of Beam's runners."""
    largest: int | None = None
    """Workers of one segment job at most; None where nobody said."""
    address: str | None = None
    """Of a cluster."""
    free: int | None = None
    """As in `SlotsRead`; all three, or none."""
    own: int | None = None
    """As in `SlotsRead`."""
    total: int | None = None
    """As in `SlotsRead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRead(Event):
    """What the cluster that segment jobs run on says of its slots, each of which has one worker."""

    free: int
    """Slots that no job holds."""
    own: int
    """Slots that this scheduler's segment jobs hold."""
    total: int
    """All slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsUnread(Event):
    """The cluster does not answer any more."""

    detail: str
    """What came instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent(Event):
    """Something that happened to one job."""

    job: str
    """Its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(JobEvent):
    """A job is to be run; one that was submitted before goes on where it stood."""

    document: str
    """Text of its job file."""
    facts: DataFacts
    """What is known of its data."""
    history: History
    """What is known of its past, and of other jobs."""
    num_segments: int
    """Segments that its input is cut into."""
    sizes: MachineSizes | None = None
    """What its file leaves to the machine; as it is for Pods, and in older logs, when None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(JobEvent):
    """A job is to be ended early, with nothing lost; submitting it again goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent(JobEvent):
    """Something that happened to one process."""

    process: str
    """Its name, unique in the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(ProcessEvent):
    """A process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(ProcessEvent):
    """A process is gone."""

    outcome: Outcome
    """How."""
    detail: str = ""
    """What it said last, or what ended it."""
    num_samples: int = 0
    """Of a segment job that is done: samples that it wrote."""
    work_sec: float = 0.0
    """Of a segment job that is done: seconds that it took, waiting for others left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(ProcessEvent):
    """A process is going to be taken away."""

    grace_sec: float
    """Seconds until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(ProcessEvent):
    """A running process has the cores and the memory that it was to have, or cannot get them."""

    resized: bool
    """Whether it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(ProcessEvent):
    """What was read of a running process."""

    position: int
    """Its step, or for a segment job the seconds that it has run."""
    resident_bytes: int
    """Its memory."""
    rate: float | None = None
    """Of a replica: its work per second, in any unit that all replicas of the job share."""
    busy_cores: float | None = None
    """Cores that it kept busy since the reading before; None where nobody measured them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(JobEvent):
    """Steps were committed."""

    next_step: int
    """The step after the last one."""
    num_samples: int
    """Samples trained by now, every epoch counted."""
    num_replicas: int
    """Replicas that made the steps below."""
    seconds: tuple[float, ...]
    """Of each of the latest steps with so many replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKnown(JobEvent):
    """What the oracle tells of the steps to come."""

    num_steps: int
    """Steps of the run, as far as they are known."""
    slots: tuple[tuple[int, ...], ...]
    """Accesses by equal periods of the run and equal ranges of the slots."""
    touched_rows: tuple[int, ...]
    """Distinct rows up to the end of each period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(JobEvent):
    """A range of slots has another store, or the move failed."""

    slots: int
    """Number of the range."""
    target: int
    """Number of the store that was to take it."""
    moved: bool
    """Whether it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed: the machine looks at everything."""
