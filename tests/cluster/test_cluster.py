"""The servers do what those of any cluster do: quota, rights, restarts, nodes by the dozen."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client import ApiException

from tests.cluster.binary import needs_cluster
from tests.cluster.manifests import (
    SLEEPS,
    WRITES_PID,
    events_since,
    pid_in,
    pod,
    terminated,
    wait_until_running,
)
from tests.cluster.servers import Cluster
from tests.cluster.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.slow, needs_cluster]


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
    os.kill(pid, signal.SIGKILL)  # told, at the latest, when the server is back
    cluster.restart_api_server()
    end = terminated(api, namespace)
    assert end.exit_code == 137
    # A version from before the restart may be too old for a watch: the server's cache begins anew.
    listed = api.list_namespaced_pod(namespace)
    version = listed.metadata.resource_version
    api.create_namespaced_pod(namespace, pod("two", "print()"))

    def is_last(event: dict[str, Any]) -> bool:
        found = event["object"]
        return (found.metadata.name, found.status.phase) == ("two", "Succeeded")

    events = [event["object"] for event in events_since(api, namespace, version, is_last)]
    phases = {(each.metadata.name, each.status.phase) for each in (*listed.items, *events)}
    assert phases >= {("one", "Failed"), ("two", "Pending"), ("two", "Succeeded")}


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
