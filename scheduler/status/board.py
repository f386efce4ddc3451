"""Serve the status page and metrics over HTTP on loopback."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scheduler.controller.events import Event
from scheduler.controller.handle import handle
from scheduler.controller.log import parse_record, to_decision
from scheduler.controller.state import State
from scheduler.status.journal import Journal, record
from scheduler.status.metrics import CONTENT_TYPE, metrics_text
from scheduler.status.page import page
from scheduler.status.view import View, duration, view_of
from schemas.errors import PlanError, SchemaError
from schemas.run_log import Decision

# What is shown, kept up to date from a scheduler's log, in a thread or a process of its own.
#
# The log is the only thing that is shared with the scheduler, and it is only read: who looks on
# neither slows a decision nor stops one, whichever driver carries it out.


class Board:
    """The newest view of one log; any thread may ask."""

    def __init__(self, path: Path) -> None:
        """Remember where the log lies.

        Args:
            path: of a log that is written, or was; before it exists nothing has happened.
        """
        self._path = path
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._line = 0
        self._state = State()
        self._journal = Journal()
        self._expected = deque[Decision]()
        self._view: View | None = None

    def view(self) -> View:
        """Return the view of all whole lines that the log has now.

        Raises:
            SchemaError: a line is none of a log, or this code decides otherwise.
        """
        with self._lock:
            news = self._news()
            for line in news:
                self._take(line)
            if news or self._view is None:
                self._view = view_of(self._state, self._journal)
            return self._view

    def _news(self) -> list[bytes]:
        """Return the whole lines that were not taken in yet."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._start_over()  # another log lies there
                file.seek(self._at)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SchemaError(
                f"log must be readable, got {error}; check the path", file=str(self._path)
            ) from error
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

    def _take(self, line: bytes) -> None:
        """Fold one line, which counts as read only when it was understood."""
        number = self._line + 1
        try:
            body: Any = json.loads(line)
            found = parse_record(body)
        except (ValueError, KeyError, TypeError) as error:
            raise self._wrong(f"be an event or a decision, got {line[:80]!r}", number) from error
        if isinstance(found, Event):
            if self._expected:
                raise self._wrong("be the decision that follows, got the next event", number)
            before = self._state
            self._state, actions = handle(before, found)
            decisions = [to_decision(action, self._state.now_sec) for action in actions]
            self._journal = record(self._journal, before, found, self._state, decisions)
            self._expected.extend(decisions)
        elif not self._expected or self._expected[0] != found:
            raise self._wrong("be the decision that follows, got another", number)
        else:
            self._expected.popleft()
        self._at += len(line)
        self._line = number

    def _wrong(self, must: str, line: int) -> SchemaError:
        return SchemaError(
            f"line must {must}; look with the code that wrote the log",
            file=str(self._path),
            place=str(line),
        )


# The page and the metrics over HTTP, on loopback alone, for whoever may use this machine.
#
# Threads of its own read the board; at most a few at once, and none waits for a slow reader for
# long. Only names of loopback are answered, so that no page from elsewhere can have its own name
# point here and read what is told (DNS rebinding).

LOOPBACK = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
SILENT_SEC = 300.0
"""A scheduler whose log was not written for so long is not well: it looks every 30 s at least."""
READ_SEC = 10.0
"""Longest wait for a client."""
POLL_SEC = 0.05
"""Longest time until a shutdown is seen."""
MAX_AT_ONCE = 16
"""Connections that are answered at once; more are closed."""
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


@contextmanager
def serving(
    board: Board, port: int, clock: Callable[[], float] = time.time
) -> Generator[str, None, None]:
    """Serve a board until the context ends; gives the address of the page.

    Args:
        board: what is shown.
        port: 0 for any that is free.
        clock: seconds since the epoch.

    Raises:
        PlanError: the port is taken, or may not be used.
    """
    try:
        server = _Server(board, port, clock)
    except (OSError, OverflowError) as error:
        raise PlanError(
            f"status port must be free and allowed, got {port} ({error}); use another, or 0 for any"
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(POLL_SEC,), name="status", daemon=True
    )
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def answer(path: str, board: Board, now_sec: float) -> Answer:
    """Return status, type and body of what lies at a path."""
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
            found, said = health(board.view(), now_sec)
            return found, plain, f"{said}\n".encode()
    except SchemaError as error:
        return HTTPStatus.SERVICE_UNAVAILABLE, plain, f"{error}\n".encode()
    return HTTPStatus.NOT_FOUND, plain, b"nothing lies here; see /\n"


def health(view: View, now_sec: float) -> tuple[HTTPStatus, str]:
    """Tell whether a scheduler goes on: it has written its log lately, or is done."""
    if not view.num_events:
        return HTTPStatus.OK, "starting: no event yet"
    if view.is_over:
        return HTTPStatus.OK, "ended: every job has ended"
    silent = now_sec - view.now_sec
    said = f"last event {duration(max(0.0, silent))} ago"
    if silent > SILENT_SEC:
        return HTTPStatus.SERVICE_UNAVAILABLE, f"silent: {said}, jobs have not ended"
    return HTTPStatus.OK, f"ok: {said}"


def is_local(host: str | None) -> bool:
    """Tell whether a Host header names loopback, with any port: it may be forwarded.

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
    """One thread for each of at most MAX_AT_ONCE connections."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, board: Board, port: int, clock: Callable[[], float]) -> None:
        self.board = board
        self.clock = clock
        self._free = threading.BoundedSemaphore(MAX_AT_ONCE)
        super().__init__((LOOPBACK, port), _Handler)

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away; the scheduler's own words stay readable."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, and nothing else."""

    timeout = READ_SEC
    server_version = "presage"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        hosts = self.headers.get_all("Host") or [None]
        if len(hosts) != 1 or not is_local(hosts[0]):
            body = b"this page answers to names of loopback only, such as localhost\n"
            self._send((HTTPStatus.MISDIRECTED_REQUEST, "text/plain; charset=utf-8", body))
            return
        assert isinstance(self.server, _Server), "a handler belongs to the server of a board"
        path = urlsplit(self.path).path
        self._send(answer(path, self.server.board, self.server.clock()))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no GET, in one line and with the headers of all answers."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        body = f"{message or status.phrase}; only GET is answered\n".encode("ascii", "replace")
        self._send((status, "text/plain; charset=utf-8", body))

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: the scheduler's own lines stay readable."""

    def _send(self, found: Answer) -> None:
        status, kind, body = found
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
