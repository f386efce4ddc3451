"""`scheduler replay`: what this release would decide on the events of a log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from presage.scheduler.controller.log import LogReader, logs_of
from presage.scheduler.controller.state import JobState, State
from presage.scheduler.model.pools import counted
from presage.schemas.run.records import Decision


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that would be another one today.

    Attributes:
        place: file and line.
        logged: the decision of the log; None if it has none.
        now: today's; None if there is none.
        size: largest relative difference of its numbers; infinite if it differs otherwise.
    """

    place: str
    logged: Decision | None
    now: Decision | None
    size: float

    def describe(self) -> str:
        """Return the difference in one line."""
        if self.logged is None or self.now is None or math.isinf(self.size):
            return f"{self.place}: {_describe(self.logged)}, now {_describe(self.now)}"
        before, now = self.logged.values, self.now.values
        name = max(before, key=lambda key: relative_difference(before[key], now[key]))
        numbers = f"{name}={before[name]!r}, now {now[name]!r} ({self.size:.1e} of it)"
        return f"{self.place}: {_describe(self.logged)}: {numbers}"


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    state: State
    num_events: int
    num_decisions: int
    differences: tuple[Difference, ...]

    @property
    def others(self) -> list[Difference]:
        """Decisions that differ by more than their numbers' last digits."""
        return [one for one in self.differences if one.size > SAME_NUMBER]


SAME_NUMBER = 1e-6
"""Relative difference of numbers that is due to rounding."""


def replay(path: Path) -> Replay:
    """Handle all events of a log and its archive again, from each snapshot on.

    Raises:
        SchemaError: as `recover`.
    """
    num_events, num_decisions, reader = 0, 0, LogReader(path)
    differences: list[Difference] = []
    for reader in map(LogReader, logs_of(path)):
        for entry in reader.entries():
            for logged, now in zip_longest(entry.decisions, reader.apply(entry)):
                if size := _difference(logged, now):
                    place = f"{reader.path.name}:{entry.line}"
                    differences.append(Difference(place, logged, now, size))
            num_events += 1
            num_decisions += len(entry.decisions)
    return Replay(reader.state, num_events, num_decisions, tuple(differences))


def _difference(logged: Decision | None, now: Decision | None) -> float:
    """Return how much a decision differs, except in the wording of its reason."""
    if logged is None or now is None or logged.values.keys() != now.values.keys():
        return math.inf
    if (logged.job, logged.action, logged.process) != (now.job, now.action, now.process):
        return math.inf
    numbers = [relative_difference(logged.values[key], now.values[key]) for key in now.values]
    return max(numbers, default=0.0)


def relative_difference(a: float, b: float) -> float:
    """Return the difference of two numbers over the larger one.

    Example:
        >>> relative_difference(4.0, -4.0), relative_difference(3.0, 4.0), relative_difference(0, 0)
        (2.0, 0.25, 0.0)
    """
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _describe(decision: Decision | None) -> str:
    if decision is None:
        return "nothing"
    subject = f"{decision.job} {decision.process}".strip()
    return f"{decision.action!r} of {subject} ({decision.reason})"


def describe_job(job: JobState) -> str:
    """Return the progress of a job in one line."""
    live = job.processes.values()
    pools = {pool: sum(p.pool == pool for p in live) for pool in ("segment", "replica", "store")}
    trainers = pools["replica"] if job.has_replicas else len(job.of_pool("coordinator"))
    return (
        f"{job.phase}, {len(job.built)} of {counted(job.num_segments, 'segment')} built, "
        f"{counted(job.next_step, 'step')} trained, "
        f"{counted(pools['segment'], 'segment job')}, {counted(trainers, 'trainer')}, "
        f"{counted(pools['store'], 'store')}"
    )


def describe_replay(result: Replay) -> str:
    """Return the result of a replay in one line."""
    summary = replay_summary(result)
    same = summary["num_decisions"] - summary["num_rounded"] - summary["num_others"]
    line = f"{summary['num_events']:,} events lead to the same {same:,} decisions"
    if summary["num_rounded"]:
        largest = summary["largest_rounding"]
        line += f", {summary['num_rounded']:,} more differ by at most {largest:.1e} of a number"
    return line + (f", {summary['num_others']:,} are others" if summary["num_others"] else "")


def replay_summary(result: Replay) -> dict[str, Any]:
    """Return what `replay --json` prints."""
    rounding = [one.size for one in result.differences if one.size <= SAME_NUMBER]
    return {
        "num_events": result.num_events,
        "num_decisions": result.num_decisions,
        "num_rounded": len(rounding),
        "largest_rounding": max(rounding, default=0.0),
        "num_others": len(result.differences) - len(rounding),
        "jobs": jobs_summary(result.state),
    }


def jobs_summary(state: State) -> dict[str, Any]:
    """Return the progress of every job, for JSON."""
    return {
        job.name: {
            "phase": job.phase,
            "segments_built": len(job.built),
            "num_segments": job.num_segments,
            "next_step": job.next_step,
            "num_trained": job.num_trained,
            "processes": sorted(job.processes),
        }
        for job in state.jobs.values()
    }
