"""What a Pod means for its process, from the objects that API servers and nodes leave."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.drivers.base import Ending, Needs
from scheduler.drivers.kubernetes.api import quantity
from scheduler.drivers.kubernetes.pod import (
    Tracked,
    ending_of,
    is_over,
    is_running,
    last_message,
    notice_of,
    resized,
    waiting_of,
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


ENDINGS: dict[str, tuple[dict[str, Any], Ending]] = {
    "its work is done": (pod("Succeeded", exited(0, "Completed")), Ending(status=0)),
    "it says that it cannot": (pod("Failed", exited(1)), Ending(status=1)),
    "it is killed": (pod("Failed", exited(137)), Ending(status=-9)),
    "out of memory": (
        pod("Failed", exited(137, "OOMKilled")),
        Ending(status=-9, lost="OOMKilled", oom=True),
    ),
    "evicted by its node": (
        pod("Failed", exited(137), reason="Evicted", message="The node was low on memory."),
        Ending(status=-9, lost="Evicted: The node was low on memory."),
    ),
    "rejected by its node": (
        pod("Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu"),
        Ending(lost="OutOfcpu: Node didn't have enough resource: cpu"),
    ),
    "preempted": (
        pod("Running", exited(143), disrupted("PreemptionByScheduler"), deleted=60),
        Ending(status=-15, lost="Preempted"),
    ),
    "drained from its node": (
        pod("Running", {}, disrupted("EvictionByEvictionAPI", "asked for"), deleted=60),
        Ending(lost="Evicted: asked for"),
    ),
    "its node is no more": (
        pod("Failed", None, disrupted("DeletionByPodGC", "PodGC: node no longer exists")),
        Ending(lost="NodeLost: PodGC: node no longer exists"),
    ),
    "it left in time when it was evicted": (
        pod("Succeeded", exited(0), disrupted("EvictionByEvictionAPI"), deleted=60),
        Ending(status=0),
    ),
    "somebody deleted it": (
        pod("Running", exited(143), deleted=30),
        Ending(status=-15, lost="deleted"),
    ),
    "it is gone and nobody saw how": (pod("Running", {"running": {}}), Ending(lost="deleted")),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_ending_of_a_pod_is_its_status_and_what_took_it(name: str) -> None:
    seen, expected = ENDINGS[name]
    assert ending_of(seen, asked=False) == expected


def test_ending_of_a_pod_that_we_deleted_is_not_somebody_elses_doing() -> None:
    assert ending_of(pod("Running", exited(143), deleted=30), asked=True) == Ending(status=-15)


def test_phases_tell_whether_a_program_runs_and_is_over() -> None:
    assert is_running(pod("Running", {"running": {}}))
    assert not is_running(pod("Running", exited(0)))
    assert not is_running(pod("Pending"))
    assert not is_over(pod("Running", exited(0))), "its phase is what says so"
    assert is_over(pod("Succeeded", exited(0)))
    assert is_over(pod("Failed"))


def test_notice_of_comes_with_a_deletion_or_a_disruption() -> None:
    assert notice_of(pod()) is None
    assert notice_of(pod(deleted=30)) == 30.0
    assert notice_of(pod(condition=disrupted("PreemptionByScheduler"))) == 60.0
    assert notice_of(pod("Failed", deleted=30)) is None, "it is over"


def test_waiting_of_tells_what_lacks_from_what_is_wrong() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    room = waiting_of(pod("Pending", condition={**condition, "message": "0/3 nodes"}))
    assert room is not None
    assert (room.word, room.message, room.hopeless) == ("Unschedulable", "0/3 nodes", False)
    begins = waiting_of(pod("Pending", {"waiting": {"reason": "ContainerCreating"}}))
    assert begins is not None
    assert (begins.in_words, begins.hopeless) == ("ContainerCreating", False)
    assert waiting_of(pod("Pending")) is None


def test_last_message_is_the_last_line_that_a_container_left() -> None:
    assert last_message(pod("Failed", exited(2, message="a\nsh: no folder\n"))) == "sh: no folder"
    assert last_message(pod("Failed")) == ""


def test_resized_is_what_the_container_has_not_what_it_is_to_have() -> None:
    seen = pod("Running", {"running": {}})
    small, large = (Needs(cpus=0.5, memory_bytes=mib << 20) for mib in (1, 2))
    assert resized(seen, small) is None
    limits = {"memory": "1Mi", "cpu": "500m"}
    seen["status"]["containerStatuses"][0]["resources"] = {"limits": limits}
    assert resized(seen, small) is True
    assert resized(seen, replace(small, cpus=0.4)) is None
    assert resized(seen, large) is None
    for reason, expected in (("Deferred", None), ("Infeasible", False)):
        pending = {"type": "PodResizePending", "status": "True", "reason": reason}
        assert resized({**seen, "status": {"conditions": [pending]}}, large) is expected


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
    tracked = Tracked("a", seen=pod("Pending", condition={**condition, "message": "0/3"}))
    for now in (0.0, 10.0):
        assert tracked.look(now, 10.0, 30.0) is not None
        assert tracked.lives
    tracked.look(10.1, 10.0, 30.0)
    assert (tracked.must_be_deleted, tracked.grace_sec) == (True, 1)
    assert tracked.lives, "it may begin meanwhile"
    tracked.is_gone = True
    assert tracked.ending == Ending(lost="Unschedulable: 0/3")


def test_a_pod_that_did_its_work_as_it_was_given_up_has_done_it() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = Tracked("a", seen=pod("Pending", condition=condition))
    tracked.look(0.0, 10.0, 30.0)
    tracked.look(10.1, 10.0, 30.0)
    tracked.seen = pod("Succeeded", exited(0), deleted=1)
    assert tracked.ending == Ending(status=0)


def test_a_pod_that_is_about_to_begin_is_worth_a_word_late_and_given_up_later() -> None:
    creating = {"waiting": {"reason": "ContainerCreating", "message": ""}}
    tracked = Tracked("a", seen=pod("Pending", creating))
    assert tracked.look(0.0, 300.0, 30.0) is None
    assert tracked.look(29.0, 300.0, 30.0) is None
    assert tracked.look(31.0, 300.0, 30.0) is not None
    tracked.look(300.0, 300.0, 30.0)
    assert not tracked.must_be_deleted
    tracked.look(300.1, 300.0, 30.0)
    assert tracked.must_be_deleted
    tracked.is_gone = True
    assert tracked.ending == Ending(lost="ContainerCreating")


def test_a_pod_that_found_its_node_late_has_its_whole_time_to_begin() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = Tracked("a", seen=pod("Pending", condition=condition))
    tracked.look(0.0, 10.0, 30.0)
    tracked.seen = pod("Pending", {"waiting": {"reason": "ContainerCreating"}})
    tracked.look(9.0, 10.0, 30.0)
    tracked.look(18.0, 10.0, 30.0)
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
    found = waiting_of(waits)
    assert found is not None
    assert (found.word, found.hopeless) == (word, is_final)
    tracked = Tracked("a", seen=waits)
    tracked.look(0.0, 10.0, 30.0)
    between = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    tracked.seen = pod("Pending", {"waiting": between})
    tracked.look(10.1, 10.0, 30.0)
    # What a node says of a container that never began.
    tracked.seen = pod("Failed", exited(137, "ContainerStatusUnknown"), deleted=1)
    said = f"{word}: {message}"
    lost = Ending(lost="ImagePullBackOff: Back-off pulling image")
    assert tracked.ending == (Ending(refused=said) if is_final else lost)


def test_a_pod_that_found_its_place_has_its_whole_time_again() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    tracked = Tracked("a", seen=pod("Pending", condition=condition))
    tracked.look(0.0, 10.0, 30.0)
    tracked.seen = pod("Running", {"running": {}})
    tracked.look(9.0, 10.0, 30.0)
    tracked.seen = pod("Pending", condition=condition)
    tracked.look(12.0, 10.0, 30.0)
    assert tracked.lives


def test_a_pod_that_no_node_ends_is_lost_after_its_grace_and_the_time_of_nodes() -> None:
    tracked = Tracked("a", seen=pod("Running", {"running": {}}, deleted=60))
    for now in (0.0, 60.0, 90.0):
        tracked.look(now, 10.0, 30.0)
        assert tracked.lives, now
    tracked.look(90.5, 10.0, 30.0)
    assert tracked.ending.lost == "NodeLost: its node has not ended it 30 s after its time"
    assert tracked.must_be_deleted


def test_a_pod_that_the_server_was_never_told_of_ends_when_it_is_asked_to() -> None:
    tracked = Tracked("a", wanted={})
    assert tracked.lives
    tracked.end(60)
    assert (tracked.lives, tracked.must_be_deleted) == (False, False)
    assert tracked.wanted is None


def test_a_pod_that_somebody_deleted_first_is_theirs_also_when_we_delete_it_then() -> None:
    tracked = Tracked("a", seen=pod(deleted=60))
    tracked.look(0.0, 10.0, 30.0)
    assert tracked.notice_sec == 60.0
    tracked.end(1)
    tracked.deleted = 1
    tracked.seen = pod("Failed", exited(143), deleted=1)
    tracked.look(1.0, 10.0, 30.0)
    assert tracked.ending == Ending(status=-15, lost="deleted")


@pytest.mark.slow
def test_a_pod_that_is_to_go_sooner_is_deleted_again() -> None:
    tracked = Tracked("a", seen=pod())
    tracked.end(60)
    assert tracked.must_be_deleted
    tracked.deleted = 60
    assert not tracked.must_be_deleted
    tracked.end(60)
    assert not tracked.must_be_deleted
    tracked.end(1)
    assert tracked.must_be_deleted
