"""The platforms by name: this machine, or a Kubernetes cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scheduler.drivers.base import Platform
from scheduler.drivers.kubernetes.manifest import read_cluster
from scheduler.drivers.local.children import Children, OomKills, own_counter
from scheduler.drivers.local.commands import environment
from schemas.config.job import load_job
from schemas.errors import PlanError


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


def check_driver(
    driver: str | None, cluster: Path | None, job_files: Sequence[Path], output: Path
) -> None:
    """Refuse a driver, a cluster and jobs that do not belong together.

    Args:
        driver: as it was named; that of the jobs when None.
        cluster: the file of a cluster.
        job_files: the jobs.
        output: folder of the scheduler.

    Raises:
        PlanError: the jobs name several drivers, or there is a cluster for none or none for one.
        SchemaError: a job is none, or the file of the cluster.
    """
    named = sorted({load_job(path).schedule.driver for path in job_files})
    if driver is None and len(named) > 1:
        raise PlanError(
            f"jobs must have one schedule.driver together, got {' and '.join(named)}; say --driver"
        )
    wanted = driver or named[0]
    if wanted == "kubernetes" and cluster is None:
        raise PlanError(
            "cluster must be given with driver kubernetes, got none; name a --cluster file"
        )
    if wanted == "process" and cluster is not None:
        raise PlanError(
            f"cluster must be left out with driver process, got {cluster}; say --driver kubernetes"
        )
    if cluster is not None:
        read_cluster(cluster, output)


@contextmanager
def open_platform(
    cluster: Path | None, output: Path, say: Callable[[str], None]
) -> Generator[Platform]:
    """Open the platform of a run.

    Args:
        cluster: file of a cluster; this machine when None.
        output: folder of the scheduler.
        say: told what the platform says.

    Raises:
        SchemaError: the file is none.
        PlanError: the cluster cannot be reached.
    """
    if cluster is None:
        yield ThisMachine()
        return
    # The client of Kubernetes takes a second to import.
    from scheduler.drivers.kubernetes.platform import kubernetes

    with kubernetes(read_cluster(cluster, output), output, say) as platform:
        yield platform
