"""A proxy before an object store that injects faults and counts requests."""

from __future__ import annotations

import http.client
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Reply = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body."""
Forward = Callable[[http.client.HTTPConnection, str, str, Mapping[str, str], bytes], Reply]
"""Sends method, path, headers and body of a request over a connection."""
CONDITIONS = ("if-none-match", "x-goog-if-generation-match")


def send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
) -> Reply:
    """Send a request as it is; once more if the server has closed an idle connection."""
    for attempt in (1, 2):
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        except (http.client.HTTPException, OSError):
            connection.close()
            if attempt == 2:
                raise
    raise AssertionError


FAULTS = ("drop_reply", "error_after", "error_before", "conflict_before", "cut_body", "reset")
"""What a proxy can do to a request: drop the reply after the store acted; answer 503 after it has
acted, or without asking it; answer 409 without asking it; cut the reply's body; reset the
connection."""


@dataclass
class Faults:
    """Decides about each request; may be changed while the proxy runs.

    Attributes:
        rates: fault to probability, for each request.
        methods: only requests of these methods have faults.
        latency_sec: pause before each request.
        ignore_conditions: whether conditional puts reach the store without their conditions;
            only for a store whose requests are not signed.
        counts: faults injected so far.
        requests: requests so far, by method.
    """

    rates: dict[str, float] = field(default_factory=dict[str, float])
    methods: frozenset[str] = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
    latency_sec: float = 0.0
    seed: int = 0
    ignore_conditions: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    requests: Counter[str] = field(default_factory=Counter[str])
    script: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(text in `METHOD PATH`, fault): each applies once, to the first request that has the text."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def draw(self, method: str, path: str) -> str | None:
        """Return the fault of a request, if any."""
        with self._lock:
            self.requests[method] += 1
            fault = self._draw(method, path)
            if fault:
                self.counts[fault] += 1
            return fault

    def _draw(self, method: str, path: str) -> str | None:
        for index, (text, fault) in enumerate(self.script):
            if text in f"{method} {path}":
                del self.script[index]
                return fault
        if method not in self.methods:
            return None
        draw = self._random.random()
        for fault, rate in self.rates.items():
            draw -= rate
            if draw < 0:
                return fault
        return None


@contextmanager
def fault_proxy(endpoint: str, faults: Faults, forward: Forward = send) -> Generator[str]:
    """Run a proxy before a server; yield its own endpoint.

    Args:
        endpoint: of the server.
        faults: what to do to the requests.
        forward: sends a request to the server, perhaps as other requests.
    """
    address = urlsplit(endpoint)

    class Handler(_Handler):
        target, decide = address.netloc, faults
        forward_request = staticmethod(forward)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{address.path}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    target: str
    decide: Faults
    forward_request: Forward
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._server = http.client.HTTPConnection(self.target, timeout=60)

    def finish(self) -> None:
        self._server.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.decide.draw(self.command, self.path)
        time.sleep(self.decide.latency_sec)
        if fault == "reset":
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        elif fault == "error_before":
            self._reply(503, {}, b"")
        elif fault == "conflict_before":
            self._reply(409, {}, b"<Error><Code>OperationAborted</Code></Error>")
        else:
            status, headers, content = self._forward(body)
            if fault == "drop_reply":
                self.close_connection = True
            elif fault == "error_after":
                self._reply(503, {}, b"")
            else:
                self._reply(status, headers, content, cut=fault == "cut_body")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def _forward(self, body: bytes) -> Reply:
        headers = dict(self.headers.items())
        if self.decide.ignore_conditions:
            headers = {name: v for name, v in headers.items() if name.lower() not in CONDITIONS}
        return self.forward_request(self._server, self.command, self.path, headers, body)

    def _reply(
        self, status: int, headers: Mapping[str, str], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        own = [value for name, value in headers.items() if name.lower() == "content-length"]
        if status != 204:
            length = own[0] if self.command == "HEAD" and own else str(len(content))
            self.send_header("Content-Length", length)
        self.end_headers()
        self.close_connection = self.close_connection or cut
        if self.command != "HEAD":
            with suppress(OSError):  # the client may have ended
                self.wfile.write(content[: len(content) // 2] if cut else content)
