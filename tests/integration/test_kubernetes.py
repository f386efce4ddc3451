"""A job whose processes are Pods of a real cluster: Pods, a node and the scheduler are lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.machine.events import Ended
from scheduler.machine.log import LOG, read_log, recover
from tests.cluster.fixtures import cluster, namespace
from tests.cluster.servers import Cluster
from tests.integration.test_scheduled import Scheduler, command, num_lines, write_jobs

__all__ = ["cluster", "namespace"]


def write_cluster(repository: Path, cluster: Cluster, namespace: str, folder: Path) -> Path:
    """Write the file of a cluster whose Pods are processes of this machine."""
    body = {
        "namespace": namespace,
        "image": "none",
        "kubeconfig": str(cluster.kubeconfig),
        "volumes": [{"path": str(folder), "host_path": str(folder)}],
        "python": [str(repository / ".venv" / "bin" / "python")],
        "environment": {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        "shared_loopback": True,
        "grace": "60s",
        "lost_after": "3s",
        "unschedulable_after": "60s",
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def pod_of(cluster: Cluster, namespace: str, process: str) -> Any:
    """Return the Pod of a process, None where there is none that runs."""
    found = cluster.core().list_namespaced_pod(
        namespace, label_selector=f"presage/process={process}"
    )
    return next((pod for pod in found.items if pod.status.phase == "Running"), None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_job_of_pods_that_are_lost_finishes_with_the_bits_of_an_undisturbed_one(
    repository: Path, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    demo, _ = write_jobs(repository, tmp_path)
    output = tmp_path / "out"
    (tmp_path / "budget.yaml").write_text("cpus: 4\nmemory: 8GiB\n")
    words = [str(demo), "--output", str(output), "--budget", str(tmp_path / "budget.yaml")]
    words += ["--driver", "kubernetes", "--status", "off", "--json", "--cluster"]
    words.append(str(write_cluster(repository, cluster, namespace, tmp_path)))
    api, steps = cluster.core(), output / "demo" / "run" / "metrics.jsonl"

    scheduler = Scheduler(repository, words, tmp_path / "said")
    scheduler.until(lambda: pod_of(cluster, namespace, "segment-0.1"))
    pod = pod_of(cluster, namespace, "segment-0.1")
    api.delete_namespaced_pod(pod.metadata.name, namespace, grace_period_seconds=1)
    scheduler.until(lambda: num_lines(steps) >= 2)
    lead = pod_of(cluster, namespace, "lead-0.1")
    body = {"metadata": {"name": lead.metadata.name}}
    api.create_namespaced_pod_eviction(lead.metadata.name, namespace, body)
    scheduler.until(lambda: pod_of(cluster, namespace, "lead-0.2"))
    cluster.restart_api_server()
    scheduler.until(lambda: num_lines(steps) >= 4)
    store = pod_of(cluster, namespace, "store-0.1")
    cluster.fail_node(store.spec.node_name)
    scheduler.process.kill()
    scheduler.process.wait()
    cluster.add_node(store.spec.node_name)

    scheduler = Scheduler(repository, words, tmp_path / "said-again")
    assert scheduler.process.wait() == 0, scheduler.said.read_text()
    jobs = json.loads(scheduler.said.read_text().splitlines()[-1])
    assert jobs["demo"]["phase"] == "finished"
    assert not api.list_namespaced_pod(namespace).items
    ends = [entry.event for entry in read_log(output / LOG) if isinstance(entry.event, Ended)]
    told = {end.process: end for end in ends}
    assert len(told) == len(ends), "each process ends once"
    assert told["segment-0.1"].outcome == "lost"
    assert told["segment-0.1"].detail == "deleted"
    assert told["lead-0.1"].outcome == "left", "it was told before it was taken away"
    assert told["store-0.1"].outcome == "lost"
    recover(output / LOG)
    verified = command(repository, "trainer", "verify", str(output / "demo" / "run"))
    assert verified.returncode == 0, verified.stderr

    again = tmp_path / "undisturbed"
    dataset = str(output / "demo" / "dataset")
    trained = command(
        repository, "trainer", "train", str(demo), "--dataset", dataset, "--output", str(again)
    )
    assert trained.returncode == 0, trained.stderr
    equal = command(repository, "trainer", "equal", str(output / "demo" / "run"), str(again))
    assert equal.returncode == 0, equal.stdout + equal.stderr
