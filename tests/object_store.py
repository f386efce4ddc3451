"""A real S3 store (versitygw) on this machine, and a proxy before it that injects faults."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.external_tools import build_go_program

VERSITYGW = "github.com/versity/versitygw/cmd/versitygw"
VERSION = "v1.8.0"
ACCESS_KEY, SECRET_KEY = "presage-test", "presage-test-secret"
BUCKET = "bucket"


@contextmanager
def s3_server(folder: Path) -> Generator[str]:
    """Run versitygw over a folder with one empty bucket; yield its endpoint."""
    program = build_go_program(VERSITYGW, VERSION)
    (folder / "root" / BUCKET).mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--access", ACCESS_KEY, "--secret", SECRET_KEY, "--quiet"]
    command += ["--port", f"127.0.0.1:{port}", "posix", "--sidecar", folder / "meta"]
    (folder / "meta").mkdir()
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*map(str, command), str(folder / "root")],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        )
    try:
        _wait_for_port(server, port, folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _wait_for_port(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while server.poll() is None:
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 1)):
            return
        time.sleep(0.02)
    raise RuntimeError(f"S3 server ended: {log.read_text()}")


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which a client finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


FAULTS = ("drop_reply", "error_after", "error_before", "conflict_before", "cut_body", "reset")
"""What a proxy can do to a request: drop the reply after the store acted; answer 503 after it has
acted, or without asking it; answer 409 without asking it; cut the reply's body; close at once."""


@dataclass
class Faults:
    """Decides about each request; may be changed while the proxy runs.

    Attributes:
        rates: fault to probability, for each request.
        methods: only requests of these methods have faults.
        latency_sec: pause before each request.
        counts: faults injected so far.
        requests: requests so far, by method.
    """

    rates: dict[str, float] = field(default_factory=dict[str, float])
    methods: frozenset[str] = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
    latency_sec: float = 0.0
    seed: int = 0
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
def fault_proxy(endpoint: str, faults: Faults) -> Generator[str]:
    """Run a proxy before a server; yield its own endpoint."""
    netloc = urlsplit(endpoint).netloc

    class Handler(_Handler):
        target, decide = netloc, faults

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    target: str
    decide: Faults
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

    def _forward(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        for attempt in (1, 2):  # the server may have closed an idle connection
            try:
                self._server.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    self._server.putheader(name, value)
                self._server.endheaders(body or None)
                reply = self._server.getresponse()
                return reply.status, dict(reply.getheaders()), reply.read()
            except (http.client.HTTPException, OSError):
                self._server.close()
                if attempt == 2:
                    raise
        raise AssertionError

    def _reply(
        self, status: int, headers: Mapping[str, str], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(content)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.wfile.flush()
        self.close_connection = self.close_connection or cut


def new_url() -> str:
    """Return the URL of a new empty folder in the bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
