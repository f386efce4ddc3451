"""The Flink runner against a server with answers recorded from Flink 1.19."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from scheduler.controller.events import Event, RunnerSet, SlotsRead, SlotsUnread
from scheduler.controller.handle import handle
from scheduler.controller.state import State
from scheduler.drivers.beam_runners import (
    READ_SEC,
    FlinkConfig,
    FlinkRest,
    FlinkRunner,
    JobNames,
    UnreachableError,
)
from schemas.errors import SchemaError
from tests.scheduler.controller.world import BUDGET, submitted

ANSWERS = json.loads((Path(__file__).parent / "golden" / "flink.json").read_text())
NAME = "presage-1234-demo-segment-0.1"
"""Of the job that ran while they were recorded."""
OWN = "presage-1234-"


class Cluster:
    """Answers as a cluster did at one moment; notes what it is asked to cancel."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = dict(ANSWERS["idle"])
        self.cancelled: list[str] = []
        self.cancel_code = 202
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = outer.answers.get(self.path)
                self.answer(404 if found is None else 200, json.dumps(found))

            def do_PATCH(self) -> None:
                outer.cancelled.append(self.path)
                self.answer(outer.cancel_code, "{}")

            def answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


def config(address: str, **fields: Any) -> FlinkConfig:
    return FlinkConfig(
        address=address,
        job_endpoint="localhost:8099",
        environment_config="localhost:50000",
        **fields,
    )


def flink(cluster: Cluster, **fields: Any) -> FlinkRunner:
    return FlinkRunner(config(cluster.address, **fields), JobNames(OWN), "runner.yaml")


def told(state: State, events: list[Event]) -> State:
    for event in events:
        state, _ = handle(state, event)
    return state


def building() -> State:
    """A state with a job whose first segment is being built."""
    return told(State(), [BUDGET, submitted("demo")])


def of_live_job() -> dict[str, Any]:
    """Return the answers while a job is built, as if it were that of `building()`."""
    text = json.dumps(ANSWERS["building"])
    return json.loads(text.replace(NAME, JobNames(OWN).of("demo", "segment-0.1")))


