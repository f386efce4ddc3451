"""The platforms by name: this machine, or a Kubernetes cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scheduler.drivers.base import Platform
from scheduler.drivers.kubernetes.manifest import read_cluster
from scheduler.drivers.local.children import Children, OomKills, oom_kill_counter
from scheduler.drivers.local.commands import environment
from schemas.config.job import load_job
from schemas.errors import PlanError


class ThisMachine:
    """Runs the processes of every job as children."""

    resizes = False
    """No limits are enforced: a process that needs more memory is restarted."""
    identity = "process"
    """Children of any scheduler of this folder are found by their locks."""

    def __init__(self) -> None:
        """Start counting OOM kills."""
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        self._kills = OomKills(oom_kill_counter(groups), time.monotonic())

    def of_job(self, job: str, folder: Path) -> Children:
        """Return the children of a job."""
        return Children(folder, environment(), self._kills)

    def poll(self) -> None:
        """Count OOM kills; children are polled one by one."""
        self._kills.poll(time.monotonic())


def check_driver(
    driver: str | None, cluster: Path | None, job_files: Sequence[Path], output: Path
) -> None:
    """Raise unless the driver, the cluster file and the jobs fit together.

    Args:
        driver: as given by the user; the jobs' own when None.
        cluster: configuration file of a cluster.
        job_files: the jobs.
        output: folder of the scheduler.

    Raises:
        PlanError: the jobs name several drivers, or driver and cluster file contradict each other.
        SchemaError: a job or the cluster file is invalid.
    """
    declared = sorted({load_job(path).schedule.driver for path in job_files})
    if driver is None and len(declared) > 1:
        raise PlanError(
            f"jobs declare different values of schedule.driver: {' and '.join(declared)}; "
            "choose one with --driver"
        )
    driver = driver or declared[0]
    if driver == "kubernetes" and cluster is None:
        raise PlanError("driver kubernetes needs a cluster; add a --cluster file")
    if driver == "process" and cluster is not None:
        raise PlanError(f"driver process takes no cluster: {cluster}; use --driver kubernetes")
    if cluster is not None:
        read_cluster(cluster, output)


@contextmanager
def open_platform(
    cluster: Path | None, output: Path, progress: Callable[[str], None]
) -> Generator[Platform]:
    """Open the platform of a run.

    Args:
        cluster: configuration file of a cluster; this machine when None.
        output: folder of the scheduler.
        progress: called with messages of the platform.

    Raises:
        SchemaError: the file is invalid.
        PlanError: the cluster cannot be reached.
    """
    if cluster is None:
        yield ThisMachine()
        return
    # Importing the Kubernetes client takes a second.
    from scheduler.drivers.kubernetes.platform import kubernetes

    with kubernetes(read_cluster(cluster, output), output, progress) as platform:
        yield platform
