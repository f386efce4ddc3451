"""A live process, as it is shown."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.machine.state import Process, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One live process."""

    name: str
    """`<pool>-<number>.<attempt>`."""
    status: Status
    """What it does."""
    since_sec: float
    """When it was started."""
    cpus: float
    """Cores that are booked for it."""
    busy_cores: float | None
    """Cores that it kept busy, as read last; None before."""
    limit_bytes: int
    """Memory that is booked for it, 0 where it is that of another process."""
    resident_bytes: int | None
    """Memory that was read last; None before."""


def process_view(process: Process) -> ProcessView:
    """Return what is shown of a process."""
    return ProcessView(
        name=process.name,
        status=process.status,
        since_sec=process.began_sec,
        cpus=process.cpus,
        busy_cores=process.busy_cores,
        limit_bytes=process.memory_bytes,
        resident_bytes=process.readings[-1][1] if process.readings else None,
    )
