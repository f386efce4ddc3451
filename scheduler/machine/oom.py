"""What a process gets whose like was killed for memory."""

from __future__ import annotations

from dataclasses import replace

from scheduler.correction import after_oom
from scheduler.machine.left import booked, left_of, room_of
from scheduler.machine.state import JobState, PoolName, Process, State
from scheduler.machine.watch import foreseen, segment_sec
from schemas.job_schedule import ScheduleConfig


def larger(job: JobState, process: Process, state: State) -> tuple[JobState, bool, str]:
    """Give the next processes of a pool more than the one had that was killed for memory.

    Args:
        job: without the process.
        process: it.
        state: before.

    Returns:
        The job, whether the next process gets more, and in words what.
    """
    had = (process.memory_before or process.memory_bytes) // process.workers
    if had >= memory_of(job, process.pool):
        most = _most(job, process.pool, state)
        given = int(after_oom(had, _wanted(job, process, state), most))
        job = _with_memory(job, process.pool, given)
        job = replace(job, outgrown=job.outgrown + _outgrows(job, state))
    given = memory_of(job, process.pool)
    each = "each of its workers" if process.pool == "segment" else "it"
    words = f"was killed for memory when {each} had {had:,} bytes"
    if given <= had:
        return job, False, f"{words}, and the budget has no more"
    return job, True, f"{words}, and has {given:,} from now on"


def memory_of(job: JobState, pool: PoolName) -> int:
    """Return the bytes of the next process of a pool, of each worker of a segment job."""
    if pool == "segment":
        return job.worker_memory
    return job.store_memory if pool == "store" else job.replica_memory


def _with_memory(job: JobState, pool: PoolName, memory_bytes: int) -> JobState:
    if pool == "segment":
        return replace(job, worker_memory=memory_bytes)
    if pool == "store":
        return replace(job, store_memory=memory_bytes)
    return replace(job, replica_memory=memory_bytes)


def _wanted(job: JobState, process: Process, state: State) -> int:
    """Return the bytes that its readings foresee for one like it, 0 where they tell nothing."""
    if not process.readings or process.pool == "store":
        return 0
    end = job.num_steps
    if process.pool == "segment":
        left = left_of(job, state.now_sec, state.budget, state.runner)
        end = int(segment_sec(job, left, process)[0])
    seen = foreseen(None if process.pool == "segment" else job, process, end)
    return -(-seen.needed_bytes // process.workers) if seen.confident else 0


def _most(job: JobState, pool: PoolName, state: State) -> int:
    """Return the bytes that each process of a pool may have beside the smallest other pools."""
    config: ScheduleConfig = job.snapshot.job.schedule
    numbers: dict[PoolName, int] = {
        "segment": max(1, config.preprocessing.min_workers) if job.left_segments else 0,
        "replica": max(1, config.training.min_replicas),
        "store": _num_stores(job),
    }
    kind: PoolName = "replica" if pool == "lead" else pool
    others = sum(n * memory_of(job, other) for other, n in numbers.items() if other != kind)
    most = min(config.budget.memory, state.budget.memory)
    return max(0, most - others) // max(1, numbers[kind])


def _num_stores(job: JobState) -> int:
    if job.num_stores is None:
        return 0 if job.sizes is None else job.sizes.num_stores
    return job.num_stores


def _outgrows(job: JobState, state: State) -> bool:
    """Tell whether its sizes need more memory now than it has a share of."""
    return booked(job, job.sizes)[1] > room_of(state, job).memory