MOMENTS = {
    "idle": (4, 0, 4, 0),
    "deploying": (1, 3, 4, 1),
    "building": (1, 3, 4, 1),
    # The job has finished: between two answers one of its slots came back.
    "releasing": (1, 2, 4, 0),
    "between": (4, 0, 4, 0),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_load_counts_the_slots_of_own_jobs_apart_when(moment: str, cluster: Cluster) -> None:
    cluster.answers = ANSWERS[moment]
    free, own, total, running = MOMENTS[moment]
    load = FlinkRest(cluster.address).load(OWN)
    assert (load.free, load.own, load.total, len(load.running)) == (free, own, total, running)
    others = FlinkRest(cluster.address).load("another-")
    assert (others.free, others.own, dict(others.running)) == (free, 0, {})


def test_load_of_two_task_managers_is_their_sum(cluster: Cluster) -> None:
    busy = ANSWERS["building"]["/taskmanagers"]["taskmanagers"][0]
    free = {**busy, "id": "second", "freeSlots": 4}
    gone = {**busy, "id": "third", "slotsNumber": 2, "freeSlots": 0}  # no answer of its own
    cluster.answers = {
        **ANSWERS["building"],
        "/taskmanagers": {"taskmanagers": [busy, free, gone]},
    }
    load = FlinkRest(cluster.address).load(OWN)
    assert (load.free, load.own, load.total) == (5, 3, 10)


BAD = {
    "another server": ({"/taskmanagers": {"errors": []}}, "invalid answer"),
    "a list": ({"/taskmanagers": []}, "invalid answer"),
    "no such path": ({}, "HTTP 404 of /taskmanagers"),
}


@pytest.mark.parametrize("name", BAD)
def test_load_of_what_is_no_cluster_is_silence(name: str, cluster: Cluster) -> None:
    cluster.answers, message = BAD[name]
    with pytest.raises(UnreachableError, match=re.escape(message)):
        FlinkRest(cluster.address).load(OWN)


def test_load_of_a_server_that_accepts_and_says_nothing_is_silence_in_bounded_time() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # nobody serves
    try:
        rest = FlinkRest(f"http://127.0.0.1:{server.server_port}", timeout_sec=0.2)
        with pytest.raises(UnreachableError, match="timed out"):
            rest.load(OWN)
    finally:
        server.server_close()


def test_begin_tells_where_jobs_run_and_what_is_free(cluster: Cluster) -> None:
    found = flink(cluster, largest_parallelism=3).begin(State(), 7.0)
    seen = {"free": 4, "own": 0, "total": 4}
    assert found == [
        RunnerSet(time_sec=7.0, name="flink", address=cluster.address, largest=3, **seen)
    ]
    again = flink(cluster, largest_parallelism=3).begin(told(State(), found), 9.0)
    assert again == [SlotsRead(time_sec=9.0, free=4, own=0, total=4)]


def test_begin_refuses_an_address_that_nobody_answers(cluster: Cluster) -> None:
    cluster.close()
    message = (
        f"flink.address does not answer: {cluster.address}: [Errno 111] Connection refused "
        "in runner.yaml; start the cluster, or correct the address"
    )
    with pytest.raises(SchemaError) as error:
        flink(cluster).begin(State(), 0.0)
    assert str(error.value) == message


def test_begin_refuses_more_parallelism_than_there_are_slots(cluster: Cluster) -> None:
    message = (
        "flink.largest_parallelism exceeds the 4 slots of the cluster: 5 in runner.yaml; "
        "lower it, or start more task managers"
    )
    with pytest.raises(SchemaError) as error:
        flink(cluster, largest_parallelism=5).begin(State(), 0.0)
    assert str(error.value) == message


def test_begin_of_a_scheduler_that_goes_on_waits_for_task_managers_that_are_lost(
    cluster: Cluster,
) -> None:
    state = told(State(), flink(cluster, largest_parallelism=4).begin(State(), 0.0))
    managers = ANSWERS["idle"]["/taskmanagers"]["taskmanagers"]
    fewer = [{**managers[0], "slotsNumber": 2, "freeSlots": 2}]
    cluster.answers["/taskmanagers"] = {"taskmanagers": fewer}
    again = flink(cluster, largest_parallelism=4).begin(state, 9.0)
    assert again == [SlotsRead(time_sec=9.0, free=2, own=0, total=2)]
    with pytest.raises(SchemaError, match="exceeds the 2 slots of the cluster: 3"):
        flink(cluster, largest_parallelism=3).begin(state, 9.0)


def test_begin_at_another_address_forgets_the_slots_of_the_first(cluster: Cluster) -> None:
    elsewhere = RunnerSet(
        time_sec=0.0, name="flink", address="http://127.0.0.1:1", free=8, own=0, total=8
    )
    state = told(building(), [elsewhere])
    found = told(state, flink(cluster).begin(state, 9.0)).runner
    assert found.slots is not None
    assert (found.address, found.slots.total) == (cluster.address, 4)
    cluster.answers = {}
    with pytest.raises(SchemaError, match="address does not answer"):
        flink(cluster).begin(state, 9.0)


def test_poll_tells_what_is_new_and_asks_no_more_often_than_it_must(cluster: Cluster) -> None:
    runner, said = flink(cluster), list[str]()
    state = told(building(), runner.begin(State(), 0.0))
    assert runner.poll(state, READ_SEC, said.append) == []
    cluster.answers = of_live_job()
    assert runner.poll(state, READ_SEC + 1.0, said.append) == []
    found = runner.poll(state, 2 * READ_SEC, said.append)
    assert found == [SlotsRead(time_sec=2 * READ_SEC, free=1, own=3, total=4)]
    assert runner.poll(told(state, found), 3 * READ_SEC, said.append) == []


def test_poll_says_silence_once_and_hears_the_cluster_again(cluster: Cluster) -> None:
    runner, said = flink(cluster), list[str]()
    state = told(building(), runner.begin(State(), 0.0))
    cluster.answers = {}
    found = runner.poll(state, 5.0, said.append)
    assert found == [SlotsUnread(time_sec=5.0, detail="HTTP 404 of /taskmanagers")]
    state = told(state, found)
    for now in range(6, 40):
        assert runner.poll(state, float(now), said.append) == []
    assert said == [
        f"runner: {cluster.address} does not answer (HTTP 404 of /taskmanagers); its last known "
        "slots are used for 300 s, then one worker at a time"
    ]
    cluster.answers = ANSWERS["idle"]
    found = runner.poll(state, 100.0, said.append)
    assert found == [SlotsRead(time_sec=100.0, free=4, own=0, total=4)]
    assert told(state, found).runner.silent_sec is None


def test_begin_of_a_scheduler_that_goes_on_beside_a_silent_cluster_uses_what_is_known(
    cluster: Cluster,
) -> None:
    state = told(building(), flink(cluster).begin(State(), 0.0))
    cluster.answers, said = {}, list[str]()
    again = flink(cluster)
    assert again.begin(state, 10.0) == []
    assert [type(e) for e in again.poll(state, 10.0, said.append)] == [SlotsUnread]
    assert len(said) == 1


def test_poll_cancels_jobs_that_outlived_their_segment_job(cluster: Cluster) -> None:
    runner, said = flink(cluster), list[str]()
    state = told(building(), runner.begin(State(), 0.0))
    cluster.answers = ANSWERS["building"]
    (job_id,) = FlinkRest(cluster.address).load(OWN).running
    runner.poll(state, READ_SEC, said.append)
    assert cluster.cancelled == [f"/jobs/{job_id}?mode=cancel"]
    assert said == [f"runner: {NAME} is cancelled: its segment job has ended"]


@pytest.mark.parametrize("code", [404, 409])
def test_poll_takes_a_job_that_ended_before_it_was_cancelled_for_no_silence(
    code: int, cluster: Cluster
) -> None:
    runner, said = flink(cluster), list[str]()
    state = told(building(), runner.begin(State(), 0.0))
    cluster.answers, cluster.cancel_code = ANSWERS["building"], code
    found = runner.poll(state, READ_SEC, said.append)
    assert found == [SlotsRead(time_sec=READ_SEC, free=1, own=3, total=4)]
    assert len(cluster.cancelled) == len(said) == 1


def test_poll_and_end_leave_the_job_of_a_live_segment_job_alone(cluster: Cluster) -> None:
    runner, said = flink(cluster), list[str]()
    state = told(building(), runner.begin(State(), 0.0))
    cluster.answers = of_live_job()
    runner.poll(state, READ_SEC, said.append)
    runner.end(state, said.append)
    assert (cluster.cancelled, said) == ([], [])
    job = replace(state.jobs["demo"], processes={})
    runner.end(replace(state, jobs={"demo": job}), said.append)
    assert len(cluster.cancelled) == 1
