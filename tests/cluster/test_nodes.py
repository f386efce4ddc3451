"""Nodes do what a kubelet does: ends, limits, grace, eviction, loss, resizes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiException

from tests.cluster.binary import needs_cluster
from tests.cluster.manifests import (
    SLEEPS,
    WRITES_PID,
    events_since,
    is_gone,
    pid_in,
    pod,
    terminated,
    wait_until_running,
)
from tests.cluster.servers import Cluster
from tests.cluster.waiting import runs, until

pytestmark = [pytest.mark.nightly, pytest.mark.slow, needs_cluster]

EVEN = {kind: {"cpu": "200m", "memory": "256Mi"} for kind in ("requests", "limits")}


ENDS = {
    "its work is done": ("print('done')", ("Succeeded", 0, "Completed", "")),
    "it says that it failed": (
        "import sys; sys.exit('no such table')",
        ("Failed", 1, "Error", "no such table\n"),
    ),
    "it has an exit code of its own": ("import sys; sys.exit(3)", ("Failed", 3, "Error", "")),
    "somebody kills it": (
        "import os; os.kill(os.getpid(), 9)",
        ("Failed", 128 + signal.SIGKILL, "Error", ""),
    ),
}


@pytest.mark.parametrize(("code", "expected"), ENDS.values(), ids=ENDS.keys())
def test_container_that_ends_is_reported(
    code: str, expected: tuple[str, int, str, str], cluster: Cluster, namespace: str
) -> None:
    api = cluster.core()
    api.create_namespaced_pod(namespace, pod("one", code))
    end = terminated(api, namespace)
    phase = api.read_namespaced_pod("one", namespace).status.phase
    assert (phase, end.exit_code, end.reason, end.message or "") == expected


def test_container_over_its_memory_limit_is_killed(cluster: Cluster, namespace: str) -> None:
    api = cluster.core()
    small = {"limits": {"memory": "64Mi"}}
    code = f"held = b'x' * 150_000_000; {SLEEPS}"
    api.create_namespaced_pod(namespace, pod("one", code, resources=small))
    end = terminated(api, namespace)
    assert (end.exit_code, end.reason) == (137, "OOMKilled")


def test_pod_of_two_containers_is_refused(cluster: Cluster, namespace: str) -> None:
    api = cluster.core()
    manifest = pod("one", "print()")
    manifest["spec"]["containers"] *= 2
    manifest["spec"]["containers"][1] = {**manifest["spec"]["containers"][0], "name": "second"}
    api.create_namespaced_pod(namespace, manifest)
    until("its end", lambda: api.read_namespaced_pod("one", namespace).status.phase == "Failed")
    status = api.read_namespaced_pod("one", namespace).status
    assert status.message == "a node of processes runs Pods of one container; leave out the others"


LEAVES = (
    "import pathlib, signal, sys, time\n"
    "def leave(*_):\n"
    "    time.sleep(1)\n"
    "    pathlib.Path(sys.argv[1]).write_text('saved')\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('ready', flush=True)\n"
    "pathlib.Path(sys.argv[2]).touch()\n"
    "time.sleep(600)\n"
)


def test_pod_deleted_with_grace_may_end_its_work(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    api.create_namespaced_pod(namespace, pod("one", LEAVES, tmp_path / "out", tmp_path / "ready"))
    until("its handler", (tmp_path / "ready").exists)
    api.delete_namespaced_pod("one", namespace, grace_period_seconds=30)
    assert not is_gone(api, namespace)
    until("its end", lambda: is_gone(api, namespace))
    assert (tmp_path / "out").read_text() == "saved"


def test_pod_deleted_that_does_not_end_is_killed(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WRITES_PID}"
    api.create_namespaced_pod(namespace, pod("one", code, tmp_path / "pid"))
    pid = pid_in(tmp_path / "pid")
    api.delete_namespaced_pod("one", namespace, grace_period_seconds=1)
    until("its end", lambda: is_gone(api, namespace))
    assert not runs(pid)


def test_pod_deleted_at_once_ends_its_process(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    api.create_namespaced_pod(namespace, pod("one", WRITES_PID, tmp_path / "pid"))
    pid = pid_in(tmp_path / "pid")
    api.delete_namespaced_pod("one", namespace, grace_period_seconds=0)
    assert is_gone(api, namespace)
    until("its end", lambda: not runs(pid))


def test_pod_that_is_evicted_is_told_why(cluster: Cluster, namespace: str) -> None:
    api = cluster.core()
    api.create_namespaced_pod(namespace, pod("one", SLEEPS))
    wait_until_running(api, namespace)
    seen = api.list_namespaced_pod(namespace).metadata.resource_version
    api.create_namespaced_pod_eviction("one", namespace, {"metadata": {"name": "one"}})
    until("its end", lambda: is_gone(api, namespace))
    *_, last = events_since(api, namespace, seen, lambda event: event["type"] == "DELETED")
    status = last["object"].status
    reasons = {one.type: one.reason for one in status.conditions}
    assert reasons["DisruptionTarget"] == "EvictionByEvictionAPI"
    assert status.container_statuses[0].state.terminated.exit_code == 128 + signal.SIGTERM


def test_pods_of_a_lost_node_are_deleted_when_it_stays_away(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    cluster.add_node("lost")
    cluster.wait_for_nodes("lost")
    place = {"kubernetes.io/hostname": "lost"}
    api.create_namespaced_pod(
        namespace, pod("one", WRITES_PID, tmp_path / "pid", nodeSelector=place)
    )
    pid = pid_in(tmp_path / "pid")
    cluster.fail_node("lost")
    until("its process's end", lambda: not runs(pid))

    def deleted() -> Any:
        return api.read_namespaced_pod("one", namespace).metadata.deletion_timestamp

    assert not deleted()  # nobody knows yet
    until("its deletion", deleted)
    reasons = {
        one.type: one.reason for one in api.read_namespaced_pod("one", namespace).status.conditions
    }
    assert reasons["DisruptionTarget"] == "DeletionByTaintManager"
    cluster.add_node("lost")  # only its node may say that it has ended
    until("its end", lambda: is_gone(api, namespace))
    cluster.wait_for_nodes("lost")
    cluster.remove_node("lost")


def test_node_that_comes_back_soon_says_what_it_lost(cluster: Cluster, namespace: str) -> None:
    api = cluster.core()
    cluster.add_node("brief")
    cluster.wait_for_nodes("brief")
    api.create_namespaced_pod(namespace, pod("one", SLEEPS, nodeName="brief"))
    wait_until_running(api, namespace)
    cluster.fail_node("brief")
    cluster.add_node("brief")
    end = terminated(api, namespace)
    assert (end.exit_code, end.reason) == (137, "ContainerStatusUnknown")
    cluster.remove_node("brief")


def resized(api: Any, namespace: str, cpu: str, memory: str) -> None:
    amounts = {"cpu": cpu, "memory": memory}
    container = {"name": "main", "resources": {"requests": amounts, "limits": amounts}}
    api.patch_namespaced_pod_resize("one", namespace, {"spec": {"containers": [container]}})


def test_pod_resized_in_place_keeps_its_process(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    code = f"held = b'x' * 60_000_000; {WRITES_PID}"
    api.create_namespaced_pod(namespace, pod("one", code, tmp_path / "pid", resources=EVEN))
    pid = pid_in(tmp_path / "pid")

    def status() -> Any:
        return api.read_namespaced_pod("one", namespace).status

    resized(api, namespace, "400m", "128Mi")
    until("it", lambda: status().container_statuses[0].resources.limits["memory"] == "128Mi")
    assert status().container_statuses[0].allocated_resources["cpu"] == "400m"
    assert runs(pid)

    with pytest.raises(ApiException, match="didn't have enough allocatable resources") as refusal:
        resized(api, namespace, "64", "128Mi")
    assert refusal.value.status == 403

    resized(api, namespace, "300m", "32Mi")  # less than it holds
    assert terminated(api, namespace).reason == "OOMKilled"
    assert not runs(pid)


def test_pod_resized_to_what_its_neighbour_has_waits_for_it(
    cluster: Cluster, namespace: str
) -> None:
    api = cluster.core()
    for name in ("one", "neighbour"):
        api.create_namespaced_pod(namespace, pod(name, SLEEPS, nodeName="node-0", resources=EVEN))
        wait_until_running(api, namespace, name)

    def status() -> Any:
        return api.read_namespaced_pod("one", namespace).status

    def pending() -> list[str]:
        return [one.reason for one in status().conditions if one.type == "PodResizePending"]

    resized(api, namespace, "1900m", "256Mi")
    assert until("the node's word", pending) == ["Deferred"]
    assert status().container_statuses[0].resources.limits["cpu"] == "200m"
    api.delete_namespaced_pod("neighbour", namespace, grace_period_seconds=0)
    until("it", lambda: status().container_statuses[0].resources.limits["cpu"] == "1900m")
    assert pending() == []


def test_pod_sees_its_secret_once_it_is_there_and_an_address_of_its_own(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    code = "import os, sys; print(os.environ['IP'], open(sys.argv[1]).read()); sys.exit(1)"
    made = pod("one", code, tmp_path / "seen" / "key")
    (container,) = made["spec"]["containers"]
    container["env"] = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    container["volumeMounts"] = [{"name": "keys", "mountPath": str(tmp_path / "seen")}]
    secret = {"secretName": "keys", "defaultMode": 0o440}
    made["spec"]["volumes"] = [{"name": "keys", "secret": secret}]
    api.create_namespaced_pod(namespace, made)

    def waits() -> Any:
        found = api.read_namespaced_pod("one", namespace).status.container_statuses
        return found and found[0].state.waiting

    said = until("a word", waits)
    assert (said.reason, '"keys" not found' in said.message) == ("ContainerCreating", True)
    api.create_namespaced_secret(
        namespace, {"metadata": {"name": "keys"}, "stringData": {"key": "k"}}
    )
    end = terminated(api, namespace)
    address = api.read_namespaced_pod("one", namespace).status.pod_ip
    assert end.message == f"{address} k\n"
    assert address.startswith("127.")
    assert not address.startswith("127.0.")
    assert (tmp_path / "seen" / "key").stat().st_mode & 0o777 == 0o440
    api.create_namespaced_pod(namespace, pod("two", "print()"))
    terminated(api, namespace, "two")
    assert api.read_namespaced_pod("two", namespace).status.pod_ip != address
