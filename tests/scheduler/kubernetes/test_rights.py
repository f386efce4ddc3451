"""The rights in `deploy/kubernetes` are sufficient, and all are needed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from presage.scheduler.drivers.kubernetes.pod_manifest import INSTANCE, pod_name
from tests.cluster.servers import Cluster
from tests.scheduler.kubernetes.pods import LEAVES, config_of, observe_pods
from tests.scheduler.kubernetes.test_pods import NEEDS

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(180)]
ACCOUNT = "presage-scheduler"
GIVEN = {
    *(("", "pods", verb) for verb in ("create", "get", "list", "watch", "patch", "delete")),
    ("", "pods/resize", "patch"),
    *(("", "secrets", verb) for verb in ("create", "delete")),
    ("metrics.k8s.io", "pods", "list"),
}


def give_rights(repository: Path, cluster: Cluster, namespace: str) -> None:
    """Do what `kubectl apply` does with the shipped file, in another namespace."""
    text = (repository / "deploy" / "kubernetes" / "base" / "rbac.yaml").read_text()
    moved = text.replace("namespace: presage\n", f"namespace: {namespace}\n")
    account, role, binding = yaml.safe_load_all(moved)
    cluster.core().create_namespaced_service_account(namespace, account)
    rights = client.RbacAuthorizationV1Api(cluster.client())
    rights.create_namespaced_role(namespace, role)
    rights.create_namespaced_role_binding(namespace, binding)


def rights_of(cluster: Cluster, namespace: str, account: str) -> set[tuple[str, str, str]]:
    """Return what an account may do in its namespace: groups, resources and verbs."""
    path = cluster.kubeconfig_of(namespace, account)
    asks: Any = client.AuthorizationV1Api(config.new_client_from_config(str(path)))
    asked = {"spec": {"namespace": namespace}}
    found = asks.create_self_subject_rules_review(asked).status
    return {
        (group, resource, verb)
        for rule in found.resource_rules
        for group, resource in itertools.product(rule.api_groups or [""], rule.resources or [])
        for verb in rule.verbs
    }


def test_the_shipped_rights_are_enough(
    repository: Path, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    give_rights(repository, cluster, namespace)
    path = cluster.kubeconfig_of(namespace, ACCOUNT)
    settings = config_of(cluster, namespace, tmp_path, kubeconfig=str(path))
    with observe_pods(settings, tmp_path) as observer:
        observer.pods.start("coordinator-0.1", LEAVES, NEEDS)
        observer.until_up("coordinator-0.1")
        observer.until(lambda: observer.pods.resize("coordinator-0.1", 0.1, 256 << 20))
        assert observer.pods.resident_bytes("coordinator-0.1") == 0
        observer.pods.start("segment-0.1", LEAVES, NEEDS)
        observer.until_up("segment-0.1")
        # One that lost its label is asked for by its name.
        name = pod_name((tmp_path / "instance").read_text().strip(), "job", "segment-0.1")
        patch = {"metadata": {"labels": {INSTANCE: None}}}
        cluster.core().patch_namespaced_pod(name, namespace, patch)
        observer.pods.request_stop("coordinator-0.1")
        observer.until_ended("coordinator-0.1")
        observer.until_ended("segment-0.1")
        observer.pods.remove_ended([])
        observer.until(lambda: not cluster.core().list_namespaced_pod(namespace).items)
        assert not cluster.core().list_namespaced_secret(namespace).items
        memory, label = observer.messages
        assert memory.startswith("memory cannot be read from metrics.k8s.io: ")
        assert "forbidden" not in memory, "there is no metrics server; one might be asked"
        assert label == f"Pod {name} has lost its labels and is deleted"


def test_the_shipped_rights_are_no_more_than_that(
    repository: Path, cluster: Cluster, namespace: str
) -> None:
    give_rights(repository, cluster, namespace)
    given = rights_of(cluster, namespace, ACCOUNT) - rights_of(cluster, namespace, "default")
    assert given == GIVEN
    path = cluster.kubeconfig_of(namespace, ACCOUNT)
    asks: Any = client.AuthorizationV1Api(config.new_client_from_config(str(path)))

    def may(verb: str, resource: str, space: str = namespace, sub: str = "") -> bool:
        asked = {"verb": verb, "resource": resource, "subresource": sub, "namespace": space}
        body = {"spec": {"resourceAttributes": asked}}
        return asks.create_self_subject_access_review(body).status.allowed

    assert may("delete", "pods")
    assert may("patch", "pods", sub="resize")
    others = [(verb, "secrets") for verb in ("get", "list", "watch", "patch", "update")]
    others += [("list", "nodes"), ("create", "services"), ("update", "pods")]
    assert not [one for one in others if may(*one)]
    assert not may("create", "pods", sub="exec")
    assert not may("list", "pods", space="kube-system")
