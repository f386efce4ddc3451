"""Pods on a real API server: every way in which one ends, and temporary conditions."""

import itertools
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from presage.scheduler.drivers.base import ExitStatus, ResourceRequest
from presage.scheduler.drivers.kubernetes.pod_manifest import GPU, pod_name
from tests.cluster.servers import Cluster
from tests.scheduler.kubernetes.pods import LEAVES, SLEEPS, config_of, observe_pods

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(180)]
NEEDS = ResourceRequest(cpus=0.1, memory_bytes=128 << 20)
FAILS = [sys.executable, "-c", "import sys; print('log', file=sys.stderr); sys.exit('error: b')"]
PRINTS = [sys.executable, "-c", "import sys; print('log', file=sys.stderr); print('out')"]


def name_of(folder: Path, process: str) -> str:
    """Return the name of a Pod of the only job."""
    return pod_name((folder / "instance").read_text().strip(), "job", process)


def test_a_process_runs_once_and_what_it_said_is_known(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", FAILS, NEEDS)
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        observer.pods.start("segment-0.1", PRINTS, NEEDS)
        observer.until_ended("coordinator-0.1")
        observer.until_ended("segment-0.1")

        def check() -> None:
            assert observer.pods.output("segment-0.1") == "out\n"
            assert observer.pods.last_stderr_line("segment-0.1") == ""
            assert observer.pods.output("coordinator-0.1") == ""
            assert observer.pods.last_stderr_line("coordinator-0.1") == "error: b"

        assert observer.pods.exit_status("coordinator-0.1") == ExitStatus(status=1)
        check()
        observer.pods.remove_ended([])
        observer.until(lambda: not cluster.core().list_namespaced_pod(namespace).items)
        observer.until(lambda: observer.pods.remove_ended([]) or not observer.statuses())
        check()  # from the records in the folder
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        assert not observer.pods.is_alive("coordinator-0.1"), "a name is started once"
        assert observer.pods.newest_started("coordinator-") == "coordinator-0.1"


def test_pods_outlive_the_scheduler_and_are_found_by_the_next_one(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    config = config_of(cluster, namespace, tmp_path)
    with observe_pods(config, tmp_path) as observer:
        observer.pods.start("coordinator-0.1", LEAVES, NEEDS)
        observer.pods.start("segment-0.1", FAILS, NEEDS)
        observer.until_up("coordinator-0.1")
    with observe_pods(config, tmp_path) as observer:
        assert observer.pods.is_alive("coordinator-0.1")
        observer.pods.request_stop("coordinator-0.1")
        observer.until_ended("coordinator-0.1")
        assert observer.pods.exit_status("coordinator-0.1") == ExitStatus(status=0), (
            "it left as it was asked"
        )
        observer.until_ended("segment-0.1")
        assert observer.pods.exit_status("segment-0.1").status == 1


def test_a_process_that_is_ended_or_deleted_is_told_apart(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        for name in ("segment-0.1", "segment-1.1"):
            observer.pods.start(name, SLEEPS, NEEDS)
            observer.until_up(name)
        observer.pods.kill("segment-0.1")
        observer.until_ended("segment-0.1")
        assert observer.pods.exit_status("segment-0.1") == ExitStatus(status=-15)
        assert observer.pods.preemption_notices() == {}
        cluster.core().delete_namespaced_pod(name_of(tmp_path, "segment-1.1"), namespace)
        observer.until(
            lambda: observer.pods.preemption_notices() or not observer.pods.is_alive("segment-1.1")
        )
        observer.until_ended("segment-1.1")
        assert observer.pods.exit_status("segment-1.1").lost == "deleted"


def test_an_evicted_process_is_announced_and_lost_by_its_word(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    stubborn = [*SLEEPS[:2], f"import signal\nsignal.signal(15, signal.SIG_IGN)\n{SLEEPS[2]}"]
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", stubborn, NEEDS)
        observer.until_up("coordinator-0.1")
        name = name_of(tmp_path, "coordinator-0.1")
        cluster.core().create_namespaced_pod_eviction(name, namespace, {"metadata": {"name": name}})
        observer.until(observer.pods.preemption_notices)
        assert observer.pods.preemption_notices() == {"coordinator-0.1": 5.0}
        observer.until_ended("coordinator-0.1")
        assert observer.pods.exit_status("coordinator-0.1").lost.startswith("Evicted: ")


def test_a_process_over_its_memory_is_lost_as_out_of_memory(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    grows = "import time\nheld = b'x' * (300 << 20)\ntime.sleep(600)"
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", [sys.executable, "-c", grows], NEEDS)
        observer.until_ended("coordinator-0.1")
        assert observer.pods.exit_status("coordinator-0.1") == ExitStatus(
            status=-9, lost="OOMKilled", oom=True
        )


def test_a_running_process_gets_more_memory_in_place_and_less_or_is_said_not_to(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        observer.until_up("coordinator-0.1")
        observer.until(lambda: observer.pods.resize("coordinator-0.1", 0.05, 256 << 20))
        (pod,) = cluster.core().list_namespaced_pod(namespace).items
        assert pod.status.container_statuses[0].restart_count == 0
        limits = {"cpu": "50m", "memory": str(256 << 20)}
        assert pod.spec.containers[0].resources.limits == limits
        assert pod.status.container_statuses[0].resources.limits == limits
        assert observer.pods.is_alive("coordinator-0.1")
        observer.until(lambda: observer.pods.resize("coordinator-0.1", 0.05, 192 << 20))
        (pod,) = cluster.core().list_namespaced_pod(namespace).items
        assert pod.status.container_statuses[0].resources.limits["memory"] == str(192 << 20)
        assert pod.status.container_statuses[0].restart_count == 0
        observer.until(lambda: observer.pods.resize("coordinator-0.1", 0.05, 1 << 40) is False)
        assert observer.pods.is_alive("coordinator-0.1")
        assert any("cannot be resized: " in line for line in observer.messages), observer.messages


def test_a_process_without_room_is_given_up_until_later(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        for attempt in (1, 2):
            observer.pods.start(
                f"coordinator-0.{attempt}", SLEEPS, ResourceRequest(cpus=64.0, memory_bytes=1 << 30)
            )
            assert observer.pods.is_alive(f"coordinator-0.{attempt}")
            observer.until_ended(f"coordinator-0.{attempt}")
            lost = observer.pods.exit_status(f"coordinator-0.{attempt}").lost
            assert lost.startswith("Unschedulable: 0/")
        assert len([line for line in observer.messages if "Unschedulable" in line]) == 1
        observer.until(lambda: not cluster.core().list_namespaced_pod(namespace).items)


def test_a_process_on_a_gpu_waits_for_a_node_that_has_one_and_keeps_it(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api, needs = cluster.core(), replace(NEEDS, gpus=1)
    node = api.list_node().items[0].metadata.name
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", SLEEPS, needs)
        observer.until_ended("coordinator-0.1")
        assert f"Insufficient {GPU}" in observer.pods.exit_status("coordinator-0.1").lost
        offered = {"capacity": {GPU: "1"}, "allocatable": {GPU: "1"}}
        api.patch_node_status(node, {"status": offered})
        try:
            observer.pods.start("coordinator-0.2", SLEEPS, needs)
            observer.until_up("coordinator-0.2")
            observer.until(lambda: observer.pods.resize("coordinator-0.2", 0.05, 256 << 20))
            (pod,) = [p for p in api.list_namespaced_pod(namespace).items if p.spec.node_name]
            assert pod.spec.node_name == node
            limits = {"cpu": "50m", "memory": str(256 << 20), GPU: "1"}
            assert pod.spec.containers[0].resources.limits == limits
            assert pod.spec.containers[0].resources.requests == limits
        finally:
            gone = {"capacity": {GPU: None}, "allocatable": {GPU: None}}
            api.patch_node_status(node, {"status": gone})


def test_a_process_over_the_quota_is_lost_and_begins_when_there_is_room(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    hard = {"requests.cpu": "50m", "requests.memory": "1Gi"}
    quota = {"metadata": {"name": "small"}, "spec": {"hard": hard}}
    api.create_namespaced_resource_quota(namespace, quota)
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.until(lambda: api.read_namespaced_resource_quota("small", namespace).status.hard)
        for attempt in (1, 2):
            observer.pods.start(f"coordinator-0.{attempt}", SLEEPS, NEEDS)
            assert observer.pods.exit_status(f"coordinator-0.{attempt}") == ExitStatus(
                lost="quota exceeded"
            )
        assert observer.messages == ["the namespace's quota small is exceeded"]
        api.delete_namespaced_resource_quota("small", namespace)
        attempts = (f"coordinator-0.{attempt}" for attempt in itertools.count(3))

        def begins() -> bool:  # the server forgets a quota in its own time
            observer.pods.start(last := next(attempts), SLEEPS, NEEDS)
            return observer.pods.is_alive(last)

        observer.until(begins)
        begun = observer.pods.newest_started("coordinator-")
        assert begun is not None
        observer.until_up(begun)


def test_what_the_api_server_refuses_is_said_in_its_words(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    config = config_of(cluster, namespace, tmp_path, spec={"priorityClassName": "absent"})
    with observe_pods(config, tmp_path) as observer:
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        refused = observer.pods.exit_status("coordinator-0.1").refused
        assert "no PriorityClass with name absent was found" in refused


def test_a_pod_of_that_name_which_is_anothers_stays_and_the_next_name_is_free(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        name = name_of(tmp_path, "coordinator-0.1")
        other = {"name": "other", "image": "none", "command": [*SLEEPS]}
        pod = {"metadata": {"name": name}, "spec": {"containers": [other]}}
        api.create_namespaced_pod(namespace, pod)
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        assert observer.pods.exit_status("coordinator-0.1").refused.startswith(f"Pod {name}: ")
        observer.pods.remove_ended([])
        observer.pods.start("coordinator-0.2", SLEEPS, NEEDS)
        observer.until_up("coordinator-0.2")
        left = api.read_namespaced_pod(name, namespace)
        assert left.spec.containers[0].name == "other"
        assert left.metadata.deletion_timestamp is None


def test_a_pod_whose_fields_somebody_else_took_over_is_still_ours(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    config = config_of(cluster, namespace, tmp_path)
    with observe_pods(config, tmp_path) as observer:
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        observer.until_up("coordinator-0.1")
        (pod,) = cluster.core().list_namespaced_pod(namespace).items
        patch = {"metadata": {"labels": {"presage/pool": "theirs"}}}
        cluster.core().patch_namespaced_pod(pod.metadata.name, namespace, patch)
        # As after an answer that was lost: applied again, refused for the label, and there it is.
        (tmp_path / "processes" / "coordinator-0.1.begun").unlink()
    with observe_pods(config, tmp_path) as observer:
        observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
        observer.until_up("coordinator-0.1")
        assert len(cluster.core().list_namespaced_pod(namespace).items) == 1


def test_a_pod_that_lost_its_labels_is_ended_before_it_is_called_lost(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", LEAVES, NEEDS)
        observer.until_up("coordinator-0.1")
        (pod,) = cluster.core().list_namespaced_pod(namespace).items
        patch = {"metadata": {"labels": {"app.kubernetes.io/instance": None}}}
        cluster.core().patch_namespaced_pod(pod.metadata.name, namespace, patch)
        observer.until_ended("coordinator-0.1")
        # It left as it was asked; whether that was seen before its object went is chance.
        assert observer.pods.exit_status("coordinator-0.1") in (
            ExitStatus(status=0),
            ExitStatus(lost="deleted"),
        )
        observer.until(lambda: not cluster.core().list_namespaced_pod(namespace).items)
        assert any("has lost its labels" in line for line in observer.messages)


def test_a_restart_of_the_api_server_loses_nothing(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        observer.pods.start("coordinator-0.1", LEAVES, NEEDS)
        observer.pods.start(
            "segment-0.1", [*FAILS[:2], f"import time; time.sleep(3); {FAILS[2]}"], NEEDS
        )
        observer.until_up("coordinator-0.1")
        cluster.stop("kube-apiserver")
        observer.pods.start("store-0.1", SLEEPS, NEEDS)
        observer.cluster.poll()
        assert observer.pods.is_alive("store-0.1")
        assert observer.pods.is_alive("coordinator-0.1")
        cluster.start("kube-apiserver")
        observer.until_up("store-0.1")
        observer.until_ended("segment-0.1")
        assert observer.pods.exit_status("segment-0.1").status == 1
        observer.pods.request_stop("coordinator-0.1")
        observer.until_ended("coordinator-0.1")
        unreachable = [line for line in observer.messages if "the API server" in line]
        assert unreachable[0].startswith("the API server does not answer: ")
        assert "the API server answers again" in unreachable


def test_a_process_whose_node_is_gone_is_lost_with_it(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    cluster.add_node("node-lost")
    cluster.wait_for_nodes("node-lost")
    selector = {"kubernetes.io/hostname": "node-lost"}
    config = config_of(
        cluster, namespace, tmp_path, spec={"nodeSelector": selector}, grace=timedelta(seconds=1)
    )
    try:
        with observe_pods(config, tmp_path) as observer:
            observer.pods.start("coordinator-0.1", SLEEPS, NEEDS)
            observer.until_up("coordinator-0.1")
            cluster.fail_node("node-lost")
            observer.until(observer.pods.preemption_notices)
            observer.until_ended("coordinator-0.1")
            assert observer.pods.exit_status("coordinator-0.1").lost.startswith("NodeLost: ")
            observer.pods.remove_ended([])
            observer.until(lambda: not cluster.core().list_namespaced_pod(namespace).items)
    finally:
        cluster.remove_node("node-lost")
