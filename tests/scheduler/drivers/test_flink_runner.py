"""The Flink runner against a server with answers recorded from Flink 1.19."""

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.state import State
from presage.scheduler.drivers.beam_runners import READ_SEC, FlinkConfig, FlinkRunner, JobNames
from presage.schemas.errors import SchemaError
from tests.scheduler.controller.world import BUDGET, submitted

ANSWERS = json.loads((Path(__file__).parent / "golden" / "flink.json").read_text())
NAME = "presage-1234-demo-segment-0.1"
"""Of the job that ran while they were recorded."""
OWN = "presage-1234-"


class Cluster:
    """Answers as a cluster did at one moment; notes what it is asked to cancel."""

    def __init__(self) -> None:
        self.overview: Any = ANSWERS["building"]
        self.cancelled: list[str] = []
        self.cancel_code = 202
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200 if self.path == "/jobs/overview" else 404, outer.overview)

            def do_PATCH(self) -> None:
                outer.cancelled.append(self.path)
                self.answer(outer.cancel_code, {})

            def answer(self, code: int, body: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

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


def flink(cluster: Cluster) -> FlinkRunner:
    config = FlinkConfig(
        address=cluster.address,
        largest_parallelism=4,
        job_endpoint="localhost:8099",
        environment_config="localhost:50000",
    )
    return FlinkRunner(config, JobNames(OWN), "runner.yaml")


def building() -> State:
    """A state with a job whose first segment is being built."""
    state, _ = handle(State(), BUDGET)
    return handle(state, submitted("demo"))[0]


def test_check_refuses_an_address_that_nobody_answers(cluster: Cluster) -> None:
    flink(cluster).check()
    cluster.close()
    message = (
        f"flink.address does not answer: {cluster.address}: [Errno 111] Connection refused "
        "in runner.yaml; start the cluster, or correct the address"
    )
    with pytest.raises(SchemaError) as error:
        flink(cluster).check()
    assert str(error.value) == message


@pytest.mark.parametrize("answer", [[], {"errors": []}, {"jobs": [{"jid": "a"}]}])
def test_check_refuses_a_server_that_is_not_flink(cluster: Cluster, answer: Any) -> None:
    cluster.overview = answer
    with pytest.raises(SchemaError, match=r"flink\.address does not answer: .*: invalid answer"):
        flink(cluster).check()


@pytest.mark.parametrize("code", [202, 404, 409])  # it may end before it is cancelled
def test_jobs_that_outlived_their_segment_job_are_cancelled(cluster: Cluster, code: int) -> None:
    runner, messages = flink(cluster), list[str]()
    cluster.cancel_code = code
    runner.cancel_ended(building(), 0.0, messages.append)
    (job,) = cluster.overview["jobs"]
    assert cluster.cancelled == [f"/jobs/{job['jid']}?mode=cancel"]
    assert messages == [f"runner: {NAME} is cancelled: its segment job has ended"]
    runner.cancel_ended(building(), READ_SEC - 1.0, messages.append)
    assert len(cluster.cancelled) == 1  # it is not asked so soon
    cluster.overview = ANSWERS["releasing"]  # the job has finished
    runner.cancel_ended(building(), READ_SEC, messages.append)
    assert len(cluster.cancelled) == len(messages) == 1


def test_the_job_of_a_live_segment_job_is_left_alone(cluster: Cluster) -> None:
    runner, messages, state = flink(cluster), list[str](), building()
    text = json.dumps(ANSWERS["building"])
    cluster.overview = json.loads(text.replace(NAME, JobNames(OWN).of("demo", "segment-0.1")))
    runner.cancel_ended(state, 0.0, messages.append)
    assert (cluster.cancelled, messages) == ([], [])
    job = replace(state.jobs["demo"], processes={})
    runner.cancel_ended(replace(state, jobs={"demo": job}), READ_SEC, messages.append)
    assert len(cluster.cancelled) == 1


def test_silence_is_reported_once(cluster: Cluster) -> None:
    runner, messages, overview = flink(cluster), list[str](), cluster.overview
    cluster.overview = {}
    for number in range(3):
        runner.cancel_ended(building(), number * READ_SEC, messages.append)
    assert messages == [
        f"runner: {cluster.address} does not answer: invalid answer (KeyError('jobs')); "
        "jobs may run on"
    ]
    cluster.overview = overview
    runner.cancel_ended(building(), 3 * READ_SEC, messages.append)
    assert len(cluster.cancelled) == 1
