"""Pods of a namespace as the driver handles them, with test commands."""

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from presage.scheduler.drivers.kubernetes.cluster import Cluster, Pods
from presage.scheduler.drivers.kubernetes.pod_manifest import ClusterConfig
from tests.cluster.servers import Cluster as Servers

PATIENCE_SEC = 90.0
SMALL = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}
SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
LEAVES = [
    sys.executable,
    "-c",
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "print('up', flush=True)\n"
    "time.sleep(600)",
]


def config_of(
    cluster: Servers, namespace: str, folder: Path, spec: Mapping[str, Any] | None = None, **changes
) -> ClusterConfig:
    """Return the settings of a namespace whose Pods are processes of this machine."""
    mounts = [{"name": "data", "mountPath": str(folder)}]
    template = {
        "containers": [{"name": "main", "volumeMounts": mounts}],
        "volumes": [{"name": "data", "hostPath": {"path": str(folder)}}],
        **(spec or {}),
    }
    fields = {
        "namespace": namespace,
        "image": "none",
        "pod_template": {"spec": template},
        "kubeconfig": str(cluster.kubeconfig),
        "python": (sys.executable,),
        "secrets": str(folder / "secrets"),
        "grace": timedelta(seconds=5),
        "unschedulable_after": timedelta(seconds=2),
        "lost_after": timedelta(seconds=2),
    }
    return ClusterConfig(**{**fields, **changes})


class PodObserver:
    """The Pods of one job, looked at as the loop does."""

    def __init__(self, cluster: Cluster, folder: Path, messages: list[str], nodes: Path) -> None:
        self.cluster = cluster
        self._nodes = nodes
        self.pods: Pods = cluster.of_job("job", folder / "processes")
        self.messages = messages

    def until(self, condition: Callable[[], object]) -> None:
        """Look until a condition holds, bounded in time; no speed is meant by it."""
        end_sec = time.monotonic() + PATIENCE_SEC
        while not condition():
            assert time.monotonic() < end_sec, (self.messages, self.statuses())
            time.sleep(0.05)
            self.cluster.poll()

    def statuses(self) -> dict[str, object]:
        """Return what the API server says of each Pod."""
        pods = self.cluster.pods_of("job")
        return {name: one.observed and one.observed.get("status") for name, one in pods.items()}

    def until_up(self, name: str) -> None:
        self.until(lambda: self.pods.is_running(name) and self._has_printed(name))

    def _has_printed(self, name: str) -> bool:
        """Look at the files of its node: the API shows output when a container has ended."""
        pod = self.cluster.pods_of("job")[name]
        files = [path for path in self._nodes.glob(f"*/{pod.uid}/*") if path.is_file()]
        return any(path.stat().st_size for path in files)

    def until_ended(self, name: str) -> None:
        self.until(lambda: not self.pods.is_alive(name))


@contextmanager
def observe_pods(config: ClusterConfig, folder: Path) -> Generator[PodObserver]:
    """Follow the Pods of a job."""
    messages: list[str] = []
    with Cluster(config, folder, messages.append) as cluster:
        yield PodObserver(cluster, folder, messages, Path(config.kubeconfig or "").parent)
