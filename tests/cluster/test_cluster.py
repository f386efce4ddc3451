"""The cluster does what one of machines does: ends, limits, notices, losses, rights."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch
from kubernetes.client import ApiException

from tests.cluster.binary import needs_cluster
from tests.cluster.servers import Cluster
from tests.cluster.waiting import runs, until

pytestmark = [pytest.mark.slow, needs_cluster]

SLEEPS = "import time; time.sleep(600)"
SMALL = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}
EVEN = {kind: {"cpu": "200m", "memory": "256Mi"} for kind in ("requests", "limits")}


def pod(name: str, code: str, *arguments: object, **spec: Any) -> dict[str, Any]:
    """A Pod of one container that runs Python code; `resources` are the container's."""
    container = {
        "name": "main",
        "image": "none",
        "command": [sys.executable, "-c", code],
        "args": [str(argument) for argument in arguments],
        "resources": spec.pop("resources", SMALL),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"metadata": {"name": name}, "spec": spec}


def terminated(api: Any, namespace: str, name: str = "one") -> Any:
    """Wait for a Pod's container to end, and return how it did."""

    def look() -> Any:
        statuses = api.read_namespaced_pod(name, namespace).status.container_statuses
        return statuses and statuses[0].state.terminated

    return until(f"the end of {name}", look)


def wait_until_running(api: Any, namespace: str, name: str = "one") -> None:
    until(
        f"{name} to run",
        lambda: api.read_namespaced_pod(name, namespace).status.phase == "Running",
    )


def is_gone(api: Any, namespace: str, name: str = "one") -> bool:
    found = api.list_namespaced_pod(namespace, field_selector=f"metadata.name={name}")
    return not found.items


def events_since(
    api: Any, namespace: str, seen: str, is_last: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Watch the Pods from a version that was seen before, to an event that must come."""
    watcher: Any = watch.Watch()
    for event in watcher.stream(
        api.list_namespaced_pod, namespace, resource_version=seen, timeout_seconds=60
    ):
        yield event
        if is_last(event):
            return
    pytest.fail(f"the last event must come, got the end of the watch from version {seen}")


def pid_in(file: Path) -> int:
    """Wait for a process to write its pid to a file."""
    return int(until(f"a pid in {file}", lambda: file.exists() and file.read_text()) or 0)


WRITES_PID = f"import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); {SLEEPS}"

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
    api.create_namespaced_pod(namespace, pod("one", f"held = b'x' * 400_000_000; {SLEEPS}"))
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


def test_pod_that_fits_nowhere_waits(cluster: Cluster, namespace: str) -> None:
    api = cluster.core()
    large = {"requests": {"cpu": "64"}}
    api.create_namespaced_pod(namespace, pod("one", SLEEPS, resources=large))

    def reasons() -> set[str]:
        found = api.read_namespaced_pod("one", namespace).status.conditions or []
        return {one.reason for one in found if one.type == "PodScheduled"}

    until("the scheduler's word", lambda: "Unschedulable" in reasons())


def test_pod_over_the_quota_is_refused(cluster: Cluster, namespace: str) -> None:
    api = cluster.core()
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "150m"}}}
    api.create_namespaced_resource_quota(namespace, quota)

    def counted() -> Any:
        return api.read_namespaced_resource_quota("small", namespace).status.used

    until("the quota", counted)
    api.create_namespaced_pod(namespace, pod("one", SLEEPS))
    with pytest.raises(
        ApiException, match=r"exceeded quota: small, requested: requests\.cpu=100m"
    ) as refusal:
        api.create_namespaced_pod(namespace, pod("two", SLEEPS))
    assert refusal.value.status == 403


def test_api_server_that_is_killed_comes_back_with_its_data(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    api.create_namespaced_pod(namespace, pod("one", WRITES_PID, tmp_path / "pid"))
    pid = pid_in(tmp_path / "pid")
    wait_until_running(api, namespace)
    seen = api.list_namespaced_pod(namespace).metadata.resource_version
    os.kill(pid, signal.SIGKILL)  # told, at the latest, when the server is back
    cluster.restart_api_server()
    end = terminated(api, namespace)
    assert end.exit_code == 137
    api.create_namespaced_pod(namespace, pod("two", "print()"))

    def is_last(event: dict[str, Any]) -> bool:
        found = event["object"]
        return (found.metadata.name, found.status.phase) == ("two", "Succeeded")

    events = [event["object"] for event in events_since(api, namespace, seen, is_last)]
    phases = {(found.metadata.name, found.status.phase) for found in events}
    assert phases >= {("one", "Failed"), ("two", "Pending"), ("two", "Succeeded")}


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


def test_service_account_may_do_what_its_role_says_and_no_more(
    cluster: Cluster, namespace: str
) -> None:
    api = cluster.core()
    rights: Any = client.RbacAuthorizationV1Api(cluster.client())
    api.create_namespaced_service_account(namespace, {"metadata": {"name": "reader"}})
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
    rights.create_namespaced_role(namespace, {"metadata": {"name": "reader"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    rights.create_namespaced_role_binding(namespace, binding)
    path = cluster.kubeconfig_of(namespace, "reader")
    reader: Any = client.CoreV1Api(config.new_client_from_config(str(path)))

    def may_list() -> bool:
        try:
            return reader.list_namespaced_pod(namespace).items == []
        except ApiException:
            return False  # the role is known a moment later

    until("its right", may_list)
    for refused in (
        lambda: reader.create_namespaced_pod(namespace, pod("one", SLEEPS)),
        lambda: reader.list_namespaced_pod("default"),
        lambda: reader.list_node(),
    ):
        with pytest.raises(ApiException, match=r"cannot (create|list) resource") as refusal:
            refused()
        assert refusal.value.status == 403


def test_nodes_without_processes_say_what_they_are_told_to_say(
    cluster: Cluster, namespace: str
) -> None:
    api = cluster.core()
    nodes = [f"fake-{index}" for index in range(20)]
    for name in nodes:
        cluster.add_node(name, cpu="8", memory="32Gi", processes=False)
    cluster.wait_for_nodes(*nodes)
    large = {"requests": {"cpu": "6"}}  # one for each node
    for name in nodes:
        api.create_namespaced_pod(namespace, pod(name, SLEEPS, resources=large))
    for name in nodes:
        wait_until_running(api, namespace, name)
    places = {one.spec.node_name for one in api.list_namespaced_pod(namespace).items}
    assert places == set(nodes)
    annotations = {"metadata": {"annotations": {"cluster.test/exit": "7"}}}
    api.patch_namespaced_pod("fake-3", namespace, annotations)
    assert terminated(api, namespace, "fake-3").exit_code == 7
    for name in nodes:
        cluster.remove_node(name)
