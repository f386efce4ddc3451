"""From sizes to processes: what is started and what leaves, so that pools get their sizes.

Asked after every event. It starts nothing that the budget does not hold beside all that
still runs, and no place (a segment, a replica) ever has two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.correction import ended
from scheduler.decision import counted
from scheduler.machine.booking import Pass, needs
from scheduler.machine.elastic import are_there, is_served, with_members
from scheduler.machine.events import THIRD_RULES
from scheduler.machine.runner import Bound
from scheduler.machine.state import Action, JobState, Process, State
from scheduler.outlook import Sizes


def reconcile(state: State) -> tuple[State, list[Action]]:
    """Start and end processes until pools are what they are to be, as far as there is room."""
    cpus, memory = state.used
    done = Pass(
        now_sec=state.now_sec,
        cpus=state.budget.cpus - cpus,
        memory_bytes=state.budget.memory - memory,
        resizes=state.resizes,
        elastic=state.rules > THIRD_RULES,
        runner=state.runner,
        booked_workers=sum(p.workers for j in state.jobs.values() for p in j.of_pool("segment")),
    )
    jobs = dict(state.jobs)
    for job in state.jobs.values():
        if job.phase in ("drained", "finished", "failed") and job.processes:
            jobs[job.name] = _end_all(job, done, f"the job has {job.phase}")
    for job in state.by_priority:
        jobs[job.name] = _settle(_reconcile_job(job, done), state.now_sec)
    found = _spare_given(jobs, done) if done.lacks_memory else jobs
    return replace(state, jobs=found), done.actions


def _spare_given(jobs: Mapping[str, JobState], done: Pass) -> Mapping[str, JobState]:
    """Let one trainer that has more than it is to have leave, for one that has less.

    One at a time, and only where nothing leaves anyway. Segment jobs are left alone: what
    is ended keeps nothing.
    """
    if any(p.status == "leaving" for job in jobs.values() for p in job.processes.values()):
        return jobs
    for job in jobs.values():
        for process in (*job.of_pool("lead"), *job.of_pool("replica")):
            more = process.memory_bytes - job.replica_memory
            waits = done.elastic and process.memory_before is not None
            if more > 0 and process.status == "running" and not waits:
                why = f"it has {more:,} bytes more than its next one gets, and others need them"
                return {**jobs, job.name: done.leave(job, process, why)}
    return jobs


def _reconcile_job(job: JobState, done: Pass) -> JobState:
    if job.phase == "draining":
        job = _end_all(job, done, "the job is asked to end")
        return job if job.processes else replace(job, phase="drained")
    if job.sizes is None:
        return _end_all(job, done, "the job waits for room")
    return _segments(_fit(_training(job, job.sizes, done), done), job.sizes, done)


def _fit(job: JobState, done: Pass) -> JobState:
    """Book for trainers and stores what the next ones get, as far as that can be changed."""
    for process in (*job.of_pool("lead"), *job.of_pool("replica"), *job.of_pool("store")):
        computes = process.pool != "lead" or process.cpus > 0  # a lead beside replicas does not
        if computes:
            cpus, memory_bytes = needs(job, process.pool)
            job = done.fit(job, process, cpus)
            if process.pool != "store":  # of whose memory nothing is foreseen
                job = done.spare(job, job.processes[process.name], memory_bytes)
    return job


def _end_all(job: JobState, done: Pass, reason: str) -> JobState:
    """Let all leave: replicas save while their lead is there, and stores go when both have."""
    for process in job.of_pool("segment"):
        job = done.leave(job, process, reason, stop=True)
    first = next(filter(None, map(job.of_pool, ("replica", "lead", "store"))), [])
    for process in first:
        job = done.leave(job, process, reason)
    return job


def _segments(job: JobState, sizes: Sizes, done: Pass) -> JobState:
    """Build the segments in order; the first one alone, as it decides what the others must be."""
    for process in job.of_pool("segment"):
        wanted = process.workers * job.worker_memory
        if process.memory_bytes < wanted:
            why = f"its workers are to have {job.worker_memory:,} bytes"
            job = done.grow(job, process, wanted, why, stop=True)
    building = [p.number for p in job.of_pool("segment")]
    most = sizes.segment_jobs if job.built else 1
    open_ones = [n for n in range(job.num_segments) if n not in job.built]
    for number in open_ones:
        if number in building:
            continue
        if len(building) >= most:
            break
        found = done.bound(job)
        if not found.workers:
            job = _lacking_slots(job, number, found, done)
            break
        job = replace(job, lacks_slots=False)
        if not done.has_room(*needs(job, "segment", found.workers)):
            break
        before = len(job.processes)
        job = _build(job, number, found, done)
        if len(job.processes) == before:
            break  # it failed a moment ago; those after it wait for it anyway
        building.append(number)
    full = len(building) >= most or job.lacks_slots
    if open_ones and building and open_ones[0] not in building and full:
        last = job.of_pool("segment")[-1]
        why = f"segment {open_ones[0]} is to be built first: later ones wait for it"
        job = done.leave(job, last, why, stop=True)
    return job


def _build(job: JobState, number: int, found: Bound, done: Pass) -> JobState:
    """Start a segment job with the workers that it gets."""
    reason = f"segment {number} of {job.num_segments} is to be built"
    if found.reason:
        reason += f" by {counted(found.workers, 'worker')}: {found.reason}"
    return done.start(job, "segment", number, reason, found)


def _lacking_slots(job: JobState, number: int, found: Bound, done: Pass) -> JobState:
    """Say once that the next segment job waits for a slot."""
    if job.lacks_slots:
        return job
    reason = f"segment {number} of {job.num_segments} waits for a slot: {found.reason}"
    done.actions.append(Action(verb="wait", job=job.name, reason=reason, values=found.values))
    return replace(job, lacks_slots=True)


def _training(job: JobState, sizes: Sizes, done: Pass) -> JobState:
    """Run the lead, its replicas and its stores, once the first segment is there."""
    if not job.built:
        return job
    if job.num_stores is None:
        job = replace(job, num_stores=sizes.num_stores)
    job = _stores(job, sizes, done)
    lead = next(iter(job.of_pool("lead")), None)
    if lead is not None and job.grouped and lead.cpus > 0:
        return done.leave(job, lead, "several replicas take over; it saves, and one begins anew")
    if lead is not None and 0 < lead.memory_bytes < job.replica_memory:
        why = f"it is to have {job.replica_memory:,} bytes"
        return done.grow(job, lead, job.replica_memory, why)
    replicas = job.of_pool("replica")
    if lead is None and replicas:
        for process in replicas:  # they know another lead
            job = done.leave(job, process, "its lead is gone", stop=True)
        return job
    served = is_served(job) if job.stores else job.num_stores == len(job.running_stores)
    if lead is None and served:
        job = done.start(job, "lead", 0, "a segment is there to train on")
    if not job.grouped or lead is None or lead.status != "running":
        return job
    for process in reversed(replicas):
        if process.number >= sizes.num_replicas:
            job = done.leave(job, process, f"{sizes.num_replicas} replicas are enough")
    short = [p for p in job.of_pool("replica") if p.memory_bytes < job.replica_memory]
    if short and all(p.status == "running" for p in job.of_pool("replica")):  # one by one
        why = f"it is to have {job.replica_memory:,} bytes"
        job = done.grow(job, short[0], job.replica_memory, why)
    for number in range(sizes.num_replicas):
        job = done.start(job, "replica", number, f"{sizes.num_replicas} replicas are to train")
    return job


def _stores(job: JobState, sizes: Sizes, done: Pass) -> JobState:
    """Run the stores; by newer rules as many as the sizes say."""
    if done.elastic:
        job = with_members(job, sizes)
    for number in job.stores or range(job.num_stores or 0):
        job = done.start(job, "store", number, "rows need a store")
    for process in job.of_pool("store") if job.stores else ():
        if process.number not in job.stores:
            job = done.leave(job, process, "it has no slots any more, the others are enough")
    return job


def is_settled(job: JobState) -> bool:
    """Tell whether the pools are what they are to be, and every process runs."""
    if job.sizes is None:
        return not job.processes
    if any(p.status != "running" or _is_short(job, p) for p in job.processes.values()):
        return False
    wanted = min(job.sizes.segment_jobs if job.built else 1, job.left_segments)
    building = len(job.of_pool("segment"))
    if building > wanted or (building < wanted and not job.lacks_slots):
        return False
    if not job.built:
        return True
    if job.stores and not are_there(job, job.sizes):
        return False
    replicas = job.sizes.num_replicas if job.grouped else 0
    return len(job.of_pool("lead")) == 1 and len(job.of_pool("replica")) == replicas


def _is_short(job: JobState, process: Process) -> bool:
    """Tell whether a process has less memory than it is to have, or not yet."""
    if process.is_changing:
        return True
    wanted = {"segment": process.workers * job.worker_memory, "replica": job.replica_memory}
    return process.memory_bytes < wanted.get(process.pool, 0)


def _settle(job: JobState, now_sec: float) -> JobState:
    """End the change in flight when nothing of it is left to do."""
    if job.correction.in_flight is None or not is_settled(job):
        return job
    return replace(job, correction=ended(job.correction, now_sec))
