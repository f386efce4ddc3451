"""What a Pod's reported state means for its process."""

from dataclasses import replace
from typing import Any

import pytest

from presage.scheduler.drivers.base import ExitStatus, ResourceRequest
from presage.scheduler.drivers.kubernetes.api_server import quantity
from presage.scheduler.drivers.kubernetes.pod import (
    TrackedPod,
    exit_status_of,
    has_ended,
    is_running,
    output_of,
    preemption_notice,
    resize_result,
    wait_of,
)


def pod(
    phase: str = "Running", state: dict | None = None, condition: dict | None = None, **more: Any
) -> dict[str, Any]:
    """Return a Pod of one container; `deleted` is its grace, the rest is of its status."""
    metadata: dict[str, Any] = {"name": "a", "uid": "1"}
    if "deleted" in more:
        metadata["deletionTimestamp"] = "2026-11-22T10:00:00Z"
        metadata["deletionGracePeriodSeconds"] = more.pop("deleted")
    status: dict[str, Any] = {"phase": phase, **more}
    if state is not None:
        status["containerStatuses"] = [{"name": "main", "state": state}]
    if condition is not None:
        status["conditions"] = [{"type": "Ready", "status": "False"}, condition]
    spec = {"terminationGracePeriodSeconds": 60}
    return {"metadata": metadata, "spec": spec, "status": status}


def exited(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


def disrupted(reason: str, message: str = "") -> dict[str, str]:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


ENDINGS: dict[str, tuple[dict[str, Any], ExitStatus]] = {
    "its work is done": (pod("Succeeded", exited(0, "Completed")), ExitStatus(status=0)),
    "it says that it cannot": (pod("Failed", exited(1)), ExitStatus(status=1)),
    "it is killed": (pod("Failed", exited(137)), ExitStatus(status=-9)),
    "out of memory": (
        pod("Failed", exited(137, "OOMKilled")),
        ExitStatus(status=-9, lost="OOMKilled", oom=True),
    ),
    "evicted by its node": (
        pod("Failed", exited(137), reason="Evicted", message="The node was low on memory."),
        ExitStatus(status=-9, lost="Evicted: The node was low on memory."),
    ),
    "rejected by its node": (
        pod("Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu"),
        ExitStatus(lost="OutOfcpu: Node didn't have enough resource: cpu"),
    ),
    "preempted": (
        pod("Running", exited(143), disrupted("PreemptionByScheduler"), deleted=60),
        ExitStatus(status=-15, lost="Preempted"),
    ),
    "drained from its node": (
        pod("Running", {}, disrupted("EvictionByEvictionAPI", "asked for"), deleted=60),
        ExitStatus(lost="Evicted: asked for"),
    ),
    "its node is no more": (
        pod("Failed", None, disrupted("DeletionByPodGC", "PodGC: node no longer exists")),
        ExitStatus(lost="NodeLost: PodGC: node no longer exists"),
    ),
    "it left in time when it was evicted": (
        pod("Succeeded", exited(0), disrupted("EvictionByEvictionAPI"), deleted=60),
        ExitStatus(status=0, lost="Evicted"),
    ),
    "somebody deleted it": (
        pod("Running", exited(143), deleted=30),
        ExitStatus(status=-15, lost="deleted"),
    ),
    "it is gone and nobody saw how": (pod("Running", {"running": {}}), ExitStatus(lost="deleted")),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_ending_of_a_pod_is_its_status_and_what_took_it(name: str) -> None:
    status, expected = ENDINGS[name]
    assert exit_status_of(status, deleted_by_us=False) == expected


def test_ending_of_a_pod_that_we_deleted_is_not_somebody_elses_doing() -> None:
    assert exit_status_of(
        pod("Running", exited(143), deleted=30), deleted_by_us=True
    ) == ExitStatus(status=-15)


def test_phases_tell_whether_a_program_runs_and_is_over() -> None:
    assert is_running(pod("Running", {"running": {}}))
    assert not is_running(pod("Running", exited(0)))
    assert not is_running(pod("Pending"))
    assert not has_ended(pod("Running", exited(0))), "its phase is what says so"
    assert has_ended(pod("Succeeded", exited(0)))
    assert has_ended(pod("Failed"))


def test_notice_of_comes_with_a_deletion_or_a_disruption() -> None:
    assert preemption_notice(pod()) is None
    assert preemption_notice(pod(deleted=30)) == 30.0
    assert preemption_notice(pod(condition=disrupted("PreemptionByScheduler"))) == 60.0
    assert preemption_notice(pod("Failed", deleted=30)) is None, "it is over"


def test_waiting_of_tells_what_lacks_from_what_is_wrong() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    room = wait_of(pod("Pending", condition={**condition, "message": "0/3 nodes"}))
    assert room is not None
    assert (room.reason, room.message, room.permanent) == ("Unschedulable", "0/3 nodes", False)
    begins = wait_of(pod("Pending", {"waiting": {"reason": "ContainerCreating"}}))
    assert begins is not None
    assert (begins.text, begins.permanent) == ("ContainerCreating", False)
    assert wait_of(pod("Pending")) is None


def test_message_of_a_container_is_its_output_or_if_it_failed_its_log() -> None:
    assert output_of(pod("Succeeded", exited(0, message="{}\n"))) == ("{}\n", "")
    assert output_of(pod("Failed", exited(2, message="error: a\n"))) == ("", "error: a\n")
    assert output_of(pod("Running", {"running": {}})) == ("", "")


def test_resized_is_what_the_container_has_not_what_it_is_to_have() -> None:
    status = pod("Running", {"running": {}})
    small, large = (ResourceRequest(cpus=0.5, memory_bytes=mib << 20) for mib in (1, 2))
    assert resize_result(status, small) is None
    limits = {"memory": "1Mi", "cpu": "500m"}
    status["status"]["containerStatuses"][0]["resources"] = {"limits": limits}
    assert resize_result(status, small) is True
    assert resize_result(status, replace(small, cpus=0.4)) is None
    assert resize_result(status, large) is None
    for reason, expected in (("Deferred", None), ("Infeasible", False)):
        pending = {"type": "PodResizePending", "status": "True", "reason": reason}
        assert resize_result({**status, "status": {"conditions": [pending]}}, large) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "5Gi": 5 << 30,
        "1024": 1024,
        "128974848000m": 128974848,
        "129M": 129_000_000,
        "1Pi": 1 << 50,
        "2E": 2 * 10**18,
        "500n": 0,
        "3u": 0,
    }.items(),
)
def test_quantity_is_in_bytes(text: str, expected: int) -> None:
    assert quantity(text) == expected


