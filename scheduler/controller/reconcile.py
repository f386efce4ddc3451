"""From pool sizes to actions.

Which processes start and stop, and which slots move between stores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from scheduler.controller.allocation import Reconciler, required_resources
from scheduler.controller.events import THIRD_RULES
from scheduler.controller.slots import (
    NUM_RANGES,
    SlotMove,
    format_spans,
    plan_emptying,
    plan_levelling,
    redistribute,
    store_loads,
)
from scheduler.controller.state import Action, JobState, Process, State, WorkerBound
from scheduler.controller.watch import accesses_at, future_step
from scheduler.model.memory import HEADROOM, STORE_BASE_BYTES, tables_bytes
from scheduler.planner.correction import Sizes, end_change
from scheduler.planner.policy import counted

# Stores that become more and fewer while a job trains: who belongs, and what moves between them.
#
# A new store begins without slots and gets ranges of them from the others, as they go on; one
# that is too many gives all of its ranges away and then leaves. Numbers are never given again,
# and the first store always stays: by it whoever begins anew finds the others.

RETRY_SEC = 30.0
"""Time after which a move that failed is tried again: whoever trains may not have begun. Twice as
long each time."""
MAX_RETRY_SEC = 960.0


def target_stores(sizes: Sizes) -> int:
    """Return how many stores a job that has some is to have."""
    return max(1, min(NUM_RANGES, sizes.num_stores))


def update_members(job: JobState, sizes: Sizes) -> JobState:
    """Return a job with the stores that belong to it at its sizes.

    Those that are too many belong to it until they have no range, and for sure none that a move
    brought that seemed to fail. Where nothing trains they go at once: whoever begins reads the rows
    from its checkpoint, and may need their room.
    """
    if not job.num_stores:
        return job
    if not job.stores:
        job = replace(job, stores=tuple(range(job.num_stores)), num_initial_stores=job.num_stores)
    wanted = target_stores(sizes)
    if not job.of_pool("lead") and not job.of_pool("replica"):
        job = _untrained(job, wanted)
    stores = list(job.stores)
    while len(stores) < wanted:
        stores.append(_fresh(job, stores))
    if job.owners and not job.moving:
        has = {*job.owners, *job.maybe_owners}
        stores = stores[:wanted] + [n for n in stores[wanted:] if n in has]
    return replace(job, stores=tuple(stores), num_stores=len(stores))


def _untrained(job: JobState, wanted: int) -> JobState:
    """Return a job that nothing trains without the stores that are too many.

    Before the first step nobody may have opened them, and together those that are left would not
    have been started with every slot: then others take the place of all.
    """
    if not job.of_pool("store"):
        job = replace(job, moving=())
    if job.moving or len(job.stores) <= wanted:
        return job
    if job.next_step:
        kept = job.stores[:wanted]
        owners = redistribute(job.owners, kept)  # whoever begins may give them to others
        unsure = tuple(n for n in kept if n in job.maybe_owners or n not in owners)
        return replace(job, stores=kept, owners=owners, maybe_owners=unsure)
    first = _fresh(job, job.stores) if _numbers(job) else 0
    stores = tuple(range(first, first + wanted))
    return replace(
        job,
        stores=stores,
        first_initial_store=first,
        num_initial_stores=wanted,
        owners=(),
        maybe_owners=(),
    )


def _fresh(job: JobState, stores: Sequence[int]) -> int:
    """Return a number that no store had."""
    return 1 + max(*stores, *_numbers(job), 0)


def _numbers(job: JobState) -> list[int]:
    """Return the numbers that stores have had."""
    return [int(p.removeprefix("store-")) for p in job.attempts if p.startswith("store-")]


def stores_ready(job: JobState) -> bool:
    """Tell whether all stores run that have slots, and those that are too many are gone."""
    gone = all(p.number in job.stores for p in job.of_pool("store"))
    return gone and set(job.owners or job.stores) <= set(job.running_stores)


def stores_present(job: JobState, sizes: Sizes) -> bool:
    """Tell whether all stores are there that are to be.

    Nobody waits for those that are too many: they may take long to give their slots away.
    """
    there = {process.number for process in job.of_pool("store")}
    wanted = job.stores[: target_stores(sizes)]
    return len(wanted) == target_stores(sizes) and set(wanted) <= there


def move_slots(
    job: JobState, sizes: Sizes, ahead_steps: int, now_sec: float
) -> tuple[JobState, list[Action]]:
    """Begin the next move of slots: off a store that is too many, or off one with too much load.

    Args:
        job: that trains.
        sizes: what it is to have.
        ahead_steps: steps from now at which loads are looked at.
        now_sec: the time.
    """
    running = set(job.running_stores)
    wait = min(MAX_RETRY_SEC, RETRY_SEC * 2.0 ** max(0, job.num_failed_moves - 1))
    early = job.move_failed_sec is not None and now_sec < job.move_failed_sec + wait
    trains = any(p.status == "running" for p in job.of_pool("lead"))
    if job.moving or early or not trains or not set(job.owners) <= running:
        return job, []
    counts, step = range_loads(job, ahead_steps)
    staying = running & set(job.stores[: target_stores(sizes)])
    most = max_ranges(job, len(staying))
    move = plan_emptying(job.owners, counts, staying, most)
    if move is not None:
        whole = len(move.ranges) == job.owners.count(move.source)
        return _moved(job, move, f"{len(staying)} are enough", {"whole": float(whole)})
    if (source := _to_search(job, staying)) is not None:
        target = min(staying & set(job.owners))
        move = SlotMove((job.owners.index(target),), source, target)
        why = f"store {source} is too many; a move to it that failed may have brought it slots"
        return _moved(job, move, why, {"whole": 1.0})
    move = plan_levelling(job.owners, counts, staying, most)
    if move is None:
        return job, []
    mean = sum(counts) / len(staying)
    mine = store_loads(job.owners, counts, staying)[move.source]
    left = mine - sum(counts[number] for number in move.ranges)
    known = "" if step is None else f" at step {step}, as the oracle knows"
    why = (
        f"store {move.source} is to answer {mine / mean:.2f} times the mean{known}; the move "
        f"leaves {left / mean:.2f}"
    )
    return _moved(job, move, why, {})


def max_ranges(job: JobState, num_stores: int) -> int:
    """Return how many ranges one of several stores has memory for, as far as rows lie evenly."""
    facts, train = job.snapshot.facts, job.snapshot.job.train
    room = job.store_memory - STORE_BASE_BYTES
    held = int(NUM_RANGES * room / max(1.0, HEADROOM * tables_bytes(facts, train)))
    return min(NUM_RANGES, max(held, -(-NUM_RANGES // max(1, num_stores))))


def _to_search(job: JobState, staying: Collection[int]) -> int | None:
    """Return a store that is to go and may have slots that nobody knows of."""
    running = job.running_stores
    found = [n for n in job.maybe_owners if n in running and n not in staying and n in job.stores]
    return found[-1] if found and set(staying) & set(job.owners) else None


def range_loads(job: JobState, ahead_steps: int) -> tuple[Sequence[float], int | None]:
    """Return what each range is to be asked for, and at which step; the same where nobody knows.

    Args:
        job: whose load is known, or not.
        ahead_steps: steps from now.
    """
    step = future_step(job, ahead_steps)
    if job.load is None or step is None:
        return [1.0] * len(job.owners), None
    return accesses_at(job.load, step).tolist(), step


def _moved(
    job: JobState, move: SlotMove, why: str, values: dict[str, float]
) -> tuple[JobState, list[Action]]:
    many = len(move.ranges) > 1
    what = f"ranges {format_spans(move.ranges)}" if many else f"range {move.ranges[0]}"
    what += f" of the slots {'move' if many else 'moves'}"
    action = Action(
        verb="migrate",
        job=job.name,
        reason=f"{what} from store {move.source} to store {move.target}: {why}",
        values={
            "slots": float(move.ranges[0]),
            "source": float(move.source),
            "target": float(move.target),
            **values,
        },
    )
    emptied = move.source if values.get("whole") else None
    return replace(job, moving=move.ranges, emptying_store=emptied), [action]


# From sizes to processes: what is started and what leaves, so that pools get their sizes.
#
# Asked after every event. It starts nothing that the budget does not hold beside all that still
# runs, and no place (a segment, a replica) ever has two processes.


def reconcile(state: State) -> tuple[State, list[Action]]:
    """Start and end processes until pools are what they are to be, as far as there is room."""
    cpus, memory = state.used
    done = Reconciler(
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


def _spare_given(jobs: Mapping[str, JobState], done: Reconciler) -> Mapping[str, JobState]:
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


def _reconcile_job(job: JobState, done: Reconciler) -> JobState:
    if job.phase == "draining":
        job = _end_all(job, done, "the job is asked to end")
        return job if job.processes else replace(job, phase="drained")
    if job.sizes is None:
        return _end_all(job, done, "the job waits for room")
    return _segments(_fit(_training(job, job.sizes, done), done), job.sizes, done)


def _fit(job: JobState, done: Reconciler) -> JobState:
    """Book for trainers and stores what the next ones get, as far as that can be changed."""
    for process in (*job.of_pool("lead"), *job.of_pool("replica"), *job.of_pool("store")):
        computes = process.pool != "lead" or process.cpus > 0  # a lead beside replicas does not
        if computes:
            cpus, memory_bytes = required_resources(job, process.pool)
            job = done.fit(job, process, cpus)
            if process.pool != "store":  # of whose memory nothing is foreseen
                job = done.spare(job, job.processes[process.name], memory_bytes)
    return job


def _end_all(job: JobState, done: Reconciler, reason: str) -> JobState:
    """Let all leave: replicas save while their lead is there, and stores go when both have."""
    for process in job.of_pool("segment"):
        job = done.leave(job, process, reason, stop=True)
    first = next(filter(None, map(job.of_pool, ("replica", "lead", "store"))), [])
    for process in first:
        job = done.leave(job, process, reason)
    return job


def _segments(job: JobState, sizes: Sizes, done: Reconciler) -> JobState:
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
        found = done.bound_workers(job)
        if not found.workers:
            job = _lacking_slots(job, number, found, done)
            break
        job = replace(job, waits_for_slots=False)
        if not done.has_room(*required_resources(job, "segment", found.workers)):
            break
        before = len(job.processes)
        job = _build(job, number, found, done)
        if len(job.processes) == before:
            break  # it failed a moment ago; those after it wait for it anyway
        building.append(number)
    full = len(building) >= most or job.waits_for_slots
    if open_ones and building and open_ones[0] not in building and full:
        last = job.of_pool("segment")[-1]
        why = f"segment {open_ones[0]} is to be built first: later ones wait for it"
        job = done.leave(job, last, why, stop=True)
    return job


def _build(job: JobState, number: int, found: WorkerBound, done: Reconciler) -> JobState:
    """Start a segment job with the workers that it gets."""
    reason = f"segment {number} of {job.num_segments} is to be built"
    if found.reason:
        reason += f" by {counted(found.workers, 'worker')}: {found.reason}"
    return done.start(job, "segment", number, reason, found)


def _lacking_slots(job: JobState, number: int, found: WorkerBound, done: Reconciler) -> JobState:
    """Say once that the next segment job waits for a slot."""
    if job.waits_for_slots:
        return job
    reason = f"segment {number} of {job.num_segments} waits for a slot: {found.reason}"
    done.actions.append(Action(verb="wait", job=job.name, reason=reason, values=found.values))
    return replace(job, waits_for_slots=True)


def _training(job: JobState, sizes: Sizes, done: Reconciler) -> JobState:
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
    served = stores_ready(job) if job.stores else job.num_stores == len(job.running_stores)
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


def _stores(job: JobState, sizes: Sizes, done: Reconciler) -> JobState:
    """Run the stores; by newer rules as many as the sizes say."""
    if done.elastic:
        job = update_members(job, sizes)
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
    wanted = min(job.sizes.segment_jobs if job.built else 1, job.remaining_segments)
    building = len(job.of_pool("segment"))
    if building > wanted or (building < wanted and not job.waits_for_slots):
        return False
    if not job.built:
        return True
    if job.stores and not stores_present(job, job.sizes):
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
    return replace(job, correction=end_change(job.correction, now_sec))
