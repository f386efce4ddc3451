"""Jobs and their pools for humans and for scripts."""

from __future__ import annotations

from typing import Any

from scheduler.decision import counted
from scheduler.machine.log import Replay
from scheduler.machine.state import JobState, State


def pools_in_words(job: JobState) -> str:
    """Return what a job is at in one line."""
    live = job.processes.values()
    pools = {pool: sum(p.pool == pool for p in live) for pool in ("segment", "replica", "store")}
    trainers = pools["replica"] if job.grouped else len(job.of_pool("lead"))
    return (
        f"{job.phase}, {len(job.built)} of {counted(job.num_segments, 'segment')} built, "
        f"{counted(job.next_step, 'step')} trained, "
        f"{counted(pools['segment'], 'segment job')}, {counted(trainers, 'trainer')}, "
        f"{counted(pools['store'], 'store')}"
    )


def replayed(found: Replay) -> dict[str, Any]:
    """Return what `replay --json` prints."""
    return {
        "num_events": found.num_events,
        "num_decisions": found.num_decisions,
        "num_missing": len(found.missing),
        "jobs": jobs_as_json(found.state),
    }


def jobs_as_json(state: State) -> dict[str, Any]:
    """Return what every job is at."""
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
