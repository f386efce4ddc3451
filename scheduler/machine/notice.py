"""What is done when a process is about to be taken away."""

from __future__ import annotations

from dataclasses import replace

from scheduler.machine.events import Preempted
from scheduler.machine.left import left_of
from scheduler.machine.state import Action, JobState, State
from scheduler.machine.watch import segment_sec

Handled = tuple[JobState, list[Action]]


def on_preempted(job: JobState, event: Preempted, state: State) -> Handled:
    """Hand back what runs there, unless it is done before.

    Trainers leave after their step. A segment job keeps nothing when it ends early, so it
    stays where it is predicted to be done in time, and otherwise makes room at once.
    """
    process = job.processes[event.process]
    if process.status == "leaving":
        return job, []
    verb, why = "drain", "it leaves with nothing lost"
    if process.pool == "lead" and job.grouped:
        why = "its replicas go on from their checkpoint with another one"
    if process.pool == "segment":
        left = left_of(job, event.time_sec, state.budget, state.runner)
        ends = process.began_sec + segment_sec(job, left, process)[1] - event.time_sec
        if 0.0 < ends <= event.grace_sec:
            reason = f"to be taken in {event.grace_sec:g} s; it is done in {ends:.0f} s at most"
            return job, [_said(job, process.name, reason)]
        verb, why = "stop", "it is built elsewhere, from the start"
    reason = f"to be taken in {event.grace_sec:g} s; {why}"
    after = replace(process, status="leaving")
    job = replace(job, processes={**job.processes, process.name: after})
    action = Action(verb=verb, job=job.name, process=process.name, reason=reason)
    return job, [_said(job, process.name, reason), action]


def _said(job: JobState, process: str, reason: str) -> Action:
    return Action(verb="hand back", job=job.name, process=process, reason=reason)
