"""The way of one replica to the lighthouse, which can be cut: a partition of the network."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

_BYTES = 1 << 16


class Relay:
    """Hands connections on to another address until this process ends."""

    def __init__(self, target: str) -> None:
        """Listen on a free port of loopback.

        Args:
            target: `http://host:port`.
        """
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._cut_until = 0.0
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, name="relay", daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Let nobody through for some seconds; connections that there are have to be broken."""
        self._cut_until = time.monotonic() + seconds

    def _serve(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = None
            if time.monotonic() >= self._cut_until:
                with suppress(OSError):
                    far = socket.create_connection(self._target)
            if far is None:
                near.close()
                continue
            for side, other in ((near, far), (far, near)):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_hand_on, args=(side, other), daemon=True).start()


def _hand_on(side: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := side.recv(_BYTES):
            other.sendall(data)
    for end in (side, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
