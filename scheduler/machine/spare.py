"""Memory that a pool's processes have and will not need: the next ones get less.

Trainers that run get less, too, where memory is a limit that can be changed in place. Nobody is
replaced for it, unless something else cannot begin for lack of memory (`reconcile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.correction import ENOUGH, HEADROOM, MemoryWatch, Pool
from scheduler.machine.left import Left
from scheduler.machine.state import Action, JobState
from scheduler.memory import trainer_memory, worker_bytes
from scheduler.outlook import Sizes

SPARE_LOOKS = 20
"""Looks in a row at which it must be so: 100 s at least."""


def give_back(
    job: JobState, sizes: Sizes, left: Left, watches: Sequence[MemoryWatch], *, peaks: bool
) -> tuple[JobState, list[Action]]:
    """Count the looks at which each pool has memory to spare; after enough its next ones get less.

    Args:
        job: with nothing on its way.
        sizes: what it runs at.
        left: of it.
        watches: of all processes that were read.
        peaks: whether a segment job gets no less than any before it was read to have, and none
            gets less before one has ended: what it foresees while it runs is too little.
    """
    actions: list[Action] = []
    pools: tuple[Pool, ...] = ("preprocessing", "training")
    for pool in pools:
        has = job.worker_memory if pool == "preprocessing" else job.replica_memory
        wanted = _wanted(job, pool, sizes, left, watches)
        if peaks and pool == "preprocessing" and wanted is not None:
            wanted = max(wanted, int(HEADROOM * job.worker_peak)) if job.built else None
        looks = job.spare.get(pool, 0) + 1
        if wanted is None or wanted >= (1.0 - ENOUGH) * has:
            looks = 0
        elif looks >= SPARE_LOOKS:
            job, looks = _with_memory(job, pool, wanted), 0
            actions.append(_said(job, pool, has, wanted))
        job = replace(job, spare={**job.spare, pool: looks})
    return job, actions


def _wanted(
    job: JobState, pool: Pool, sizes: Sizes, left: Left, watches: Sequence[MemoryWatch]
) -> int | None:
    """Return the bytes that all processes of a pool get by with, None where one is not known."""
    seen = [watch.forecast for watch in watches if watch.pool == pool]
    kinds = ("segment",) if pool == "preprocessing" else ("lead", "replica")
    live = [p for p in job.processes.values() if p.pool in kinds and p.memory_bytes]
    if not seen or len(seen) < len(live) or not all(one.confident for one in seen):
        return None
    needed = int(HEADROOM * max(one.needed_bytes for one in seen))
    return max(needed, _least(job, pool, sizes, left))


def _least(job: JobState, pool: Pool, sizes: Sizes, left: Left) -> int:
    """Return the bytes with which plans still fit that have no fewer processes."""
    facts, train = left.snapshot.facts, left.snapshot.job.train
    if pool == "preprocessing":
        rows = facts.num_samples / left.models.num_segments
        return worker_bytes(facts, rows, sizes.workers_per_job)
    fewest = left.config.training.min_replicas
    base = left.models.base_bytes
    return trainer_memory(facts, train, fewest, sizes.num_stores, base).total_bytes


def _with_memory(job: JobState, pool: Pool, memory_bytes: int) -> JobState:
    if pool == "preprocessing":
        return replace(job, worker_memory=memory_bytes)
    return replace(job, replica_memory=memory_bytes)


def _said(job: JobState, pool: Pool, has: int, wanted: int) -> Action:
    return Action(
        verb="give back",
        job=job.name,
        reason=f"{pool} is to need less than its {has:,} bytes, {SPARE_LOOKS} looks long: its next "
        f"processes get {wanted:,}",
        values={"memory_bytes": float(wanted)},
    )
