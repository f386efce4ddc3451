"""What is observed of a job: its steps as they are written, and how its processes ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from presage.scheduler.controller.events import Ended, Outcome, Stepped
from presage.scheduler.controller.state import JobState, PoolProcess
from presage.scheduler.drivers.base import Processes
from presage.scheduler.drivers.job_files import JobPaths
from presage.scheduler.model.past_runs import PAST_JOBS, format_past_job
from presage.scheduler.model.predict import fit_models, summarize_job
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.manifest import find_root
from presage.schemas.errors import SchemaError, StorageError
from presage.schemas.run.records import (
    EXIT_BEHIND,
    EXIT_HUNG,
    EXIT_LOST_ROWS,
    METRICS,
    SUMMARY,
    StepMetric,
)
from presage.schemas.run.run_manifest import RunLogTail, read_run_file
from presage.schemas.storage.location import Location

P = ParamSpec("P")
T = TypeVar("T")

MAX_STEPS = 32
"""Latest steps whose times one event reports."""
LAST_BYTES = 4096
"""Bytes at the end of standard error that are searched for the last line."""
CLUSTER_FAILED = re.compile(r"error: pipeline failed: Pipeline \S+ failed in state (.*)")
"""Last line of a segment job whose pipeline ended on a cluster."""
PEER_UNREACHABLE = re.compile(r"error: (store|lighthouse) did not answer within ")
"""Last line of a process that waited for another one of its job."""


class StepTail:
    """New lines of a run's metrics; all lines again after a restore from an older checkpoint."""

    def __init__(self, run: Location) -> None:
        self._log = RunLogTail(run, METRICS)
        self._num_samples = 0

    def read(self, job: str, time_sec: float) -> Stepped | None:
        """Return the steps since the last call, None if there are none."""
        lines, restarted = self._log.read()
        steps: list[StepMetric] = []
        for line in lines:
            with suppress(ValueError, TypeError):  # truncated while it was read
                steps.append(StepMetric(**json.loads(line)))
        if restarted:
            self._num_samples = 0
        if not steps:
            return None
        self._num_samples += sum(m.num_samples for m in steps)
        replicas = steps[-1].num_replicas
        # Without the first step, which compiles kernels.
        timed = [
            m for m in steps if m.step and m.num_replicas == replicas and m.samples_per_sec > 0
        ]
        return Stepped(
            time_sec=time_sec,
            job=job,
            next_step=steps[-1].step + 1,
            num_samples=self._num_samples,
            num_replicas=replicas,
            seconds=tuple(round(m.num_samples / m.samples_per_sec, 6) for m in timed[-MAX_STEPS:]),
        )


# How a process ended.


def ended_event(
    paths: JobPaths, processes: Processes, job: str, process: PoolProcess, time_sec: float
) -> Ended:
    """Return how a process ended: its files decide before its exit status and its output.

    A segment job that exits with 0 and prints its result has committed: its files are not read.
    """
    name, exit_status = process.name, processes.exit_status(process.name)
    status = exit_status.status
    detail = processes.last_stderr_line(name)
    result = parse_result(processes.output(name)) if process.pool == "segment" else None
    num_samples, work_sec, damage = 0, 0.0, ""
    try:
        is_complete = (status == 0 and result is not None) or read_files(
            _is_complete, paths, process
        )
    except StorageError:
        raise
    except SchemaError as error:
        is_complete, damage = False, str(error)
    if is_complete:
        outcome: Outcome = "done"
        if process.pool == "segment":
            num_samples, work_sec = _build_figures(result or {})
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


def _is_complete(paths: JobPaths, process: PoolProcess) -> bool:
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


def _build_figures(result: dict[str, Any]) -> tuple[int, float]:
    """Return samples and seconds from the result of `build --json`; zeros if nothing was built."""
    try:
        if result["built"] is False:
            return 0, 0.0
        return int(result["num_samples"]), float(result["startup_sec"]) + float(result["wall_sec"])
    except (ValueError, KeyError, TypeError):
        return 0, 0.0


def read_output(path: Path) -> str:
    """Return the text of an output file, empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def last_line(text: str) -> str:
    """Return the last line near the end of a text that is not empty."""
    lines = text[-LAST_BYTES:].strip().splitlines()
    return lines[-1].strip() if lines else ""


def parse_result(output: str) -> dict[str, Any] | None:
    """Return the JSON object that a command printed; None if it did not complete.

    NaN, such as the NE of a diverged model, becomes None.

    Example:
        >>> parse_result('{"ne": NaN}'), parse_result('{"stopped": "SIGTERM"}')
        ({'ne': None}, None)
        >>> parse_result('{"ne"') is None
        True
    """
    lines = output.strip().splitlines()
    try:
        body = json.loads(lines[-1], parse_constant=lambda _: None) if lines else None
    except ValueError:
        return None
    return body if isinstance(body, dict) and "stopped" not in body else None


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
