"""What measurements change: windows of steps, readings of processes, loads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler.cells import observe
from scheduler.grid import Grid
from scheduler.machine.events import LoadKnown, Moved, Read, Resized, Started, Stepped
from scheduler.machine.fitting import with_steps
from scheduler.machine.slots import first_owners
from scheduler.machine.state import Action, JobState, State
from scheduler.models import training_setting
from schemas.job_schedule import ScheduleConfig

READINGS = 256
"""Readings of a process that are kept: beyond, every second one is dropped."""

Handled = tuple[JobState, list[Action]]


def on_started(job: JobState, event: Started, state: State) -> Handled:
    """A process runs; a store takes its share of the slots when no other has it."""
    process = job.processes[event.process]
    if process.status == "starting":  # what it waited for a place is no work
        process = replace(process, status="running", began_sec=event.time_sec)
    job = replace(job, processes={**job.processes, process.name: process})
    if process.pool == "store" and not job.owners and job.num_stores:
        homes = first_owners(job.num_homes or job.num_stores)
        job = replace(job, owners=tuple(job.first_home + number for number in homes))
    return job, []


def on_read(job: JobState, event: Read, state: State) -> Handled:
    """Memory, speed and busy cores of one process."""
    process = job.processes[event.process]
    readings = (*process.readings, (event.position, event.resident_bytes))
    if len(process.readings) and event.position <= process.readings[-1][0]:
        readings = process.readings  # it does not get on: nothing is learned of its growth
    if len(readings) > READINGS:
        readings = readings[::2]
    rate = process.rate if event.rate is None else event.rate
    busy = process.busy_cores if event.busy_cores is None else event.busy_cores
    process = replace(process, readings=readings, rate=rate, busy_cores=busy)
    job = replace(job, processes={**job.processes, process.name: process})
    if process.pool == "segment":
        peak = max(job.worker_peak, event.resident_bytes // process.workers)
        job = replace(job, worker_peak=peak)
    return job, []


def on_resized(job: JobState, event: Resized, state: State) -> Handled:
    """A process has its new cores and memory; or it never will, and has what it had."""
    process = job.processes[event.process]
    if not event.resized and process.is_changing:
        memory, cpus = process.memory_before, process.cpus_before
        less = memory is not None and process.memory_bytes < memory
        refused_sec = process.refused_sec if less else None
        process = replace(
            process,
            memory_bytes=process.memory_bytes if memory is None else memory,
            cpus=process.cpus if cpus is None else cpus,
            fixed=process.fixed or (memory is not None and not less),
            refused_sec=refused_sec if cpus is None else event.time_sec,
            unspared_sec=event.time_sec if less else process.unspared_sec,
        )
    process = replace(process, memory_before=None, cpus_before=None)
    return replace(job, processes={**job.processes, process.name: process}), []


def on_stepped(job: JobState, event: Stepped, state: State) -> Handled:
    """Steps were committed: whoever trained is not in trouble."""
    config: ScheduleConfig = job.snapshot.job.schedule
    stores, steps = job.num_serving, job.steps
    if event.seconds and not job.doubted:
        grid = Grid.of_rows(np.array([(1, 1, event.num_replicas, stores)] * len(event.seconds)))
        setting = training_setting(job.snapshot, config, grid)
        steps = observe(steps, setting, event.seconds, event.time_sec - job.since_sec)
    trains = ("lead", "replica", "store")
    troubles = {k: v for k, v in job.troubles.items() if not k.startswith(trains)}
    after = replace(
        job,
        steps=steps,
        next_step=event.next_step,
        num_trained=event.num_samples,
        troubles=troubles if event.next_step > job.next_step else job.troubles,
        seen=with_steps(job.seen, event),
    )
    return after, []


def on_load(job: JobState, event: LoadKnown, state: State) -> Handled:
    """The oracle tells of more steps."""
    return replace(job, load=event), []


def on_moved(job: JobState, event: Moved, state: State) -> Handled:
    """Ranges of slots have their new store, or stay where they were."""
    owners = list(job.owners)
    for number in job.moving or (event.slots,):
        if event.moved and number < len(owners):
            owners[number] = event.target
    unsure = tuple(n for n in job.unsure if not event.moved or n != job.emptied)
    if not event.moved and event.target >= 0 and job.stores:
        unsure = (*(n for n in unsure if n != event.target), event.target)
    unmoved_sec = None if event.moved else event.time_sec
    job = replace(job, moving=(), emptied=None, owners=tuple(owners))
    num_unmoved = 0 if event.moved else job.num_unmoved + 1
    return replace(job, unsure=unsure, unmoved_sec=unmoved_sec, num_unmoved=num_unmoved), []
