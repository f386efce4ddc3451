"""Which requests the server answers, and that no client blocks another."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from presage.scheduler.controller.log import LOG
from presage.scheduler.status.board import MAX_CONNECTIONS, SILENT_SEC, Board, serving
from presage.schemas.errors import PlanError
from tests.scheduler.status.recordings import record_jobs

Served = tuple[int, Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The port of a page about a job that runs, and its log."""
    log = tmp_path_factory.mktemp("job") / LOG
    record_jobs(3).write_log(log, 60)
    now = record_jobs(3).state(60).now_sec
    with serving(Board(log), 0, clock=lambda: now) as address:
        yield int(address.rstrip("/").rpartition(":")[2]), log


def ask(
    port: int, path: str = "/", method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def test_get_of_each_path_is_answered_with_headers_that_keep_it_here(served: Served) -> None:
    port, _ = served
    for path, word in {
        "/": "<!doctype html>",
        "/?x=1": "<!doctype html>",
        "/status.css": "prefers-color-scheme",
        "/status.js": "DOMParser",
        "/metrics": "presage_booked_cores",
        "/healthz": "ok: last event 0.0 s ago",
    }.items():
        status, headers, body = ask(port, path)
        assert status == 200, body
        assert word in body
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Access-Control-Allow-Origin"] is None
    body = json.loads(ask(port, "/status.json")[2])
    assert body["num_events"] == 60
    assert ask(port, "/../scheduler.jsonl")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"])
def test_anything_but_get_is_refused(served: Served, method: str) -> None:
    status, headers, _ = ask(served[0], method=method)
    assert status == 405
    assert headers["Allow"] == "GET"
    assert headers["Content-Security-Policy"]


ELSEWHERE = ("evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "10.0.0.1")


@pytest.mark.parametrize("host", [*ELSEWHERE, "", "x@localhost", "[::1"])
def test_names_that_are_not_of_loopback_are_refused(served: Served, host: str) -> None:
    status, _, body = ask(served[0], host=host)
    assert status == 421
    assert "doctype" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:9", "[::1]:80"])
def test_names_of_loopback_are_answered_with_any_port_as_it_may_be_forwarded(
    served: Served, host: str
) -> None:
    assert ask(served[0], host=host)[0] == 200


@pytest.mark.slow
def test_clients_that_say_nothing_hold_up_nobody(served: Served) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", served[0])) for _ in range(MAX_CONNECTIONS - 1)
    ]
    assert ask(served[0])[0] == 200
    for one in silent:
        one.close()


def test_a_damaged_log_is_told_and_does_not_end_the_server(served: Served) -> None:
    port, log = served
    whole = log.read_bytes()
    log.write_bytes(whole + b"{\n")
    for path in ("/", "/metrics", "/healthz", "/status.json"):
        status, _, body = ask(port, path)
        assert status == 503
        assert "line is no event: " in body
    log.write_bytes(whole)
    assert ask(port)[0] == 200


@pytest.mark.slow
def test_health_tells_a_scheduler_that_is_silent_from_one_that_is_done(tmp_path: Path) -> None:
    running, over = tmp_path / "running", tmp_path / "over"
    record_jobs(3).write_log(running, 60)
    record_jobs(3).write_log(over)
    late = record_jobs(3).state(60).now_sec + SILENT_SEC + 1
    for log, wanted in ((running, 503), (over, 200), (tmp_path / "none", 200)):
        with serving(Board(log), 0, clock=lambda: late) as address:
            port = int(address.rstrip("/").rpartition(":")[2])
            assert ask(port, "/healthz")[0] == wanted


def test_a_port_that_is_taken_is_named(served: Served) -> None:
    text = re.escape(f"status port cannot be used: {served[0]}: ")
    with pytest.raises(PlanError, match=text), serving(Board(served[1]), served[0]):
        pass
