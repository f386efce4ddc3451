"""A job of Pods of a real cluster with its files at a URL: Pods, a node, the scheduler are lost."""

import base64
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from presage.schemas.storage.location import Location
from tests.cluster.fixtures import cluster, namespace
from tests.cluster.servers import Cluster
from tests.cluster.sockets import pids_with, sockets_of
from tests.integration.scheduled_jobs import (
    CACHE,
    SMALL,
    Scheduler,
    check_run,
    ends_of,
    num_steps,
    words_for,
    write_jobs,
)
from tests.object_store import Store

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

__all__ = ["cluster", "namespace"]

REACHED = ("coordinator-0.1", "replica-0.1", "replica-1.1", "store-0.1", "store-1.1")
"""Processes of a job that reach each other, as they begin."""
TOGETHER = """
schedule:
  budget: {cpus: 8, memory: 32GiB}
  training:
    replica: {cpus: 0.5, memory: 1100MiB}
    store: {cpus: 0.5, memory: 200MiB}
    min_replicas: 2
    max_replicas: 2
    max_stores: 2
"""
PATIENT = "\n  stores: {timeout: 3m}"
"""A store is away until its Pod is replaced, on a machine that has much else to do."""


def cluster_options(
    repository: Path,
    cluster: Cluster,
    namespace: str,
    folder: Path,
    store: Store,
    storage: Location,
) -> list[str]:
    """Write the file of a cluster whose Pods are processes without a volume; return options."""
    credentials = {"metadata": {"name": "store"}, "stringData": store.environment}
    cluster.core().create_namespaced_secret(namespace, credentials)
    variables = {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    container = {
        "name": "main",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "envFrom": [{"secretRef": {"name": "store"}}],
    }
    body = {
        "namespace": namespace,
        "image": "none",
        "kubeconfig": str(cluster.kubeconfig),
        "python": [str(repository / ".venv" / "bin" / "python")],
        "pod_template": {"spec": {"containers": [container]}},
        "secrets": str(folder / "secrets"),
        "grace": "60s",
        "lost_after": "3s",
        "unschedulable_after": "60s",
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(body))
    driver = ["--driver", "kubernetes", "--cluster", str(path)]
    return [*driver, "--storage", str(storage), "--status", "off"]


@pytest.fixture
def storage(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Where the files of jobs are; the scheduler has the credentials in its environment."""
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    return Location.parse(f"{s3_store.new_url()}/scheduled")


def pod_of(cluster: Cluster, namespace: str, process: str) -> Any:
    """Return the Pod of a process, None where there is none that runs."""
    found = cluster.core().list_namespaced_pod(
        namespace, label_selector=f"presage/process={process}"
    )
    return next((pod for pod in found.items if pod.status.phase == "Running"), None)


def test_a_job_of_pods_that_are_lost_finishes_with_the_bits_of_an_undisturbed_one(
    repository: Path,
    cluster: Cluster,
    namespace: str,
    s3_store: Store,
    storage: Location,
    tmp_path: Path,
) -> None:
    (demo, _), output = write_jobs(repository, tmp_path), tmp_path / "out"
    options = cluster_options(repository, cluster, namespace, tmp_path, s3_store, storage)
    words = words_for(tmp_path, [demo], *options)
    api, run = cluster.core(), storage / "demo" / "run"

    scheduler = Scheduler(repository, words, tmp_path / "first")
    scheduler.until(lambda: pod_of(cluster, namespace, "segment-0.1"))
    pod = pod_of(cluster, namespace, "segment-0.1")
    api.delete_namespaced_pod(pod.metadata.name, namespace, grace_period_seconds=1)
    with paused(str(storage), "--position\0003\0"):  # without it the run cannot end
        scheduler.until(lambda: num_steps(run) >= 2)
        coordinator = pod_of(cluster, namespace, "coordinator-0.1")
        body = {"metadata": {"name": coordinator.metadata.name}}
        api.create_namespaced_pod_eviction(coordinator.metadata.name, namespace, body)
        scheduler.until(lambda: pod_of(cluster, namespace, "coordinator-0.2"))
        cluster.restart_api_server()
        store = pod_of(cluster, namespace, "store-0.1")
        cluster.fail_node(store.spec.node_name)
        scheduler.process.kill()
        scheduler.process.wait()
    cluster.add_node(store.spec.node_name)

    scheduler = Scheduler(repository, words, tmp_path / "second")
    jobs = scheduler.result()
    assert jobs["demo"]["phase"] == "finished"
    assert not api.list_namespaced_pod(namespace).items
    ends = {process: end for (_, process), end in ends_of(output).items()}
    assert (ends["segment-0.1"].outcome, ends["segment-0.1"].detail) == ("lost", "deleted")
    assert ends["coordinator-0.1"].outcome == "left", "it got a notice before the eviction"
    assert ends["store-0.1"].outcome == "lost", "and its rows with it"
    check_run(repository, demo, storage / "demo", tmp_path / "undisturbed")
    assert not [path for path in output.rglob("*") if path.name in ("dataset", "run", "work")]


@contextmanager
def paused(*texts: str) -> Iterator[None]:
    """Stop each process with these texts in its command as soon as it begins, until the end."""
    over, stopped = threading.Event(), set[int]()

    def stop() -> None:
        while not over.wait(0.02):
            for pid in {*pids_of_command(*texts)} - stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.add(pid)

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        try:
            yield
        finally:
            over.set()
            stopping.result()
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def pids_of_command(*texts: str) -> list[int]:
    """Return the processes whose commands, with a null byte after each word, contain these."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace")
            if all(text in words for text in texts):
                found.append(int(folder.name))
    return found


def write_job(repository: Path, folder: Path) -> Path:
    """Write the demo job, smaller, with replicas and stores."""
    demo = repository / "schemas" / "demo"
    (folder / "schema.pbtxt").write_bytes((demo / "schema.pbtxt").read_bytes())
    text = (demo / "job.yaml").read_text()
    for old, new in SMALL.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "demo.yaml"
    text = text.replace("{every_steps: 2}", f"{{every_steps: 2}}{CACHE}{PATIENT}").rstrip()
    path.write_text(text + TOGETHER)
    return path


class Watched:
    """The Pods of a run that reach each other, with the addresses that any of them had."""

    def __init__(self, cluster: Cluster, namespace: str, store: Store) -> None:
        url = urlsplit(store.endpoint)
        self._endpoint = (url.hostname, url.port)
        self._cluster = cluster
        self._namespace = namespace
        self.addresses: dict[str, str] = {}

    def pids(self, process: str) -> list[int]:
        """Return the processes of a Pod that runs, none of one that does not."""
        pod = pod_of(self._cluster, self._namespace, process)
        if pod is None:
            return []
        self.addresses[process] = pod.status.pod_ip
        return pids_with("PRESAGE_HOST", pod.status.pod_ip)

    def kill(self, process: str) -> None:
        """Kill all of a Pod, as a node does that is short of memory."""
        for pid in self.pids(process):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def check(self, processes: Sequence[str]) -> None:
        """Have each listen at its own address alone, and call the others and the store alone."""
        found = {name: sockets_of(self.pids(name)) for name in processes}
        for name, sockets in found.items():
            own = self.addresses[name]
            assert not own.startswith("127.0.0."), own
            assert {host for host, _ in sockets.listening} <= {own}, (name, sockets)
            called = {other[0] for other in sockets.called if other != self._endpoint}
            assert called <= set(self.addresses.values()), (name, sockets)
        for name in processes:
            if not name.startswith("coordinator-"):
                assert found[name].listening, name
        replicas = [found[name] for name in processes if name.startswith("replica-")]
        assert all(each.called - {self._endpoint} for each in replicas)


def test_a_job_of_pods_with_addresses_of_their_own_loses_some_and_has_the_same_bits(
    repository: Path,
    cluster: Cluster,
    namespace: str,
    s3_store: Store,
    storage: Location,
    tmp_path: Path,
) -> None:
    demo, output = write_job(repository, tmp_path), tmp_path / "out"
    options = cluster_options(repository, cluster, namespace, tmp_path, s3_store, storage)
    words = words_for(tmp_path, [demo], *options, cpus=3.5)
    api, run = cluster.core(), storage / "demo" / "run"
    watched = Watched(cluster, namespace, s3_store)
    address = storage / "demo" / "stores" / "0" / "address"

    scheduler = Scheduler(repository, words, tmp_path / "first")
    with paused(str(storage), "--position\0003\0"):  # without it the run cannot end
        scheduler.until(lambda: num_steps(run) >= 2)
        (secret,) = api.list_namespaced_secret(namespace, label_selector="presage/job").items
        begun = [name for name in REACHED if watched.pids(name)]
        assert begun == list(REACHED), begun
        watched.check(begun)
        before = text_of(address)
        watched.kill("store-0.1")
        scheduler.until(lambda: text_of(address) not in ("", before))
        watched.kill("replica-1.1")
        scheduler.until(lambda: watched.pids("replica-1.2"))
    jobs = scheduler.result()
    assert jobs["demo"]["phase"] == "finished"
    assert watched.addresses["store-0.1"] in before
    assert watched.addresses["replica-1.1"] != watched.addresses["replica-1.2"]
    assert not api.list_namespaced_pod(namespace).items
    assert not api.list_namespaced_secret(namespace, label_selector="presage/job").items
    token = base64.b64decode(secret.data["token"])
    for files in (Location.parse(output), storage):
        kept = [e.path for e in files.entries() if token in (files / e.path).read_bytes()]
        assert not kept, "the token is in no file"
    ends = ends_of(output)
    assert {ends["demo", process].outcome for process in ("store-0.1", "replica-1.1")} == {"lost"}
    check_run(repository, demo, storage / "demo", tmp_path / "undisturbed")


def text_of(location: Location) -> str:
    """Return the text of a file, empty if there is none."""
    try:
        return location.read_text()
    except FileNotFoundError:
        return ""
