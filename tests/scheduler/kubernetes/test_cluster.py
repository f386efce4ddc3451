"""Requests to an API server that answers late, once, or wrongly."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from presage.scheduler.drivers.base import NO_RESOURCES, ExitStatus, instance_of
from presage.scheduler.drivers.kubernetes import cluster as asked
from presage.scheduler.drivers.kubernetes.api_server import ApiRefusedError, PodUsage
from presage.scheduler.drivers.kubernetes.cluster import USAGE_SEC, Cluster, Pods
from presage.scheduler.drivers.kubernetes.pod_manifest import ClusterConfig, Task, pod_name, pod_of
from tests.scheduler.kubernetes.server import FORBIDDEN, SILENT, Server

CONFIG = ClusterConfig(namespace="here", image="none")
RETRY_SEC, PATIENCE_SEC = 0.1, 30.0
AWAY, BACK = "the API server does not answer: timed out", "the API server answers again"


class Followed:
    """The Pods of one job on a server of this process."""

    def __init__(self, cluster: Cluster, server: Server, folder: Path, messages: list[str]) -> None:
        self.cluster = cluster
        self.server = server
        self.messages = messages
        self.pods = Pods(cluster, "job", folder / "processes")
        self.instance = instance_of(folder)

    def name(self, process: str) -> str:
        return pod_name(self.instance, "job", process)

    def until(self, condition: Callable[[], object]) -> None:
        """Look until a condition holds, bounded in time; no speed is meant by it."""
        end_sec = time.monotonic() + PATIENCE_SEC
        while not condition():
            assert time.monotonic() < end_sec, (self.messages, self.server.calls)
            time.sleep(0.01)
            self.cluster.poll()


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Followed]:
    with following(tmp_path, monkeypatch) as found:
        yield found


@contextmanager
def following(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: ClusterConfig = CONFIG
) -> Generator[Followed]:
    """Follow a server that is asked again soon."""
    server, messages = Server(), list[str]()
    monkeypatch.setattr(asked, "RETRY_SEC", RETRY_SEC)
    monkeypatch.setattr(asked, "connect", lambda _: server)
    with Cluster(config, folder, messages.append) as cluster:
        yield Followed(cluster, server, folder, messages)


def test_a_pod_whose_making_was_not_answered_and_that_was_ended_does_not_run_on(
    followed: Followed,
) -> None:
    server, pods = followed.server, followed.pods
    server.loses_answers = True
    pods.start("segment-0.1", [])
    pods.kill("segment-0.1")
    assert not pods.is_alive("segment-0.1")
    pods.remove_ended([])
    name = followed.name("segment-0.1")
    assert name in server.pods, "the server took it all the same"
    server.send(name)
    followed.until(lambda: name not in server.pods)
    assert not pods.is_alive("segment-0.1")


def test_a_pod_that_the_scheduler_before_asked_for_and_that_comes_late_does_not_run_on(
    followed: Followed, tmp_path: Path
) -> None:
    server, pods = followed.server, followed.pods
    task = Task(job="job", name="segment-0.1", command=[], request=NO_RESOURCES)
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "segment-0.1.begun").touch()
    pods.start("segment-0.1", [])
    assert not pods.is_alive("segment-0.1"), "it is told as lost, and another takes its place"
    pods.remove_ended(["segment-0.2"])
    name = followed.name("segment-0.1")
    server.apply(pod_of(CONFIG, followed.instance, task))
    server.send(name)
    followed.until(lambda: pods.is_alive("segment-0.1"))
    pods.remove_ended(["segment-0.2"])
    followed.until(lambda: name not in server.pods)
    followed.until(lambda: not pods.is_alive("segment-0.1"))


def test_a_move_of_slots_lives_without_being_named(followed: Followed) -> None:
    followed.pods.start("move-1-to-2.3", [])
    followed.pods.remove_ended([])
    assert "delete" not in followed.server.calls
    assert followed.pods.is_alive("move-1-to-2.3")


def test_a_delete_that_is_refused_is_asked_again_at_a_pace_and_said_once(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pods = followed.server, followed.pods
    pods.start("coordinator-0.1", [])
    server.fails["delete"] = FORBIDDEN
    monkeypatch.setattr(asked, "RETRY_SEC", 600.0)
    pods.request_stop("coordinator-0.1")
    for _ in range(3):
        followed.cluster.poll()
    assert server.calls.count("delete") == 1, "not with each look"
    monkeypatch.setattr(asked, "RETRY_SEC", RETRY_SEC)
    followed.until(lambda: server.calls.count("delete") == 3)
    assert followed.messages == [
        f"Pod {followed.name('coordinator-0.1')} cannot be deleted: no right"
    ]
    server.fails.clear()
    followed.until(lambda: not pods.is_alive("coordinator-0.1"))


def test_missed_pods_are_asked_for_at_a_pace(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pods = followed.server, followed.pods
    pods.start("coordinator-0.1", [])
    server.send(followed.name("coordinator-0.1"), "DELETED")  # its labels are gone, it is not
    server.fails["get"] = FORBIDDEN
    followed.until(lambda: "get" in server.calls)
    monkeypatch.setattr(asked, "RETRY_SEC", 600.0)
    before = server.calls.count("get")
    for _ in range(5):
        followed.cluster.poll()
    assert server.calls.count("get") <= before + 1


def test_one_call_without_an_answer_is_taken_back_by_the_next_that_has_one(
    followed: Followed,
) -> None:
    followed.server.fails["apply"] = SILENT
    followed.pods.start("coordinator-0.1", [])
    assert followed.messages == [AWAY]
    followed.server.fails.clear()
    followed.until(lambda: len(followed.messages) == 2)
    assert followed.messages == [AWAY, BACK]
    assert followed.name("coordinator-0.1") in followed.server.pods


def test_a_watch_that_is_cut_is_away_until_it_goes_on(followed: Followed) -> None:
    server = followed.server
    server.fails["watch"] = SILENT
    server.cut()
    followed.until(lambda: followed.messages)
    followed.pods.start("coordinator-0.1", [])
    assert followed.messages == [AWAY], "calls are answered, the watch is not"
    server.fails.clear()
    followed.until(lambda: followed.messages == [AWAY, BACK])


def test_while_calls_hang_no_other_one_is_begun(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pods = followed.server, followed.pods
    for name in ("coordinator-0.1", "store-0.1"):
        pods.start(name, [])
    monkeypatch.setattr(asked, "RETRY_SEC", 600.0)
    server.fails["resize"] = SILENT
    for name in ("coordinator-0.1", "store-0.1", "coordinator-0.1"):
        assert pods.resize(name, 0.5, 1 << 30) is None, "it is asked again"
    assert server.calls.count("resize") == 1


def test_a_reading_of_usage_that_took_long_is_not_begun_again_at_once(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = followed.server
    followed.pods.start("coordinator-0.1", [])
    server.pods[followed.name("coordinator-0.1")]["status"] = {
        "phase": "Running",
        "containerStatuses": [{"state": {"running": {}}}],
    }
    server.send(followed.name("coordinator-0.1"), "MODIFIED")
    followed.until(lambda: followed.pods.is_running("coordinator-0.1"))
    clock = [time.monotonic()]
    answer = server.usage

    def usage(selector: str) -> dict[str, PodUsage]:
        clock[0] += 2 * USAGE_SEC
        return answer(selector)

    monkeypatch.setattr(asked, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(server, "usage", usage)
    for _ in range(2):
        followed.pods.resident_bytes("coordinator-0.1")
    assert server.calls.count("usage") == 1
    clock[0] += USAGE_SEC
    followed.pods.resident_bytes("coordinator-0.1")
    assert server.calls.count("usage") == 2


def test_usage_that_was_refused_once_is_read_again(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights of the scheduler, or the metrics server, may come after the first Pod."""
    server, name = followed.server, followed.name("coordinator-0.1")
    followed.pods.start("coordinator-0.1", [])
    server.pods[name]["status"] = {
        "phase": "Running",
        "containerStatuses": [{"state": {"running": {}}}],
    }
    server.send(name, "MODIFIED")
    followed.until(lambda: followed.pods.is_running("coordinator-0.1"))
    monkeypatch.setattr(asked, "USAGE_SEC", 0.0)
    server.fails["usage"] = FORBIDDEN
    for _ in range(3):
        assert followed.pods.resident_bytes("coordinator-0.1") == 0
    assert followed.messages == ["memory cannot be read from metrics.k8s.io: 403: no right"]
    server.fails.clear()
    monkeypatch.setattr(server, "usage", lambda _: {name: PodUsage(memory_bytes=7, cores=0.5)})
    assert followed.pods.resident_bytes("coordinator-0.1") == 7


