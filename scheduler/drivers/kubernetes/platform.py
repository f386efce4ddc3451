"""A Kubernetes cluster as a place where processes run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from scheduler.drivers.kubernetes.cluster import Cluster
from scheduler.drivers.kubernetes.pods import Pods
from scheduler.drivers.kubernetes.settings import ClusterConfig


class Kubernetes:
    """Has a Pod for each process."""

    resizes = True
    """A container's cores and memory may be changed while it runs."""

    def __init__(self, cluster: Cluster) -> None:
        """Remember whom to ask."""
        self._cluster = cluster
        self.where = cluster.where

    def of_job(self, job: str, folder: Path) -> Pods:
        """Return the Pods of a job."""
        return Pods(self._cluster, job, folder)

    def poll(self) -> None:
        """Take in what has happened."""
        self._cluster.poll()


@contextmanager
def kubernetes(
    config: ClusterConfig, output: Path, say: Callable[[str], None]
) -> Generator[Kubernetes]:
    """Follow the Pods of a scheduler; they go on after it.

    Args:
        config: of the cluster.
        output: folder of the scheduler.
        say: told what the cluster says.

    Raises:
        PlanError: the API server does not answer, or does not let us.
    """
    with Cluster(config, output, say) as cluster:
        yield Kubernetes(cluster)
