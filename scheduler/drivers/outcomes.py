"""How a process ended: by its files first, then by its exit status."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from scheduler.controller.events import Ended, Outcome
from scheduler.controller.state import JobState, Process
from scheduler.drivers.base import Processes, parse_result
from scheduler.drivers.job_files import JobPaths
from scheduler.model.past_runs import PAST_JOBS, format_past_job
from scheduler.model.predict import fit_models, summarize_job
from schemas.dataset.files import replace_bytes
from schemas.dataset.manifest import find_root
from schemas.errors import SchemaError, StorageError
from schemas.run.records import EXIT_BEHIND, EXIT_HUNG, EXIT_LOST_ROWS, SUMMARY
from schemas.run.run_manifest import read_run_file

P = ParamSpec("P")
T = TypeVar("T")

CLUSTER_FAILED = re.compile(r"error: pipeline failed: Pipeline \S+ failed in state (.*)")
"""Last line of a segment job whose pipeline ended on a cluster."""
PEER_UNREACHABLE = re.compile(r"error: (store|lighthouse) did not answer within ")
"""Last line of a process that waited for another one of its job."""


def ended_event(
    paths: JobPaths, processes: Processes, job: str, process: Process, time_sec: float
) -> Ended:
    """Return how a process ended: its files decide before its exit status and its output."""
    name, exit_status = process.name, processes.exit_status(process.name)
    status = exit_status.status
    detail = processes.last_stderr_line(name)
    num_samples, work_sec, damage = 0, 0.0, ""
    try:
        is_complete = read_files(_is_complete, paths, process)
    except StorageError:
        raise
    except SchemaError as error:
        is_complete, damage = False, str(error)
    if is_complete:
        outcome: Outcome = "done"
        if process.pool == "segment":
            num_samples, work_sec = _build_figures(processes.output(name))
    elif damage:
        outcome, detail = "failed", damage
    elif status == 0 and process.pool != "segment":
        outcome = "left" if process.status == "leaving" or exit_status.lost else "lost"
        unexpected = "exited with status 0 before it was done"
        detail = exit_status.lost or (detail if outcome == "left" else unexpected)
    elif exit_status.oom:
        outcome, detail = "oom", exit_status.lost
    elif exit_status.lost:
        outcome, detail = "lost", exit_status.lost
    elif exit_status.refused:
        outcome, detail = "failed", exit_status.refused
    elif status in (EXIT_HUNG, EXIT_BEHIND, EXIT_LOST_ROWS):
        outcome = "lost"
    elif status is not None and status < 0:
        outcome, detail = "lost", f"signal {-status}"
    elif process.pool == "segment" and is_cluster_failure(detail):
        outcome = "lost"
    elif processes.endpoint is not None and PEER_UNREACHABLE.match(detail):
        outcome = "lost"  # the peer's node is unreachable; its Pods are replaced minutes later
    elif status is None and not detail.startswith("error"):
        unknown = "ended while no scheduler ran" if processes.was_started(name) else "not started"
        outcome, detail = "lost", detail or unknown
    else:
        outcome = "failed"
    return Ended(
        time_sec=time_sec,
        job=job,
        process=name,
        outcome=outcome,
        detail="" if outcome == "done" else detail[:500],
        num_samples=num_samples,
        work_sec=work_sec,
    )


def is_cluster_failure(line: str) -> bool:
    """Return whether a pipeline failed on a cluster without an error in one of our steps.

    Example:
        >>> is_cluster_failure(
        ...     "error: pipeline failed: Pipeline a_1 failed in state FAILED: "
        ...     "org.apache.flink.runtime.JobException: a task manager is gone"
        ... )
        True
    """
    match = CLUSTER_FAILED.match(line)
    return match is not None and "[while running '" not in match[1]


def _is_complete(paths: JobPaths, process: Process) -> bool:
    if process.pool == "segment":
        return is_built(paths, process.number)
    return process.pool == "coordinator" and is_trained(paths)


def read_files(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that reads files of a job.

    Raises:
        SchemaError: one is damaged.
        StorageError: one cannot be read now.
    """
    try:
        return read(*args, **kwargs)
    except OSError as error:
        raise StorageError(str(error)) from error


def undamaged(read: Callable[P, T | None], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what a function reads; None if it is damaged, which the process that needs it reports.

    Raises:
        StorageError: a file cannot be read now.
    """
    try:
        return read_files(read, *args, **kwargs)
    except StorageError:
        raise
    except SchemaError:
        return None


def is_built(paths: JobPaths, number: int) -> bool:
    """Return whether a segment is committed; for the last one, whether the dataset is sealed."""
    root = find_root(paths.dataset)
    if root is None:
        return False
    committed = any(segment.position == number for segment in root.manifest.segments)
    return committed and (number + 1 < paths.num_segments or root.manifest.sealed)


def is_trained(paths: JobPaths) -> bool:
    """Return whether the run is complete."""
    return read_run_file(paths.run, SUMMARY) is not None


def _build_figures(output: str) -> tuple[int, float]:
    """Return samples and seconds from the output of `build --json`; zeros if nothing was built."""
    body = parse_result(output) or {}
    try:
        if body["built"] is False:
            return 0, 0.0
        return int(body["num_samples"]), float(body["startup_sec"]) + float(body["wall_sec"])
    except (ValueError, KeyError, TypeError):
        return 0, 0.0


def record_history(job: JobState, folder: Path) -> None:
    """Append a finished job's fitted models to the history.

    Nothing is written if no step was measured or the same line is there already.
    """
    models = fit_models(job.snapshot, job.snapshot.job.schedule, job.steps, job.builds)
    if not models.training.num_cells:
        return
    line = format_past_job(summarize_job(job.snapshot, models.training, models.segments)).encode()
    path = folder / PAST_JOBS
    content = path.read_bytes() if path.exists() else b""
    if line not in content.splitlines():
        folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, content[: content.rfind(b"\n") + 1] + line + b"\n")