def test_a_pod_that_waits_too_long_is_deleted_and_has_ended_when_it_is_gone() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = TrackedPod("a", observed=pod("Pending", condition={**condition, "message": "0/3"}))
    for now in (0.0, 10.0):
        assert tracked.check_timeouts(now, 10.0, 30.0) is not None
        assert tracked.is_alive
    tracked.check_timeouts(10.1, 10.0, 30.0)
    assert (tracked.must_be_deleted, tracked.grace_sec) == (True, 1)
    assert tracked.is_alive, "it may begin meanwhile"
    tracked.is_gone = True
    assert tracked.exit_status == ExitStatus(lost="Unschedulable: 0/3")


def test_a_pod_that_did_its_work_as_it_was_given_up_has_done_it() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = TrackedPod("a", observed=pod("Pending", condition=condition))
    tracked.check_timeouts(0.0, 10.0, 30.0)
    tracked.check_timeouts(10.1, 10.0, 30.0)
    tracked.deleted_grace_sec = 1
    tracked.observed = pod("Succeeded", exited(0), deleted=1)
    assert tracked.exit_status == ExitStatus(status=0)


def test_a_pod_that_is_about_to_begin_is_worth_a_word_late_and_given_up_later() -> None:
    creating = {"waiting": {"reason": "ContainerCreating", "message": ""}}
    tracked = TrackedPod("a", observed=pod("Pending", creating))
    assert tracked.check_timeouts(0.0, 300.0, 30.0) is None
    assert tracked.check_timeouts(29.0, 300.0, 30.0) is None
    assert tracked.check_timeouts(31.0, 300.0, 30.0) is not None
    tracked.check_timeouts(300.0, 300.0, 30.0)
    assert not tracked.must_be_deleted
    tracked.check_timeouts(300.1, 300.0, 30.0)
    assert tracked.must_be_deleted
    tracked.is_gone = True
    assert tracked.exit_status == ExitStatus(lost="ContainerCreating")


