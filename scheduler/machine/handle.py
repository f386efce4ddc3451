"""From an event to actions: the page to read first.

    take in the event -> look at each job (corrections, stragglers, load, memory)
    -> share the budget anew if a job came or went -> bring processes in line with sizes

Nothing here reads a clock or a file: the same events give the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from scheduler.machine.allot import allot
from scheduler.machine.endings import on_ended
from scheduler.machine.events import (
    FIRST_RULES,
    BudgetSet,
    Drained,
    Ended,
    Event,
    JobEvent,
    LoadKnown,
    Moved,
    Preempted,
    ProcessEvent,
    Read,
    Resized,
    RunnerSet,
    SlotsRead,
    SlotsUnread,
    Started,
    Stepped,
    Submitted,
    Ticked,
)
from scheduler.machine.look import look
from scheduler.machine.notice import on_preempted
from scheduler.machine.reconcile import reconcile
from scheduler.machine.runner import on_runner
from scheduler.machine.state import ENDED, Action, JobState, Seen, State
from scheduler.machine.taking_in import (
    on_load,
    on_moved,
    on_read,
    on_resized,
    on_started,
    on_stepped,
)
from scheduler.machine_sizes import on_cluster
from scheduler.pools import Cores
from scheduler.snapshot import Snapshot
from schemas.job import parse_job
from schemas.job_schedule import BudgetConfig

Handler = Callable[[JobState, Any, State], tuple[JobState, list[Action]]]


def handle(state: State, event: Event) -> tuple[State, list[Action]]:
    """Take in one event.

    Args:
        state: after the event before.
        event: what happened.

    Returns:
        The state, and what is to be done, in order.

    Raises:
        SchemaError: a submitted job file is none.
    """
    # A clock that was set back must not undo what was waited for.
    event = replace(event, time_sec=max(event.time_sec, state.now_sec))
    before = _claims(state)
    state, actions = _take_in(replace(state, now_sec=event.time_sec), event)
    if isinstance(event, Ticked):
        state, found = look(state)
        actions += found
    if _claims(state) != before:
        state, found = allot(state)
        actions += found
    state, found = reconcile(state)
    return state, [*actions, *found]


def _claims(state: State) -> tuple[BudgetConfig, list[tuple[str, int]]]:
    """Return the budget and the jobs among which it is shared."""
    asking = [job for job in state.by_priority if job.phase != "draining"]
    return state.budget, [(job.name, job.outgrown + job.spared) for job in asking]


def _take_in(state: State, event: Event) -> tuple[State, list[Action]]:
    if isinstance(event, BudgetSet):
        return _with_budget(state, event), []
    if isinstance(event, Submitted):
        return _submit(state, event), []
    if isinstance(event, RunnerSet | SlotsRead | SlotsUnread):
        return replace(state, runner=on_runner(state.runner, event)), []
    if not isinstance(event, JobEvent):
        return state, []
    job = state.jobs.get(event.job)
    if job is None or (isinstance(event, ProcessEvent) and event.process not in job.processes):
        return state, []  # news of what is gone
    job, actions = _HANDLERS[type(event)](job, event, state)
    return replace(state, jobs={**state.jobs, job.name: job}), actions


def _with_budget(state: State, event: BudgetSet) -> State:
    haste = event.haste if event.rules > FIRST_RULES else 1.0
    budget = replace(state.budget, cpus=event.cpus, memory=event.memory_bytes, haste=haste)
    return replace(state, budget=budget, resizes=event.resizes, rules=event.rules)


def _submit(state: State, event: Submitted) -> State:
    """Add a job, or let one that was ended early go on."""
    old = state.jobs.get(event.job)
    if old is not None and old.phase not in ("drained", "draining", "failed"):
        return state
    job = parse_job(event.document, event.job)
    declared = job.schedule
    settled = on_cluster(declared) if event.sizes is None else event.sizes.applied_to(declared)
    job = replace(job, schedule=settled)
    snapshot = Snapshot(job=job, facts=event.facts, history=event.history)
    config = job.schedule
    if old is not None:
        again = replace(
            old,
            document=event.document,
            snapshot=snapshot,
            phase="submitted",
            sizes=None,
            troubles={},
            lacks_slots=False,
            replica_cpus=config.training.replica.cpus,
            store_cpus=config.training.store.cpus,
            seen=Seen(),
            cores=Cores(),
            doubted=False,
        )
        return replace(state, jobs={**state.jobs, event.job: again})
    fresh = JobState(
        name=event.job,
        since_sec=event.time_sec,
        document=event.document,
        snapshot=snapshot,
        num_segments=event.num_segments,
        worker_memory=config.preprocessing.worker.memory,
        replica_memory=config.training.replica.memory,
        store_memory=config.training.store.memory,
        replica_cpus=config.training.replica.cpus,
        store_cpus=config.training.store.cpus,
    )
    return replace(state, jobs={**state.jobs, event.job: fresh})


def _drain(job: JobState, _event: Drained, _state: State) -> tuple[JobState, list[Action]]:
    ended = job.phase in ENDED
    return job if ended else replace(job, phase="draining", sizes=None), []


_HANDLERS: Mapping[type[Event], Handler] = MappingProxyType(
    {
        Drained: _drain,
        Started: on_started,
        Ended: on_ended,
        Preempted: on_preempted,
        Read: on_read,
        Resized: on_resized,
        Stepped: on_stepped,
        LoadKnown: on_load,
        Moved: on_moved,
    }
)
