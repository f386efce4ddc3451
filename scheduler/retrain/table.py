"""What happened to each day, for people and for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from scheduler.retrain.state import Attempt, State

COLUMNS = ("day", "segment", "version", "run", "NE", "AUC", "calibration", "promoted", "why not")


def rows_of(state: State) -> list[dict[str, Any]]:
    """Return what is known of each run, by day and attempt."""
    found: list[dict[str, Any]] = []
    for attempt in sorted(state.attempts, key=lambda a: (a.day, state.attempts.index(a))):
        metrics = attempt.metrics("evaluate")
        found.append(
            {
                "day": attempt.day,
                "segment": attempt.segment,
                "version": version_of(state, attempt),
                "run": attempt.run,
                "base": attempt.base,
                "trained": list(attempt.segments),
                "ne": None if metrics is None else metrics.ne,
                "auc": None if metrics is None else metrics.auc,
                "calibration": None if metrics is None else metrics.calibration,
                "promoted": attempt.promoted is not None,
                "is_last_good": attempt.run == state.last_good,
                "is_removed": attempt.run in state.removed,
                "why_not": why_not(attempt),
            }
        )
    return found


def version_of(state: State, attempt: Attempt) -> int | None:
    """Return which version of its day's segment an attempt had, from 1; None before it had one."""
    versions: list[str] = []
    for other in state.of_day(attempt.day):
        if other.segment is not None and (not versions or versions[-1] != other.segment):
            versions.append(other.segment)
        if other.run == attempt.run:
            return len(versions) if other.segment is not None else None
    raise AssertionError("an attempt is among those at its day")


def why_not(attempt: Attempt) -> str:
    """Return why a run is not promoted; nothing where it is."""
    if attempt.promoted is not None:
        return ""
    if attempt.closed is not None:
        return attempt.closed.reason
    if attempt.judged is not None:
        return "; ".join(attempt.judged.reasons)
    last = attempt.failures[-1] if attempt.failures else None
    where = f"unfinished: {attempt.stage or 'verdict'} is next"
    return where if last is None else f"{where}; {last.stage} failed: {last.reason}"


def table_of(state: State) -> Table:
    """Return the table of all runs."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        is_number = name in ("version", "NE", "AUC", "calibration")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "why not")
    for row in rows_of(state):
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    numbers = ["" if row[k] is None else f"{row[k]:.5f}" for k in ("ne", "auc", "calibration")]
    promoted = "yes" if row["promoted"] else "no"
    version = "" if row["version"] is None else str(row["version"])
    return [
        row["day"],
        row["segment"] or "",
        version,
        row["run"],
        *numbers,
        "now" if row["is_last_good"] else promoted,
        row["why_not"],
    ]