def test_a_pod_that_found_its_node_late_has_its_whole_time_to_begin() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = TrackedPod("a", observed=pod("Pending", condition=condition))
    tracked.check_timeouts(0.0, 10.0, 30.0)
    tracked.observed = pod("Pending", {"waiting": {"reason": "ContainerCreating"}})
    tracked.check_timeouts(9.0, 10.0, 30.0)
    tracked.check_timeouts(18.0, 10.0, 30.0)
    assert not tracked.must_be_deleted


IMAGES = {
    "it is not there": ("ErrImagePull", "rpc error: code = NotFound desc = b:1: not found", True),
    "its name is wrong": ("InvalidImageName", "couldn't parse image name", True),
    "it is another's": (
        "ErrImagePull",
        "pull access denied, repository does not exist or may require authorization",
        True,
    ),
    "its registry is away": ("ErrImagePull", "dial tcp 10.0.0.1:443: i/o timeout", False),
    "its registry has no address": ("ErrImagePull", "lookup b.example: no such host", False),
    "its registry has too much to do": ("ErrImagePull", "429 Too Many Requests", False),
    "nobody says why": ("ImagePullBackOff", 'Back-off pulling image "b:1"', False),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_does_not_come_is_wrong_only_if_that_is_said(name: str) -> None:
    word, message, is_final = IMAGES[name]
    waits = pod("Pending", {"waiting": {"reason": word, "message": message}})
    found = wait_of(waits)
    assert found is not None
    assert (found.reason, found.permanent) == (word, is_final)
    tracked = TrackedPod("a", observed=waits)
    tracked.check_timeouts(0.0, 10.0, 30.0)
    between = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    tracked.observed = pod("Pending", {"waiting": between})
    tracked.check_timeouts(10.1, 10.0, 30.0)
    # What a node says of a container that never began.
    tracked.observed = pod("Failed", exited(137, "ContainerStatusUnknown"), deleted=1)
    reason = f"{word}: {message}"
    lost = ExitStatus(lost="ImagePullBackOff: Back-off pulling image")
    assert tracked.exit_status == (ExitStatus(refused=reason) if is_final else lost)


def test_a_pod_that_found_its_place_has_its_whole_time_again() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = TrackedPod("a", observed=pod("Pending", condition=condition))
    tracked.check_timeouts(0.0, 10.0, 30.0)
    tracked.observed = pod("Running", {"running": {}})
    tracked.check_timeouts(9.0, 10.0, 30.0)
    tracked.observed = pod("Pending", condition=condition)
    tracked.check_timeouts(12.0, 10.0, 30.0)
    assert tracked.is_alive


def test_a_pod_that_no_node_ends_is_lost_after_its_grace_and_the_time_of_nodes() -> None:
    tracked = TrackedPod("a", observed=pod("Running", {"running": {}}, deleted=60))
    for now in (0.0, 60.0, 90.0):
        tracked.check_timeouts(now, 10.0, 30.0)
        assert tracked.is_alive, now
    tracked.check_timeouts(90.5, 10.0, 30.0)
    assert tracked.exit_status.lost == "NodeLost: not terminated 30 s after its grace period"
    assert tracked.must_be_deleted


def test_a_pod_that_the_server_was_never_told_of_ends_when_it_is_asked_to() -> None:
    tracked = TrackedPod("a", manifest={})
    assert tracked.is_alive
    tracked.delete(60)
    assert (tracked.is_alive, tracked.must_be_deleted) == (False, False)
    assert tracked.manifest is None


def test_a_pod_that_somebody_deleted_first_is_theirs_also_when_we_delete_it_then() -> None:
    tracked = TrackedPod("a", observed=pod(deleted=60))
    tracked.check_timeouts(0.0, 10.0, 30.0)
    assert tracked.notice_sec == 60.0
    tracked.delete(1)
    tracked.deleted_grace_sec = 1
    tracked.observed = pod("Failed", exited(143), deleted=1)
    tracked.check_timeouts(1.0, 10.0, 30.0)
    assert tracked.exit_status == ExitStatus(status=-15, lost="deleted")


def test_a_pod_that_is_to_go_sooner_is_deleted_again() -> None:
    tracked = TrackedPod("a", observed=pod())
    tracked.delete(60)
    assert tracked.must_be_deleted
    tracked.deleted_grace_sec = 60
    assert not tracked.must_be_deleted
    tracked.delete(60)
    assert not tracked.must_be_deleted
    tracked.delete(1)
    assert tracked.must_be_deleted
