"""This machine as a place where processes run."""

from __future__ import annotations

import time
from pathlib import Path

from scheduler.drivers.process.children import Children
from scheduler.drivers.process.commands import environment
from scheduler.drivers.process.oom import OomKills, own_counter


class ThisMachine:
    """Starts the processes of every job as children."""

    resizes = False
    """No limit is kept here: who is to have more memory is started again with it, and cores are
    what is booked."""
    where = "process"
    """Children of any scheduler that had this folder are found by their locks in it."""

    def __init__(self) -> None:
        """Know what the kernel has done so far."""
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        self._kills = OomKills(own_counter(groups), time.monotonic())

    def of_job(self, job: str, folder: Path) -> Children:
        """Return the children of a job."""
        return Children(folder, environment(), self._kills)

    def poll(self) -> None:
        """Count what the kernel has killed; children are looked at one by one."""
        self._kills.look(time.monotonic())