def test_pods_of_a_job_are_found_without_going_through_those_of_others(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Pods(followed.cluster, "other", followed.pods.work)
    names = [f"replica-{number}.1" for number in range(4)]
    for name in names:
        followed.pods.start(name, [])
        followed.server.send(followed.name(name), "MODIFIED")
    followed.until(lambda: all(followed.pods.is_alive(name) for name in names))
    with monkeypatch.context() as patch:
        patch.setattr(asked, "pod_name", None)  # nothing is computed for each Pod
        assert list(followed.cluster.pods_of("job")) == names
        assert followed.cluster.pods_of("other") == {}
        assert others.preemption_notices() == {}
    followed.pods.kill(names[0])
    followed.until(lambda: not followed.pods.is_alive(names[0]))
    followed.pods.remove_ended(names[1:])
    assert list(followed.cluster.pods_of("job")) == names[1:]


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
}


@pytest.mark.slow
def test_no_pod_is_given_up_for_what_was_seen_before_the_server_went_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = timedelta(seconds=1)
    config = replace(CONFIG, unschedulable_after=patience)
    with following(tmp_path, monkeypatch, config) as followed:
        server, pods = followed.server, followed.pods
        pods.start("coordinator-0.1", [])
        name = followed.name("coordinator-0.1")
        server.pods[name]["status"] = UNSCHEDULABLE
        server.send(name, "MODIFIED")
        followed.until(lambda: followed.messages)
        server.fails["watch"] = SILENT
        server.cut()
        followed.until(lambda: AWAY in followed.messages)
        end_sec = time.monotonic() + 1.2 * patience.total_seconds()
        followed.until(lambda: time.monotonic() > end_sec)
        assert "delete" not in server.calls
        server.fails.clear()
        followed.until(lambda: not pods.is_alive("coordinator-0.1"))
        assert pods.exit_status("coordinator-0.1") == ExitStatus(lost="Unschedulable")
        assert name not in server.pods, "it is gone before it is called ended"


def test_a_full_quota_is_said_once_however_often_it_is_met(followed: Followed) -> None:
    for attempt in (1, 2):
        message = (
            f'pods "coordinator-{attempt}" is forbidden: exceeded quota: small, requested: cpu=1'
        )
        followed.server.fails["apply"] = ApiRefusedError(403, message)
        followed.pods.start(f"coordinator-0.{attempt}", [])
        assert followed.pods.exit_status(f"coordinator-0.{attempt}") == ExitStatus(
            lost="quota exceeded"
        )
    assert followed.messages == ["the namespace's quota small is exceeded"]


def test_what_a_folder_does_not_give_is_as_if_nothing_was_said(
    followed: Followed, tmp_path: Path
) -> None:
    for kind in ("out", "err"):
        (tmp_path / "processes" / f"coordinator-0.1.{kind}").mkdir(parents=True)
    assert (
        followed.pods.output("coordinator-0.1"),
        followed.pods.last_stderr_line("coordinator-0.1"),
    ) == ("", "")
