"""The shipped manifests as kustomize renders them: accepted by an API server, and running."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.dynamic import DynamicClient
from kubernetes.utils import parse_quantity

from presage.scheduler import __main__ as scheduler
from presage.scheduler.__main__ import build_parser, main
from presage.scheduler.drivers.kubernetes.pod_manifest import check_volumes, read_cluster
from presage.schemas.config.schedule import BudgetConfig
from tests.cluster.kustomize import objects_of
from tests.cluster.servers import Cluster
from tests.cluster.waiting import until
from tests.scheduler.kubernetes.pods import SMALL
from tests.shared import json_of

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]
KINDS = {
    "ServiceAccount": "presage-scheduler",
    "Role": "presage-scheduler",
    "RoleBinding": "presage-scheduler",
    "NetworkPolicy": "presage-jobs",
    "ConfigMap": "presage-cluster",
    "PersistentVolumeClaim": "presage-scheduler",
    "Job": "presage-scheduler",
    "CronJob": "presage-retrain",
}


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    """Where the manifests lie."""
    return repository / "deploy" / "kubernetes"


@pytest.fixture
def moved(folder: Path, namespace: str, tmp_path: Path) -> list[dict[str, Any]]:
    """The shipped example in the namespace of a test, by an overlay over it."""
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [os.path.relpath(folder / "overlays" / "small", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(body))
    return objects_of(tmp_path)


def named(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [body for body in objects if body["kind"] == kind]
    return found


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def test_every_file_is_in_a_kustomization(folder: Path) -> None:
    for path in folder.rglob("kustomization.yaml"):
        body = yaml.safe_load(path.read_text())
        listed = {*body["resources"], *(patch["path"] for patch in body.get("patches", []))}
        beside = {p.name for p in path.parent.glob("*.yaml")} - {path.name}
        assert beside == {name for name in listed if not name.startswith("..")}


def test_overlay_sets_namespace_images_and_sizes_of_all(folder: Path) -> None:
    objects = objects_of(folder / "overlays" / "small")
    assert {body["kind"]: body["metadata"]["name"] for body in objects} == KINDS
    assert {body["metadata"]["namespace"] for body in objects} == {"shop"}
    pods = [
        named(objects, "Job")["spec"]["template"],
        named(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"],
    ]
    images = [container_of(pod)["image"] for pod in pods]
    prefix = "registry.example/shop"
    assert images == [f"{prefix}/presage-scheduler:1.2.0", f"{prefix}/presage:1.2.0"]
    for pod in pods:
        words = container_of(pod)
        assert words["command"][:3] == ["python", "-m", "presage.scheduler"]
        build_parser().parse_args([*words["command"][3:], *words.get("args", [])])


def test_no_volume_is_shared_and_the_cluster_file_is_that_of_the_namespace(
    folder: Path, tmp_path: Path
) -> None:
    objects = objects_of(folder / "overlays" / "small")
    assert named(objects, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    path = tmp_path / "cluster.yaml"
    path.write_text(named(objects, "ConfigMap")["data"]["cluster.yaml"])
    config = read_cluster(path)
    words = container_of(named(objects, "Job")["spec"]["template"])
    found = build_parser().parse_args([*words["command"][3:], *words["args"]])
    check_volumes(config, path, found.storage, found.jobs)
    assert not config.pod_spec.get("volumes")
    daily = named(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]
    assert (config.namespace, config.image) == ("shop", container_of(daily)["image"])


def test_api_server_takes_all_of_it_twice(
    cluster: Cluster, namespace: str, moved: list[dict[str, Any]]
) -> None:
    api: Any = DynamicClient(cluster.client())
    for _ in range(2):  # what is there already is left as it is
        for body in moved:
            kind = api.resources.get(api_version=body["apiVersion"], kind=body["kind"])
            applied = kind.server_side_apply(
                body=body,
                name=body["metadata"]["name"],
                namespace=namespace,
                field_manager="test",
                query_params=[("fieldValidation", "Strict")],
            )
            assert applied.metadata.namespace == namespace


@pytest.mark.parametrize("kind", ["Job", "CronJob"])
def test_pods_of_the_manifests_run(
    kind: str, cluster: Cluster, namespace: str, moved: list[dict[str, Any]], repository: Path
) -> None:
    spec = named(moved, kind)["spec"]
    spec = spec if kind == "Job" else spec["jobTemplate"]["spec"]
    pod = spec["template"]
    container = container_of(pod)
    # Nodes of tests have processes in place of images, this user, and no volumes; all else stays.
    cluster.core().create_namespaced_secret(namespace, {"metadata": {"name": "presage-storage"}})
    pod["spec"] = {
        name: value
        for name, value in pod["spec"].items()
        if name not in ("volumes", "securityContext", "serviceAccountName")
    }
    for name in ("volumeMounts", "securityContext"):
        container.pop(name, None)
    command, arguments = container["command"], container.pop("args", [])
    container |= {
        "command": [sys.executable, *command[1:], *arguments, "--help"],
        "env": [{"name": "PYTHONPATH", "value": str(repository)}],
        "resources": SMALL,
    }
    jobs: Any = client.BatchV1Api(cluster.client())
    jobs.create_namespaced_job(namespace, {"metadata": {"name": "one"}, "spec": spec})

    def done() -> bool:
        return bool(jobs.read_namespaced_job("one", namespace).status.succeeded)

    until("the end of the job", done)


def test_day_of_the_example_has_room_for_what_the_plan_takes(
    folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = BudgetConfig(cpus=8.0, memory=32 << 30)
    monkeypatch.setattr(scheduler, "machine_budget", lambda: machine)
    plan = json_of(main, ["plan", str(repository / "schemas" / "demo" / "job.yaml"), "--json"])
    pools = plan["preprocessing"], plan["training"]
    day = named(objects_of(folder / "overlays" / "small"), "CronJob")["spec"]["jobTemplate"]["spec"]
    asked = container_of(day["template"])["resources"]["requests"]
    # A day is built, and then trained.
    assert parse_quantity(asked["cpu"]) >= max(pool["cpus"] for pool in pools)
    assert parse_quantity(asked["memory"]) >= max(pool["memory_bytes"] for pool in pools)
