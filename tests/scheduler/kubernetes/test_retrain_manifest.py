"""An API server accepts the shipped CronJob; a refused day is tried once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from presage.scheduler.retrain.decide import EXIT_REFUSED
from tests.cluster.servers import Cluster
from tests.cluster.waiting import until
from tests.scheduler.kubernetes.pods import SMALL

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def manifest(repository: Path, namespace: str) -> dict[str, Any]:
    """The shipped manifest, in another namespace."""
    path = repository / "deploy" / "kubernetes" / "retrain" / "cronjob.yaml"
    body = yaml.safe_load(path.read_text())
    body["metadata"]["namespace"] = namespace
    return body


def test_shipped_cron_job_is_taken_with_every_key(
    cluster: Cluster, namespace: str, manifest: dict[str, Any]
) -> None:
    jobs = client.BatchV1Api(cluster.client())
    created: Any = jobs.create_namespaced_cron_job(
        namespace, manifest, dry_run="All", field_validation="Strict"
    )
    assert created.spec.concurrency_policy == "Forbid"


@pytest.mark.parametrize(("status", "tries"), [(EXIT_REFUSED, 1), (1, 2)])
def test_its_job_is_tried_again_unless_the_day_was_refused(
    status: int, tries: int, cluster: Cluster, namespace: str, manifest: dict[str, Any]
) -> None:
    spec = manifest["spec"]["jobTemplate"]["spec"] | {"backoffLimit": 1}
    pod = spec["template"]["spec"]
    # The nodes of tests have no images and no volumes; all else stays.
    del pod["volumes"]
    container = pod["containers"][0]
    del container["volumeMounts"], container["envFrom"]
    container |= {"command": [sys.executable, "-c", f"exit({status})"], "resources": SMALL}
    jobs: Any = client.BatchV1Api(cluster.client())
    body = {"metadata": {"name": "retrain"}, "spec": spec}
    jobs.create_namespaced_job(namespace, body)

    def ended() -> Any:
        found = jobs.read_namespaced_job("retrain", namespace).status
        return found if any(c.type == "Failed" for c in found.conditions or []) else None

    assert until("the end of the job", ended).failed == tries
