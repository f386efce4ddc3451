"""Serve the status page and metrics of a scheduler's log over HTTP on loopback.

The log is the only connection to the scheduler, and is only read. Only loopback names are answered,
which prevents DNS rebinding.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from presage.scheduler.controller.log import LogReader
from presage.scheduler.status.prometheus import CONTENT_TYPE, metrics_text
from presage.scheduler.status.status_page import page
from presage.scheduler.status.view import View, duration, view_of
from presage.schemas.errors import PlanError, SchemaError

LOOPBACK = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
SILENT_SEC = 300.0
"""A scheduler that has not written its log for this long is unhealthy; it ticks every 30 s."""
READ_SEC = 10.0
"""Time limit for a client's request."""
POLL_SEC = 0.05
"""Longest delay of a shutdown."""
MAX_CONNECTIONS = 16
"""Concurrent connections; more are closed."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HERE = Path(__file__).parent
FILES = {
    "/status.css": ("text/css; charset=utf-8", HERE.joinpath("status.css").read_bytes()),
    "/status.js": ("text/javascript; charset=utf-8", HERE.joinpath("status.js").read_bytes()),
}

Answer = tuple[HTTPStatus, str, bytes]


class Board:
    """The current view of a log; thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._inode = 0
        self._reader = LogReader(self._path)
        self._view: View | None = None

    def view(self) -> View:
        """Return the view after all complete lines of the log.

        Raises:
            SchemaError: a line is invalid.
        """
        with self._lock:
            lines = self._new_lines()
            for line in lines:
                if entry := self._reader.read(line):
                    self._reader.apply(entry)
            if lines or self._view is None:
                self._view = view_of(self._reader.state, self._reader.journal)
            return self._view

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._reader.num_bytes or status.st_ino != self._inode:
                    self._restart()  # another log begins, with a snapshot
                    self._inode = status.st_ino
                file.seek(self._reader.num_bytes)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SchemaError(
                f"log cannot be read: {error}; check the path", file=str(self._path)
            ) from error
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


@contextmanager
def serving(
    board: Board, port: int, clock: Callable[[], float] = time.time
) -> Generator[str, None, None]:
    """Serve a board while the context is open; yields the URL of the page.

    Raises:
        PlanError: the port is in use or not permitted.
    """
    try:
        server = _Server(board, port, clock)
    except (OSError, OverflowError) as error:
        raise PlanError(
            f"status port cannot be used: {port}: {error}; use another, or 0 for any"
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(POLL_SEC,), name="status", daemon=True
    )
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(path: str, board: Board, now_sec: float) -> Answer:
    """Return status, content type and body for a path."""
    if path in FILES:
        return HTTPStatus.OK, *FILES[path]
    plain = "text/plain; charset=utf-8"
    try:
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", page(board.view()).encode()
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE, metrics_text(board.view())
        if path == "/status.json":
            body = json.dumps(asdict(board.view())).encode()
            return HTTPStatus.OK, "application/json", body
        if path == "/healthz":
            status, line = health(board.view(), now_sec)
            return status, plain, f"{line}\n".encode()
    except SchemaError as error:
        return HTTPStatus.SERVICE_UNAVAILABLE, plain, f"{error}\n".encode()
    return HTTPStatus.NOT_FOUND, plain, b"not found; see /\n"


def health(view: View, now_sec: float) -> tuple[HTTPStatus, str]:
    """Return whether a scheduler is healthy: it has written its log recently, or is done."""
    if not view.num_events:
        return HTTPStatus.OK, "starting: no event yet"
    if view.is_over:
        return HTTPStatus.OK, "ended: all jobs have ended"
    silent = now_sec - view.now_sec
    age = f"last event {duration(max(0.0, silent))} ago"
    if silent > SILENT_SEC:
        return HTTPStatus.SERVICE_UNAVAILABLE, f"silent: {age}, jobs have not ended"
    return HTTPStatus.OK, f"ok: {age}"


def is_local(host: str | None) -> bool:
    """Return whether a Host header names loopback, with any port (it may be forwarded).

    Example:
        >>> is_local("127.0.0.1:80"), is_local("[::1]:8080"), is_local("localhost")
        (True, True, True)
        >>> is_local("127.0.0.1.evil.example"), is_local("a@localhost"), is_local(None)
        (False, False, False)
    """
    if not host or "@" in host:
        return False
    try:
        return urlsplit(f"//{host}").hostname in NAMES
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that `server_close` waits for them

    def __init__(self, board: Board, port: int, clock: Callable[[], float]) -> None:
        self.board = board
        self.clock = clock
        self._connections: set[Any] = set()
        super().__init__((LOOPBACK, port), _Handler)

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        if len(self._connections) == MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._connections.add(request)
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.discard(request)

    def server_close(self) -> None:
        """Close the connections, too."""
        for connection in [*self._connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_SEC
    server_version = "presage"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        hosts = self.headers.get_all("Host") or [None]
        if len(hosts) != 1 or not is_local(hosts[0]):
            body = b"only loopback names such as localhost are served\n"
            self._send((HTTPStatus.MISDIRECTED_REQUEST, "text/plain; charset=utf-8", body))
            return
        assert isinstance(self.server, _Server), "the server has a board"
        path = urlsplit(self.path).path
        self._send(answer(path, self.server.board, self.server.clock()))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an error in one line, with the headers of all answers."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        body = f"{message or status.phrase}; only GET is supported\n".encode("ascii", "replace")
        self._send((status, "text/plain; charset=utf-8", body))

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: stderr belongs to the scheduler."""

    def _send(self, response: Answer) -> None:
        status, kind, body = response
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
