"""This machine as a place where processes run."""

from __future__ import annotations

from pathlib import Path

from scheduler.drivers.process.children import Children
from scheduler.drivers.process.commands import environment


class ThisMachine:
    """Starts the processes of every job as children."""

    resizes = False
    """No limit of memory is kept here: who is to have more is started again with it."""
    where = "process"
    """Children of any scheduler that had this folder are found by their locks in it."""

    def of_job(self, job: str, folder: Path) -> Children:
        """Return the children of a job."""
        return Children(folder, environment())

    def poll(self) -> None:
        """Do nothing: children are looked at one by one."""
