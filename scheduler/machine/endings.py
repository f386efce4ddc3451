"""What the end of a process means for its job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler.cells import observe
from scheduler.grid import Grid
from scheduler.machine.events import Ended
from scheduler.machine.oom import larger
from scheduler.machine.state import Action, JobState, Process, State, Trouble
from scheduler.model import SegmentSetting
from scheduler.models import fit_models, segment_setting

MAX_FAILED = 3
"""Times that the process of one place may say that it cannot do its work: it would say so again."""
FIRST_RETRY_SEC = 1.0
"""After the first end without progress a process is started again so much later, and twice as late
each time: being killed is nobody's fault, so there is no last time."""
MAX_RETRY_SEC = 60.0
MAX_DOUBLINGS = 10
"""Beyond, nothing changes any more."""

Handled = tuple[JobState, list[Action]]


def on_ended(job: JobState, event: Ended, state: State) -> Handled:
    """Take a process out, and its work in if that is done."""
    process = job.processes[event.process]
    beside = len(job.of_pool("segment"))
    job = replace(job, processes={k: v for k, v in job.processes.items() if k != process.name})
    if event.outcome == "done" and process.pool == "segment":
        return _built(job, process, event, beside), []
    if event.outcome == "done" and process.pool == "lead":
        return _finished(job, event)
    if event.outcome in ("done", "left") or process.status == "leaving":
        return job, []
    return _in_trouble(job, process, event, state)


def _built(job: JobState, process: Process, event: Ended, beside: int) -> JobState:
    builds = job.builds
    if event.work_sec > 0.0:
        sizes = Grid.of_rows(np.array([(max(1, beside), process.workers, 1, 0)]))
        models = fit_models(job.snapshot, job.snapshot.job.schedule)
        found = segment_setting(models, job.snapshot, job.snapshot.job.schedule, sizes)
        setting = SegmentSetting(
            rows=event.num_samples,
            workers=found.workers,
            worker_cpus=found.worker_cpus,
            segment_jobs=found.segment_jobs,
        )
        builds = observe(builds, setting, [event.work_sec], event.time_sec - job.since_sec)
    troubles = {k: v for k, v in job.troubles.items() if k != process.place}
    return replace(job, built=job.built | {process.number}, builds=builds, troubles=troubles)


def _finished(job: JobState, event: Ended) -> Handled:
    job = replace(job, phase="finished", sizes=None)
    seconds = event.time_sec - job.since_sec
    action = Action(
        verb="finish",
        job=job.name,
        reason=f"{job.num_trained:,} samples of {job.num_segments} segments are trained, "
        f"{seconds:,.0f} s after it was submitted",
        values={"seconds": seconds, "num_samples": float(job.num_trained)},
    )
    return job, [action]


def _how(job: JobState, process: Process, event: Ended, state: State) -> tuple[JobState, bool, str]:
    """Return the job with more memory where that was lacking, whether nothing helps, and why."""
    if event.outcome == "oom" and process.memory_bytes:
        job, grew, how = larger(job, process, state)
        return job, not grew, how
    said = f": {event.detail}" if event.detail else ""
    if event.outcome == "failed":
        return job, True, f"failed{said}"
    return job, False, f"is gone{said}"


def _in_trouble(job: JobState, process: Process, event: Ended, state: State) -> Handled:
    """Start it again later, or give the job up when it says again and again that it cannot."""
    place = process.place
    old = job.troubles.get(place, Trouble())
    job, cannot, how = _how(job, process, event, state)
    failed, lost = old.failed + cannot, old.lost + (not cannot)
    wait = min(MAX_RETRY_SEC, FIRST_RETRY_SEC * 2.0 ** min(failed + lost - 1, MAX_DOUBLINGS))
    trouble = Trouble(failed=failed, lost=lost, retry_sec=event.time_sec + wait)
    job = replace(job, troubles={**job.troubles, place: trouble})
    if failed >= MAX_FAILED:
        said = how.removeprefix("failed") if event.outcome == "failed" else f": it {how}"
        reason = f"{place} cannot do its work, {failed} times{said}"
        after = replace(job, phase="failed", sizes=None)
        return after, [Action(verb="fail", job=job.name, process=process.name, reason=reason)]
    reason = f"it {how}; another one takes its place in {wait:g} s"
    return job, [Action(verb="replace", job=job.name, process=process.name, reason=reason)]
